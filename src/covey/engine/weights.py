"""Weights pushed to engines: the trained parameters, hashed, with a probe."""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from statistics import fmean

import torch
from torch import Tensor

from covey.algorithm.softmax import log_softmax
from covey.engine.base import Probe, PushRefused, WeightSet, digest_of
from covey.policy.attention.base import DENSE
from covey.policy.attention.bidirectional import inputs_layout
from covey.policy.models.text import ordinary_ids
from covey.policy.policy import Policy, inference

PROBE_LENGTH = 32
"""Tokens of a text that every probe begins with."""
TEXT_LENGTH = 32
"""Tokens of a prompt of the run: rows of an embedding that training does not touch prove nothing."""
PROBE_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 0.5, torch.float16: 0.1}
"""Largest rounding in nats of a token's log-prob, by precision. Frozen 4-bit weights are the same bits on both sides,
and add nothing."""
EIGHT_BITS = 2.0
"""The same with engine.weights=int8: 0.6 at most and 0.07 on average were measured."""
MEAN_SHARE = 0.1
"""The mean may be this share of it: a defect moves many tokens a little before it moves one by much."""
ROUNDINGS = 3.0
"""Bound of the mean in multiples of a policy's mean rounding: both sides round, each in its own order."""
MOST = {torch.float64: 1.0, torch.float32: 10.0, torch.bfloat16: 2.0, torch.float16: 2.0}
"""Most rounding in multiples of the usual tolerance: it must not explain any real defect."""

Shapes = dict[str, tuple[int, ...]]


def trained_tensors(policy: Policy) -> dict[str, Tensor]:
    """Return the trained parameters by name; with LoRA the adapter's alone."""
    return {name: tensor for name, tensor in policy.model.named_parameters() if tensor.requires_grad}


def make_weight_set(policy: Policy, version: int, text: Sequence[int] = (), *, copy: bool = True) -> WeightSet:
    """Copy the trained weights with a probe that reads `text` too (`unproved_set`)."""
    weights = unproved_set(policy, version, text, copy=copy)
    return replace(weights, probe=replace(weights.probe, logprobs=prove(policy, weights.probe)))


def unproved_set(policy: Policy, version: int, text: Sequence[int] = (), *, copy: bool = True) -> WeightSet:
    """Copy the trained weights; the probe's log-probs follow by `prove`.

    Shards must be gathered around it (`sharding.gather_weights`). Without `copy`, weights in host memory are the
    policy's own, to be used before it is trained on; gathered ones are copied anyway.
    """
    copy = copy or policy.sharded
    tensors = {name: tensor.detach().to("cpu", copy=copy) for name, tensor in trained_tensors(policy).items()}
    return WeightSet(version, tensors, digest_of(tensors), _unread_probe(policy, text))


def prove(policy: Policy, probe: Probe) -> tuple[float, ...]:
    """Score a probe on the policy's weights, and publish the result."""
    logprobs = tuple(probe_logprobs(policy, probe.token_ids))
    if isinstance(probe.logprobs, Future):
        probe.logprobs.set_result(logprobs)
    return logprobs


async def await_probe(probe: Probe) -> Probe:
    """Return the probe once its log-probs are there."""
    if not isinstance(probe.logprobs, Future):
        return probe
    # Who gives up waiting must not end it for others
    coming: asyncio.Future[tuple[float, ...]] = asyncio.wrap_future(probe.logprobs)
    return replace(probe, logprobs=await asyncio.shield(coming))


def make_probe(policy: Policy, text: Sequence[int] = ()) -> Probe:
    """Return a probe scored on the policy's current weights (`_unread_probe`)."""
    probe = _unread_probe(policy, text)
    return replace(probe, logprobs=prove(policy, probe))


def _unread_probe(policy: Policy, text: Sequence[int]) -> Probe:
    """Return a fixed text followed by the beginning of `text`."""
    room = policy.max_length - 1  # vLLM scores a text by continuing it
    read = text[:TEXT_LENGTH] if policy.mask_id is None else ()
    token_ids = (*ordinary_ids(policy, PROBE_LENGTH), *read)[:room]
    return Probe(token_ids, Future(), tolerance(policy.precision, policy.rounding))


def tolerance(precision: torch.dtype, rounding: float, usual: float = 0.0) -> float:
    """Return a token's largest rounding in nats; `usual` 0: by precision."""
    usual = usual or PROBE_TOLERANCE[precision]
    return usual * min(max(1.0, ROUNDINGS * rounding / (MEAN_SHARE * usual)), MOST[precision])


