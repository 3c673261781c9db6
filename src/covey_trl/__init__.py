"""Runs scripts of TRL with one import changed, `from covey.trl import GRPOConfig, GRPOTrainer`.

trl itself is not imported and need not be installed. docs/use/trl.md lists what each field becomes. The classes are
imported when they are first asked for, so that the table of fields is there without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from covey.system.machine import silence_bitsandbytes

if TYPE_CHECKING:
    from covey_trl.config import GRPOConfig
    from covey_trl.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer"]
MODULES = {"GRPOConfig": "covey_trl.config", "GRPOTrainer": "covey_trl.trainer"}


def __getattr__(name: str) -> Any:
    """Import a class at its first use."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    silence_bitsandbytes()
    return getattr(import_module(MODULES[name]), name)
