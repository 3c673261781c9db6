"""A checkpoint holds a buffer whatever an environment noted, and gives the same groups back."""

from enum import IntEnum, StrEnum
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from covey.rollouts.buffer import Bound, GroupBuffer
from covey.rollouts.saved_buffer import buffer_state, load_buffer
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


def saved_and_loaded(rollout: Rollout) -> Rollout:
    """Put the rollout into a buffer and the buffer into a checkpoint, and return what comes back."""
    buffer, again = GroupBuffer(Bound(1, 0)), GroupBuffer(Bound(1, 0))
    prompt = Prompt("p", "e", "", {})
    ticket = buffer.admit(prompt, Sampling(stop=("x",)), 1)
    buffer.finish(ticket, Group(prompt, (rollout,), (Failure("late"),)))
    file = BytesIO()
    torch.save(buffer_state(buffer), file)
    file.seek(0)
    load_buffer(again, torch.load(file, weights_only=True), {prompt.id: prompt})
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


@pytest.mark.parametrize("kind", NOTED)
def test_what_an_environment_notes_does_not_keep_a_run_from_being_resumed(kind: str) -> None:
    noted, plain = NOTED[kind]
    found = saved_and_loaded(rollout(noted))
    assert found.reward.extra == found.turns[0].info == {"noted": plain}
    assert found.messages[1]["content"] == plain
