"""engine.weights=int8: what is drawn, from which distribution, and how far it lies from what is trained."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from covey.engine.native.engine import NativeEngine
from covey.engine.native.own_weights import OwnWeightsEngine
from covey.engine.weights import EIGHT_BITS, PushRefused, make_weight_set, probe_logprobs
from covey.policy.kernels.compiler import load
from covey.policy.policy import Policy
from covey.types import Completion, Sampling

from ..tiny import tiny_policy
from .test_decode_weights import with_adapters
from .test_engine import GENEROUS
from .test_fused_hybrids import policy_of
from .test_own_weights import moved

PROMPTS = [[5, 9, 200], [17, 3, 44, 101, 7, 250, 31, 30, 29, 12, 64], [99]]
SAMPLING = Sampling(temperature=1.0, max_tokens=12, seed=5)


def engine_of(policy: Policy) -> NativeEngine:
    return NativeEngine(policy, GENEROUS, 64, weights="int8")


def sampled(engine: NativeEngine) -> list[list[Completion]]:
    async def run() -> list[list[Completion]]:
        return list(await asyncio.gather(*(engine.generate(ids, 3, SAMPLING) for ids in PROMPTS)))

    return asyncio.run(run())


def gap(policy: Policy, groups: list[list[Completion]]) -> Tensor:
    """Nats between each token's log-prob and that of a policy on the whole text."""
    pieces = []
    for ids, group in zip(PROMPTS, groups, strict=True):
        for each in group:
            found = probe_logprobs(policy, [*ids, *each.token_ids])[len(ids) - 1 :]
            pieces.append((torch.tensor(found) - torch.tensor(each.logprobs)).abs())
    return torch.cat(pieces)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "qwen3_5_text", "falcon_h1"])
def test_log_probs_are_of_the_rounded_weights_near_the_trained(architecture: str, tmp_path: Path) -> None:
    policy = tiny_policy(architecture) if architecture in ("llama", "qwen3") else policy_of(architecture, tmp_path)
    engine = engine_of(policy)
    groups = sampled(engine)
    engine._take_weights()
    assert gap(engine._policy, groups).max() < 1e-3  # a sum on the edge of two roundings may fall to either side
    assert 1e-4 < gap(policy, groups).mean() < 0.1


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_an_adapter_stays_beside_the_rounded_weights(precision: str) -> None:
    policy = with_adapters(precision)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            parameter.mul_(1e-3) if "lora_B" in name else None  # far less than a step of eight bits
    engine = engine_of(policy)
    before = torch.tensor(probe_logprobs(engine._policy, PROMPTS[1]))
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            parameter.mul_(-1.0) if "lora_B" in name else None
    engine.load_weights(1)
    sampled(engine)
    after = torch.tensor(probe_logprobs(engine._policy, PROMPTS[1]))
    trained = torch.tensor(probe_logprobs(policy, PROMPTS[1]))
    assert 1e-5 < (after - before).abs().max() < 0.1
    assert (after - trained).abs().max() < 0.3


def test_rows_do_not_depend_on_the_rows_beside_them() -> None:
    policy = tiny_policy("llama")
    together = sampled(engine_of(policy))
    for ids, group in zip(PROMPTS, together, strict=True):
        alone = asyncio.run(engine_of(policy).generate(ids, 3, SAMPLING))
        assert [each.token_ids for each in alone] == [each.token_ids for each in group]


def test_pushed_weights_are_taken_and_broken_ones_are_refused() -> None:
    policy = tiny_policy("llama")
    engine = OwnWeightsEngine(policy, GENEROUS, 64, weights="int8")
    other, weights = moved(policy, 1)
    asyncio.run(engine.update(weights, "keep"))
    assert gap(other, sampled(engine)).max() < EIGHT_BITS
    wrong = make_weight_set(other, 2)
    wrong = replace(wrong, probe=replace(wrong.probe, logprobs=tuple(3 * each - 5 for each in wrong.probe.logprobs)))  # type: ignore[union-attr]
    with pytest.raises(PushRefused, match="differs from the trainer's probe"):
        asyncio.run(engine.update(wrong, "keep"))


@pytest.mark.parametrize(("policy", "kernels"), [(tiny_policy("llama"), "torch"), (tiny_policy("gpt2"), "auto")])
def test_a_model_that_is_not_computed_in_c_as_a_whole_is_refused(policy: Policy, kernels: str) -> None:
    with pytest.raises(ValueError, match=r"engine\.weights=int8 needs a model that is decoded in C as a whole"):
        NativeEngine(policy, GENEROUS, 64, kernels, weights="int8")


@pytest.mark.parametrize("weights", ["trained", "int8"])
def test_nothing_is_compiled_once_the_engine_is_built(weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load.cache_clear()  # another test may have looked for all of them
    engine = NativeEngine(tiny_policy("llama"), GENEROUS, 64, weights=weights)

    def refuse(*given: object) -> None:
        raise AssertionError("a library was looked for inside a step")

    monkeypatch.setattr("covey.policy.kernels.compiler._build", refuse)
    assert all(len(group) == 3 for group in sampled(engine))


def test_weights_that_are_not_finite_give_no_token() -> None:
    policy = tiny_policy("llama")
    engine = engine_of(policy)
    with torch.no_grad():
        next(p for name, p in policy.model.named_parameters() if "down_proj" in name)[3, 2] = torch.inf
    engine.load_weights(1)
    with pytest.raises(ValueError, match="must be finite, got nan"):
        sampled(engine)
