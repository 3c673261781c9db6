"""The buffer as plain containers for checkpoints: groups whole, prompts by id."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from covey.rollouts.buffer import GroupBuffer, Ticket
from covey.rollouts.saved.plain import SavedGroup, from_plain, to_plain
from covey.rollouts.settings import group_sizes
from covey.rollouts.source import LocalSource
from covey.system.jsonl import plain_data
from covey.types import Prompt, Sampling

LOGGER = logging.getLogger(__name__)


def buffer_state(buffer: GroupBuffer) -> dict[str, Any]:
    """Return everything a resume needs, without copying tokens."""
    buffer.check_conservation()
    pending = {ticket.number: ticket for ticket in buffer.pending}
    return {
        "step": buffer.step,
        "counts": (buffer.admitted, buffer.trained, buffer.dropped),
        "pending": [_of_ticket(ticket) for ticket in pending.values()],
        "finished": {
            number: to_plain(SavedGroup.of(group)) for number, group in buffer.finished.items() if number in pending
        },
    }


def load_buffer(buffer: GroupBuffer, state: Mapping[str, Any], local: LocalSource) -> None:
    """Restore a buffer under `local`'s settings. ValueError for unknown prompts.

    Groups of another sampling or group_size are sampled by this run's.
    """
    prompts = {prompt.id: prompt for prompt in local.stream.prompts}
    saved = [_ticket(one, prompts) for one in state["pending"]]
    steps = [state["step"] + place // buffer.bound.groups_per_step for place in range(len(saved))]
    tickets = [_renew(ticket, local, step) for ticket, step in zip(saved, steps, strict=True)]
    kept = {now.number: now.prompt for then, now in zip(saved, tickets, strict=True) if then == now}
    if len(kept) < len(saved):
        renewed = len(saved) - len(kept)
        LOGGER.info("%d groups of the checkpoint are sampled by the changed sampling or group_size", renewed)
    finished = {n: from_plain(SavedGroup, one).group(kept[n]) for n, one in state["finished"].items() if n in kept}
    buffer.restore(state["step"], tuple(state["counts"]), tickets, finished)


def _renew(ticket: Ticket, local: LocalSource, step: int) -> Ticket:
    """Return the ticket with the run's sampling, equal if that is unchanged."""
    is_known = ticket.group_size in group_sizes(local.group_size, local.later_sizes)
    size = ticket.group_size if is_known else local.size_at(step)
    return replace(ticket, sampling=replace(local.sampling, seed=ticket.sampling.seed), group_size=size)


def _of_ticket(ticket: Ticket) -> dict[str, Any]:
    numbers = {name: getattr(ticket, name) for name in ("number", "group_size", "least_version", "attempt")}
    return numbers | {"prompt": plain_data(ticket.prompt.id), "sampling": to_plain(ticket.sampling)}


def _ticket(saved: Mapping[str, Any], prompts: Mapping[str, Prompt]) -> Ticket:
    if saved["prompt"] not in prompts:
        raise ValueError(f"the checkpoint holds a group of prompt {saved['prompt']!r}, which this run has not")
    sampling = from_plain(Sampling, saved["sampling"])
    return Ticket(**{**saved, "prompt": prompts[saved["prompt"]], "sampling": sampling})
