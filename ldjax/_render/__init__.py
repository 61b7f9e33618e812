"""Pictures and text forms of trees, rounds and generations.

Pure functions from plain Python data to strings: SVG and HTML that notebooks
show without JavaScript, and plain text for terminals.
"""

from ldjax._render._generation import generation_html, generation_text
from ldjax._render._tree_svg import tree_svg
from ldjax._render._tree_text import tree_text

__all__ = ["generation_html", "generation_text", "tree_svg", "tree_text"]
