"""The schedule of an asynchronous run: groups of each step, with versions.

One row a step in schedule.jsonl, about 100 bytes a group:

    {"step": 12, "weights": "9f3c...", "epoch": 1.5, "groups": [{"prompt": "train-17", "seed": 81, "size": 8,
     "versions": [9]}, ...]}

With `streaming`, `ahead` holds the places of groups that were trained before the others were there, part by part. With
several trainer ranks, `ranks` holds the rank that trained each group, and `threads` the number of threads of each.
`versions` names the one version of all tokens, or holds for each rollout its spans [version, start, end]. `weights` is
the digest of the weights after the step, where a version was published, and `epoch` is what rewards were told after it,
groups counted in that were dropped. With this, `covey replay` runs the same run again on this machine, in a process for
each rank.

Tokens follow from seeds, not from others sampled at the same time; the last bits of their log-probs do not. If the
loss reads them, `logprobs` holds them too: 4 bytes a token (8 of a float64 policy), in base 64.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

from covey.rollouts.buffer import Ticket
from covey.rollouts.saved.plain import pack, unpack
from covey.types import Group, Rollout, Span


@dataclass(frozen=True, slots=True)
class PastGroup:
    """A trained group, without values that can be recomputed."""

    prompt_id: str
    seed: int
    size: int
    failures: int
    """Completions that were not scored."""
    spans: tuple[tuple[Span, ...], ...]
    """Spans of each completion, over all tokens that the policy chose; an end of -1 stands for the last token."""
    logprobs: tuple[float, ...] | None = None
    """Log-probs of those tokens, completion after completion, under the sampler; None where nothing reads them."""

    def versions(self) -> set[int]:
        return {span.version for spans in self.spans for span in spans}


def row_of(ticket: Ticket, group: Group, *, has_logprobs: bool = False) -> dict[str, Any]:
    """Return a trained group's row, with log-probs if they are read."""
    of_each = [_spans(rollout) for rollout in group.rollouts]
    whole = {spans[0][0] for spans in of_each if len(spans) == 1}
    versions: list[Any] = [*whole] if len(whole) == 1 and all(len(spans) == 1 for spans in of_each) else of_each
    row = {"prompt": group.prompt.id, "seed": ticket.sampling.seed, "size": ticket.group_size, "versions": versions}
    row |= {"failures": len(group.failures)} if group.failures else {}
    return row | ({"logprobs": pack(_sampler_logprobs(group), "fd")} if has_logprobs else {})


def shared_out(
    ranks: Mapping[int, int], early: Iterable[Iterable[int]], threads: Sequence[int]
) -> dict[str, list[Any]]:
    """Describe the sharing of a step's groups among ranks.

    `threads` holds the number of threads of each rank.
    `ranks` holds who trained each group, in order, by a number; `early` those that were trained ahead, part by part.
    """
    places = {number: place for place, number in enumerate(ranks)}
    ahead = [[places[number] for number in part] for part in early]
    of_parts: dict[str, list[Any]] = {"ahead": ahead} if ahead else {}
    return of_parts | ({"ranks": [*ranks.values()], "threads": [*threads]} if len(threads) > 1 else {})


def past_group(row: Mapping[str, Any]) -> PastGroup:
    """Read a group's row."""
    failures, size = int(row.get("failures", 0)), int(row["size"])
    versions: Sequence[Any] = row["versions"]
    if len(versions) == 1 and isinstance(versions[0], int):
        spans: list[Sequence[Sequence[int]]] = [[(versions[0], 0, -1)]] * size
    else:
        spans = list(versions)
    of_each = tuple(tuple(Span(*numbers) for numbers in of_one) for of_one in spans)
    logprobs = unpack(row["logprobs"]) if "logprobs" in row else None
    return PastGroup(row["prompt"], int(row["seed"]), size, failures, of_each, logprobs)


def with_logprobs(group: Group, past: PastGroup) -> Group:
    """Return a resampled group with its original log-probs, if recorded."""
    if past.logprobs is None or len(past.logprobs) != len(_sampler_logprobs(group)):
        return group
    left = iter(past.logprobs)

    def as_sampled(rollout: Rollout) -> Rollout:
        pairs = zip(rollout.loss_mask, rollout.sampler_logprobs, strict=True)
        return replace(rollout, sampler_logprobs=tuple(next(left) if chosen else other for chosen, other in pairs))

    return replace(group, rollouts=tuple(map(as_sampled, group.rollouts)))


def _sampler_logprobs(group: Group) -> list[float]:
    return [value for one in group.rollouts for value in compress(one.sampler_logprobs, one.loss_mask)]


def _spans(rollout: Rollout) -> list[list[int]]:
    if not rollout.spans:
        return [[rollout.policy_version, 0, rollout.num_loss_tokens]]
    return [[span.version, span.start, span.end] for span in rollout.spans]
