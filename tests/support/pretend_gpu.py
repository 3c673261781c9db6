"""A pretend GPU for machines without one: a tensor "on cuda" is a CPU tensor whose storage is marked.

    with PretendGpu() as gpu:
        policy = load_policy(ModelConfig(), seed=0)  # device "auto" is cuda:0 inside
        ...                                          # real numbers, computed on the CPU
    gpu.mixed    # operations on tensors of two devices, which a GPU refuses
    gpu.waits    # places where host and device wait for each other
    gpu.kernels  # operations that would launch a kernel, by name
    gpu.shapes   # shapes of queries and keys of fused attention, which some backends plan for one by one

FakeTensorMode does not serve: in a CPU build of torch whatever autograd records on "cuda" raises, and it stops at the
first .item(). Nothing here tells which attention kernel runs, nor anything of CUDA graphs, the device's memory or NCCL.
"""

import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from covey.engine.native import decode_weights, graph
from covey.policy import head
from covey.policy.attention import varlen
from covey.policy.models import loading

from .flash import flash_forward

CUDA = torch.device("cuda", 0)
FREE_BYTES = 2**34
SHAPES = "view _unsafe_view as_strided transpose t permute expand slice select unsqueeze squeeze unfold alias detach"
STORAGES = (
    "split split_with_sizes unbind _reshape_alias lift_fresh empty empty_like empty_strided new_empty resize_ set_"
)
NO_KERNEL = frozenset(f"{SHAPES} {STORAGES} _local_scalar_dense".split(" "))
"""Operations on shapes and storages alone."""
WAITS = frozenset({"equal", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"})
"""Operations whose result, or its shape, the host must know."""
INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"})
COPIES = frozenset({"copy_", "_to_copy"})
FUSED_ATTENTION = "_scaled_dot_product"
PINNED = "pretends_to_be_pinned"
FOREIGN = ("/torch/", "/transformers/", "/peft/", "contextlib", __file__)
"""Files that are not asked where a wait comes from."""


class PretendGpu:
    """Makes tensors of device "cuda" possible inside, and notes what a GPU would refuse or wait for."""

    def __init__(self) -> None:
        self.mixed: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()
        self.shapes: set[tuple[tuple[int, ...], ...]] = set()
        self._marked: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "PretendGpu":
        patch = self._stack.enter_context(pytest.MonkeyPatch.context())
        real_autocast, real_fork = torch.autocast, torch.random.fork_rng

        class Autocast(real_autocast):  # type: ignore[valid-type,misc]
            def __init__(self, device_type: str, *args: Any, **keywords: Any) -> None:
                super().__init__("cpu", *args, **keywords)

        for module in (torch, torch.amp, torch.amp.autocast_mode):
            patch.setattr(module, "autocast", Autocast)
        patch.setattr(torch.random, "fork_rng", lambda devices=(), **keywords: real_fork([], **keywords))
        patch.setattr(torch.cuda, "synchronize", lambda *args: self.note_wait("synchronize"))
        patch.setattr(torch.cuda, "mem_get_info", lambda *args: (FREE_BYTES, FREE_BYTES))
        patch.setattr(torch.cuda, "get_device_name", lambda *args: "a pretend GPU")
        for name in ("memory_reserved", "memory_allocated"):
            patch.setattr(torch.cuda, name, lambda *args: 0)
        # Hooks of autograd see the CPU, recomputation the device.
        kinds = {"default": lambda tensor: {"shape": tensor.shape, "dtype": tensor.dtype}}
        patch.setattr(checkpoint, "_allowed_determinism_checks_to_fns", kinds)
        patch.setattr(varlen, "flash", self._attend)
        patch.setattr(graph, "flash_rows", self._attend_rows)
        for module in (head, decode_weights):
            patch.setattr(module, "wide_product", _wide_product)
        real_choice = loading.choose_device
        patch.setattr(loading, "choose_device", lambda name: CUDA if name == "auto" else real_choice(name))
        self.operations = self._stack.enter_context(_Operations(self))
        self._stack.enter_context(_Calls(self))
        return self

    def _attend(self, *given: Any) -> Tensor:
        """Stand in for FlashAttention: one kernel, which waits for nothing."""
        kernels, waits = Counter(self.kernels), Counter(self.waits)
        out = varlen.reference(*given)
        self.kernels, self.waits = kernels + Counter(flash=1), waits
        return out

    def _attend_rows(self, *given: Any) -> Tensor:
        """Do the same over cached rows."""
        kernels, waits = Counter(self.kernels), Counter(self.waits)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.ops.aten, "_flash_attention_forward", flash_forward)
            out = varlen.flash_rows(*given)
        self.kernels, self.waits = kernels + Counter(flash=1), waits
        return out

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def reset(self) -> None:
        """Forget what was noted so far; tensors stay where they are."""
        for noted in (self.mixed, self.waits, self.kernels, self.shapes):
            noted.clear()

    def mark(self, tensor: Tensor) -> Tensor:
        """Put a tensor's storage on the device."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._marked.setdefault(key, weakref.ref(storage, lambda _: self._marked.pop(key, None)))
        return tensor

    def holds(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is on the device."""
        with torch._C.DisableTorchFunction():
            return tensor.untyped_storage()._cdata in self._marked

    def note_wait(self, what: str) -> None:
        self.waits[f"{what} @ {_place()}"] += 1


def _wide_product(x: Tensor, y: Tensor, added: Tensor | None = None) -> Tensor:
    found = (x @ y).float()
    return found if added is None else added + found


class _Calls(TorchFunctionMode):
    """Devices as Python sees them: factories, .to(), .device, .tolist(), and backward passes."""

    def __init__(self, gpu: PretendGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords, name = dict(kwargs or {}), getattr(func, "__name__", str(func))
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if name == "__get__":
            return self._attribute(func, args)
        if name == "backward" and (first is not None or func is torch.autograd.backward):
            roots = (first,) if first is not None else tuple(args[0])
            ones = tuple(torch.ones_like(root) for root in roots)
            with self:  # hooks and recomputation ask for devices too
                return _engine_run_backward(roots, ones, False, False, allow_unreachable=True, accumulate_grad=True)
        if first is not None and name in ("tolist", "numpy") and self._gpu.holds(first):
            self._gpu.note_wait(f"to host: {name}")
        if first is not None and name in ("cpu", "cuda", "to"):
            return self._moved(name, func, first, list(args[1:]), keywords)
        if name == "pin_memory" or keywords.pop("pin_memory", False):
            return _pinned(first if name == "pin_memory" else func(*args, **keywords))
        device = keywords.get("device")
        if name != "_parse_to" and device is not None and torch.device(device).type == "cuda":
            return self._made(name, func, args, keywords)
        return func(*args, **keywords)

    def _attribute(self, func: Callable[..., Any], args: Sequence[Any]) -> Any:
        name = getattr(getattr(func, "__self__", None), "__name__", "")
        shown = {"device": CUDA, "is_cuda": True, "is_cpu": False}
        return shown[name] if name in shown and self._gpu.holds(args[0]) else func(*args)

    def _made(self, name: str, func: Callable[..., Any], args: Sequence[Any], keywords: dict[str, Any]) -> Any:
        """Make new tensors on the device; those of Python's numbers are copied to it while the host waits."""
        if name in ("tensor", "as_tensor"):
            self._gpu.note_wait(f"to device: torch.{name}")
        out = func(*args, **{**keywords, "device": "cpu"})
        for tensor in _tensors(out):
            self._gpu.mark(tensor)
        return out

    def _moved(
        self, name: str, func: Callable[..., Any], tensor: Tensor, rest: list[Any], keywords: dict[str, Any]
    ) -> Tensor:
        gpu, is_there = self._gpu, self._gpu.holds(tensor)
        # Read the device and the type asked for
        device = {"cpu": "cpu", "cuda": "cuda"}.get(name, keywords.get("device"))
        if name == "to" and rest and isinstance(rest[0], str | torch.device):
            device = rest.pop(0)
        if name == "to" and rest and isinstance(rest[0], Tensor):
            device, keywords["dtype"] = (CUDA if gpu.holds(rest[0]) else "cpu"), rest.pop(0).dtype
        dtype = keywords.get("dtype") or next((r for r in rest if isinstance(r, torch.dtype)), tensor.dtype)
        is_wanted = is_there if device is None else torch.device(device).type == "cuda"
        # Stay, or copy to the other device
        if is_wanted == is_there:
            if dtype == tensor.dtype and not keywords.get("copy"):
                return tensor
            copied: Tensor = func(tensor, dtype, **{k: v for k, v in keywords.items() if k == "copy"})
            return copied
        # A copy goes on beside the host only where the host's memory is pinned.
        if not (keywords.get("non_blocking") and getattr(tensor, PINNED, False)):
            gpu.note_wait(f"to {'device' if is_wanted else 'host'}: {name}")
        gpu.operations.is_marking = False
        try:
            with torch._C.DisableTorchFunction():
                out = torch.clone(tensor).to(dtype)
        finally:
            gpu.operations.is_marking = True
        return gpu.mark(out) if is_wanted else out


class _Operations(TorchDispatchMode):
    """Kernels, waits and mixed devices, forward and backward."""

    supports_higher_order_operators = True

    def __init__(self, gpu: PretendGpu) -> None:
        super().__init__()
        self._gpu = gpu
        self.is_marking = True
        """Whether results lie where what they were made of does."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords, gpu = dict(kwargs or {}), self._gpu
        name = func._schema.name.split("::")[-1] if hasattr(func, "_schema") else str(func)
        given = _tensors((args, keywords))
        there, here = [t for t in given if gpu.holds(t)], [t for t in given if not gpu.holds(t)]
        if there:
            self._note_waits(name, args, keywords)
            # Numbers without an axis may come from the host.
            if any(tensor.dim() for tensor in here) and name not in COPIES:
                gpu.mixed[f"{func} {[tuple(t.shape) for t in here if t.dim()]} @ {_place()}"] += 1
        out = func(*args, **keywords)
        if there and self.is_marking:
            gpu.kernels[name] += name not in NO_KERNEL and name not in WAITS
            if name.startswith(FUSED_ATTENTION) and not name.endswith("backward"):
                gpu.shapes.add(tuple(tuple(tensor.shape) for tensor in given[:2]))
            for tensor in _tensors(out) if name != "copy_" else ():
                gpu.mark(tensor)
        return out

    def _note_waits(self, name: str, args: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        if name == "_local_scalar_dense":
            self._gpu.note_wait("to host: item")
        elif name in WAITS:
            self._gpu.note_wait(name)
        elif name in INDEXING and any(index.dtype == torch.bool for index in _tensors(args[1])):
            self._gpu.note_wait(f"{name} by a mask")
        elif name == "repeat_interleave" and keywords.get("output_size") is None:
            self._gpu.note_wait(name)


def _pinned(tensor: Tensor) -> Tensor:
    setattr(tensor, PINNED, True)
    return tensor


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _place() -> str:
    """Return file and line of covey's, or of a test, that asked for it."""
    frames = [f for f in reversed(traceback.extract_stack()) if not any(part in f.filename for part in FOREIGN)]
    return f"{'/'.join(frames[0].filename.split('/')[-2:])}:{frames[0].lineno}" if frames else "?"
