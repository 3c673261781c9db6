"""Callable modules (`covey.train`), and user modules that changed since their import."""

import inspect
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    """A module whose call goes to a function of another, imported lazily."""

    __callee__: tuple[str, str]

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return _function(self)(*arguments, **keywords)

    @property
    def __doc__(self) -> str:  # type: ignore[override] # a module's is text as well
        """Return signature and docstring of the function, for `help`."""
        function = _function(self)
        summary, _, rest = (inspect.getdoc(function) or "").partition("\n\n")
        plain = [p.replace(annotation=p.empty) for p in inspect.signature(function).parameters.values()]
        return f"{summary}\n\n{self.__name__}{inspect.Signature(plain)}\n\n{rest}"

    @property
    def __all__(self) -> list[str]:
        """Return no name, so that `help` shows the function alone."""
        return []

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(_function(self))


def _function(module: _CallableModule) -> Any:
    home, name = module.__callee__
    return vars(import_module(home))[name]


def make_callable(module: str, home: str, name: str) -> None:
    """Let a call of `module` go to the function `name` of `home`.

    `from covey.train import train_step` and patches by name work as before.
    """
    made = sys.modules[module]
    made.__class__ = _CallableModule
    vars(made)["__callee__"] = (home, name)


MET: dict[str, str] = {}
"""User's module -> the text of its file when covey first met it, or imported it anew. Python keeps none."""
ANEW: set[str] = set()
"""Modules that were imported anew: objects of theirs may be those of an older text."""


def meet(module: ModuleType) -> None:
    """Remember the content of a module's file."""
    if module.__name__ not in MET and (text := _text_of(module)) is not None:
        MET[module.__name__] = text


def changed() -> Iterator[tuple[ModuleType, str]]:
    """Yield modules whose files have changed, with the new text."""
    for name, text in list(MET.items()):
        module = sys.modules.get(name)
        now = None if module is None else _text_of(module)
        if module is not None and now is not None and now != text:
            yield module, now


def _text_of(module: ModuleType) -> str | None:
    file = vars(module).get("__file__")
    try:
        return Path(str(file)).read_text(encoding="utf-8") if str(file).endswith(".py") else None
    except (OSError, UnicodeDecodeError):
        return None
