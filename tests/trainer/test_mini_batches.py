"""Mini-batches: several optimiser steps on what was sampled at once, each on whole groups and with its own counts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from covey.algorithm.aggregation import StepCounts
from covey.algorithm.metrics import Average
from covey.algorithm.settings import AlgorithmConfig
from covey.policy.reference import make_reference
from covey.system import collectives
from covey.trainer.forward import StreamedWork
from covey.trainer.optimizer import order_of_updates
from covey.trainer.prepare import Packing, make_training_batches, mini_batches, train_ahead
from covey.types import Batch, Group, Prompt, Reward, Rollout
from tests.support.builders import credit_assigner

from ..support.builders import SGD, copied, make, make_policy, make_trainer, random_groups, rollout_of
from ..support.processes import on_two_ranks
from ..support.small import rows, scripted, small_config, use

ADVANTAGES = [[1.0, -0.5, -0.5], [0.7, -0.7], [1.5, -0.5, -0.5, -0.5]]


def eleven() -> list[Group]:
    return [
        Group(Prompt(f"p{number % 9}", "test", "", {}), (rollout_of((1, 2), (3 + number,)),), ())
        for number in range(11)
    ]


def shared_out(groups: list[Group], count: int, seed: str) -> list[list[int]]:
    return mini_batches(groups, count, seed)


@pytest.mark.parametrize(("count", "sizes"), [(1, [11]), (2, [5, 6]), (4, [2, 3, 3, 3]), (11, [1] * 11)])
def test_mini_batches_partition_groups_evenly(count: int, sizes: list[int]) -> None:
    found = shared_out(eleven(), count, "0/mini-batches/0")
    assert sorted(place for members in found for place in members) == list(range(11))
    assert sorted(map(len, found)) == sizes


def test_groups_of_one_prompt_with_equal_answers_fill_mini_batches_as_others_do() -> None:
    twins = [Group(Prompt("p", "test", "", {}), (rollout_of((1, 2), (3,)),) * 2, ())] * 4
    assert sorted(map(len, shared_out(twins, 4, "s"))) == [1, 1, 1, 1]
    first_alike = [replace(twins[0], rollouts=(*twins[0].rollouts, rollout_of((1,), (last,)))) for last in range(5, 9)]
    of_each = [{id(first_alike[place]) for place in members} for members in shared_out(first_alike, 2, "s")]
    back = first_alike[::-1]
    assert [{id(back[place]) for place in members} for members in shared_out(back, 2, "s")] == of_each


def test_each_step_and_seed_has_its_own_repeatable_shuffle() -> None:
    found = {seed: shared_out(eleven(), 3, seed) for seed in ("0/0", "0/1", "1/0")}
    assert len({str(members) for members in found.values()}) == 3
    assert shared_out(eleven(), 3, "0/1") == found["0/1"]


def test_the_order_of_groups_does_not_decide_who_is_together() -> None:
    groups = eleven()
    back = groups[::-1]
    of_each = [{id(groups[place]) for place in members} for members in shared_out(groups, 4, "s")]
    assert [{id(back[place]) for place in members} for members in shared_out(back, 4, "s")] == of_each


def test_two_ranks_make_the_mini_batches_of_one(tmp_path: Path) -> None:
    groups = eleven()

    def work() -> list[list[int]]:
        start, end = ((0, 4), (4, 11))[collectives.rank()]
        return [[start + place for place in members] for members in shared_out(groups[start:end], 4, "s")]

    first, second = on_two_ranks(work, tmp_path)
    assert [[*own, *other] for own, other in zip(first, second, strict=True)] == shared_out(groups, 4, "s")


def test_a_step_without_groups_has_empty_mini_batches() -> None:
    assert shared_out([], 3, "s") == [[], [], []]


def test_every_pass_takes_every_mini_batch_in_an_order_of_its_own() -> None:
    trainer = make_trainer(make_policy("gpt2"), updates_per_batch=3, num_mini_batches=5)
    order = order_of_updates(trainer.settings, step=2, count=5)
    passes = [order[start : start + 5] for start in (0, 5, 10)]
    assert all(sorted(own) == list(range(5)) for own in passes)
    assert len({str(own) for own in passes}) > 1
    assert order_of_updates(trainer.settings, step=2, count=5) == order
    others = [(trainer.settings, 3), (replace(trainer.settings, seed=1), 2)]
    assert order not in [order_of_updates(settings, step, count=5) for settings, step in others]


def parts() -> list[Batch]:
    groups = random_groups()
    return [make(groups[:2], advantages=ADVANTAGES[:2]), make(groups[2:], advantages=ADVANTAGES[2:])]


def test_each_mini_batch_has_its_own_counts_and_the_advantages_of_the_whole_batch() -> None:
    groups = [replace(group, rollouts=rewarded(group)) for group in random_groups()]
    algorithm, packing = AlgorithmConfig(loss="reinforce", advantage="group_center"), Packing("shared", 10_000)
    found = {}
    for count in (1, 3):
        trainer = make_trainer(make_policy("gpt2"), algorithm, num_mini_batches=count)
        found[count] = make_training_batches(groups, trainer, credit_assigner(algorithm, {}), packing, step=0)
    (whole,), credit = found[1]
    parts, same_credit = found[3]
    assert same_credit.advantages == credit.advantages
    assert (whole.num_loss_tokens, whole.num_sequences, whole.num_rollouts) == (43, 9, 9)
    assert sorted((part.num_loss_tokens, part.num_sequences, part.num_rollouts) for part in parts) == [
        (10, 2, 2),
        (13, 3, 3),
        (20, 4, 4),
    ]


def counted_and_trained(algorithm: AlgorithmConfig, group: Group) -> tuple[int, list[list[float]]]:
    """The rollouts that a step counts, and the advantages of all."""
    trainer = make_trainer(make_policy("gpt2"), algorithm)
    packing = Packing("shared", 10_000)
    (batch,), credit = make_training_batches([group], trainer, credit_assigner(algorithm), packing, step=0)
    return batch.num_rollouts, credit.advantages


def test_what_a_selection_drops_leaves_the_count_of_rollouts() -> None:
    group = replace(random_groups()[2], rollouts=rewarded(random_groups()[2]))
    best = AlgorithmConfig(advantage="group_center", selection="top_k", selection_options={"k": 3})
    assert counted_and_trained(best, group)[0] == 3
    assert counted_and_trained(AlgorithmConfig(advantage="group_center"), group)[0] == len(group.rollouts) == 4


def test_a_masked_completion_is_shaped_by_what_it_wrote() -> None:
    group = random_groups()[0]
    long = max(rollout.num_loss_tokens for rollout in group.rollouts)
    cut = replace(group, rollouts=tuple(replace(one, finish_reason="length") for one in group.rollouts))
    shaping = {"soft_overlong": {"max_len": long, "cache": long}}
    masked = AlgorithmConfig(advantage="none", shaping=shaping, mask_truncated=True)
    expected = [one.reward.value - one.num_loss_tokens / long for one in group.rollouts]
    assert counted_and_trained(masked, cut)[1] == [pytest.approx(expected)]


def rewarded(group: Group) -> tuple[Rollout, ...]:
    return tuple(replace(one, reward=Reward(float(place))) for place, one in enumerate(group.rollouts))


def flat(policy: Any) -> Tensor:
    return torch.cat([weight.detach().flatten() for weight in policy.model.parameters()]).double()


def test_updates_without_a_ratio_are_those_of_one_batch_after_the_other() -> None:
    policy = make_policy("gpt2", torch.float64)
    apart, together = copied(policy), copied(policy)
    trainer = make_trainer(together, num_mini_batches=2)
    trainer.step(parts(), 0)
    for place in order_of_updates(trainer.settings, 0, 2):
        make_trainer(apart).step(parts()[place], 0)
    moved = flat(together) - flat(policy)
    assert float((flat(together) - flat(apart)).norm() / moved.norm()) < 1e-12


def test_the_ratio_is_against_the_policy_before_the_first_of_them() -> None:
    policy = make_policy("gpt2", torch.float64)
    trainer = make_trainer(policy, AlgorithmConfig(loss="clip"), num_mini_batches=2)
    metrics = trainer.step(parts(), 0)
    assert metrics["first_update/approx_kl"] == 0.0
    assert metrics["last_update/approx_kl"] > 1e-6
    assert metrics["num_rollouts_trained"] == 9


def test_what_is_logged_and_steers_weighs_tokens_and_not_mini_batches() -> None:
    """3 and 6 sequences, 13 and 30 tokens, and steps that are too small to change anything."""
    policy, groups = make_policy("gpt2", torch.float64), random_groups()
    reference, still = (
        make_reference(make_policy("gpt2", torch.float64, seed=9), refreshed=False),
        replace(SGD, lr=1e-15),
    )
    algorithm = AlgorithmConfig(kl_coef=0.1, target_kl=0.1)
    apart = [make(groups[:1], advantages=ADVANTAGES[:1]), make(groups[1:], advantages=ADVANTAGES[1:])]
    whole = make_trainer(policy, algorithm, still, reference).step(make(groups, advantages=ADVANTAGES), 0)
    found = make_trainer(policy, algorithm, still, reference, num_mini_batches=2).step(apart, 0)
    assert found["last_update/entropy"] != pytest.approx(whole["entropy"], rel=1e-4)
    for name in ("kl", "kl_sequence_mean", "entropy", "mismatch", "sampler_weight_mean", "ess_fraction", "kl_coef"):
        assert found[name] == pytest.approx(whole[name], rel=1e-9), name


def test_an_empty_mini_batch_makes_no_step() -> None:
    policy = make_policy("gpt2", torch.float64)
    alone, beside = copied(policy), copied(policy)
    make_trainer(alone).step(parts()[0], 0)
    metrics = make_trainer(beside, num_mini_batches=2).step([make([]), parts()[0]], 0)
    assert metrics["skipped"] == 0
    assert torch.equal(flat(alone), flat(beside))


def trained(folder: Path, **changes: Any) -> tuple[list[dict[str, Any]], bytes]:
    from covey.loop import train

    config = small_config(preflight__enabled=False, groups_per_step=4, num_steps=3, optimizer__lr=0.01, **changes)
    train(config, folder)
    [saved] = (folder / "checkpoints").glob("step-000003/policy/model.safetensors")
    return rows(folder / "metrics.jsonl", "train"), saved.read_bytes()


@pytest.mark.long
def test_mini_batches_by_groups_or_rollouts_agree_and_one_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, scripted())
    _, whole = trained(tmp_path / "whole")
    _, all_of_it = trained(tmp_path / "all", mini_batch_groups=4)
    by_groups, halves = trained(tmp_path / "halves", mini_batch_groups=2)
    size = small_config().group_size
    _, by_rollouts = trained(tmp_path / "rollouts", mini_batch_rollouts=2 * size)
    assert all_of_it == whole
    assert by_rollouts == halves != whole
    assert all("last_update/grad_norm" in row or "last_update/approx_kl" in row for row in by_groups)


@pytest.mark.long
def test_a_stopped_run_resumes_to_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from covey.loop import train

    use(monkeypatch, scripted())
    _, whole = trained(tmp_path / "whole", mini_batch_groups=2, updates_per_batch=2, output__save_every=1)
    folder = tmp_path / "parts"
    (tmp_path / "whole").rename(folder)
    for name in ("step-000002", "step-000003"):
        for path in sorted((folder / "checkpoints" / name).rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        (folder / "checkpoints" / name).rmdir()
    again = small_config(
        preflight__enabled=False,
        groups_per_step=4,
        num_steps=3,
        optimizer__lr=0.01,
        mini_batch_groups=2,
        updates_per_batch=2,
        output__save_every=1,
        resume=str(folder),
    )
    train(again, folder)
    assert (folder / "checkpoints" / "step-000003" / "policy" / "model.safetensors").read_bytes() == whole


def test_groups_without_loss_tokens_give_no_count_to_divide_by_ahead_of_their_step() -> None:
    """Divided by 1 in place of the tokens of a step, gradients of float16 overflow."""
    algorithm, packing = AlgorithmConfig(mask_truncated=True), Packing("shared", 10_000)
    trainer = make_trainer(make_policy("gpt2"), algorithm, streaming=True)
    cut = [replace(g, rollouts=tuple(replace(r, finish_reason="length") for r in rewarded(g))) for g in random_groups()]
    for early in ([], cut):
        train_ahead(early, trainer, credit_assigner(algorithm), packing, step=0)
        assert trainer.ahead.totals is None
    train_ahead(
        [replace(g, rollouts=rewarded(g)) for g in random_groups()], trainer, credit_assigner(algorithm), packing, 0
    )
    assert trainer.ahead.totals is not None
    assert trainer.ahead.totals.num_tokens == 43


def test_early_groups_are_divided_by_the_counts_of_a_whole_step() -> None:
    """Else gradients are larger by the number of groups that are still to come, which is much for float16."""
    groups = [replace(g, rollouts=rewarded(g)) for g in random_groups()]
    trainer = make_trainer(make_policy("gpt2"), AlgorithmConfig(), streaming=True, groups_per_step=24)
    for part in (groups, groups[:1]):
        train_ahead(part, trainer, credit_assigner(AlgorithmConfig()), Packing("shared", 10_000), 0)
        assert trainer.ahead.totals == StepCounts(8 * 43, 8 * 9, 8 * 9)


def test_the_real_counts_change_what_was_divided_by_them_and_nothing_else() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([1.0, -2.0])
    logged = {
        "policy_loss": Average(torch.tensor(2.0), torch.tensor(1.0)),
        "ratio": Average(torch.tensor(3.0), torch.tensor(4.0)),
    }
    ahead = StreamedWork(totals=StepCounts(10, 2, 2), sums=[logged])
    ahead.rescale([weight, torch.nn.Parameter(torch.zeros(1))], {"num_tokens"}, StepCounts(40, 2, 2))
    assert weight.grad.tolist() == [0.25, -0.5]
    assert (float(ahead.sums[0]["policy_loss"].numerator), ahead.sums[0]["ratio"]) == (0.5, logged["ratio"])
