"""Chat templates: Jinja2 in a sandbox, with what templates expect to find."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import ext, nodes, parser, sandbox


class _Generation(ext.Extension):
  """`{% generation %}…{% endgeneration %}`: for training, no effect here."""

  tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

  def parse(self, source: parser.Parser) -> list[nodes.Node]:
    next(source.stream)
    return source.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> None:
  raise jinja2.TemplateError(message)


def _now(form: str) -> str:
  return datetime.datetime.now().strftime(form)


def _to_json(
  value: Any,
  ensure_ascii: bool = False,
  indent: int | None = None,
  separators: tuple[str, str] | None = None,
  sort_keys: bool = False,
) -> str:
  # Jinja2's own escapes for HTML, which a prompt must not contain.
  return json.dumps(
    value,
    ensure_ascii=ensure_ascii,
    indent=indent,
    separators=separators,
    sort_keys=sort_keys,
  )


def compile_template(source: str) -> jinja2.Template:
  """Compiles a chat template in a sandbox that can change nothing.

  Raises:
    ValueError: if the template is not valid Jinja2.
  """
  environment = sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[_Generation, "jinja2.ext.loopcontrols"],
  )
  environment.filters["tojson"] = _to_json
  environment.globals["raise_exception"] = _raise
  environment.globals["strftime_now"] = _now
  try:
    return environment.from_string(source)
  except jinja2.TemplateSyntaxError as error:
    raise ValueError(
      f"the chat template is not valid: line {error.lineno}: {error.message}"
    ) from error


def render(
  template: jinja2.Template,
  messages: Sequence[Mapping[str, Any]],
  add_generation_prompt: bool,
  special: Mapping[str, str],
) -> str:
  """Renders messages, or says what the template objects to.

  Raises:
    ValueError: for messages of another form, or those the template refuses.
  """
  for index, message in enumerate(messages):
    if not isinstance(message, Mapping) or "role" not in message:
      raise ValueError(
        f"message {index} is {message!r:.80}; a dict with 'role' and 'content'"
        " is needed"
      )
  try:
    return template.render(
      messages=list(messages),
      add_generation_prompt=add_generation_prompt,
      tools=None,
      documents=None,
      **special,
    )
  except (jinja2.TemplateError, TypeError) as error:
    raise ValueError(
      f"the model's chat template refuses these messages: {error}"
    ) from error
