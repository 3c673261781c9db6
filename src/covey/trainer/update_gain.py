"""Check that the update raised a group's best answer above its worst.

It reads rewards as the environment gave them and log-probs as the sampler gave them, and asks the updated policy once
more. So it notices what the update itself cannot: an advantage of the wrong sign or of another answer, and a step of
weights that the policy does not have.
"""

from collections.abc import Sequence
from statistics import fmean, stdev

import torch

from covey.policy.logprobs import score_tokens
from covey.policy.policy import inference
from covey.system import collectives
from covey.trainer.batch import Packing, make_rows, pack_rows, pad_micro_batches
from covey.trainer.trainer import Trainer
from covey.types import Group, MicroBatch, Rollout

EVERY, FIRST = 5, 3
"""Steps between looks, and how many are looked at from the beginning."""
MOST_GROUPS = 8
"""Maximum groups of each rank in a look: two answers each, so that it costs a small part of an update."""


def is_gain_measured(step: int) -> bool:
    """Return True for a step (from 0) whose update gain is measured."""
    return step < FIRST or (step + 1) % EVERY == 0


def measure_update_gain(groups: Sequence[Group], trainer: Trainer, packing: Packing) -> dict[str, float]:
    """Return the rise of best above worst answers, with its error.

    A mean over groups and its standard error, nats an answer: to first order above 0 for every step along the gradient.
    Nothing where fewer than two groups have rewards that differ. Collective.
    """
    pairs = [pair for group in groups if (pair := _best_and_worst(group)) is not None][:MOST_GROUPS]
    rows = make_rows(pairs, [[0.0, 0.0]] * len(pairs))
    batch = pad_micro_batches(pack_rows(rows, trainer.policy, packing, totals=(1, 1, 1)), trainer.policy)
    with trainer.timer.phase("logprobs"), inference(trainer.policy.model):
        rises = [rise for part in batch.micro_batches for rise in _rises(part, trainer)]
    gains = [best - worst for best, worst in zip(rises[::2], rises[1::2], strict=True)]
    gains = [gain for of_rank in collectives.all_gather(gains) for gain in of_rank]
    if len(gains) < 2:
        return {}
    return {"update_gain": fmean(gains), "update_gain_error": stdev(gains) / len(gains) ** 0.5}


def _best_and_worst(group: Group) -> Group | None:
    """Return a group of the best and worst answer, None if equal."""
    answers = [one for one in group.rollouts if one.num_loss_tokens > 0]
    if not answers:
        return None
    best, worst = max(answers, key=_reward), min(answers, key=_reward)
    return Group(group.prompt, (best, worst), ()) if _reward(best) > _reward(worst) else None


def _reward(rollout: Rollout) -> float:
    return rollout.reward.value


def _rises(part: MicroBatch, trainer: Trainer) -> list[float]:
    """Return the rise of each row's log-prob since sampling, nats."""
    logprob_L = score_tokens(trainer.policy, part, trainer.forward.scoring).logprob_L.double()
    risen_N = torch.zeros(part.num_rows, dtype=torch.float64, device=logprob_L.device)
    if part.num_rows == 0:
        return []
    return risen_N.index_add_(0, part.row_L, logprob_L - part.sampler_logprob_L).tolist()
