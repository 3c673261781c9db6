"""Models with layers that have a state, on the fast path: what transformers alone computes, in every layout."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.checks.architectures import plain, plain_logprobs
from covey.policy.logprobs import Scoring, score_tokens
from covey.policy.plain import _exactly
from covey.policy.policy import Policy
from covey.policy.recurrence.mixers import is_routed, unroute
from covey.types import MicroBatch, Sampling

from ...support.builders import ADVANTAGES, SGD, gradient, make, make_trainer, relative_error
from ..models.test_general import groups, loaded, rollouts

HYBRIDS = ("qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "nemotron_h", "granitemoehybrid", "falcon_h1", "lfm2_moe")


def logprobs_of(policy: Policy, micro_batches: Sequence[MicroBatch]) -> Tensor:
    return torch.cat([score_tokens(policy, m, Scoring(Sampling(), 0)).logprob_L for m in micro_batches])


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("architecture", HYBRIDS)
def test_every_layout_computes_what_transformers_alone_computes(
    architecture: str, checkpointing: bool, tmp_path: Path
) -> None:
    policy = loaded(tmp_path, architecture, gradient_checkpointing=checkpointing)
    assert policy.path == "fast"
    model = plain(str(tmp_path))
    expected_L = torch.cat([plain_logprobs(model, rollout) for rollout in rollouts()])
    weight_L = torch.linspace(-1.0, 2.0, len(expected_L))
    (weight_L * expected_L).sum().backward()
    expected = torch.cat([p.grad.flatten() for _, p in sorted(model.named_parameters()) if p.grad is not None])
    for packing in ("shared", "packed", "padded"):
        policy.model.train()
        policy.model.zero_grad()
        found_L = logprobs_of(policy, make(groups(), packing, 150, attention=policy.attention).micro_batches)
        (weight_L * found_L).sum().backward()
        own = sorted(policy.causal_lm.named_parameters())
        found = torch.cat([p.grad.flatten() for _, p in own if p.grad is not None])
        assert float((found_L - expected_L).detach().abs().max()) < 1e-5, packing
        assert relative_error(found, expected) < 1e-5, packing


@pytest.mark.parametrize("architecture", ["qwen3_5_text", "nemotron_h", "lfm2"])
def test_an_update_in_float64_does_not_depend_on_the_layout(architecture: str, tmp_path: Path) -> None:
    gradients = []
    for packing, budget in (("padded", 200), ("packed", 90), ("shared", 10_000), ("shared", 70)):
        policy = loaded(tmp_path / packing / str(budget), architecture, precision="float64")
        with _exactly(torch.float64):  # its norms would compute in float32
            batch = make(groups(), packing, budget, ADVANTAGES, attention=policy.attention)
            make_trainer(policy, optimizer=SGD).step(batch, 0)
        gradients.append(gradient(policy))
    for found in gradients[1:]:
        assert relative_error(found, gradients[0]) < 1e-9


def test_a_trained_model_generates_through_its_own_cache(tmp_path: Path) -> None:
    for architecture in ("qwen3_5_text", "falcon_h1", "lfm2"):
        model = loaded(tmp_path / architecture, architecture).causal_lm.eval()
        ids = torch.tensor([[5, 9, 17, 40]])
        found = model.generate(ids, max_new_tokens=8, do_sample=False)  # type: ignore[operator]
        assert is_routed(model)
        unroute(model)
        assert not is_routed(model)
        assert found.tolist() == model.generate(ids, max_new_tokens=8, do_sample=False).tolist()  # type: ignore[operator]
