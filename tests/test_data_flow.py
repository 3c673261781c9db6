"""What was sampled is what is trained: tokens, log-probs and advantages from the engine to the loss."""

import sys
import tomllib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.algorithm.credit.scores import Scores
from covey.config.schema import Config
from covey.engine.fake import FakeEngine
from covey.environments.base import Environment
from covey.loop import train
from covey.run.build import Run, build_run
from covey.system import collectives
from covey.system.waits.timer import PhaseTimer
from covey.trainer.batch import make_rows
from covey.trainer.layouts import Row
from covey.trainer.prepare import make_training_batches, pack_rows, reward_penalty, train_ahead
from covey.types import Batch, Failure, Group, MicroBatch, Prompt, Rollout

from .support.builders import normal
from .support.small import TOKENIZER, equal, rows, saved_weights, scripted, small_config, timeless, use, varied

END = TOKENIZER.eos_token_id
DIGITS = [TOKENIZER(digit)["input_ids"][0] for digit in "0123"]


def digits(prompt_ids: tuple[int, ...], index: int) -> list[int]:
    """Sample 0 writes "0", sample 1 "11", sample 2 "222" and sample 3 "3333", each with the stop token."""
    return [DIGITS[index]] * (index + 1) + [END]


def first_digit(prompt: Prompt, text: str) -> float:
    return float(text[0])


def step_of(
    config: Config, script: Any = digits, environment: Environment | None = None
) -> tuple[Run, list[Group], Batch]:
    """The groups that a scripted engine answers with, and the batch they become."""
    run = build_run(config, environment or scripted(first_digit), PhaseTimer())
    engine = FakeEngine(script, vocab_size=len(TOKENIZER))
    run.source.sampler = replace(run.source.sampler, engine=engine)
    groups = run.source.take(config.groups_per_step)
    run.source.close()
    (batch,), _ = make_training_batches(groups, run.trainer, run.credit, run.packing, 0)
    return run, groups, batch


def loss_tokens(batch: Batch) -> list[tuple[str, int, float]]:
    """(prompt, token, advantage) of every loss token, in order."""
    found = []
    for micro in batch.micro_batches:
        names = [micro.prompt_ids[row] for row in micro.row_L.tolist()]
        found += list(zip(names, micro.target_L.tolist(), micro.advantage_L.tolist(), strict=True))
    return found


# ------------------------------------------------------------------------------------------------ tokens to loss


def test_every_sampled_token_is_a_loss_token_with_the_advantage_of_its_rollout() -> None:
    config = small_config(groups_per_step=1, sampling__max_tokens=8, algorithm__advantage="group_center")
    _, (group,), batch = step_of(config)
    expected = [
        (group.prompt.id, token, advantage)
        for index, advantage in enumerate((-1.5, -0.5, 0.5, 1.5))
        for token in digits((), index)
    ]
    assert loss_tokens(batch) == expected
    assert (batch.num_loss_tokens, batch.num_sequences, batch.num_rollouts) == (14, 4, 4)
    (micro,) = batch.micro_batches
    assert set(micro.sampler_logprob_L.tolist()) == {group.rollouts[0].sampler_logprobs[-1]}


def test_rollouts_without_advantage_leave_the_work_but_not_the_denominators() -> None:
    """Rewards 0, 1, 1, 2: the two middle ones are exactly average."""

    def verdict(prompt: Prompt, text: str) -> float:
        return {"0": 0.0, "11": 1.0, "222": 1.0, "3333": 2.0}[text]

    config = small_config(groups_per_step=1, sampling__max_tokens=8)
    _, _, batch = step_of(config, environment=scripted(verdict))
    assert [token for _, token, _ in loss_tokens(batch)] == digits((), 0) + digits((), 3)
    assert (batch.num_loss_tokens, batch.num_sequences, batch.num_rollouts) == (14, 4, 4)


def test_the_denominators_of_a_step_are_those_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "all_sum_ints", lambda *values: tuple(value + 100 for value in values))
    _, _, batch = step_of(small_config(groups_per_step=1, sampling__max_tokens=8))
    assert len(loss_tokens(batch)) == 14
    assert (batch.num_loss_tokens, batch.num_sequences, batch.num_rollouts) == (114, 104, 104)


def test_with_a_kl_penalty_rollouts_without_advantage_stay() -> None:
    config = small_config(groups_per_step=1, sampling__max_tokens=8, algorithm__kl_coef=0.1)
    _, _, batch = step_of(config, environment=scripted(lambda prompt, text: 1.0))
    assert len(loss_tokens(batch)) == 14


