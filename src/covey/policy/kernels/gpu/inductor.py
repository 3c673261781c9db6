"""Compile functions by torch into few kernels for a GPU.

A function that torch cannot compile runs as it is, with a warning. Another process may add up in another order, so
`model.deterministic` turns this off.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

LOGGER = logging.getLogger(__name__)
T = TypeVar("T")
KINDS = 64
"""Most types and widths of its tensors that a function is compiled for."""
_LOOKED_AT: list[bool] = []


def is_wanted(kernels: str, device: torch.device) -> bool:
    """Return True where model.kernels and the device allow compiled functions."""
    return kernels != "torch" and device.type == "cuda" and find_spec("triton") is not None


@contextmanager
def without_compiling() -> Iterator[None]:
    """Run functions without compiling them inside, to compare passes."""
    _LOOKED_AT.append(True)
    try:
        yield
    finally:
        _LOOKED_AT.pop()


@cache
def compile_once(function: Callable[..., T]) -> Callable[..., T]:
    """Compile once for any number of rows, the first tensor's first dimension."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException  # takes seconds

    # A process may hold policies of several widths and types
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, KINDS)
    made: Callable[..., T] = torch.compile(function, fullgraph=True)
    able = [True]

    def call(*given: Any) -> T:
        # Inspected functions run as they are, and so do those that cannot be compiled: nothing was touched then
        if able[0] and not _LOOKED_AT and not is_in_torch_dispatch_mode():
            try:
                return made(*_bare(given))
            except (TorchDynamoException, FailOnRecompileLimitHit) as error:
                able[0] = False
                why = " ".join(str(error).split())[:200]
                LOGGER.warning("%s runs uncompiled, and slower: %s", function.__name__, why)
        return function(*given)

    return call


def number(value: float) -> Tensor:
    """Return a host tensor: a float would be compiled in."""
    return torch.tensor(value, dtype=torch.float64)


def _bare(given: tuple[Any, ...]) -> Iterator[Any]:
    """Yield tensors without a gradient, their number of rows marked as dynamic."""
    for each in given:
        if not isinstance(each, Tensor):
            yield each
            continue
        tensor = each.detach()
        if not isinstance(each, nn.Parameter) and (each.dim() > 1 or (each.dim() and len(each) == len(given[0]))):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        yield tensor
