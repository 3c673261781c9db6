"""A module that can be called: `covey.train` is the module of the loop, and `covey.train(...)` trains."""

import inspect
import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    """A module whose call goes to a function of another, which is imported then."""

    __callee__: tuple[str, str]

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return _function(self)(*arguments, **keywords)

    @property
    def __doc__(self) -> str:  # type: ignore[override] # a module's is text as well
        """Return the arguments and the words of the function, which `help` shows in the place of the module's."""
        function = _function(self)
        summary, _, rest = (inspect.getdoc(function) or "").partition("\n\n")
        plain = [p.replace(annotation=p.empty) for p in inspect.signature(function).parameters.values()]
        return f"{summary}\n\n{self.__name__}{inspect.Signature(plain)}\n\n{rest}"

    @property
    def __all__(self) -> list[str]:
        """Return no name: `help` lists what is in it, and that is not what is called."""
        return []

    @property
    def __signature__(self) -> inspect.Signature:
        """Return the signature of the function, which `help` and notebooks show."""
        return inspect.signature(_function(self))


def _function(module: _CallableModule) -> Any:
    home, name = module.__callee__
    return vars(import_module(home))[name]


def make_callable(module: str, home: str, name: str) -> None:
    """Let a call of the module `module` go to the function `name` of the module `home`.

    The module itself stays what it is, so that `from covey.train import train_step` and patches by name work.
    """
    made = sys.modules[module]
    made.__class__ = _CallableModule
    vars(made)["__callee__"] = (home, name)
