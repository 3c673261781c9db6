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
