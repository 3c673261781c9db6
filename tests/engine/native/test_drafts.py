"""Drafts change how many passes sampling takes, and no bit of what is sampled."""

import asyncio
import ctypes
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from covey.engine.base import EngineStats
from covey.engine.drafts.contexts import SHARED, SOURCE, Contexts, Memory
from covey.engine.drafts.drafter import Drafter, accept
from covey.engine.native.engine import NativeEngine
from covey.engine.native.own_weights import OwnWeightsEngine
from covey.engine.native.rows import DecodeRow, RowDraws, SamplingRequest
from covey.policy.kernels.compiler import library
from covey.policy.policy import Policy
from covey.policy.sampling import random_uniform, row_key, uniform
from covey.types import Completion, Sampling

from ..tiny import tiny_policy
from .test_sessions import Turns, played

ROOM = 1 << 24
PROMPTS = [[5, 9, 200], [17, 3, 44, 101, 7, 250, 31, 30, 29, 12, 64], [99]]
KINDS = [
    {"temperature": 1.0},
    {"temperature": 0.05},
    {"temperature": 0.0},
    {"temperature": 0.3, "top_k": 5},
    {"temperature": 0.3, "top_p": 0.7, "min_p": 0.02},
    {"temperature": 0.05, "stop": ("a", "\n")},
]
PRECISIONS = [torch.float32, torch.bfloat16]


def sampled(engine: NativeEngine, sampling: Sampling, n: int = 3) -> list[list[Completion]]:
    async def run() -> list[list[Completion]]:
        calls = [engine.generate(prompt, n, replace(sampling, seed=i)) for i, prompt in enumerate(PROMPTS)]
        return list(await asyncio.gather(*calls))

    return asyncio.run(run())


def pair(policy: Policy, max_rows: int = 64, room: int = ROOM) -> tuple[NativeEngine, NativeEngine]:
    plain, drafting = (NativeEngine(policy, room, max_rows, "compiled", word) for word in ("off", "on"))
    assert plain._drafter is None
    assert drafting._drafter is not None
    return plain, drafting


