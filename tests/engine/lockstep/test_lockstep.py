"""The lockstep engine against transformers alone, architecture by architecture, and against the native engine."""

import asyncio
import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.checks.architecture_configs import tiny_config
from covey.engine.build import ENGINES, OWN_WEIGHTS
from covey.engine.lockstep.engine import LockstepEngine
from covey.engine.native.engine import NativeEngine
from covey.engine.native.runner import cache_shape
from covey.engine.settings import EngineConfig
from covey.policy.models.caches import cache_bytes
from covey.policy.policy import Policy
from covey.types import Completion, Sampling

from ..native.test_sessions import GENEROUS, as_prompts, played
from ..tiny import TOKENIZER, plain_logprobs, tiny_policy

PROMPTS = [[5, 9, 200], [17, 3, 44, 101, 7, 250, 31, 30, 29, 12, 64], [99], [1, 2, 3, 4, 5, 6, 7], [8, 8, 8]]
SAMPLING = Sampling(temperature=0.8, top_p=0.95, max_tokens=16, seed=5)
HYBRIDS = ("qwen3_5_text", "qwen3_next", "nemotron_h", "lfm2", "falcon_h1", "granitemoehybrid")
OTHERS = ("llama4_text", "bloom", "jamba", "mamba")
Builder = Callable[[Policy, EngineConfig, str], object]
STOPS = range(0, 260, 23)


def policy_of(architecture: str, stop_ids: Sequence[int] = STOPS) -> Policy:
    """A tiny random model with transformers' own attention."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny_config(architecture)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.08) if parameter.dim() > 1 else None
    model.config.max_position_embeddings = 128  # some have no limit
    model.generation_config.eos_token_id = list(stop_ids)
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.eos_token = None
    return Policy(model=model, tokenizer=tokenizer, precision=torch.float32, head_is_linear=False)


def sampled(engine: NativeEngine, sampling: Sampling = SAMPLING, n: int = 3) -> list[list[Completion]]:
    """Sample n completions of all prompts at the same time."""

    async def run() -> list[list[Completion]]:
        calls = [engine.generate(ids, n, replace(sampling, seed=i)) for i, ids in enumerate(PROMPTS)]
        return list(await asyncio.gather(*calls))

    return asyncio.run(run())


def largest_gap(policy: Policy, groups: list[list[Completion]], sampling: Sampling = SAMPLING) -> float:
    """Return the most nats between a token's log-prob and transformers' on the whole text."""
    gaps = []
    for prompt_ids, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            expected = plain_logprobs(policy.causal_lm, prompt_ids, completion, sampling).tolist()
            gaps += [abs(a - b) for a, b in zip(completion.logprobs, expected, strict=True)]
    return max(gaps)


@pytest.mark.parametrize("architecture", [*HYBRIDS, *OTHERS])
def test_log_probs_are_those_of_transformers_alone(architecture: str) -> None:
    policy = policy_of(architecture)
    engine = LockstepEngine(policy, GENEROUS, 64)
    groups = sampled(engine)
    assert engine._reader.forks
    assert largest_gap(policy, groups) < 1e-5
    lengths = {len(completion.token_ids) for group in groups for completion in group}
    assert len(lengths) > 1, "rows leave at different times"
    stats = engine.take_stats()
    assert (stats.prompt_tokens, stats.peak_rows) == (sum(map(len, PROMPTS)), 15)
    assert engine.cache_bytes_used == 0


@pytest.mark.parametrize("architecture", ["bamba", "recurrent_gemma"])
def test_a_cache_that_cannot_be_forked_is_done_without(architecture: str) -> None:
    policy = policy_of(architecture)
    engine = LockstepEngine(policy, GENEROUS, 64)
    assert not engine._reader.forks
    assert largest_gap(policy, sampled(engine, replace(SAMPLING, max_tokens=6))) < 1e-5


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.0}, {"top_k": 7, "min_p": 0.05, "stop": ("e", "th")}])
def test_tokens_are_those_of_the_native_engine(changes: dict[str, float]) -> None:
    policy = tiny_policy("llama", torch.float64, STOPS)
    sampling = replace(SAMPLING, max_tokens=24, **changes)
    wanted = sampled(NativeEngine(policy, GENEROUS, 64), sampling)
    for max_rows in (64, 4):
        found = sampled(LockstepEngine(policy, GENEROUS, max_rows), sampling)
        assert [[c.token_ids for c in group] for group in found] == [[c.token_ids for c in group] for group in wanted]
        for mine, theirs in zip(chain(*found), chain(*wanted), strict=True):
            assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-9)
            assert mine.finish_reason == theirs.finish_reason


@pytest.mark.parametrize("architecture", ["qwen3_5_text", "jamba"])
def test_turns_of_hybrids_are_those_of_whole_histories(architecture: str) -> None:
    engine = LockstepEngine(policy_of(architecture), GENEROUS, 64)
    found = played(engine.open, turns=3)
    assert engine.take_stats().re_encoded_tokens == 0
    wanted = played(as_prompts(engine), turns=3)
    for mine, theirs in zip(chain(*found), chain(*wanted), strict=True):
        assert mine.token_ids == theirs.token_ids
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
    assert not engine._runner.cache.num_slots


@pytest.mark.parametrize("architecture", ["qwen3_5_text", "falcon_h1"])
def test_states_count_in_the_budget_of_the_cache(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of(architecture)
    free = LockstepEngine(policy, GENEROUS, 64)
    wanted = sampled(free)
    budget = free.take_stats().peak_cache_bytes // 3
    tight = LockstepEngine(policy, budget, 64)
    held: list[int] = []
    decode = tight._runner.decode

    def measured(*given: object) -> object:
        found = decode(*given)  # type: ignore[arg-type]
        held.append(sum(cache_bytes(cohort.held) for cohort in tight._runner.cache.cohorts))  # type: ignore[attr-defined]
        return found

    monkeypatch.setattr(tight._runner, "decode", measured)
    found = sampled(tight)
    assert [[c.token_ids for c in group] for group in found] == [[c.token_ids for c in group] for group in wanted]
    stats = tight.take_stats()
    assert 0 < max(held) <= stats.peak_cache_bytes <= budget
    assert stats.peak_rows < 15


def test_the_same_seed_gives_the_same_rollouts_in_any_batch() -> None:
    policy = policy_of("qwen3_5_text")
    together = sampled(LockstepEngine(policy, GENEROUS, 64))
    assert sampled(LockstepEngine(policy, GENEROUS, 64)) == together
    for number, ids in enumerate(PROMPTS[:2]):
        engine = LockstepEngine(policy, GENEROUS, 64)
        alone = asyncio.run(engine.generate(ids, 3, replace(SAMPLING, seed=number)))
        assert [c.token_ids for c in alone] == [c.token_ids for c in together[number]]


@pytest.mark.parametrize("builders", [ENGINES, OWN_WEIGHTS])
def test_a_policy_on_the_general_path_is_sampled_by_it(builders: dict[str, Builder]) -> None:
    for path, kind in (("general", LockstepEngine), ("fast", NativeEngine)):
        policy = replace(tiny_policy("llama"), path=path)
        engine = builders["native"](policy, EngineConfig(), "torch")
        assert isinstance(engine, LockstepEngine) == (kind is LockstepEngine)
        assert cache_shape(policy).max_slots(2**20) > 1000
    assert isinstance(builders["transformers"](policy, EngineConfig(), "torch"), LockstepEngine)
