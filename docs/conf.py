"""The site: `sphinx-build -W --keep-going docs OUT`."""

import pathlib
import sys
import tomllib

_DOCS = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(_DOCS / "_ext"))

project = "ldjax"
author = "The ldjax authors"
with open(_DOCS.parent / "pyproject.toml", "rb") as _file:
  release = version = tomllib.load(_file)["project"]["version"]

extensions = [
  "myst_nb",
  "sphinx.ext.autodoc",
  "sphinx.ext.autosummary",
  "sphinx.ext.napoleon",
  "sphinx.ext.viewcode",
  "sphinx_copybutton",
  "public_api",
  "command_options",
]
# No network: what other projects document is named, not linked.
exclude_patterns = ["_ext", "**/*.py", "**/.ipynb_checkpoints"]

# A reference to something of ldjax must resolve.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!ldjax\.).*")]
default_role = "public-name"

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
autosummary_generate = False
napoleon_use_rtype = False
napoleon_preprocess_types = False
python_maximum_signature_line_length = 80

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3

# Notebooks run once a change, on the demo model; an error fails the build.
nb_execution_mode = "cache"
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_execution_in_temp = True
nb_merge_streams = True

html_theme = "furo"
html_title = "ldjax"
html_copy_source = False
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["ldjax.css"]
pygments_style = "tango"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
