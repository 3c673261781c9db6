"""How many bytes tensors hold at the same time, also where a storage grows and shrinks, as those of FSDP do."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageBytes(TorchDispatchMode):
    """Looks at each operation that makes or fills a tensor what all storages that it has met hold now.

    Those there were before count too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.peak_by_type: dict[torch.dtype, int] = {}
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], torch.dtype]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        has_grown = func.namespace == "fsdp" or "copy" in func.__name__  # type: ignore[attr-defined] # an operation's
        for tensor in tree_leaves((args, kwargs, out)):
            if type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                has_grown |= storage._cdata not in self._alive
                self._alive[storage._cdata] = (weakref.ref(storage), tensor.dtype)
        if has_grown:
            self._look()
        return out

    def _look(self) -> None:
        by_type: dict[torch.dtype, int] = {}
        for key, (reference, dtype) in list(self._alive.items()):
            storage = reference()
            if storage is None:
                del self._alive[key]
            else:
                by_type[dtype] = by_type.get(dtype, 0) + storage.nbytes()
        self.peak = max(self.peak, sum(by_type.values()))
        for dtype, now in by_type.items():
            self.peak_by_type[dtype] = max(now, self.peak_by_type.get(dtype, 0))