def test_masked_truncated_completions_leave_the_token_counts_but_not_the_rollouts() -> None:
    """With at most 3 tokens sample 2 and sample 3 are cut; sample 3 has the best reward, and the baseline knows it."""
    settings = {"algorithm__mask_truncated": True, "algorithm__advantage": "group_center"}
    config = small_config(groups_per_step=1, sampling__max_tokens=3, **settings)
    _, (group,), batch = step_of(config)
    assert [rollout.finish_reason for rollout in group.rollouts] == ["stop", "stop", "length", "length"]
    assert {advantage for _, _, advantage in loss_tokens(batch)} == {-1.5, -0.5}
    assert (batch.num_loss_tokens, batch.num_sequences, batch.num_rollouts) == (5, 2, 4)


def test_selection_leaves_rollouts_out_of_the_loss_and_its_denominators() -> None:
    settings = {"algorithm__selection": "top_k", "algorithm__selection_options": {"k": 2}}
    config = small_config(groups_per_step=1, sampling__max_tokens=8, **settings)
    _, _, batch = step_of(config)
    assert [token for _, token, _ in loss_tokens(batch)] == digits((), 2) + digits((), 3)
    assert (batch.num_loss_tokens, batch.num_sequences, batch.num_rollouts) == (9, 2, 2)


def test_groups_trained_ahead_are_divided_by_the_counts_of_a_step_like_them() -> None:
    """In float16 a few tokens alone would leave gradients that overflow."""
    run, groups, _ = step_of(small_config(groups_per_step=5, sampling__max_tokens=8))
    train_ahead(groups[:2], run.trainer, run.credit, run.packing, 0)
    counted = run.trainer.ahead.totals
    assert counted is not None
    of_two = sum(rollout.num_loss_tokens for group in groups[:2] for rollout in group.rollouts)
    assert (counted.num_tokens, counted.num_sequences, counted.num_rows) == (2 * of_two, 2 * 8, 2 * 8)


def test_a_completion_of_nothing_counts_as_a_rollout_and_not_as_a_sequence() -> None:
    run, (group,), _ = step_of(small_config(groups_per_step=1, sampling__max_tokens=8))
    silent = replace(group.rollouts[1], loss_mask=(False,) * len(group.rollouts[1].loss_mask))
    groups = [replace(group, rollouts=(group.rollouts[0], silent, *group.rollouts[2:]))]
    (batch,), _ = make_training_batches(groups, run.trainer, run.credit, run.packing, 0)
    assert (batch.num_loss_tokens, batch.num_sequences, batch.num_rollouts) == (2 + 4 + 5, 3, 4)


def test_groups_of_the_same_prompt_in_one_step_have_baselines_of_their_own() -> None:
    """One prompt in the data, two groups a step: the first gets rewards 0 and 1, the second 10 and 20."""
    given = iter([0.0, 1.0, 10.0, 20.0])
    environment = scripted(lambda prompt, text: next(given), num_prompts=1)
    config = small_config(group_size=2, sampling__max_tokens=8, algorithm__advantage="group_center")
    _, groups, batch = step_of(config, environment=environment)
    assert [group.prompt.id for group in groups] == ["train-0", "train-0"]
    assert sorted({advantage for _, _, advantage in loss_tokens(batch)}) == [-5.0, -0.5, 0.5, 5.0]


def test_rollouts_of_different_groups_never_meet_in_the_wrong_micro_batch() -> None:
    config = small_config(groups_per_step=4, sampling__max_tokens=8, micro_batch_tokens=24)
    _, groups, batch = step_of(config)
    assert len(batch.micro_batches) > 2
    for micro in batch.micro_batches:
        assert rollouts_in(micro) <= {
            (group.prompt.id, rollout.target_ids) for group in groups for rollout in group.rollouts
        }
    assert sum(len(rollouts_in(micro)) for micro in batch.micro_batches) == 16


def rollouts_in(micro: MicroBatch) -> set[tuple[str, tuple[int, ...]]]:
    """(prompt, all targets) of each row: read back from the packed stream, prompt included."""
    prompts = {f"train-{index}": TOKENIZER(f"prompt {index}:")["input_ids"] for index in range(6)}
    found = set()
    for row, name in enumerate(micro.prompt_ids):
        written = micro.target_L[micro.row_L == row].tolist()
        start = int(micro.source_L[micro.row_L == row][0]) - len(prompts[name]) + 1
        assert micro.input_ids_BT.flatten()[start : start + len(prompts[name])].tolist() == prompts[name]
        found.add((name, (*prompts[name][1:], *written)))
    return found


