"""Turn a step's groups into batches, with the counts of all ranks."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from covey.algorithm.aggregation import StepCounts
from covey.algorithm.credit.groups import Credit, CreditAssigner
from covey.system import collectives
from covey.trainer.batch import Packing, count, make_rows, pack_rows
from covey.trainer.forward import StreamedGroup
from covey.trainer.layouts import Row
from covey.trainer.trainer import Trainer
from covey.types import Batch, Group, Reward, Rollout


def make_training_batches(
    groups: Sequence[Group], trainer: Trainer, assigner: CreditAssigner, packing: Packing, step: int
) -> tuple[list[Batch], Credit]:
    """Make this rank's batches, one per mini-batch, and their advantages.

    Advantages are of the whole step, denominators of each mini-batch. Rollouts whose gradient is certainly 0 are left
    out of the work, never out of the counts. Collective.
    """
    # Advantages are of all rollouts: a masked one keeps its reward in its group.
    credit = assigner.assign(groups, reward_penalty(groups, trainer, packing))
    trainer.ahead.check(groups, credit.group_advantages)
    rows = make_rows(groups, credit.row_advantages, credit.in_loss, trainer.settings.teach)
    given = [_given_answers(group, trainer) for group in groups]

    batches = []
    settings = trainer.settings
    for members in mini_batches(groups, settings.num_mini_batches, f"{settings.seed}/mini-batches/{step}"):
        # The denominators of the loss, counted once over all ranks.
        num_loss_tokens = sum(row.rollout.num_loss_tokens for index in members for row in rows[index])
        num_sequences = sum(len(rows[index]) for index in members)
        num_rollouts = sum(sum(credit.keep[index]) for index in members)
        taught = count([[row for row in rows[index] if row.has_teacher] for index in members])
        supervised = count([given[index] for index in members])
        counts = (num_loss_tokens, num_sequences, num_rollouts, *taught, *supervised)
        *found, num_groups = collectives.all_sum_ints(*counts, len(members))
        totals = (*found[:3], tuple(found[3:5]), tuple(found[5:]))

        # Groups that were trained ahead cost no pass, nor do rows without gradient.
        kept = [index for index in members if id(groups[index]) not in trainer.ahead.trained]
        own = _rows_with_gradient([rows[index] for index in kept], trainer)
        with_answers = [[*of_group, *given[index]] for index, of_group in zip(kept, own, strict=True)]
        shared = share_rows(with_answers, num_groups)
        batches.append(pack_rows(shared, trainer.policy, packing, totals))
    return batches, credit


def _given_answers(group: Group, trainer: Trainer) -> list[Row]:
    """Return rows of given answers, which are learnt as they are."""
    answers = trainer.settings.answers
    found = () if answers is None else answers(group)
    zeros = [(0.0,) * one.num_loss_tokens for one in found]
    return [
        Row(group.prompt.id, one, advantages, has_teacher=False, is_supervised=True)
        for one, advantages in zip(found, zeros, strict=True)
    ]


def share_rows(rows: Sequence[list[Row]], num_groups: int) -> Sequence[list[Row]]:
    """Share all ranks' rows out where groups are fewer than ranks.

    Otherwise each rank keeps its own rows.
    Advantages and counts are there already, so it does not matter who trains a row. Long ones are dealt first, and rows
    of a group stay side by side, for their prompt is read once. Collective.
    """
    num_ranks = collectives.world_size()
    if num_groups >= num_ranks:
        return rows
    of_ranks = collectives.all_gather([[_bare(row) for row in of_group] for of_group in rows])
    groups = [of_group for of_rank in of_ranks for of_group in of_rank]
    places = [(group, place) for group, of_group in enumerate(groups) for place in range(len(of_group))]
    places.sort(key=lambda at: -groups[at[0]][at[1]].num_tokens)
    own = set(places[collectives.rank() :: num_ranks])
    kept = [[row for place, row in enumerate(rows) if (group, place) in own] for group, rows in enumerate(groups)]
    return [of_group for of_group in kept if of_group]


def _bare(row: Row) -> Row:
    """Drop fields that an update does not read; some cannot travel."""

    def bare(rollout: Rollout) -> Rollout:
        return replace(rollout, text="", messages=(), turns=(), reward=Reward(0.0))

    return replace(row, rollout=bare(row.rollout), taught=None if row.taught is None else bare(row.taught))


def mini_batches(groups: Sequence[Group], count: int, seed: str) -> list[list[int]]:
    """Split all ranks' groups into `count` mini-batches, shuffled by `seed`.

    Their sizes differ by at most one.
    Returns the places of this rank's groups in each. A group stays whole. Which groups are together depends on what
    they are and not on the rank that has them: any number of ranks makes the same mini-batches. Collective.
    """
    if count == 1:
        return [list(range(len(groups)))]
    # A prompt that was drawn twice has other answers; groups that are alike in all of them may change places
    names = [f"{group.prompt.id}/{[rollout.target_ids for rollout in group.rollouts]}" for group in groups]
    keys = [hashlib.sha256(f"{seed}/{name}".encode()).hexdigest() for name in names]
    of_ranks = collectives.all_gather(keys)
    order = sorted((key, rank, index) for rank, own in enumerate(of_ranks) for index, key in enumerate(own))
    found: list[list[int]] = [[] for _ in range(count)]
    for place, (_, rank, index) in enumerate(order):
        if rank == collectives.rank():
            found[place * count // len(order)].append(index)
    return [sorted(members) for members in found]


def train_ahead(
    groups: Sequence[Group], trainer: Trainer, assigner: CreditAssigner, packing: Packing, step: int
) -> None:
    """Accumulate gradients of early groups of a step.

    On this rank alone, where settings allow it (`trainer.ahead`); `make_training_batches` then leaves them out.
    """
    penalties = reward_penalty(groups, trainer, packing)
    credit = assigner.assign(groups, penalties, alone=True)
    rows = make_rows(groups, credit.row_advantages, credit.in_loss, trainer.settings.teach)
    if not any(rows):  # no count to divide by, until others are there
        return
    counted = trainer.ahead.totals
    if counted is None:
        # As if the step's other groups were like the first: divided by its few tokens alone, float16 overflows
        times = max(1, trainer.settings.groups_per_step // len(groups))
        num_tokens, num_sequences = count(rows)
        counted = StepCounts(times * num_tokens, times * num_sequences, times * sum(map(sum, credit.keep)))
    totals = (counted.num_tokens, counted.num_sequences, counted.num_rows)
    trainer.accumulate(pack_rows(_rows_with_gradient(rows, trainer), trainer.policy, packing, totals), step)
    for index, group in enumerate(groups):
        penalty = None if penalties is None else penalties[index]
        trainer.ahead.trained[id(group)] = StreamedGroup(group, credit.group_advantages[index], penalty)


def drop_zero_advantage_rows(rows: Sequence[Sequence[Row]]) -> list[list[Row]]:
    """Drop rows of advantage 0, without gradient in a proportional loss."""
    return [[row for row in group if any(row.advantages)] for group in rows]


def _rows_with_gradient(rows: Sequence[list[Row]], trainer: Trainer) -> Sequence[list[Row]]:
    return drop_zero_advantage_rows(rows) if trainer.objective.zero_advantage_is_free else rows


def make_measured_batch(groups: Sequence[Group], trainer: Trainer, packing: Packing) -> Batch:
    """Make one micro-batch without advantages, to measure a step without an update."""
    rows = make_rows(groups, teach=trainer.settings.teach)
    return pack_rows(rows, trainer.policy, packing, totals=(1, 1, 1, (1, 1), (1, 1)), limit=1)


def reward_penalty(groups: Sequence[Group], trainer: Trainer, packing: Packing) -> list[list[float]] | None:
    """Return kl_coef x KL(policy || reference) per rollout, None if unused.

    The KL is that of the whole rollout, in the loss or not.

    Rewards are compared within their group, so all of them carry the penalty.
    """
    coef = trainer.controller.coef
    if trainer.algorithm.kl_in != "reward" or coef == 0:
        return None
    # A group that was trained ahead keeps the penalty it had.
    ahead = trainer.ahead.trained
    rest = [group for group in groups if id(group) not in ahead]
    rows = make_rows(rest)
    kl = iter(trainer.sequence_kl(pack_rows(rows, trainer.policy, packing, (1, 1, 1))))
    penalties: dict[int, Sequence[float] | None] = {name: one.penalties for name, one in ahead.items()}
    penalties |= {id(g): [coef * next(kl) if r.num_loss_tokens else 0.0 for r in g.rollouts] for g in rest}
    return [list(penalties[id(group)] or ()) for group in groups]
