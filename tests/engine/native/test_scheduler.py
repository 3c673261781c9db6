"""Admission, finishing and slots, without a model."""

import random
from collections.abc import Sequence

import pytest

from covey.engine.native.rows import DecodeRow, SamplingRequest
from covey.engine.native.scheduler import Capacity, Scheduler
from covey.types import Completion, Sampling

STOP = 2


def request(prompt_length: int = 4, n: int = 2, max_tokens: int = 8, stop: tuple[str, ...] = ()) -> SamplingRequest:
    sampling = Sampling(max_tokens=max_tokens, stop=stop)
    return SamplingRequest(tuple(range(10, 10 + prompt_length)), n, sampling, frozenset({STOP}), decode, version=5)


def decode(token_ids: Sequence[int]) -> str:
    return "".join(f"<{token_id}>" for token_id in token_ids)


def scheduler(max_rows: int = 100, max_slots: int = 10_000, max_prefill: int = 10_000) -> Scheduler:
    return Scheduler(Capacity(max_rows, max_slots, max_prefill))


def finish(made: Scheduler, rows: list[DecodeRow]) -> None:
    made.advance(rows, [STOP] * len(rows), [-1.0] * len(rows))


def test_a_group_enters_at_once_where_there_is_room() -> None:
    made, first, second = scheduler(), request(n=3), request(n=2)
    made.submit(first)
    made.submit(second)
    admission = made.admit()
    assert admission.prompts == (first, second)
    assert [(row.request, row.sample_index) for row in admission.rows] == [
        (first, 0),
        (first, 1),
        (first, 2),
        (second, 0),
        (second, 1),
    ]
    assert made.admit().rows == ()


def test_a_group_larger_than_max_rows_enters_in_waves_and_its_prompt_once() -> None:
    made, big = scheduler(max_rows=4), request(n=10)
    made.submit(big)
    admission = made.admit()
    assert (len(admission.prompts), len(admission.rows)) == (1, 4)
    finish(made, made.rows[:3])
    assert made.depart().requests == ()
    admission = made.admit()
    assert admission.prompts == ()
    assert [row.sample_index for row in admission.rows] == [4, 5, 6]
    assert made.groups == [big]


def reserved_slots(made: Scheduler) -> int:
    """Cached tokens that what is in may come to, padding included."""
    return len(made.groups) * made.longest_prompt + len(made.rows) * made.longest_row


def test_rows_reserve_their_worst_case_within_the_budget() -> None:
    made = scheduler(max_slots=60)
    made.submit(request(prompt_length=10, n=8, max_tokens=12))
    assert len(made.admit().rows) == 4
    assert reserved_slots(made) == 58


def test_padding_counts_towards_the_budget() -> None:
    made = scheduler(max_slots=100)
    made.submit(request(prompt_length=5, n=5, max_tokens=10))
    made.submit(request(prompt_length=5, n=1, max_tokens=30))
    # A row of 30 would widen all rows to 30: 6 * 30 + 2 * 5 > 100.
    assert len(made.admit().rows) == 5
    finish(made, made.rows[:3])
    made.depart()
    assert len(made.admit().rows) == 1
    assert reserved_slots(made) == 3 * 30 + 2 * 5
    finish(made, made.rows[-1:])
    made.depart()
    assert made.longest_row == 10


def test_what_sessions_keep_takes_room_until_they_are_closed() -> None:
    made, talk = scheduler(max_slots=40), request(prompt_length=4, n=2, max_tokens=8)
    talk.keep_rows()
    made.submit(talk)
    finish(made, [*made.admit().rows])
    for _, row in made.turns_over():
        row.read = 6
        made.rest(row)
    assert made.depart().requests == ()
    made.submit(request(prompt_length=4, n=3, max_tokens=8))
    assert len(made.admit().rows) == 2  # 40 slots but for twice 6 kept and two prompts of 4
    for row in talk.sessions:
        made.close(row)
    assert made.kept_slots == 0
    assert made.depart().requests == (talk,)


def test_requests_are_served_in_order_and_none_overtakes() -> None:
    made, wide, narrow = scheduler(max_slots=50), request(n=2, max_tokens=20), request(n=1, max_tokens=1)
    made.submit(wide)
    made.submit(wide_too := request(n=1, max_tokens=40))
    made.submit(narrow)
    assert {row.request for row in made.admit().rows} == {wide}
    finish(made, made.rows)
    assert made.depart().requests == (wide,)
    assert made.admit().prompts == (wide_too,)


def test_prompts_are_encoded_up_to_the_prefill_limit_but_at_least_one() -> None:
    made = scheduler(max_prefill=20)
    for length in (30, 8, 9, 3):
        made.submit(request(prompt_length=length, n=1))
    assert [len(prompt.prompt_ids) for prompt in made.admit().prompts] == [30]
    assert [len(prompt.prompt_ids) for prompt in made.admit().prompts] == [8, 9]
    assert [len(prompt.prompt_ids) for prompt in made.admit().prompts] == [3]


