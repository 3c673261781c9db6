"""Promise 5: the same seed gives the same rollouts, whatever they were sampled beside.

Random numbers are a pure function of (seed, prompt, pass over the data, sample index, position). In float64 rollouts
are equal token for token; in float32 a draw that falls within rounding of a boundary may go the other way.
"""

import asyncio
import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from covey.engine.native import rows as native_rows
from covey.engine.native.engine import NativeEngine
from covey.loop import train
from covey.policy.policy import Policy
from covey.policy.sampling import row_key
from covey.run.build import build_run
from covey.system.waits.timer import PhaseTimer
from covey.types import Completion, Group, Sampling

from ...engine.tiny import tiny_policy
from ...support.small import POLICIES, rows, scripted_for, small_config, use

GENEROUS = 1 << 26
SLOT_BYTES = 2 * 2 * 32 * 8
"""Of the tiny GPT-2 in float64: keys and values of two layers, 32 numbers wide."""
PROMPTS = [[(7 * i + j) % 260 for j in range(1 + i % 9)] for i in range(16)]
SAMPLINGS = [Sampling(max_tokens=15, seed=100 + i) for i in range(16)]

KINDS = {"causal": POLICIES["causal"], "masked": POLICIES["masked"] | {"sampling__num_passes": 2}}
BOTH = pytest.mark.parametrize("kind", KINDS)

Tokens = list[list[tuple[int, ...]]]


@pytest.fixture(scope="module", name="policy")
def _policy() -> Policy:
    return tiny_policy("gpt2", torch.float64, stop_ids=range(0, 260, 20))


def sampled(engine: NativeEngine, chosen: Sequence[int], n: int = 4, lateness: Sequence[int] | None = None) -> Tokens:
    """Completions of the chosen prompts, at the same time; each call waits for so many turns of the event loop."""

    async def one(index: int, turns: int) -> list[Completion]:
        for _ in range(turns):
            await asyncio.sleep(0)
        return await engine.generate(PROMPTS[index], n, SAMPLINGS[index])

    async def run() -> list[list[Completion]]:
        late = lateness or [0] * len(chosen)
        return list(await asyncio.gather(*(one(index, turns) for index, turns in zip(chosen, late, strict=True))))

    return [[completion.token_ids for completion in group] for group in asyncio.run(run())]


@pytest.fixture(scope="module", name="expected")
def _expected(policy: Policy) -> Tokens:
    """Each prompt alone."""
    return [sampled(NativeEngine(policy, GENEROUS, 64), [index])[0] for index in range(16)]


# ------------------------------------------------------------------------------------- one engine, any batch


def test_the_batch_its_order_its_rows_and_the_cache_change_no_token(policy: Policy, expected: Tokens) -> None:
    everyone = list(range(16))
    assert sampled(NativeEngine(policy, GENEROUS, 64), everyone) == expected
    assert sampled(NativeEngine(policy, GENEROUS, 64), everyone[::-1]) == expected[::-1]
    assert sampled(NativeEngine(policy, GENEROUS, 1), everyone) == expected
    assert sampled(NativeEngine(policy, GENEROUS, 3), everyone) == expected
    assert sampled(NativeEngine(policy, SLOT_BYTES * 90, 64), everyone) == expected
    assert sampled(NativeEngine(policy, GENEROUS, 64), everyone, n=2) == [group[:2] for group in expected]


@pytest.mark.long
def test_a_cache_that_small_really_makes_rows_wait(policy: Policy) -> None:
    tight, free = NativeEngine(policy, SLOT_BYTES * 90, 64), NativeEngine(policy, GENEROUS, 64)
    for engine in (tight, free):
        sampled(engine, range(16))
    assert tight.take_stats().peak_rows <= 4
    assert free.take_stats().peak_rows == 64


def any_batch(policy: Policy, seed: int) -> tuple[Tokens, list[int]]:
    """Some prompts in some order, arriving at some time, in an engine of some size."""
    chance = random.Random(seed)
    chosen = chance.sample(range(16), chance.randint(1, 16))
    cache = chance.choice((SLOT_BYTES * 70, SLOT_BYTES * 200, GENEROUS))
    engine = NativeEngine(policy, cache, max_rows=chance.choice((1, 2, 5, 17, 64)))
    return sampled(engine, chosen, lateness=[chance.choice((0, 0, 1, 3)) for _ in chosen]), chosen


@pytest.mark.parametrize("seed", range(8))
def test_any_batch_in_any_engine_gives_the_same_rollouts(policy: Policy, expected: Tokens, seed: int) -> None:
    found, chosen = any_batch(policy, seed)
    assert found == [expected[index] for index in chosen]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 400))
def test_hundreds_of_batches_give_the_same_rollouts(policy: Policy, expected: Tokens, seed: int) -> None:
    found, chosen = any_batch(policy, seed)
    assert found == [expected[index] for index in chosen]


