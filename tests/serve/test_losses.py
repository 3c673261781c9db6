"""Losses and gradients against plain formulas of torch, written a second time."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from covey.policy.attention.base import DENSE
from covey.policy.policy import Policy, inference
from covey_serve.limits import ServiceLimits
from covey_serve.model.training import forward_backward, logprobs_of, pack
from covey_serve.wire.messages import read_training

from .served import NAME, bases, datum, read_output, training_body

TEXTS = ([5, 9, 11, 3, 8, 20], [5, 9, 11, 30], [*range(40), 7, 7], [*range(40), 9])
"""The last two begin alike for longer than what is shared."""


def plain(name: str, new: Tensor, given: Mapping[str, Tensor], low: float, high: float) -> Tensor:
    """Return the loss of one datum as the API's documentation writes it."""
    if name == "cross_entropy":
        return -(given["weights"] * new).sum()
    old, advantages = given["logprobs"], given["advantages"]
    ratio = torch.exp(new - old)
    if name == "importance_sampling":
        return -(ratio * advantages).sum()
    if name == "cispo":
        return -(ratio.clamp(low, high).detach() * new * advantages).sum()
    if name == "dro":
        return -(new * advantages - 0.5 * low * (new - old) ** 2).sum()
    if name == "gspo":
        mask = given["sequence_ratio_mask"]
        mean = ((new - old) * mask).sum() / mask.sum()
        ratio = torch.exp(mean.detach() + new - new.detach())
    return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages).sum()


CASES: list[tuple[str, dict[str, float]]] = [
    ("cross_entropy", {}),
    ("importance_sampling", {}),
    ("ppo", {}),
    ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}),
    ("cispo", {}),
    ("cispo", {"clip_low_threshold": 0.95, "clip_high_threshold": 1.02}),
    ("dro", {"beta": 0.3}),
    ("gspo", {"clip_low_threshold": 0.99, "clip_high_threshold": 1.01}),
]
DEFAULTS = {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0), "gspo": (0.8, 1.2), "dro": (0.05, 0.0)}


def numbers(options: Mapping[str, float], name: str) -> tuple[float, float]:
    low, high = DEFAULTS.get(name, (0.0, 0.0))
    return options.get("clip_low_threshold", options.get("beta", low)), options.get("clip_high_threshold", high)


def logprobs(policy: Policy, ids: Sequence[int]) -> Tensor:
    """Return log-probs by transformers' own forward pass, text by text."""
    ids_1T = torch.tensor([ids[:-1]])
    logits = policy.logits(ids_1T, torch.arange(len(ids) - 1)[None], DENSE)
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def inputs_of(policy: Policy, name: str) -> list[dict[str, list[float]]]:
    chance = np.random.default_rng(0)
    found = []
    for ids in TEXTS:
        with inference(policy.model):
            now = logprobs(policy, ids).numpy()
        given = {
            "weights": chance.normal(size=len(now)),
            "logprobs": now + 0.1 * chance.normal(size=len(now)),
            "advantages": chance.normal(size=len(now)),
            "sequence_ratio_mask": 0.5 * (np.arange(len(now)) >= 2),
        }
        reads = {"cross_entropy": ["weights"], "gspo": ["logprobs", "advantages", "sequence_ratio_mask"]}
        names = reads.get(name, ["logprobs", "advantages"])
        found.append({key: [float(np.float32(value)) for value in given[key]] for key in names})
    return found


def served(policy: Policy, name: str, options: Mapping[str, float], given: Sequence[Mapping[str, Any]]) -> Any:
    data = [datum(ids, **own) for ids, own in zip(TEXTS, given, strict=True)]
    request = read_training(training_body("m", 1, data, name, **options), ServiceLimits())
    return read_output(forward_backward(request, policy)[0])


def total(name: str, options: Mapping[str, float], new: Sequence[Tensor], given: Sequence[Mapping[str, Any]]) -> Tensor:
    low, high = numbers(options, name)
    exact = [{key: torch.tensor(own[key], dtype=torch.float64) for key in own} for own in given]
    losses = [plain(name, one.double(), own, low, high) for one, own in zip(new, exact, strict=True)]
    return torch.stack(losses).sum()


@pytest.mark.parametrize(("name", "options"), CASES)
def test_losses_and_logprobs_are_those_of_a_plain_formula(name: str, options: dict[str, float]) -> None:
    policy = bases().make(_shape(), seed=0)
    given = inputs_of(policy, name)
    metrics, values = served(policy, name, options, given)
    with inference(policy.model):
        new = [logprobs(policy, ids) for ids in TEXTS]
    assert metrics["loss:sum"] == pytest.approx(float(total(name, options, new, given)), rel=1e-6, abs=1e-5)
    for mine, theirs in zip(values, new, strict=True):
        np.testing.assert_allclose(mine, theirs.numpy(), atol=5e-6)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_gradients_in_float64_are_those_of_autograd(name: str, options: dict[str, float]) -> None:
    policy = bases(precision="float64").make(_shape(), seed=0)
    given = inputs_of(policy, name)
    served(policy, name, options, given)
    parameters = [each for each in policy.model.parameters() if each.requires_grad]
    mine = [each.grad.clone() for each in parameters]
    policy.model.zero_grad(set_to_none=True)
    # On one forward pass: transformers' norms compute in float32, which would hide the ninth digit
    (batch,) = pack([np.array(ids[:-1]) for ids in TEXTS], policy)
    order = [int(place) for place in batch.prompt_ids]
    targets = torch.tensor([token for place in order for token in TEXTS[place][1:]])
    parts = logprobs_of(policy, batch, targets).split([len(TEXTS[place]) - 1 for place in order])
    total(name, options, parts, [given[place] for place in order]).backward()
    largest = max(float(each.grad.abs().max()) for each in parameters)
    assert largest > 1e-3
    for own, other in zip(mine, parameters, strict=True):
        assert float((own - other.grad).abs().max()) <= 1e-9 * max(largest, 1.0)


def _shape() -> Any:
    from covey_serve.model.models import ModelShape

    return ModelShape(NAME, rank=4)
