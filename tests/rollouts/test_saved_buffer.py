"""A checkpoint holds a buffer whatever an environment noted, and gives the same groups back; so does the schedule."""

import math
from dataclasses import replace
from enum import IntEnum, StrEnum
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from covey.rollouts.buffer import Bound, GroupBuffer, Ticket
from covey.rollouts.saved.buffer import buffer_state, load_buffer
from covey.rollouts.schedule import past_group, row_of, with_logprobs
from covey.rollouts.settings import GroupSizeStep
from covey.rollouts.source import LocalSource
from covey.rollouts.stream import PromptStream
from covey.types import Failure, Group, Prompt, Reward, Rollout, Sampling, Span, Turn


class Level(IntEnum):
    EASY = 1


class Kind(StrEnum):
    MOVE = "move"


NOTED = {
    "a number of NumPy": (np.float64(0.5), 0.5),
    "a truth of NumPy": (np.bool_(True), True),
    "an array": (np.array([1, 2]), [1, 2]),
    "a tensor": (torch.tensor([0.5]), [0.5]),
    "a path": (Path("a/b"), "a/b"),
    "members of enumerations": ([Level.EASY, Kind.MOVE], [1, "move"]),
    "text of NumPy": ({"a": np.str_("b")}, {"a": "b"}),
}


def source(prompt: Prompt, sampling: Sampling, group_size: int, **more: Any) -> LocalSource:
    """A source of one prompt that is not asked for groups."""
    none: Any = None
    return LocalSource(none, PromptStream([prompt], 0, shuffle=False), group_size, sampling, **more)


def saved_and_loaded(rollout: Rollout) -> Rollout:
    """Put the rollout into a buffer and the buffer into a checkpoint, and return what comes back."""
    buffer, again = GroupBuffer(Bound(1, 0)), GroupBuffer(Bound(1, 0))
    prompt = Prompt("p", "e", "", {})
    ticket = buffer.give_up(buffer.admit(prompt, Sampling(stop=("x",)), 1))
    buffer.finish(ticket, Group(prompt, (rollout,), (Failure("late"),)))
    file = BytesIO()
    torch.save(buffer_state(buffer), file)
    file.seek(0)
    load_buffer(again, torch.load(file, weights_only=True), source(prompt, Sampling(stop=("x",)), 1))
    assert again.pending == buffer.pending
    assert again.finished[ticket.number].failures == (Failure("late"),)
    (found,) = again.finished[ticket.number].rollouts
    return found


def rollout(noted: Any = "plain") -> Rollout:
    return Rollout(
        *((1, 2), (2, 3), (False, True), (0.0, -0.5)),
        reward=Reward(1.0, {"value": 1.0}, {"noted": noted}),
        text="x",
        finish_reason="stop",
        policy_version=0,
        messages=({"role": "user", "content": "a"}, {"role": "tool", "content": noted}),
        spans=(Span(0, 0, 1),),
        turns=(Turn(0, 1, reward=0.5, state="s", info={"noted": noted}),),
        stop_reason="completed",
        branches=(0, 1),
    )


def test_a_group_comes_back_from_a_checkpoint_as_it_was() -> None:
    found = saved_and_loaded(rollout())
    assert found == rollout()
    assert (found.reward.extra, found.turns[0].info) == ({"noted": "plain"}, {"noted": "plain"})


def test_log_probs_come_back_from_a_checkpoint_to_the_last_bit() -> None:
    exact = (-1 / 3, math.nextafter(-0.1, -1), -5e-324, -1e300, -0.123456789012345)
    given = replace(rollout(), input_ids=(1,) * 5, target_ids=(2,) * 5, loss_mask=(True,) * 5, sampler_logprobs=exact)
    assert saved_and_loaded(given).sampler_logprobs == exact


@pytest.mark.parametrize("kind", NOTED)
def test_what_an_environment_notes_does_not_keep_a_run_from_being_resumed(kind: str) -> None:
    noted, plain = NOTED[kind]
    found = saved_and_loaded(rollout(noted))
    assert found.reward.extra == found.turns[0].info == {"noted": plain}
    assert found.messages[1]["content"] == plain


def reloaded(sampling: Sampling, group_size: int, groups_per_step: int = 1, **more: Any) -> GroupBuffer:
    """A finished group and one under way, of 2 completions at temperature 1, in a run of other settings."""
    buffer, again = (GroupBuffer(Bound(groups_per_step, 1)) for _ in range(2))
    prompt = Prompt("p", "e", "", {})
    tickets = [buffer.admit(prompt, Sampling(seed=seed), 2) for seed in (7, 8)]
    buffer.finish(tickets[0], Group(prompt, (rollout(), rollout()), ()))
    load_buffer(again, buffer_state(buffer), source(prompt, sampling, group_size, **more))
    return again


