"""Train on groups of a step that are complete while the slowest are still sampled or scored: streaming inside a step.

A loss is a sum over rollouts, divided by a count of the whole step that is not known before its last group is there.
So the gradients of early groups are divided by a provisional count, and brought to the real one when the step is
taken: the update is that of the whole batch, up to the order in which floats are added. It needs advantages that no
other group has a part in, one count that divides every term of the loss, and one update per batch; the settings refuse
what has not (`covey.trainer.settings`), and `check` finds custom functions that have not.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from covey.algorithm.aggregation import Totals
from covey.algorithm.metrics import LOSS_TERMS, Average, Sums
from covey.trainer.forward import FrozenScores
from covey.types import Group, RunStopped


@dataclass(frozen=True, slots=True)
class Trained:
    """What a group was trained with before its step."""

    group: Group
    """Kept, so that its `id` names no other group."""
    advantages: Sequence[float]
    """Of its rollouts, or of all their turns."""
    penalties: Sequence[float] | None
    """On the reward of each rollout; None where there is no such penalty."""


@dataclass
class Ahead:
    """What was accumulated for the coming step: gradients are on the weights, all else is here."""

    totals: Totals | None = None
    """Provisional counts that all parts were divided by, those of the first."""
    trained: dict[int, Trained] = field(default_factory=dict)
    """By `id` of the group."""
    prepared: list[FrozenScores] = field(default_factory=list)
    """The micro-batches."""
    sums: list[Sums] = field(default_factory=list)
    maxima: list[Mapping[str, float]] = field(default_factory=list)

    def check(self, groups: Sequence[Group], advantages: Sequence[Sequence[float]]) -> None:
        """Compare with the advantages within the whole batch. RunStopped where other groups have a part in them."""
        found = {id(group): of_group for group, of_group in zip(groups, advantages, strict=True)}
        assert found.keys() >= self.trained.keys(), "a group was trained that is none of its step's"
        for name, one in self.trained.items():
            gaps = [abs(a - b) for a, b in zip(one.advantages, found[name], strict=True)]
            if max(gaps, default=0.0) > 1e-9 * max(1.0, *map(abs, found[name])):
                raise RunStopped(
                    f"the advantages of prompt {one.group.prompt.id} depend on other groups: "
                    "streaming=true needs an advantage and shaping that look at a group alone"
                )

    def rescale(self, parameters: Sequence[torch.nn.Parameter], divisors: Collection[str], totals: Totals) -> None:
        """Bring the gradients, and what is logged of the loss, to the real counts, of which one divides it."""
        (divisor,) = divisors
        factor = _count(self.totals, divisor) / _count(totals, divisor)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        self.sums = [{name: _scaled(name, average, factor) for name, average in part.items()} for part in self.sums]


def _count(totals: Totals | None, divisor: str) -> int:
    return max(1, getattr(totals, divisor)) if divisor else 1


def _scaled(name: str, average: Average, factor: float) -> Average:
    return Average(average.numerator * factor, average.denominator) if name in LOSS_TERMS else average
