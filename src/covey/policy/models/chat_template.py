"""Chat templates: a run's defaults, and a plain one."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from jinja2 import Environment, TemplateSyntaxError, meta
from transformers import PreTrainedTokenizerBase

from covey.policy.models.text_part import change_templates
from covey.system.lookup import near

GIVEN = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now", "tojson"}
    | {"range", "dict", "lipsum", "cycler", "joiner", "namespace"}
)
"""Names that transformers and Jinja give to every template."""
GENERATION_TAG = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""A tag of transformers' own, which marks the assistant's words."""


PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{{ '\\n\\n' }}{% endfor %}"
"""Messages as text, a blank line after each: for a tokenizer without a template."""


def set_template_defaults(tokenizer: PreTrainedTokenizerBase, values: Mapping[str, Any], model_name: str) -> None:
    """Make `values` the defaults of the tokenizer's chat template.

    A missing template becomes PLAIN_TEMPLATE. ValueError for a name that it never reads, or an invalid one.
    """
    if not values:
        tokenizer.chat_template = tokenizer.chat_template or PLAIN_TEMPLATE
        return
    if tokenizer.chat_template is None:
        raise ValueError(
            f"model.chat_template_kwargs={dict(values)} needs a chat template, the tokenizer of {model_name} has none"
        )
    named = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {"": tokenizer.chat_template}
    try:
        readable = sorted({name for template in named.values() for name in _read_by(template)})
    except TemplateSyntaxError as error:
        raise ValueError(f"the chat template of {model_name} cannot be read: {error}") from error
    for name in values:
        if name not in readable:
            what = f"it reads {', '.join(readable)}" if readable else "it reads none"
            raise ValueError(
                f"model.chat_template_kwargs.{name} is set, but the chat template of {model_name} never reads it"
                f"{near(name, readable)}; {what}"
            )
    # Defaults inside the template reach every renderer
    change_templates(tokenizer, lambda template: _with_defaults(template, values))


def _read_by(template: str) -> Iterator[str]:
    """Yield the variables of a template that its caller may set."""
    parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(GENERATION_TAG.sub("", template))
    for name in meta.find_undeclared_variables(parsed):
        if name not in GIVEN and not name.endswith("_token"):
            yield name


def _with_defaults(template: str, values: Mapping[str, Any]) -> str:
    """Return the template with default values, unchanged if it has them already."""
    read = set(_read_by(template))
    defaults = "".join(
        f"{{%- if {name} is not defined %}}{{%- set {name} = {value!r} %}}{{%- endif +%}}"
        for name, value in values.items()
        if name in read
    )
    return template if template.startswith(defaults) else defaults + template