def test_unfinished_groups_are_sampled_by_the_resumed_runs_settings() -> None:
    colder = reloaded(Sampling(temperature=0.5, seed=1), 2)
    assert [(t.sampling.temperature, t.sampling.seed, t.group_size) for t in colder.pending] == [
        (0.5, 7, 2),
        (0.5, 8, 2),
    ]
    assert colder.waiting == colder.pending  # the finished group was sampled at temperature 1
    larger = reloaded(Sampling(), 4, later_sizes=[GroupSizeStep(1, 8)])
    assert [ticket.group_size for ticket in larger.pending] == [4, 8]
    assert (larger.finished, larger.admitted) == ({}, 2)
    together = reloaded(Sampling(), 4, 2, later_sizes=[GroupSizeStep(1, 8)])
    assert [ticket.group_size for ticket in together.pending] == [4, 4]  # both of the first step


def test_a_resume_keeps_finished_groups_and_admitted_group_sizes() -> None:
    again = reloaded(Sampling(seed=1), 8, later_sizes=[GroupSizeStep(5, 2)])
    assert [ticket.group_size for ticket in again.pending] == [2, 2]
    assert list(again.finished) == [0]


def sampled(version: int, *logprobs: float, spans: tuple[Span, ...] = ()) -> Rollout:
    """An answer of so many tokens to a prompt of two, the first of which has a log-prob that nobody chose."""
    length = len(logprobs) + 1
    ids, mask = (5,) * length, (False,) + (True,) * len(logprobs)
    return Rollout(ids, ids, mask, (-9.0, *logprobs), Reward(1.0), "x", "stop", version, spans=spans)


MIXED = (Span(3, 0, 1), Span(4, 1, 2))


@pytest.mark.parametrize(
    ("rollouts", "versions", "spans"),
    [
        ([sampled(9, -0.5), sampled(9, -0.25, -1.0)], [9], [[(9, 0, -1)]] * 3),
        ([sampled(9, -0.5), sampled(8, -0.5)], [[[9, 0, 1]], [[8, 0, 1]]], [[(9, 0, 1)], [(8, 0, 1)]]),
        (
            [sampled(4, -0.5), sampled(3, -0.5, -1.0, spans=MIXED)],
            [[[4, 0, 1]], [[3, 0, 1], [4, 1, 2]]],
            [[(4, 0, 1)], [(3, 0, 1), (4, 1, 2)]],
        ),
    ],
    ids=["one version", "one each", "several in one"],
)
def test_a_schedule_row_has_seed_size_and_token_versions(
    rollouts: list[Rollout], versions: list[Any], spans: list[Any]
) -> None:
    prompt = Prompt("p", "e", "", {})
    ticket = Ticket(17, prompt, Sampling(seed=81), group_size=3, least_version=0)
    row = row_of(ticket, Group(prompt, tuple(rollouts), (Failure("late"),)))
    assert row == {"prompt": "p", "seed": 81, "size": 3, "versions": versions, "failures": 1}
    past = past_group(row)
    assert (past.prompt_id, past.seed, past.size, past.failures, past.logprobs) == ("p", 81, 3, 1, None)
    assert [[(span.version, span.start, span.end) for span in own] for own in past.spans] == spans
    assert "failures" not in row_of(ticket, Group(prompt, tuple(rollouts), ()))


@pytest.mark.parametrize(("logprob", "kind"), [(-0.5, "f"), (-0.1, "d")])
def test_a_schedule_keeps_log_probs_of_chosen_tokens_bit_for_bit(logprob: float, kind: str) -> None:
    prompt = Prompt("p", "e", "", {})
    ticket = Ticket(0, prompt, Sampling(), group_size=2, least_version=0)
    then = Group(prompt, (sampled(0, logprob), sampled(0, -1.0, logprob)), ())
    row = row_of(ticket, then, has_logprobs=True)
    again = Group(prompt, (sampled(0, -2.0), sampled(0, -3.0, -4.0)), ())
    assert row["logprobs"][0] == kind
    assert with_logprobs(again, past_group(row)) == then
    assert with_logprobs(again, past_group(row_of(ticket, then))) == again
    shorter = Group(prompt, again.rollouts[:1], ())
    assert with_logprobs(shorter, past_group(row)) == shorter


def test_a_saved_buffer_with_an_unknown_prompt_is_refused_by_name() -> None:
    buffer = GroupBuffer(Bound(1, 0))
    buffer.admit(Prompt("p", "e", "", {}), Sampling(), 1)
    other = source(Prompt("q", "e", "", {}), Sampling(), 1)
    with pytest.raises(ValueError, match=r"^the checkpoint holds a group of prompt 'p', which this run has not$"):
        load_buffer(GroupBuffer(Bound(1, 0)), buffer_state(buffer), other)
