"""Functions that torch compiles for a GPU: few kernels in place of one for each operation.

Where torch cannot compile a function, it runs as it is, and a warning says so. What is compiled may add up in another
order in another process, so that `model.deterministic` goes without.
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
"""For how many types and widths of its tensors a function is compiled at most."""
_LOOKED_AT: list[bool] = []


def is_wanted(kernels: str, device: torch.device) -> bool:
    """Tell whether functions are compiled, by model.kernels: on a GPU, where there is Triton to compile to."""
    return kernels != "torch" and device.type == "cuda" and find_spec("triton") is not None


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run inside as they are the functions that would be compiled: passes under a mode and without one compare."""
    _LOOKED_AT.append(True)
    try:
        yield
    finally:
        _LOOKED_AT.pop()


@cache
def compiled(function: Callable[..., T]) -> Callable[..., T]:
    """Compile a function of tensors once for any number of rows, which are the first tensor's first dimension."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException  # takes seconds

    # A process may hold policies of several widths and types
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, KINDS)
    made: Callable[..., T] = torch.compile(function, fullgraph=True)
    able = [True]

    def call(*given: Any) -> T:
        # What is looked at runs as it is, and so does what cannot be compiled: nothing was touched then
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
    """Return a number on the host, which is not compiled in as a float would be."""
    return torch.tensor(value, dtype=torch.float64)


def _bare(given: tuple[Any, ...]) -> Iterator[Any]:
    """Yield tensors of which nothing is compiled in that varies: whether they have gradients, and how many rows."""
    for each in given:
        if not isinstance(each, Tensor):
            yield each
            continue
        tensor = each.detach()
        if not isinstance(each, nn.Parameter) and (each.dim() > 1 or (each.dim() and len(each) == len(given[0]))):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        yield tensor
