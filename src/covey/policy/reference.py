"""The reference policy of a KL penalty."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from covey.algorithm.kl import refresh
from covey.policy import sharding
from covey.policy.policy import Policy, inference, is_adapted

REFERENCE_ADAPTER = "reference"


@dataclass(frozen=True)
class Reference:
    """A frozen policy that log-probs are compared with."""

    policy: Policy
    adapter: str | None
    """Adapter that is the reference of an adapted policy, None for the bare base model."""
    is_own: bool = False
    """A model beside the policy, with all it has: no adapter of it is switched off."""

    @contextmanager
    def active(self) -> Iterator[Policy]:
        """Yield the reference without gradients; the trained adapter is restored afterwards."""
        with inference(self.policy.model):
            if self.is_own or not is_adapted(self.policy.model):
                yield self.policy
            elif self.adapter is None:
                with self.policy.model.disable_adapter():  # type: ignore[operator]
                    yield self.policy
            else:
                with _adapter(self.policy.model, self.adapter):
                    yield self.policy


def make_reference(policy: Policy, *, refreshed: bool, is_empty: bool = False) -> Reference:
    """Return a reference equal to the policy before its first step.

    Under LoRA no second copy of the weights is held: the base model is the reference, or a second adapter, where it
    will be `refreshed` or the adapters have been trained before. Otherwise weights are copied; with `is_empty` they get
    the policy's shards later (`sharding.shard_like`).
    """
    if is_adapted(policy.model):
        own_adapter = refreshed or not is_base_model(policy.model)
        if own_adapter:
            _copy_adapter(policy.model)
        return Reference(policy, REFERENCE_ADAPTER if own_adapter else None)
    if is_empty:
        return Reference(sharding.without_storage(policy), None)
    frozen = copy.deepcopy(policy.model).requires_grad_(False)
    return Reference(replace(policy, model=frozen), None)


def refresh_reference(reference: Reference, policy: Policy, alpha: float) -> None:
    """Set reference <- (1 - alpha) reference + alpha policy (arXiv 2404.09656).

    Adapters can only be replaced (alpha = 1): the mean of two low-rank products is not the product of the means.
    """
    sharding.reshard(policy, reference.policy)
    trained = dict(policy.model.named_parameters())
    with torch.no_grad():
        for name, parameter in reference.policy.model.named_parameters():
            source = _refresh_source(name, reference.adapter)
            if source is not None:
                parameter.copy_(refresh(parameter, trained[source], alpha))


def moved_weights(reference: object, moves: bool) -> dict[str, Tensor]:
    """Return the weights that a reference alone holds, gathered on rank 0.

    Nothing where training does not move it, or where another process holds it.
    """
    if not (moves and isinstance(reference, Reference)):
        return {}
    sharding.reshard(reference.policy)
    named = reference.policy.model.named_parameters()
    own = {name: p.detach() for name, p in named if _refresh_source(name, reference.adapter) is not None}
    return {name: sharding.on_rank0(weight) for name, weight in own.items()} if reference.policy.sharded else own


def load_moved(reference: object, weights: Mapping[str, Tensor]) -> None:
    """Load the weights of `moved_weights`, if any."""
    if not isinstance(reference, Reference):
        return
    parameters = dict(reference.policy.model.named_parameters())
    with torch.no_grad():
        for name, weight in weights.items():
            parameter = parameters[name]
            parameter.copy_(sharding.placed_like(weight, parameter) if reference.policy.sharded else weight)


def _refresh_source(name: str, adapter: str | None) -> str | None:
    """Return the policy's parameter behind a reference parameter, None if shared."""
    if adapter is None:
        return name
    return name.replace(f".{adapter}.", ".default.") if f".{adapter}." in name else None


def is_base_model(model: nn.Module) -> bool:
    """Return True where untrained adapters add nothing: their second factor is 0."""
    return not any(bool(parameter.any()) for name, parameter in model.named_parameters() if ".lora_B." in name)


def _copy_adapter(model: nn.Module) -> None:
    with torch.random.fork_rng(devices=[]):
        model.add_adapter(REFERENCE_ADAPTER, model.peft_config["default"])  # type: ignore[operator,index]
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            source = _refresh_source(name, REFERENCE_ADAPTER)
            if source is not None:
                parameter.copy_(parameters[source])
                parameter.requires_grad_(False)
    model.set_adapter("default")  # type: ignore[operator]


@contextmanager
def _adapter(model: nn.Module, name: str) -> Iterator[None]:
    model.set_adapter(name, inference_mode=True)  # type: ignore[operator]
    try:
        yield
    finally:
        model.set_adapter("default")  # type: ignore[operator]
