"""AdamW in C on a CPU (adamw.c), and gradients' norm.

Weights, moments and gradients are float32, each read and written once. The state has the form of torch's.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from covey.policy.kernels.compiler import KERNELS, library, struct_of
from covey.policy.kernels.support import unsupported_reason

SOURCE = KERNELS / "adamw.c"
BLOCK = 16384
"""Numbers whose squares are one sum, as in adamw.c."""
Part = struct_of(SOURCE, "Part")


class AdamW(torch.optim.AdamW):
    """torch's AdamW with its step in one pass (arXiv 1711.05101)."""

    factor = 1.0
    """Factor on gradients in the next step alone."""

    def __init__(self, groups: Any, **settings: Any) -> None:
        super().__init__(groups, fused=True, **settings)
        self._step_supports_amp_scaling = False  # a loss scale is taken off before

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        assert closure is None, "no pass is made again within a step"
        held: list[Tensor] = []
        parts = [
            self._part(weight, group, held)
            for group in self.param_groups
            for weight in group["params"]
            if weight.grad is not None
        ]
        self.factor = 1.0
        torch.autograd.graph.increment_version([weight for group in self.param_groups for weight in group["params"]])
        sizes = map(ctypes.c_int64, (len(parts), torch.get_num_threads()))
        library(SOURCE).covey_adamw_step((Part * len(parts))(*parts), *sizes)
        return None

    def _part(self, weight: Tensor, group: dict[str, Any], held: list[Tensor]) -> ctypes.Structure:
        """Count the step of a weight; `held` keeps its gradient alive."""
        state, (beta_1, beta_2) = self.state[weight], group["betas"]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        state["step"] += 1
        number, rate = float(state["step"]), float(group["lr"])
        assert weight.grad is not None, "chosen for its gradient"
        part = _gradient(weight.grad, held)
        places = (weight, state["exp_avg"], state["exp_avg_sq"])
        part.weight, part.mean, part.square = (tensor.data_ptr() for tensor in places)
        part.factor, part.decay, part.eps = self.factor, rate * group["weight_decay"], group["eps"]
        part.rate, part.root = rate / (1 - beta_1**number), (1 - beta_2**number) ** -0.5
        part.beta_1, part.beta_2, part.new_1, part.new_2 = beta_1, beta_2, 1 - beta_1, 1 - beta_2
        return part


def adamw(groups: list[dict[str, Any]], kernels: str = "auto", **settings: Any) -> torch.optim.Optimizer:
    """Build AdamW: in C where it can step these weights, else torch's."""
    weights = [weight for group in groups for weight in group["params"]]
    are_plain = all(type(weight.data) is Tensor and weight.is_contiguous() for weight in weights)
    types = [(weight.dtype, weight.device.type) for weight in weights]
    if kernels == "auto" and are_plain and not unsupported_reason("optimizer", types):
        return AdamW(groups, **settings)
    # One pass over memory, on a CPU a fifth of the time. Threads' shares end at whole vectors: any number, same bits.
    return torch.optim.AdamW(groups, fused=True, **settings)


def global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of all gradients, in float64."""
    held: list[Tensor] = []
    parts, num_blocks = [_gradient(gradient, held) for gradient in gradients], 0
    for part in parts:
        part.first, num_blocks = num_blocks, num_blocks - (-part.count // BLOCK)
    sums, count = torch.empty(num_blocks, dtype=torch.float64), ctypes.c_int64
    squares, room = library(SOURCE).covey_squares, ctypes.c_void_p(sums.data_ptr())
    squares.restype = ctypes.c_double
    found = squares((Part * len(parts))(*parts), count(len(parts)), room, count(torch.get_num_threads()))
    return torch.tensor(found, dtype=torch.float64).sqrt()


def _gradient(gradient: Tensor, held: list[Tensor]) -> ctypes.Structure:
    held.append(gradient.contiguous())
    return Part(gradient=held[-1].data_ptr(), count=gradient.numel())