# ------------------------------------------------------------------------------------------------ the group filter


def test_the_group_filter_sees_rewards_before_shaping() -> None:
    """Whether a prompt is solved is asked of its verdicts: a length penalty makes no signal of a solved group."""
    shaping = {"soft_overlong": {"max_len": 8, "cache": 8}}
    settings = {"algorithm__group_filter": "zero_std", "algorithm__shaping": shaping}
    solved = step_of(small_config(**settings), environment=scripted(lambda prompt, text: 1.0))
    assert solved[1] == []
    kept = step_of(small_config(**settings), environment=scripted(first_digit))
    assert [group.rewards for group in kept[1]] == [(0.0, 1.0, 2.0, 3.0)] * 2


# ------------------------------------------------------------------------------------------------ KL in the reward


def penalised(**changes: Any) -> tuple[Run, Config, list[Group]]:
    """A policy that has left its reference, and groups of 4, 2 and 3 rollouts of 2 to 5 tokens that it answered."""

    def verdict(prompt: Prompt, text: str) -> float | Failure:
        lost = {"train-1": "02", "train-2": "1"}.get(prompt.id, "")
        return Failure("judge timed out") if text[0] in lost else first_digit(prompt, text)

    settings = {"kl_coef": 0.5, "kl_in": "reward", "kl_estimator": "k1", "advantage": "none"}
    config = small_config(
        **{f"algorithm__{name}": value for name, value in settings.items()},
        **{"groups_per_step": 3, "shuffle": False, "sampling__max_tokens": 8} | changes,
    )
    run, groups, _ = step_of(config, environment=scripted(verdict))
    assert [len(group.rollouts) for group in groups] == [4, 2, 3]
    with torch.no_grad():
        for index, parameter in enumerate(run.policy.model.parameters()):
            parameter += 0.1 * normal(*parameter.shape, seed=index)
    return run, config, groups


def kl_alone(run: Run, config: Config, group: Group, rollout: Rollout) -> float:
    """The KL of one rollout, in a batch where there is no other."""
    rows = make_rows([replace(group, rollouts=(rollout,))], [[0.0]])
    (found,) = run.trainer.sequence_kl(pack_rows(rows, run.policy, run.packing, (1, 1, 1)))
    return found


@pytest.mark.parametrize("packing", ["shared", "padded"])
@pytest.mark.parametrize("micro_batch_tokens", [1000, 24])
def test_every_rollout_is_penalised_by_its_own_kl(packing: str, micro_batch_tokens: int) -> None:
    run, config, groups = penalised(packing=packing, micro_batch_tokens=micro_batch_tokens)
    found = reward_penalty(groups, run.trainer, run.packing)
    assert found is not None
    expected = [[0.5 * kl_alone(run, config, group, rollout) for rollout in group.rollouts] for group in groups]
    assert found == [pytest.approx(values, abs=1e-5) for values in expected]
    flat = sorted(value for values in expected for value in values)
    assert min(b - a for a, b in pairwise(flat)) > 1e-3  # no two can be taken for each other
    _, credit = make_training_batches(groups, run.trainer, run.credit, run.packing, 0)
    rewards = [
        [reward - kl for reward, kl in zip(g.rewards, kls, strict=True)]
        for g, kls in zip(groups, expected, strict=True)
    ]
    assert credit.advantages == [pytest.approx(values, abs=1e-5) for values in rewards]


def test_a_penalty_on_the_reward_follows_its_controller() -> None:
    steered = {"algorithm__target_kl": 1e-3, "algorithm__kl_controller": "doubling"}
    run, config, groups = penalised(**steered)
    batches, _ = make_training_batches(groups, run.trainer, run.credit, run.packing, 0)
    assert run.trainer.step(batches, 0)["kl_coef"] == 0.25  # from 0.5, for these few tokens say that it is below 0
    found = reward_penalty(groups, run.trainer, run.packing)
    expected = [[0.25 * kl_alone(run, config, group, rollout) for rollout in group.rollouts] for group in groups]
    assert found == [pytest.approx(values, abs=1e-5) for values in expected]


def test_a_truncated_completion_that_is_masked_is_penalised_too() -> None:
    """Its reward is in the baseline of its group, as those of the others are: with the penalty."""
    run, config, groups = penalised(sampling__max_tokens=3, algorithm__mask_truncated=True)
    assert groups[0].rollouts[3].finish_reason == "length"
    _, credit = make_training_batches(groups, run.trainer, run.credit, run.packing, 0)
    for group, advantages in zip(groups, credit.advantages, strict=True):
        expected = [r.reward.value - 0.5 * kl_alone(run, config, group, r) for r in group.rollouts]
        assert advantages == pytest.approx(expected, abs=1e-5)