def adapted(policy: Policy) -> Policy:
    """Return the policy with an adapter that does something."""
    torch.manual_seed(3)
    model: Any = get_peft_model(policy.causal_lm, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    return replace(policy, model=model)


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral-window"])
def test_completions_have_the_same_bits_with_drafts(architecture: str, dtype: torch.dtype) -> None:
    plain, drafting = pair(tiny_policy(architecture, dtype, stop_ids=[7, 40]))
    for kind in KINDS:
        for _ in range(2):  # the second time all of it was written before
            wanted = Sampling(max_tokens=40, **kind)
            assert sampled(drafting, wanted) == sampled(plain, wanted)
    stats, without = drafting.take_stats(), plain.take_stats()
    assert stats.accepted_tokens > 0.2 * stats.sampled_tokens
    assert stats.drafted_tokens > stats.accepted_tokens
    assert stats.sampled_tokens == without.sampled_tokens
    assert without.drafted_tokens == without.accepted_tokens == 0


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_adapters_keep_their_bits_with_drafts(dtype: torch.dtype) -> None:
    plain, drafting = pair(adapted(tiny_policy("llama", dtype)))
    for _ in range(2):
        assert sampled(drafting, Sampling(max_tokens=30)) == sampled(plain, Sampling(max_tokens=30))
    assert drafting.take_stats().accepted_tokens > 0


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_weights_of_eight_bits_keep_their_bits_with_drafts(dtype: torch.dtype) -> None:
    policy = tiny_policy("llama", dtype)
    plain, drafting = (NativeEngine(policy, ROOM, 64, "compiled", word, "int8") for word in ("off", "on"))
    for _ in range(2):
        assert sampled(drafting, Sampling(max_tokens=30)) == sampled(plain, Sampling(max_tokens=30))
    assert drafting.take_stats().accepted_tokens > 0


def test_rows_that_enter_one_after_another_have_the_same_bits() -> None:
    policy = tiny_policy("llama")
    plain, _ = pair(policy)
    _, few = pair(policy, max_rows=2)
    slot_bytes = few._shape.slot_bytes
    _, tight = pair(policy, room=slot_bytes * 150)
    for _ in range(2):
        wanted = sampled(plain, Sampling(max_tokens=40, temperature=0.5))
        assert sampled(few, Sampling(max_tokens=40, temperature=0.5)) == wanted
        assert sampled(tight, Sampling(max_tokens=40, temperature=0.5)) == wanted
    assert tight.take_stats().peak_cache_bytes <= slot_bytes * 150


def test_sessions_have_the_same_bits_with_drafts() -> None:
    plain, drafting = pair(tiny_policy("llama"))
    for _ in range(2):
        found: list[list[Turns]] = [played(engine.open, temperature=0.3) for engine in (drafting, plain)]
        assert found[0] == found[1]
    assert drafting.take_stats().accepted_tokens > 0
    assert drafting.cache_bytes_used == 0


def test_an_engine_on_weights_of_its_own_drafts_too() -> None:
    policy = tiny_policy("llama")
    drafting = OwnWeightsEngine(policy, ROOM, 64, "compiled", "on")
    plain = OwnWeightsEngine(policy, ROOM, 64, "compiled", "off")
    for _ in range(2):
        assert sampled(drafting, Sampling(max_tokens=30)) == sampled(plain, Sampling(max_tokens=30))
    assert drafting.take_stats().accepted_tokens > 0


@pytest.mark.parametrize("architecture", ["gpt2", "qwen3_5_text"])
def test_models_beside_the_one_call_are_not_drafted(architecture: str) -> None:
    assert NativeEngine(tiny_policy(architecture), ROOM, 8, speculation="on")._drafter is None
    assert NativeEngine(tiny_policy("llama"), ROOM, 8, "torch", "on")._drafter is None


def test_a_model_that_the_processor_holds_is_drafted_only_on_demand() -> None:
    assert NativeEngine(tiny_policy("llama"), ROOM, 8, "compiled", "auto")._drafter is None


def test_a_draft_counts_up_to_its_first_wrong_token() -> None:
    drafts = [[4, 5, 6], [], [1, 2]]
    drawn = [4.0, 5.0, 9.0, 3.0, 8.0, 1.0, 2.0, 7.0]
    assert accept(drafts, drawn) == [0, 1, 2, 4, 5, 6, 7]


def guess(known: Contexts, context: Sequence[int], number: float, beside: Contexts | None = None) -> tuple[int, float]:
    """Return the token that is guessed where the draw has this number, -1 for none, and its chance."""
    given, chance = (ctypes.c_int32 * 8)(*[-1] * (8 - len(context)), *context), ctypes.c_float()
    end = ctypes.c_void_p(ctypes.addressof(given) + 32)
    texts = [None if each is None else ctypes.byref(each.call) for each in (known, beside)]
    found = library(SOURCE).covey_guess(*texts, end, ctypes.byref(ctypes.c_double(number)), ctypes.byref(chance))
    return found, chance.value


def test_the_token_is_guessed_on_which_the_next_number_falls_after_the_longest_context() -> None:
    known = Contexts()
    text = [1, 2, 3, 4, 5, 1, 2, 3, 4, 6, 1, 2, 3, 4, 6, 9, 4, 8]
    known.add(text, [math.log(0.6 if token_id == 6 else 0.3) for token_id in text[1:]], 1)
    assert [guess(known, [1, 2, 3, 4], number)[0] for number in (0.1, 0.2, 0.5, 0.8)] == [5, 5, 6, 6]
    sure, unsure = (guess(known, [1, 2, 3, 4], number) for number in (0.6, 0.31))
    assert 0.6 < sure[1] < 1.0
    assert unsure[1] < 0.6
    assert guess(known, [7, 7, 6, 9], 0.2)[0] == 4
    assert guess(known, [0, 0, 0, 0], 0.2) == (-1, 0.0)


def test_texts_of_other_prompts_are_asked_too() -> None:
    memory = Memory()
    memory.keep((1, 2), [11, 12, 13], [0.0, 0.0, 0.0])
    assert guess(memory.contexts((3, 4)), [0, 0, 11, 12], 0.5, memory.shared) == (13, pytest.approx(1.0))
    memory.keep((1, 2), [20] * SHARED, [0.0] * SHARED)
    memory.keep((1, 2), [21], [0.0])
    assert guess(memory.contexts((3, 4)), [0, 0, 11, 12], 0.5, memory.shared)[0] == -1


def test_the_number_of_a_draw_is_known_before() -> None:
    keys, places = [row_key(seed, seed % 3) for seed in range(40)], list(range(40))
    assert random_uniform(torch.tensor(keys), torch.tensor(places)).tolist() == list(map(uniform, keys, places))


def test_completions_of_prompts_unused_for_longest_are_forgotten() -> None:
    memory = Memory(most=6)
    for prompt_ids, text in (((1, 2), [11, 12, 13]), ((3, 4), [21, 22]), ((1, 2), [14]), ((5, 6), [31])):
        memory.keep(prompt_ids, text, [0.0] * len(text))
    assert guess(memory.contexts((3, 4)), [0, 0, 3, 4], 0.5)[0] == -1
    assert guess(memory.contexts((1, 2)), [0, 0, 1, 2], 0.3)[0] == 11
    assert guess(memory.contexts((5, 6)), [0, 0, 5, 6], 0.5)[0] == 31


def test_the_tokens_of_forgotten_texts_make_room_for_as_many() -> None:
    memory = Memory(most=4)
    for prompt_ids, text in (((1, 2), [11, 12, 13]), ((3, 4), [21, 22, 23]), ((5, 6), [31])):
        memory.keep(prompt_ids, text, [0.0] * len(text))
    assert [guess(memory.contexts((n, n + 1)), [n, n + 1], 0.5)[0] for n in (1, 3, 5)] == [-1, 21, 31]


def test_a_greedy_row_is_guessed_by_the_middle_of_the_distribution() -> None:
    greedy = SamplingRequest((1, 2), 1, Sampling(temperature=0.0), frozenset(), str, 0).row(0)
    rows = [row_of([4]), greedy]
    drawn, fixed = Drafter().begin(rows, RowDraws.of(rows), 3).tensors["uniforms"].tolist()
    assert fixed == [0.5, 0.5, 0.5]
    assert len({0.5, *drawn}) == 4


def row_of(token_ids: Sequence[int], max_tokens: int = 40, stop_ids: frozenset[int] = frozenset()) -> DecodeRow:
    """Return a row that has written something, for which every token is as sure as can be."""
    request = SamplingRequest((1, 2, 3), 1, Sampling(max_tokens=max_tokens), stop_ids, lambda _: "", 0)
    row = request.row(0)
    for token_id in token_ids:
        row.take(token_id, 0.0)
    return row


def fed(drafter: Drafter, rows: Sequence[DecodeRow], most: int = 16) -> list[list[int]]:
    """Return what is fed in the next pass."""
    return drafter.begin(rows, RowDraws.of(rows), most).look()


def paced(seconds: dict[int, float]) -> Drafter:
    """Return a drafter that has measured passes of these sizes."""
    drafter = Drafter()
    for num_fed, each in seconds.items():
        note(drafter, num_fed, each)
    return drafter


def note(drafter: Drafter, num_fed: int, seconds: float) -> None:
    given = ctypes.c_int64(num_fed), ctypes.c_float(seconds)
    library(SOURCE).covey_note_pass(ctypes.byref(drafter._paces[0]), *given)


def test_drafts_are_fed_where_a_longer_pass_costs_less_than_it_brings() -> None:
    rows = [row_of([4, 5, 6, 4, 5, 6, 4 + (n > 0)][: 6 + n]) for n in range(2)]
    flat, steep = paced({2: 0.010, 16: 0.0101}), paced({2: 0.010, 3: 0.015, 16: 0.080})
    assert sum(map(len, fed(flat, rows))) > 6
    assert fed(steep, rows) == [[6], [5]]
    assert fed(paced({}), rows) == [[6], [5]]


def test_positions_fill_a_block_and_begin_no_other() -> None:
    rows = [row_of([4, 5, 6, 4, 5, 6]) for _ in range(4)]
    found = fed(paced({4: 0.010, 5: 0.012, 8: 0.0121, 9: 0.020, 16: 0.040}), rows)
    assert sum(map(len, found)) == 8


def test_what_was_slow_once_is_tried_again() -> None:
    row, drafter = row_of([4, 5, 6, 4, 5, 6]), paced({2: 0.1, 1: 0.010})
    assert fed(drafter, [row]) == [[6]]
    for _ in range(20000):
        note(drafter, 1, 0.010)
    assert len(fed(drafter, [row])[0]) > 2


def kinds_of_calls(first_drafted: float, drafted: float, plain: float, num: int) -> list[bool]:
    """Return which of `num` calls draft, when tokens of the two kinds take so long."""
    drafter, kinds = Drafter(), list[bool]()
    for _ in range(num):
        kinds.append(drafter.is_wanted(4))
        drafter.note(4, kinds[-1], (drafted if sum(kinds) > 1 else first_drafted) if kinds[-1] else plain)
    return kinds


def test_whole_calls_are_compared_after_three_of_each_kind() -> None:
    both = [True, False] * 3
    assert kinds_of_calls(0.050, 0.008, 0.010, 15) == [*both, *[True] * 7, False, True]
    assert kinds_of_calls(0.008, 0.012, 0.010, 15) == [*both, *[False] * 7, True, False]
    assert Drafter().is_wanted(49) is False
    assert Drafter(always=True).is_wanted(4) is True


def test_the_slower_kind_is_tried_ever_less_often() -> None:
    looks = [n for n, drafts in enumerate(kinds_of_calls(0.012, 0.012, 0.010, 260)) if n > 5 and drafts]
    assert [after - before for before, after in pairwise((5, *looks))] == [8, 16, 32, 64, 64, 64]


def test_no_draft_reaches_beyond_the_end_or_a_stop_token() -> None:
    drafter = Drafter(always=True)
    assert fed(drafter, [row_of([2, 3, 2], 5)], 8) == [[2, 3]]
    assert fed(drafter, [row_of([2, 3, 2], 5)], 1) == [[2]]
    assert fed(drafter, [row_of([4, 8, 4], 40, frozenset({8}))], 8) == [[4]]


def test_what_is_drawn_stands_up_to_the_first_wrong_draft_or_the_end() -> None:
    rows = [row_of([4, 5, 6, 4, 5, 6]), row_of([4, 5, 6, 4, 5, 6], stop_ids=frozenset({9})), row_of([3], 2)]
    drafted = Drafter(always=True).begin(rows, RowDraws.of(rows), 4)
    assert drafted.look() == [[6, 4, 5, 6], [6, 4, 5, 6], [3]]
    drafted.judge([4, 5, 7, 4, 4, 9, 6, 4, 8], [-0.5] * 9)
    assert drafted.tokens() == ([rows[0]] * 3 + [rows[1]] * 2 + [rows[2]], [4, 5, 7, 4, 9, 8], [-0.5] * 6)
    assert drafted.call.is_over


def test_statistics_of_two_times_are_one() -> None:
    first = EngineStats(sampled_tokens=10, peak_rows=4, drafted_tokens=5, accepted_tokens=2, saved_seconds=0.5)
    both = first + EngineStats(sampled_tokens=20, peak_rows=3, accepted_tokens=3, drafted_tokens=5, restarts=1)
    assert both == EngineStats(
        sampled_tokens=30, peak_rows=4, drafted_tokens=10, accepted_tokens=5, saved_seconds=0.5, restarts=1
    )
    assert both.metrics() == {
        "engine/restarts": 1.0,
        "engine/draft_tokens": 10.0,
        "engine/draft_accepted": 0.5,
        "engine/draft_saved_seconds": 0.5,
        "engine/tokens_per_pass": 1.2,
    }
    assert EngineStats(sampled_tokens=9).metrics() == {}
