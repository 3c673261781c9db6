"""What griffe reads of covey's docstrings: examples as code, and defaults as values."""

from typing import Any

import griffe


class Readable(griffe.Extension):
    """Fence the examples of docstrings; show the default of a setting, not the call that makes its field."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence what begins with `>>>`, up to the next blank line."""
        if obj.docstring is not None and ">>>" in obj.docstring.value:
            obj.docstring.value = "\n\n".join(map(_fenced, obj.docstring.value.split("\n\n")))

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Take the first argument of `setting(...)`, and what a factory of `field(...)` makes."""
        if isinstance(attr.value, griffe.ExprCall):
            attr.value = _default(attr.value)


def _fenced(paragraph: str) -> str:
    return f"```pycon\n{paragraph}\n```" if paragraph.lstrip().startswith(">>>") else paragraph


def _default(call: griffe.ExprCall) -> Any:
    name = str(call.function)
    if name == "setting" and call.arguments:
        return call.arguments[0]
    factories = [str(each.value) for each in call.arguments if getattr(each, "name", "") == "default_factory"]
    return {"dict": "{}", "list": "[]"}.get(factories[0], f"{factories[0]}()") if factories else call
