"""The trainer's numbers of each loss token, kept on the device.

Shapes: N rows of a micro-batch, T loss tokens of its longest row, L loss tokens.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from covey.algorithm.kl import k3
from covey.algorithm.loss_inputs import ObjectiveInputs
from covey.algorithm.metrics import LOG_RATIO_CLAMP
from covey.trainer.forward import FrozenLogProbs
from covey.types import MicroBatch


@dataclass(frozen=True, slots=True)
class SeenMicroBatch:
    """A micro-batch and the objective's inputs, without gradient."""

    batch: MicroBatch
    inputs: ObjectiveInputs


@dataclass(frozen=True, slots=True)
class RowScores:
    """Numbers of one rollout, an entry for each loss token."""

    trainer_logprob: list[float]
    """Log-probs under the weights before the first update on the batch, nats."""
    ratio: list[float]
    """Ratio of the policy at the last update on the batch to that before the first: 1 with a single update."""
    entropy: list[float] | None
    kl: list[float] | None
    """KL to the reference, nats; None without one."""


TrainedRow = tuple[str, tuple[int, ...], RowScores]
"""Prompt, loss tokens, and their numbers."""


@dataclass(frozen=True, slots=True)
class StepScores:
    """A step's micro-batches at their first and last update."""

    first: tuple[SeenMicroBatch, ...]
    last: tuple[SeenMicroBatch, ...]

    def gaps(self) -> Tensor:
        """Return |trainer - sampler| of every token's log-prob, nats."""
        read = [seen.inputs for seen in self.first]
        return _join((i.old_log_probs_NT - i.sampler_log_probs_NT).abs()[i.mask_NT] for i in read)

    def log_ratios(self) -> Tensor:
        read = [seen.inputs for seen in self.last]
        return _join((i.log_probs_NT - i.old_log_probs_NT)[i.mask_NT] for i in read)

    def entropies(self) -> Tensor:
        read = [seen.inputs for seen in self.first]
        return _join(i.entropy_NT[i.mask_NT] for i in read if i.entropy_NT is not None)

    def largest(self) -> dict[str, tuple[float, float]]:
        """Return the largest gap and |log ratio| by prompt id."""
        found: dict[str, tuple[float, float]] = {}
        for first, last in zip(self.first, self.last, strict=True):
            gap_NT = (first.inputs.old_log_probs_NT - first.inputs.sampler_log_probs_NT).abs()
            ratio_NT = (last.inputs.log_probs_NT - last.inputs.old_log_probs_NT).abs()
            maxima = [(values_NT * first.inputs.mask_NT).amax(dim=1).tolist() for values_NT in (gap_NT, ratio_NT)]
            for prompt_id, gap, ratio in zip(first.batch.prompt_ids, *maxima, strict=True):
                before = found.get(prompt_id, (0.0, 0.0))
                found[prompt_id] = (max(before[0], gap), max(before[1], ratio))
        return found

    def rows(self, prompt_ids: Iterable[str]) -> Iterator[TrainedRow]:
        """Yield prompt, tokens and numbers of these prompts' rows, in order."""
        wanted = set(prompt_ids)
        for first, last in zip(self.first, self.last, strict=True):
            for row, prompt_id in enumerate(first.batch.prompt_ids):
                if prompt_id in wanted:
                    targets = first.batch.target_L[first.batch.row_L == row].tolist()
                    yield prompt_id, tuple(targets), _row_scores(first.inputs, last.inputs, row)


class TokenScores:
    """Collects the trainer's own results, without a pass of its own."""

    def __init__(self) -> None:
        self._first: dict[int, SeenMicroBatch] = {}
        """First sight of micro-batches by `id`, which `SeenMicroBatch` holds on to."""
        self._last: dict[int, SeenMicroBatch] = {}

    def see(self, part: FrozenLogProbs, inputs: ObjectiveInputs) -> None:
        """Record a scored micro-batch, at its first and last update."""
        seen = SeenMicroBatch(part.batch, _detach(inputs))
        self._first.setdefault(id(part.batch), seen)
        self._last[id(part.batch)] = seen

    def take(self) -> StepScores:
        """Return the records since the last call."""
        found = StepScores(tuple(self._first.values()), tuple(self._last[name] for name in self._first))
        self._first, self._last = {}, {}
        return found


def _row_scores(first: ObjectiveInputs, last: ObjectiveInputs, row: int) -> RowScores:
    mask_T = first.mask_NT[row]

    def values(of_NT: Tensor) -> list[float]:
        return of_NT[row][mask_T].tolist()

    kl_NT = first.full_kl_NT
    if kl_NT is None and first.ref_log_probs_NT is not None:
        kl_NT = k3(first.log_probs_NT - first.ref_log_probs_NT, LOG_RATIO_CLAMP)
    return RowScores(
        trainer_logprob=values(first.old_log_probs_NT),
        ratio=values((last.log_probs_NT - last.old_log_probs_NT).exp()),
        entropy=None if first.entropy_NT is None else values(first.entropy_NT),
        kl=None if kl_NT is None else values(kl_NT),
    )


def _detach(inputs: ObjectiveInputs) -> ObjectiveInputs:
    given = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    return replace(inputs, **{name: values.detach() for name, values in given.items() if values is not None})


def _join(parts: Iterable[Tensor]) -> Tensor:
    found = list(parts)
    return torch.cat(found) if found else torch.zeros(0)
