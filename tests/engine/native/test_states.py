"""The native engine on models with layers that have a state: continuous batching with states beside keys and values."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain

import pytest
import torch

from benchmarks.checks.architectures import save
from covey.engine.native.engine import NativeEngine
from covey.policy.models.loading import load_policy
from covey.policy.plain import plain_model
from covey.policy.policy import Policy
from covey.policy.settings import ModelConfig
from covey.types import Completion, Sampling

from .test_sessions import GENEROUS, as_prompts, played

HYBRIDS = ("qwen3_5_text", "qwen3_next", "olmo_hybrid", "nemotron_h", "falcon_h1", "lfm2", "lfm3")
PROMPTS = [[5, 9, 200], [17, 3, 44, 101, 7, 250, 31, 30, 29, 12, 64], [99], [1, 2, 3, 4, 5, 6, 7], [8, 8, 8]]
SAMPLING = Sampling(temperature=0.8, top_p=0.95, max_tokens=16, seed=5)


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Policy]:
    found = {}
    for architecture in HYBRIDS:
        folder = tmp_path_factory.mktemp(architecture)
        save(architecture, str(folder))
        policy = load_policy(ModelConfig(name=str(folder)))
        assert policy.path == "fast"
        # Ends after few tokens, so that rows leave at different times
        policy.causal_lm.generation_config.eos_token_id = list(range(0, 260, 23))  # type: ignore[union-attr]
        found[architecture] = policy
    return found


def sampled(engine: NativeEngine, n: int = 3) -> list[list[Completion]]:
    """Sample n completions of all prompts at the same time."""

    async def run() -> list[list[Completion]]:
        calls = [engine.generate(ids, n, replace(SAMPLING, seed=i)) for i, ids in enumerate(PROMPTS)]
        return list(await asyncio.gather(*calls))

    return asyncio.run(run())


def largest_gap(policy: Policy, groups: list[list[Completion]]) -> float:
    """Return the most nats between a token's log-prob and that of transformers on the whole text, without filters."""
    plain, gaps = plain_model(policy), []
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for each in group:
            ids, first = [*prompt, *each.token_ids], len(prompt) - 1
            logits_TV = plain.logits(ids[:-1], range(first, len(ids) - 1)) / SAMPLING.temperature
            own_T = logits_TV.log_softmax(-1)[range(len(each.token_ids)), list(each.token_ids)]
            gaps.append(float((own_T - torch.tensor(each.logprobs)).abs().max()))
    return max(gaps)


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_log_probs_are_those_of_transformers(
    architecture: str, policies: Mapping[str, Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "SAMPLING", replace(SAMPLING, top_p=1.0))
    policy = policies[architecture]
    for max_rows in (64, 4):  # all together, and in waves that fill the slots of those that left
        groups = sampled(NativeEngine(policy, GENEROUS, max_rows))
        assert len({len(each.token_ids) for each in chain(*groups)}) > 3
        assert largest_gap(policy, groups) < 1e-5


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_a_row_does_not_depend_on_the_rows_beside_it(architecture: str, policies: Mapping[str, Policy]) -> None:
    policy = policies[architecture]
    together = sampled(NativeEngine(policy, GENEROUS, 64))
    for number, ids in enumerate(PROMPTS[:2]):
        engine = NativeEngine(policy, GENEROUS, 64)
        alone = asyncio.run(engine.generate(ids, 3, replace(SAMPLING, seed=number)))
        assert [each.token_ids for each in alone] == [each.token_ids for each in together[number]]


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_turns_are_those_of_whole_histories(architecture: str, policies: Mapping[str, Policy]) -> None:
    engine = NativeEngine(policies[architecture], GENEROUS, 64)
    found = played(engine.open, turns=3)
    assert engine.take_stats().re_encoded_tokens == 0
    for mine, theirs in zip(chain(*found), chain(*played(as_prompts(engine), turns=3)), strict=True):
        assert mine.token_ids == theirs.token_ids
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
    assert not engine._runner.cache.num_slots


@pytest.mark.parametrize("architecture", ["qwen3_5_text", "falcon_h1", "lfm2"])
def test_states_count_in_the_budget_of_the_cache(
    architecture: str, policies: Mapping[str, Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = policies[architecture]
    free = NativeEngine(policy, GENEROUS, 64)
    wanted, budget = sampled(free), free.take_stats().peak_cache_bytes // 3
    tight = NativeEngine(policy, budget, 64)
    held, decode = [], tight._runner.decode

    def measured(*given: object) -> object:
        blocks = tight._runner.cache.prompts, tight._runner.cache.rows
        held.append(sum(tensor.nbytes for block in blocks for tensor in (*block.keys, *block.values, *block.held)))
        return decode(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(tight._runner, "decode", measured)
    assert [[each.token_ids for each in group] for group in sampled(tight)] == [
        [each.token_ids for each in group] for group in wanted
    ]
    stats = tight.take_stats()
    assert 0 < max(held) <= stats.peak_cache_bytes <= budget
    assert stats.peak_rows < 15


def test_evicted_turns_are_read_again(policies: Mapping[str, Policy]) -> None:
    policy = policies["nemotron_h"]
    free = NativeEngine(policy, GENEROUS, 64)
    wanted = played(free.open, turns=3)
    shape = free._shape
    slots = 2 * shape.state_slots + 60
    tight = NativeEngine(
        policy, next(b for b in range(0, GENEROUS, shape.slot_bytes) if shape.max_slots(b) >= slots), 64
    )
    found = played(tight.open, turns=3)
    assert tight.take_stats().re_encoded_tokens > 0
    for mine, theirs in zip(chain(*found), chain(*wanted), strict=True):
        assert mine.token_ids == theirs.token_ids
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