# ------------------------------------------------------------------------------------------------ what must not matter


@pytest.mark.long
@pytest.mark.parametrize(
    "change",
    [
        {"evaluation__every": 1, "evaluation__num_prompts": 3},
        {"output__save_every": 1, "output__rollouts_per_step": 0},
        {"engine__max_rows": 3},
        {"logprob_chunk": 5},
    ],
)
def test_looking_saving_and_limits_of_memory_do_not_change_what_is_learned(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, scripted(varied))
    train(small_config(num_steps=3), tmp_path / "plain")
    train(small_config(num_steps=3, **change), tmp_path / "changed")
    plain, changed = (timeless(rows(tmp_path / name / "metrics.jsonl", "train")) for name in ("plain", "changed"))
    assert [row["reward_mean"] for row in plain] == [row["reward_mean"] for row in changed]
    assert [row["loss"] for row in plain] == pytest.approx([row["loss"] for row in changed], abs=1e-5)
    if "evaluation__every" in change or "output__save_every" in change:
        assert plain == changed
        assert equal(saved_weights(tmp_path / "plain"), saved_weights(tmp_path / "changed"))


@pytest.mark.long
def test_a_scripted_engine_runs_the_whole_command_without_sampling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, scripted())
    train(small_config(engine__name="fake", optimizer__lr=1e-4), tmp_path)
    found = rows(tmp_path / "metrics.jsonl", "train")
    assert [row["completion_length_mean"] for row in found] == [4.0, 4.0]
    assert all(row["mismatch_max"] > 0.1 for row in found)


# ------------------------------------------------------------------------------------------------ the way itself

ROOT = Path(__file__).resolve().parents[1]
CARRIERS = (Group, Rollout, Batch, Row, Scores)
"""What a step's groups become on their way to batches."""


def carries(value: Any, depth: int = 3) -> bool:
    """Whether a value is of a step's groups, or a collection of such."""
    if depth > 0 and isinstance(value, list | tuple | dict):
        items = list(value.values() if isinstance(value, dict) else value)
        return any(carries(item, depth - 1) for item in items[:3])
    return isinstance(value, CARRIERS)


def rooms_of_trip(visit: Any) -> list[str]:
    """The rooms that groups go through, each way from a function to another once, and back."""
    trip: list[str] = []
    ways, calls = set(), []

    def note(frame: Any, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call":
            room = path.relative_to(ROOT / "src/covey").parts[0] if path.is_relative_to(ROOT / "src/covey") else ""
            names = frame.f_code.co_varnames[: frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount]
            above = next((call for call in reversed(calls) if call), None)
            way = (above, frame.f_code.co_qualname)
            is_visit = room not in ("", "types.py") and frame.f_code.co_name[0] != "<" and way not in ways
            is_visit = is_visit and any(carries(frame.f_locals.get(name)) for name in names)
            ways.update([way] if is_visit else [])
            calls.append((room, frame.f_code.co_qualname) if is_visit else None)
            trip.extend([room] if is_visit else [])
        elif event == "return" and calls and calls.pop():
            trip.extend(call[0] for call in [next((call for call in reversed(calls) if call), None)] if call)

    sys.setprofile(note)
    try:
        visit()
    finally:
        sys.setprofile(None)
    return [room for room, before in zip(trip, ["", *trip], strict=False) if room != before]


def test_groups_come_back_to_a_higher_room_twice_at_most() -> None:
    """From the ranks to credit, and from credit to the trainer."""
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    layers = [layer.split(" | ") for layer in contract["layers"]]
    floor = {room: -place for place, rooms in enumerate(layers) for room in rooms}
    run = build_run(small_config(groups_per_step=2, sampling__max_tokens=8), scripted(first_digit), PhaseTimer())
    run.source.sampler = replace(run.source.sampler, engine=FakeEngine(digits, vocab_size=len(TOKENIZER)))
    groups = run.source.take(2)
    run.source.close()
    trip = rooms_of_trip(lambda: make_training_batches(groups, run.trainer, run.credit, run.packing, 0))
    climbs = [(below, above) for below, above in pairwise(trip) if floor[above] > floor[below]]
    assert climbs == [("system", "algorithm"), ("algorithm", "trainer")]
