"""Lends scripts of TRL the names of covey_trl: `from covey.trl import GRPOTrainer`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covey_trl import GRPOConfig, GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer"]


def __getattr__(name: str) -> Any:
    """Import a class at its first use."""
    return getattr(import_module("covey_trl"), name)
