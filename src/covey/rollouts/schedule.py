"""What settings do not determine in an asynchronous run: which groups made each step, sampled on which versions.

One row a step in schedule.jsonl, about 100 bytes a group:

    {"step": 12, "weights": "9f3c...", "groups": [{"prompt": "train-17", "seed": 81, "size": 8, "versions": [9]}, ...]}

With `streaming`, `ahead` holds the places of groups that were trained before the others were there, part by part.
`versions` names the one version of all tokens, or holds for each rollout its spans [version, start, end]. `weights` is
the digest of the weights after the step, where a version was published. With this, `covey replay` runs the same run
again in one process.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from covey.rollouts.buffer import Ticket
from covey.types import Group, Rollout, Span


@dataclass(frozen=True, slots=True)
class PastGroup:
    """A group as a run trained it, but for what can be computed again."""

    prompt_id: str
    seed: int
    size: int
    failures: int
    """Completions that were not scored."""
    spans: tuple[tuple[Span, ...], ...]
    """Of each completion, over all tokens that the policy chose; an end of -1 stands for the last token."""

    def versions(self) -> set[int]:
        return {span.version for spans in self.spans for span in spans}


def row_of(ticket: Ticket, group: Group) -> dict[str, Any]:
    """Return what is written of a trained group."""
    of_each = [_spans(rollout) for rollout in group.rollouts]
    whole = {spans[0][0] for spans in of_each if len(spans) == 1}
    versions: list[Any] = [*whole] if len(whole) == 1 and all(len(spans) == 1 for spans in of_each) else of_each
    row = {"prompt": group.prompt.id, "seed": ticket.sampling.seed, "size": ticket.group_size, "versions": versions}
    return row | ({"failures": len(group.failures)} if group.failures else {})


def past_group(row: Mapping[str, Any]) -> PastGroup:
    """Read a group again."""
    failures, size = int(row.get("failures", 0)), int(row["size"])
    versions: Sequence[Any] = row["versions"]
    if len(versions) == 1 and isinstance(versions[0], int):
        spans: list[Sequence[Sequence[int]]] = [[(versions[0], 0, -1)]] * size
    else:
        spans = list(versions)
    of_each = tuple(tuple(Span(*numbers) for numbers in of_one) for of_one in spans)
    return PastGroup(row["prompt"], int(row["seed"]), size, failures, of_each)


def _spans(rollout: Rollout) -> list[list[int]]:
    if not rollout.spans:
        return [[rollout.policy_version, 0, rollout.num_loss_tokens]]
    return [[span.version, span.start, span.end] for span in rollout.spans]
