"""FSDP2: weights, gradients and optimiser state sharded over the ranks (arXiv 2304.11277).

A layer is gathered when a pass reaches it; embeddings, final norm and head are one unit, gathered for a whole pass.
Sharded tensors are DTensors; functions here make them whole and back. torch's parts are imported late, as that takes a
second.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from covey.policy.policy import Policy
from covey.system import collectives

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


T = TypeVar("T")


def shard(policy: Policy, device: torch.device | None = None) -> Policy:
    """Shard the weights over all ranks, in place, layer by layer.

    `device` never holds more than one whole layer beside the shards; weights without storage get that of the shards
    alone, and the policy is completed. From then on passes are collective: every rank makes equally many, or runs
    inside `gather_weights`.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    root = policy.causal_lm
    mesh = init_device_mesh((device or policy.device).type, (collectives.world_size(),))
    # Half precision is gathered as such: half the traffic, 2 bytes a weight while sampling. Shards stay as they are.
    gathered, reduced = (None, None) if policy.computes_whole else (policy.precision, torch.float32)
    types = MixedPrecisionPolicy(gathered, reduced, cast_forward_inputs=False)
    for layer in layers_of(root):
        fully_shard(layer, mesh=mesh, mp_policy=types)
    fully_shard(root, mesh=mesh, mp_policy=types, reshard_after_forward=False)
    for module in _sharded_modules(root):
        # Losses are divided by global counts: gradients add up. gloo has no mean anyway.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    root.covey_pass = _run  # type: ignore[assignment]
    register_fsdp_forward_method(root, "covey_pass")
    place = device or policy.device
    policy.model._apply(lambda tensor: torch.empty_like(tensor, device=place) if tensor.is_meta else tensor)
    # Ranks make equally many passes: trees through a cache have other numbers of them
    attention = "rows" if policy.attention == "forked" else policy.attention
    sharded = replace(policy, sharded=True, attention=attention, complete=None)
    found = sharded if policy.complete is None else policy.complete(sharded)
    if found.attention == "alone":
        kind = type(root).__name__
        raise ValueError(f"parallel.strategy=fsdp needs a model that reads padded rows exactly, {kind} does not")
    return found


def without_storage(policy: Policy) -> Policy:
    """Return the policy with frozen weights on `meta`, buffers copied, for `shard_like`."""
    named = policy.model.named_parameters()
    empty = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=False) for _, p in named}
    # deepcopy takes what it finds here for copied, tied weights once.
    return replace(policy, model=copy.deepcopy(policy.model, dict(empty)), complete=None)


def shard_like(empty: Policy, example: Policy) -> Policy:
    """Give a policy `without_storage` a sharded one's shards; no weight becomes whole."""
    model = shard(empty, example.device).model
    reshard(example)
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), example.model.parameters(), strict=True):
            mine.to_local().copy_(theirs.to_local())  # type: ignore[attr-defined] # both are DTensors
    return replace(example, model=model)


@contextmanager
def gather_weights(policy: Policy) -> Iterator[None]:
    """Gather all weights on every rank inside, for single ranks' passes."""
    modules = list(_sharded_modules(policy.causal_lm)) if policy.sharded else []
    for module in modules:
        module.unshard()
        module.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for module in modules:
            module.set_reshard_after_forward(not isinstance(module, PreTrainedModel), recurse=False)
            module.reshard()


def reshard(*policies: Policy) -> None:
    """Free weights that passes without gradient left gathered."""
    for policy in policies:
        for module in _sharded_modules(policy.causal_lm) if policy.sharded else ():
            module.reshard()


def is_shard(tensor: Tensor) -> bool:
    if not collectives.is_distributed():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor. Collective where it is sharded."""
    return tensor.full_tensor() if is_shard(tensor) else tensor  # type: ignore[attr-defined] # a DTensor's


def placed_like(tensor: Tensor, example: Tensor) -> Tensor:
    """Shard a whole tensor as `example` is, if at all."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(example, DTensor):
        return tensor
    return distribute_tensor(tensor.to(example.device), example.device_mesh, example.placements)


def own_rows(num_rows: int) -> tuple[int, int]:
    """Return (first, end) of this rank's rows, as `fully_shard` splits them."""
    share = -(-num_rows // collectives.world_size())
    return min(collectives.rank() * share, num_rows), min((collectives.rank() + 1) * share, num_rows)


def on_rank0(tensor: Tensor) -> Tensor:
    """Return the whole tensor on rank 0's CPU, else an empty one. Collective."""
    found = whole(tensor)
    return found.cpu() if collectives.is_main_process() else torch.empty(0, dtype=found.dtype)


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return a sharded model's whole state dict on rank 0, ties kept."""
    identity = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    found: dict[int, Tensor] = {}
    weights = {}
    for name, value in model.state_dict().items():
        key = identity.get(name, id(value))
        if key not in found:
            found[key] = on_rank0(value)
        weights[name] = found[key]
    return weights


def full_optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimiser's whole state dict on rank 0."""
    state = optimizer.state_dict()
    gathered_state = {
        index: {name: on_rank0(value) if isinstance(value, Tensor) else value for name, value in moments.items()}
        for index, moments in state["state"].items()
    }
    return {**state, "state": gathered_state}


def load_full_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load the state of `full_optimizer_state` at any number of ranks."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    placed = {
        index: {name: _shard_moment(value, parameters[index]) for name, value in moments.items()}
        for index, moments in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": placed})


def _shard_moment(value: Any, parameter: Tensor) -> Any:
    """Shard moments like their parameter; counters are on every rank."""
    is_moment = isinstance(value, Tensor) and value.shape == parameter.shape
    return placed_like(value, parameter) if is_moment else value


def _run(make: Callable[[], T]) -> T:
    return make()


def _sharded_modules(model: nn.Module) -> "Iterator[FSDPModule]":
    from torch.distributed.fsdp import FSDPModule

    return (module for module in model.modules() if isinstance(module, FSDPModule))


def layers_of(root: PreTrainedModel) -> list[nn.Module]:
    """Return the layers that transformers never splits over devices.

    Embeddings, which encoders list there too, stay with the head that may share their weight.
    """
    names = set(root._no_split_modules or [])
    found = [module for module in root.modules() if names & {kind.__name__ for kind in type(module).__mro__}]
    return [layer for layer in found if not any(isinstance(module, nn.Embedding) for module in layer.modules())]
