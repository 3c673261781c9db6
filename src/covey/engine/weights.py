"""What is pushed from the trainer to engines: the trained parameters, hashed, with a probe that proves them."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from covey.engine.base import Probe, PushRefused, WeightSet, digest_of
from covey.policy.attention.base import DENSE
from covey.policy.attention.bidirectional import inputs_layout
from covey.policy.policy import Policy, inference

PROBE_LENGTH = 16
PROBE_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 0.5, torch.float16: 0.1}
"""Most nats by which an engine's log-prob of a token may differ: rounding, as the check before a run allows it."""


def trained_tensors(policy: Policy) -> dict[str, Tensor]:
    """Return the parameters that training changes, by name: with LoRA the adapter's alone."""
    return {name: tensor for name, tensor in policy.model.named_parameters() if tensor.requires_grad}


def make_weight_set(policy: Policy, version: int) -> WeightSet:
    """Copy the policy's trained weights as they are now.

    Shards must be gathered around it (`sharding.gathered`).
    """
    tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in trained_tensors(policy).items()}
    return WeightSet(version, tensors, digest_of(tensors), make_probe(policy))


def make_probe(policy: Policy) -> Probe:
    """Return a fixed text over the policy's vocabulary, and what its weights make of it now."""
    size = len(policy.tokenizer)
    token_ids = tuple((7919 * place + 11) % size for place in range(min(PROBE_LENGTH, policy.max_length)))
    return Probe(token_ids, tuple(probe_logprobs(policy, token_ids)), PROBE_TOLERANCE[policy.precision])


def probe_logprobs(policy: Policy, token_ids: Sequence[int]) -> list[float]:
    """Return the log-probs of token_ids[1:], at temperature 1 and unfiltered.

    Of a masked policy: those of token_ids[1:] as it reads them, in place.
    """
    ids_1T = torch.tensor([list(token_ids)], device=policy.device)
    position_1T = torch.arange(len(token_ids), device=policy.device)[None]
    with inference(policy.model):
        layout = DENSE if policy.mask_id is None else inputs_layout([len(token_ids)], policy.device)
        logprob_TV = policy.logits(ids_1T, position_1T, layout).double().log_softmax(-1)
    return [float(logprob_TV[place, token_id]) for place, token_id in enumerate(token_ids[1:])]


def probe_gap(policy: Policy, probe: Probe) -> float:
    """Return the most nats by which a policy gives a token of the probe another log-prob; NaN where one is."""
    found = torch.tensor(probe_logprobs(policy, probe.token_ids), dtype=torch.float64)
    return float((found - torch.tensor(probe.logprobs, dtype=torch.float64)).abs().max())


def check_pushed(weights: WeightSet, own: Mapping[str, Tensor]) -> None:
    """Refuse (PushRefused) weights of other names or shapes, or that changed on their way."""
    missing, foreign = sorted(own.keys() - weights.tensors.keys()), sorted(weights.tensors.keys() - own.keys())
    if missing or foreign:
        raise PushRefused(
            f"version {weights.version} lacks {len(missing)} tensors of the engine's and has {len(foreign)} others "
            f"({', '.join((missing + foreign)[:3])})"
        )
    for name, tensor in own.items():
        if tensor.shape != weights.tensors[name].shape:
            shapes = f"{tuple(weights.tensors[name].shape)} where the engine has {tuple(tensor.shape)}"
            raise PushRefused(f"version {weights.version} has {name} in the shape {shapes}")
    if digest_of(weights.tensors) != weights.digest:
        raise PushRefused(f"version {weights.version} changed on its way: its bytes have another digest")


def replace_weights(trained: Policy, weights: WeightSet, read: Policy, refresh: Callable[[], None]) -> None:
    """Copy pushed weights into a policy as one transaction.

    `read` is the policy that sampling reads, which `refresh` brings up to date. PushRefused where names, shapes, digest
    or probe are not right: the old weights are then in place, whole.
    """
    own = trained_tensors(trained)
    check_pushed(weights, own)
    old = {name: tensor.detach().clone() for name, tensor in own.items()}
    _copy(weights.tensors, own, refresh)
    gap = probe_gap(read, weights.probe)
    if not gap <= weights.probe.tolerance:  # NaN is refused too
        _copy(old, own, refresh)
        raise PushRefused(
            f"version {weights.version} gives the probe other log-probs than the trainer, {gap:.2g} nats apart where "
            f"{weights.probe.tolerance:.2g} is rounding"
        )


@torch.no_grad()
def _copy(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor], refresh: Callable[[], None]) -> None:
    for name, tensor in own.items():
        tensor.copy_(tensors[name])
    refresh()