def probe_logprobs(policy: Policy, token_ids: Sequence[int]) -> list[float]:
    """Return the log-probs of token_ids[1:], at temperature 1 and unfiltered.

    A masked policy reads them in place.
    """
    ids_1T = torch.tensor([list(token_ids)], device=policy.device)
    position_1T = torch.arange(len(token_ids), device=policy.device)[None]
    with inference(policy.model):
        layout = DENSE if policy.mask_id is None else inputs_layout([len(token_ids)], policy.device)
        logits_TV = policy.logits(ids_1T, position_1T, layout)[: len(token_ids) - 1]
        chosen_T = log_softmax(logits_TV).gather(-1, ids_1T[0, 1:, None])[:, 0]
    return [float(logprob) for logprob in chosen_T.tolist()]


def disproof(found: Sequence[float], probe: Probe) -> str:
    """Describe a difference from the probe beyond rounding, "" without one."""
    assert not isinstance(probe.logprobs, Future), "wait until the probe has arrived"
    if len(found) != len(probe.logprobs):
        return f"gives {len(found)} log-probs of the probe's {len(probe.logprobs)}"
    gaps = [abs(a - b) for a, b in zip(found, probe.logprobs, strict=True)]
    largest, mean = math.nan if any(map(math.isnan, gaps)) else max(gaps), fmean(gaps)
    if largest <= probe.tolerance and mean <= MEAN_SHARE * probe.tolerance:  # NaN is neither
        return ""
    return (
        f"differs from the trainer's probe by up to {largest:.2g} nats, {mean:.2g} on average; rounding explains "
        f"{probe.tolerance:g} and {MEAN_SHARE * probe.tolerance:g}"
    )


def shapes_of(tensors: Mapping[str, Tensor]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def difference(pushed: Shapes, own: Shapes) -> str:
    """Describe how pushed names and shapes differ, "" if not."""
    missing, foreign = sorted(own.keys() - pushed.keys()), sorted(pushed.keys() - own.keys())
    if missing or foreign:
        names = ", ".join((missing + foreign)[:3])
        return f"{len(missing)} tensors of the engine's are missing and {len(foreign)} are not the engine's ({names})"
    for name, shape in own.items():
        if pushed[name] != shape:
            return f"{name} has the shape {pushed[name]}, the engine's has {shape}"
    return ""


def defect(weights: WeightSet, version: int) -> str:
    """Describe a defect of weights for an engine at `version`, or "".

    They may be older, not finite, or changed on their way.
    """
    if weights.version < version:
        return f"it is older than version {version}, which is sampled on"
    for name, tensor in weights.tensors.items():
        if not math.isfinite(tensor.sum(dtype=torch.float32)):  # of either sign: infinities may cancel out to NaN
            return f"{name} holds values that are not finite"
    if weights.digest and digest_of(weights.tensors) != weights.digest:
        return "it changed on its way: its bytes have another digest"
    return ""


def check_pushed(weights: WeightSet, own: Shapes, version: int) -> None:
    """Refuse (PushRefused) weights that cannot replace `own`, or are defective."""
    refuse(weights.version, difference(shapes_of(weights.tensors), own) or defect(weights, version))


def refuse(version: int, reason: str) -> None:
    """Refuse a push (PushRefused) where there is a reason."""
    if reason:
        raise PushRefused(f"version {version}: {reason}")


async def replace_weights(trained: Policy, weights: WeightSet, read: Policy, refresh: Callable[[], None]) -> None:
    """Copy pushed weights into a policy as a transaction, without sampling meanwhile.

    They were checked (`check_pushed`). `read` is the decode policy, which `refresh` updates. PushRefused where the
    probe fails: the old weights are then restored.
    """
    own = trained_tensors(trained)
    old = {name: tensor.detach().clone() for name, tensor in own.items()}
    try:
        _copy(weights.tensors, own, refresh)
        found = probe_logprobs(read, weights.probe.token_ids)
        if wrong := disproof(found, await await_probe(weights.probe)):
            raise PushRefused(f"version {weights.version}: on it the engine {wrong}")
    except BaseException:
        _copy(old, own, refresh)
        raise


@torch.no_grad()
def _copy(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor], refresh: Callable[[], None]) -> None:
    for name, tensor in own.items():
        tensor.copy_(tensors[name])
    refresh()
