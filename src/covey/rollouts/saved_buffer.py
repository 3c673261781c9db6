"""The buffer as plain containers, as checkpoints hold it: finished groups whole, prompts by their id."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from covey.rollouts.buffer import GroupBuffer, Ticket
from covey.system.jsonl import plain_data
from covey.types import Failure, Group, Prompt, Reward, Rollout, Sampling, Span, Turn


def buffer_state(buffer: GroupBuffer) -> dict[str, Any]:
    """Return everything a resume needs, without copying tokens."""
    buffer.check_conservation()
    pending = {ticket.number: ticket for ticket in buffer.pending}
    return {
        "step": buffer.step,
        "counts": (buffer.admitted, buffer.trained, buffer.dropped),
        "pending": [_of_ticket(ticket) for ticket in pending.values()],
        "finished": {number: _of_group(group) for number, group in buffer.finished.items() if number in pending},
    }


def load_buffer(buffer: GroupBuffer, state: Mapping[str, Any], prompts: Mapping[str, Prompt]) -> None:
    """Restore a buffer. ValueError where a prompt of it is not among `prompts`, by id."""
    tickets = [_ticket(saved, prompts) for saved in state["pending"]]
    by_number = {ticket.number: ticket.prompt for ticket in tickets}
    finished = {number: _group(saved, by_number[number]) for number, saved in state["finished"].items()}
    buffer.restore(state["step"], tuple(state["counts"]), tickets, finished)


def _of_ticket(ticket: Ticket) -> dict[str, Any]:
    return {
        "number": ticket.number,
        "prompt": plain_data(ticket.prompt.id),
        "sampling": asdict(ticket.sampling),
        "group_size": ticket.group_size,
        "least_version": ticket.least_version,
        "attempt": ticket.attempt,
    }


def _ticket(saved: Mapping[str, Any], prompts: Mapping[str, Prompt]) -> Ticket:
    if saved["prompt"] not in prompts:
        raise ValueError(f"the checkpoint holds a group of prompt {saved['prompt']!r}, which this run has not")
    sampling = Sampling(**{**saved["sampling"], "stop": tuple(saved["sampling"]["stop"])})
    return Ticket(**{**saved, "prompt": prompts[saved["prompt"]], "sampling": sampling})


def _of_group(group: Group) -> dict[str, Any]:
    return {
        "rollouts": [_of_rollout(rollout) for rollout in group.rollouts],
        "failures": [_values(failure) for failure in group.failures],
    }


def _of_rollout(rollout: Rollout) -> dict[str, Any]:
    plain = {field.name: getattr(rollout, field.name) for field in fields(rollout)}
    return plain | {
        "reward": _values(rollout.reward),
        "spans": [asdict(span) for span in rollout.spans],
        "messages": [plain_data(message) for message in rollout.messages],
        "turns": [_values(turn) for turn in rollout.turns],
        "stop_reason": plain_data(rollout.stop_reason),
    }


def _values(verdict: Reward | Turn | Failure) -> dict[str, Any]:
    """Return what an environment said, of which a checkpoint unpickles nothing but plain data."""
    return {field.name: plain_data(getattr(verdict, field.name)) for field in fields(verdict)}


def _group(saved: Mapping[str, Any], prompt: Prompt) -> Group:
    rollouts = tuple(_rollout(plain) for plain in saved["rollouts"])
    return Group(prompt, rollouts, tuple(Failure(**plain) for plain in saved["failures"]))


def _rollout(saved: Mapping[str, Any]) -> Rollout:
    made = {
        "reward": Reward(**saved["reward"]),
        "spans": tuple(Span(**plain) for plain in saved["spans"]),
        "messages": tuple(saved["messages"]),
        "turns": tuple(Turn(**plain) for plain in saved["turns"]),
    }
    return Rollout(**{**saved, **made})