def test_a_prompt_that_can_never_fit_is_refused_with_its_length_and_the_limit() -> None:
    with pytest.raises(ValueError, match=r"a prompt of 95 tokens with max_tokens=8 needs 103 cached tokens, .* 100"):
        scheduler(max_slots=100).submit(request(prompt_length=95))


def test_the_stop_token_is_included_and_the_limit_ends_a_row() -> None:
    made, asked = scheduler(), request(n=2, max_tokens=3)
    made.submit(asked)
    made.admit()
    for tokens in ([7, 7], [STOP, 7]):
        made.advance(made.rows, tokens, [-0.5] * len(tokens))
        made.depart()
    made.advance(made.rows, [7], [-0.25])
    assert made.depart().requests == (asked,)
    assert asked.completions == {
        0: Completion((7, STOP), (-0.5, -0.5), "stop", 5),
        1: Completion((7, 7, 7), (-0.5, -0.5, -0.25), "length", 5),
    }
    assert not made.has_work


def test_a_row_whose_last_token_stops_it_is_not_called_truncated() -> None:
    made, asked = scheduler(), request(n=1, max_tokens=2)
    made.submit(asked)
    made.admit()
    for token in (7, STOP):
        made.advance(made.rows, [token], [-0.5])
    assert made.depart().requests == (asked,)
    assert asked.completions[0].finish_reason == "stop"


def test_the_token_that_completes_a_stop_string_is_the_last() -> None:
    made, asked = scheduler(), request(n=1, stop=("1><2",))
    made.submit(asked)
    made.admit()
    for token in (5, 1, 22):
        made.advance(made.rows, [token], [-1.0])
    assert made.depart().requests == (asked,)
    assert asked.completions[0].token_ids == (5, 1, 22)
    assert asked.completions[0].finish_reason == "stop"


def test_the_last_row_moves_into_the_slot_of_one_that_left() -> None:
    made, asked = scheduler(), request(n=5)
    made.submit(asked)
    made.admit()
    first, _, third, _, last = made.rows
    finish(made, [made.rows[1], made.rows[3]])
    departure = made.depart()
    assert departure.row_moves == ((4, 1),)
    assert made.rows == [first, last, third]


def test_a_cancelled_request_gives_its_slots_back() -> None:
    made, gone, stays = scheduler(max_rows=3), request(n=2), request(n=3)
    made.submit(gone)
    made.submit(stays)
    made.admit()
    made.cancel(gone)
    departure = made.depart()
    assert departure.requests == (gone,)
    assert [row.request for row in made.rows] == [stays]
    assert (stays.slot, departure.group_moves) == (0, ((1, 0),))
    assert [row.sample_index for row in made.admit().rows] == [1, 2]


def test_unfinished_requests_are_in_the_order_of_arrival_in_any_slots() -> None:
    made, asked = scheduler(max_rows=6), [request() for _ in range(4)]
    for each in asked:
        made.submit(each)
    made.admit()
    made.cancel(asked[0])
    made.depart()
    assert made.groups == [asked[2], asked[1]]
    assert made.requests == asked[1:]


def test_a_row_that_finished_is_not_cancelled_again() -> None:
    made, asked = scheduler(), request(n=2)
    made.submit(asked)
    made.admit()
    finish(made, made.rows[:1])
    made.cancel(asked)
    assert asked.num_running == 0
    assert made.depart().requests == (asked,)


def test_cancelling_what_waits_or_is_half_in_leaves_no_work() -> None:
    made, half_in, waits = scheduler(max_rows=1), request(n=5), request()
    made.submit(half_in)
    made.submit(waits)
    made.admit()
    made.cancel(waits)
    made.cancel(half_in)
    made.depart()
    assert not made.has_work


def test_every_row_is_finished_once_and_moves_follow_the_rows() -> None:
    chance = random.Random(0)
    made = scheduler(max_rows=9, max_slots=300, max_prefill=40)
    asked = [request(chance.randint(1, 20), chance.randint(1, 12), chance.randint(1, 30)) for _ in range(60)]
    for each in asked:
        made.submit(each)
    row_store: dict[int, DecodeRow] = {}
    group_store: dict[int, SamplingRequest] = {}
    done: list[SamplingRequest] = []
    while made.has_work:
        admission = made.admit()
        assert reserved_slots(made) <= 300
        assert len(made.rows) <= 9
        row_store |= {made.rows.index(row): row for row in admission.rows}
        group_store |= {prompt.slot: prompt for prompt in admission.prompts}
        made.advance(made.rows, [chance.choice((STOP, 7, 7, 7)) for _ in made.rows], [-1.0] * len(made.rows))
        departure = made.depart()
        row_store |= {target: row_store[source] for source, target in departure.row_moves}
        group_store |= {target: group_store[source] for source, target in departure.group_moves}
        assert made.rows == [row_store[slot] for slot in range(len(made.rows))]
        assert made.groups == [group_store[slot] for slot in range(len(made.groups))]
        assert [group.slot for group in made.groups] == list(range(len(made.groups)))
        done.extend(departure.requests)
    assert sorted(map(id, done)) == sorted(map(id, asked))
    assert all(sorted(each.completions) == list(range(each.n)) for each in asked)