def test_a_generator_with_a_history_is_found_out(
    policy: Policy, expected: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = itertools.count()
    monkeypatch.setattr(native_rows, "row_key", lambda seed, sample_index: row_key(next(history), 0))
    found, chosen = any_batch(policy, 0)
    assert found != [expected[index] for index in chosen]


def test_an_engine_that_has_sampled_before_samples_the_same_again(policy: Policy, expected: Tokens) -> None:
    engine = NativeEngine(policy, GENEROUS, 7)
    for chosen in ([3, 1, 4], [15, 9, 2, 6], [3, 5]):
        assert sampled(engine, chosen) == [expected[index] for index in chosen]
    engine.load_weights(1)
    assert sampled(engine, [3]) == [expected[3]]


def test_rollouts_of_other_samples_prompts_and_seeds_are_others(policy: Policy, expected: Tokens) -> None:
    assert len({row for group in expected for row in group}) > 55
    other = Sampling(max_tokens=15, seed=999)
    (again,) = [asyncio.run(NativeEngine(policy, GENEROUS, 8).generate(PROMPTS[8], 4, other))]
    assert not {completion.token_ids for completion in again} & set(expected[8])


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral", "gpt2"])
def test_in_float32_rollouts_depend_on_the_batch_only_through_rounding(architecture: str) -> None:
    policy = tiny_policy(architecture)
    together = sampled(NativeEngine(policy, GENEROUS, 64), range(8), n=8)
    in_waves = sampled(NativeEngine(policy, GENEROUS, 3), range(8), n=8)
    pairs = [pair for a, b in zip(together, in_waves, strict=True) for pair in zip(a, b, strict=True)]
    # A draw within 1e-6 of a boundary may fall on the other side: about 1 token in 10^5 here.
    assert sum(a != b for a, b in pairs) <= 1


# ------------------------------------------------------------------------------------- a source of groups


def taken(kind: str, n: int, times: int, **changes: Any) -> list[Group]:
    """The groups of so many takes of n from a stream of six prompts."""
    config = small_config(model__precision="float64", sampling__max_tokens=10, **KINDS[kind], **changes)
    run = build_run(config, scripted_for(kind), PhaseTimer())
    groups = [group for _ in range(times) for group in run.source.take(n)]
    run.close()
    return groups


def of_prompts(groups: Sequence[Group]) -> dict[str, Tokens]:
    """By prompt, pass after pass: the tokens of its rollouts."""
    found: dict[str, Tokens] = {}
    for group in groups:
        found.setdefault(group.prompt.id, []).append([rollout.target_ids for rollout in group.rollouts])
    return found


@BOTH
def test_rollouts_belong_to_prompt_and_pass_wherever_the_prompt_stands_in_the_stream(kind: str) -> None:
    expected = of_prompts(taken(kind, 6, 2))
    assert of_prompts(taken(kind, 1, 12)) == expected
    assert of_prompts(taken(kind, 4, 3, shuffle=False)) == expected
    assert of_prompts(taken(kind, 12, 1, engine__max_rows=5, engine__cache_bytes=50_000)) == expected
    assert all(first != second for first, second in expected.values())
    assert len({str(passes[0]) for passes in expected.values()}) == 6
    other = of_prompts(taken(kind, 6, 2, seed=1))
    assert other.keys() == expected.keys()
    assert all(rollouts != expected[name] for name, rollouts in other.items())


def states() -> tuple[Any, ...]:
    """Of all global generators."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), name, tuple(np.asarray(keys).tolist()), rest, torch.get_rng_state().tolist()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Other states of the global generators; those from before come back."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


@BOTH
def test_sampling_neither_reads_nor_moves_a_global_generator(kind: str) -> None:
    found = []
    for seed in (1, 2):
        with seeded(seed):
            before = states()
            found.append(of_prompts(taken(kind, 3, 2)))
            assert states() == before
    assert found[0] == found[1]


def test_sampling_leaves_training_mode_and_gradients_on(policy: Policy) -> None:
    policy.model.train()
    sampled(NativeEngine(policy, GENEROUS, 8), [0, 1])
    assert policy.model.training
    assert torch.is_grad_enabled()


# ------------------------------------------------------------------------------------- whole runs


def written(folder: Path, **changes: Any) -> list[tuple[str, str, float]]:
    """Prompt, completion and reward of every rollout of a run of 12 groups, in order."""
    settings = {"num_steps": 6, "model__precision": "float64", "output__rollouts_per_step": 100, **changes}
    train(small_config(**settings), folder)
    return [(row["prompt_id"], row["completion"], row["reward"]) for row in rows(folder / "rollouts.jsonl")]


@pytest.mark.long
@BOTH
def test_a_run_that_was_resumed_samples_what_it_would_have_sampled(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, scripted_for(kind))
    chosen = KINDS[kind]
    whole = written(tmp_path / "whole", **chosen)
    with seeded(5):
        written(tmp_path / "halves", num_steps=3, **chosen)
    with seeded(6):
        again = {"resume": str(tmp_path / "halves"), "resume_changes": ["num_steps"]}
        resumed = written(tmp_path / "halves", **again, **chosen)
    assert resumed == whole
    assert len(whole) == 48


UNCUT: dict[str, list[tuple[str, str, float]]] = {}
"""What a run of each kind of policy samples that is cut as usual, made when it is first asked for."""
CUTS: tuple[dict[str, Any], ...] = (
    {"num_steps": 2, "groups_per_step": 6},
    {"engine__max_rows": 3},
    {"engine__cache_bytes": 20_000},
    {"evaluation__every": 1},
    {"packing": "padded", "micro_batch_tokens": 30},
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "change"),
    [(kind, cut) for kind in KINDS for cut in CUTS if kind == "causal" or "engine__cache_bytes" not in cut],
)
def test_while_the_weights_stand_still_a_run_samples_the_same_however_it_is_cut(
    change: dict[str, Any], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, scripted_for(kind))
    frozen = {"optimizer__lr": 1e-60, "preflight__enabled": False, **KINDS[kind]}
    if kind not in UNCUT:
        UNCUT[kind] = written(tmp_path / "a", **frozen)
    assert written(tmp_path / "b", **frozen, **change) == UNCUT[kind]
