"""What a run leaves behind and says, however it ends."""

import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from covey.algorithm.credit.groups import Credit
from covey.algorithm.credit.scores import scores
from covey.environments.base import Split
from covey.loop import train
from covey.rollouts.source import Dropped
from covey.run import stages
from covey.run.records import record
from covey.run.records.record import RunRecorder
from covey.run.records.step_metrics import count_tokens, rollout_metrics, why_no_signal
from covey.trainer.trainer import Trainer
from covey.types import Failure, Group, Prompt, Reward, Rollout, Turn
from tests.support.scripted import Scripted

from ...support.small import group, rollout, rows, scripted, small_config, use, varied


@dataclass
class Held:
    """An environment that logs numbers of its own and must be let go of."""

    inner: Scripted
    num_scored: int = 0
    num_closed: int = 0
    asked: list[int] = field(default_factory=list)

    def prompts(self, split: Split) -> list[Prompt]:
        return self.inner.prompts(split)

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        self.num_scored += len(completions)
        return await self.inner.score(prompt, completions)

    def metrics(self) -> Mapping[str, float]:
        self.asked.append(self.num_scored)
        return {"judge/calls": float(self.num_scored)}

    def close(self) -> None:
        self.num_closed += 1


def summary_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return content


# ------------------------------------------------------------------------------------------------ metrics


def test_metrics_of_rollouts_are_over_the_rollouts_of_the_step() -> None:
    cut = rollout(0.0, num_tokens=6, finish_reason="length", correct=0.0)
    made = Group(group().prompt, (rollout(1.0, num_tokens=2, correct=1.0, style=0.5), cut), (Failure("lost"),))
    given = credit_of([made, group(1.0)])
    assert rollout_metrics([made, group(1.0)], [group(0.0, 0.25)], given, version=3) == {
        "completion_length_mean": 10 / 3,
        "completion_length_max": 6.0,
        "truncated_fraction": 1 / 3,
        "staleness_max": 3.0,
        "num_groups": 2.0,
        "num_groups_sampled": 3.0,
        "sampled_reward_mean": 2.25 / 5,
        "reward/correct": 0.5,
        "reward/style": 0.5,
        "reward/value": 1.0,
        "reward_std/correct": pytest.approx(math.sqrt(0.5)),
        "reward_std/style": None,
        "reward_std/value": None,
        "reward_std": pytest.approx(math.sqrt(1 / 3)),
        "advantage_mean": pytest.approx(1 / 6),
        "advantage_std": pytest.approx(math.sqrt(1 / 3)),
        "advantage_top_share": pytest.approx(1 / 3),
        "advantage_agreement": pytest.approx(1.0),
        "unique_fraction": 1.0,
        "disagreement_fraction": 0.0,
    }


def test_answers_that_repeat_and_are_judged_otherwise_are_counted() -> None:
    twins = (rollout(1.0), rollout(1.0), rollout(0.0), rollout(0.0, num_tokens=3))
    made = Group(group().prompt, twins, ())
    found = rollout_metrics([made], [], credit_of([made]), version=0)
    assert (found["unique_fraction"], found["disagreement_fraction"]) == (0.5, 0.75)
    twin = rollout(1.0)
    other = (replace(twin, finish_reason="length"), replace(twin, messages=({"role": "user", "content": "more"},)))
    unlike = Group(made.prompt, (twin, *other), ())
    assert rollout_metrics([unlike], [], credit_of([unlike]), version=0)["unique_fraction"] == 1.0


def test_rollouts_that_a_selection_left_out_are_not_in_the_metrics_of_advantages() -> None:
    given = replace(credit_of([group(1.0, 0.0, 0.5)]), keep=[[True, False, True]])
    found = rollout_metrics([group(1.0, 0.0, 0.5)], [], given, version=0)
    assert (found["advantage_mean"], found["advantage_std"]) == (pytest.approx(0.25), pytest.approx(math.sqrt(0.125)))


def test_rewards_that_are_not_known_are_in_no_spread() -> None:
    lost = replace(credit_of([group(1.0, 0.0)]), scores=scores([1.0, 0.0, math.nan], [0, 0, 0]))
    assert rollout_metrics([group(1.0, 0.0)], [], lost, version=0)["reward_std"] == pytest.approx(math.sqrt(0.5))


def test_tokens_of_unscored_completions_are_counted() -> None:
    made = group(1.0, 0.0)
    own = sum(one.num_loss_tokens for one in made.rollouts)
    assert own > 0
    assert count_tokens([made, replace(made, rollouts=(), failures=(Failure("late", num_tokens=5),))]) == own + 5


def test_a_step_without_groups_has_nulls_for_what_it_cannot_know() -> None:
    found = rollout_metrics([], [], credit_of([]), version=3)
    assert {name: value for name, value in found.items() if value is not None} == {
        "num_groups": 0.0,
        "num_groups_sampled": 0.0,
    }
    assert len(found) == 14


def test_of_episodes_the_reward_and_the_advantage_of_each_turn_are_logged() -> None:
    """One has two turns, one three, and one says nothing of turns."""
    (plain,) = [group(1.0, 0.0, 0.5)]
    turns = [
        (Turn(0, 1, 0.5), Turn(1, 2, 1.0)),
        (Turn(0, 1, 0.1, is_void=True), Turn(1, 2, 0.2), Turn(2, 2, 0.3)),
        (),
    ]
    made = tuple(replace(one, turns=own) for one, own in zip(plain.rollouts, turns, strict=True))
    episodes = [replace(plain, rollouts=made)]
    credit = replace(credit_of(episodes), of_turns=[[(0.2, 0.4), (0.6, 0.8, 1.0), (9.0,)]])
    found = rollout_metrics(episodes, [], credit, version=0)
    assert {name: value for name, value in found.items() if "turn" in name or name.startswith("void")} == {
        "void_fraction": 0.5,
        "turn_reward/1": pytest.approx(0.3),
        "turn_reward/2": pytest.approx(0.6),
        "turn_reward/3": pytest.approx(0.3),
        "turn_advantage/1": pytest.approx(0.4),
        "turn_advantage/2": pytest.approx(0.6),
        "turn_advantage/3": pytest.approx(1.0),
    }
    whole = rollout_metrics(episodes, [], credit_of(episodes), version=0)
    assert (whole["turn_advantage/1"], whole["turn_advantage/3"]) == (0.0, -0.5)


def test_an_episodes_messages_and_re_encoded_tokens_are_logged() -> None:
    """One is read in two sequences, after whose first chosen token the other was said; one has a single turn."""
    (plain,) = [group(1.0, 0.0, 0.5)]
    length, mask = 8, (False, True, False, True, False, False, True, False)
    broken = Rollout(
        input_ids=(5,) * length,
        target_ids=(5,) * length,
        loss_mask=mask,
        sampler_logprobs=(0.0,) * length,
        reward=Reward(1.0),
        text="8",
        finish_reason="stop",
        policy_version=0,
        turns=(Turn(0, 1), Turn(1, 2), Turn(2, 3)),
        stop_reason="max_turns",
        branches=(0, 5),
        re_encoded_tokens=7,
    )
    ended = replace(plain.rollouts[0], turns=(Turn(0, 2),), stop_reason="completed")
    found = rollout_metrics(
        [replace(plain, rollouts=(broken, ended, plain.rollouts[2]))], [], credit_of([plain]), version=0
    )
    names = ("turns_mean", "turns_max", "environment_token_fraction", "branches_mean", "re_encoded_tokens")
    assert {name: found[name] for name in names} == {
        "turns_mean": 2.0,
        "turns_max": 3.0,
        "environment_token_fraction": 3 / 8,
        "branches_mean": 1.5,
        "re_encoded_tokens": 7.0,
    }
    assert found["prefix_breaks"] == 1.0
    ends = {name[5:]: value for name, value in found.items() if name.startswith("stop/") and value}
    assert ends == {"max_turns": 0.5, "completed": 0.5}


@pytest.mark.parametrize(("number", "largest"), [(99, 1), (250, 2)])
def test_the_hundredth_of_the_answers_with_the_largest_advantages_holds_a_share(number: int, largest: int) -> None:
    """The largest are 10, below 0 the first, and the others 1."""
    values = [-10.0, 10.0, *[1.0] * (number - 2)]
    made = group(*values)
    given = replace(credit_of([made]), advantages=[values])
    share = rollout_metrics([made], [], given, version=0)["advantage_top_share"]
    assert share == pytest.approx(10 * largest / (18 + number))


def credit_of(groups: Sequence[Group]) -> Credit:
    """Advantages as rewards less that of the group's middle, 0.5."""
    labels = [(index, reward) for index, of_group in enumerate(groups) for reward in of_group.rewards]
    return Credit(
        advantages=[[reward - 0.5 for reward in of_group.rewards] for of_group in groups],
        keep=[[True] * len(of_group.rollouts) for of_group in groups],
        in_loss=[[True] * len(of_group.rollouts) for of_group in groups],
        scores=scores([reward for _, reward in labels], [index for index, _ in labels]),
    )


def test_parts_of_episodes_whose_turns_earned_nothing_are_in_the_means() -> None:
    (plain,) = [group(1.5, 1.0, 0.0)]
    rewards = [Reward(1.5, {"outcome": 1.0, "turns": 0.5}), Reward(1.0), Reward(0.0)]
    turns = [(Turn(0, 1, 0.5),), (Turn(0, 1),), (Turn(0, 1),)]
    made = [
        replace(one, reward=reward, turns=own) for one, reward, own in zip(plain.rollouts, rewards, turns, strict=True)
    ]
    episodes = [replace(plain, rollouts=tuple(made))]
    found = rollout_metrics(episodes, [], credit_of(episodes), version=0)
    assert (found["reward/turns"], found["reward/outcome"]) == pytest.approx((0.5 / 3, 2 / 3))
    idle = [replace(plain, rollouts=tuple(made[1:]))]
    assert not [name for name in rollout_metrics(idle, [], credit_of(idle), version=0) if name.startswith("reward/")]


def test_an_environment_that_logs_is_asked_for_every_row_and_closed_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(scripted())
    use(monkeypatch, held)
    train(small_config(preflight__enabled=False), tmp_path)
    evaluated = 2 * (1 + 2)
    # The first step's answers come before the first evaluation's, and are in the row of the step
    assert held.asked == [8, 8 + evaluated, 16 + evaluated, 16 + 2 * evaluated]
    assert [row["environment/judge/calls"] for row in rows(tmp_path / "metrics.jsonl", "train")] == [8.0, 22.0]
    assert [row["environment/judge/calls"] for row in rows(tmp_path / "metrics.jsonl", "evaluate")] == [14.0, 28.0]
    assert held.num_closed == 1


@pytest.mark.long
def test_what_was_found_out_about_forged_rewards_is_added_up_for_the_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Doubting(Held):
        def metrics(self) -> Mapping[str, float]:
            self.asked.append(0)
            return {"part/rechecked": 10.0, "part/recheck_disagreements": float(len(self.asked) == 2)}

        def facts(self) -> Mapping[str, Any]:
            return {"tier": "paper"}

    use(monkeypatch, Doubting(scripted()))
    train(small_config(preflight__enabled=False), tmp_path)
    content = summary_of(tmp_path)
    assert content["reward_hacking"] == "1 of 40 full-score programs failed a re-check: see covey.log"
    assert content["environment"] == {"tier": "paper"}
    (manifest,) = tmp_path.glob("checkpoints/*/manifest.json")
    assert json.loads(manifest.read_text())["environment"] == {"tier": "paper"}


def test_what_is_said_is_shown_and_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), RunRecorder(small_config(), tmp_path) as record:
        record.say("cold start: 12 steps [of 40]")
    assert capsys.readouterr().out == "cold start: 12 steps [of 40]\n"
    assert [entry.message for entry in caplog.records if entry.name == "covey.run.records.record"] == [
        "cold start: 12 steps [of 40]"
    ]


# ------------------------------------------------------------------------------------------------ endings


@pytest.mark.long
def test_an_interrupted_run_keeps_what_it_has_and_says_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[str] = set()

    def verdict(prompt: Prompt, text: str) -> float:
        seen.add(prompt.id)
        if len([name for name in seen if name.startswith("train")]) > 4:
            raise KeyboardInterrupt
        return varied(prompt, text)

    held = Held(scripted(verdict))
    use(monkeypatch, held)
    with pytest.raises(KeyboardInterrupt):
        train(small_config(num_steps=9), tmp_path)
    content = summary_of(tmp_path)
    assert (content["status"], content["steps"]) == ("interrupted", 2)
    assert content["before"] is not None
    assert (content["after"], content["gain"]) == (None, None)
    assert len(rows(tmp_path / "metrics.jsonl", "train")) == 2
    assert held.num_closed == 1


def test_a_defect_is_a_failed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: object) -> None:
        raise RuntimeError("shapes differ")

    held = Held(scripted())
    use(monkeypatch, held)
    monkeypatch.setattr(Trainer, "step", broken)
    with pytest.raises(RuntimeError, match="shapes differ"):
        train(small_config(preflight__enabled=False), tmp_path)
    assert summary_of(tmp_path)["status"] == "failed"
    assert held.num_closed == 1


def test_a_run_that_ends_before_its_first_step_has_a_summary_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_run(*_: object) -> None:
        raise RuntimeError("no memory")

    use(monkeypatch, scripted())
    monkeypatch.setattr(stages, "load_run", load_run)
    with pytest.raises(RuntimeError, match="no memory"):
        train(small_config(), tmp_path)
    content = summary_of(tmp_path)
    assert (content["status"], content["steps"], content["before"]) == ("failed", 0, None)


def test_an_interruption_of_the_cold_start_has_a_summary_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(prompt: Prompt, text: str) -> float:
        raise KeyboardInterrupt

    use(monkeypatch, scripted(interrupted))
    warm = {"cold_start__enabled": True, "cold_start__num_check_prompts": 2, "cold_start__num_steps": 2}
    with pytest.raises(KeyboardInterrupt):
        train(small_config(**warm, cold_start__cache_dir=str(tmp_path / "cache")), tmp_path)
    content = summary_of(tmp_path)
    assert content["status"] == "interrupted"
    assert content["phases"]["cold_start"]["seconds"] > 0


def test_before_and_after_are_the_first_and_last_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look takes 1,000 s and a checkpoint 100 s. Of three checkpoints the first has no evaluation of its own."""
    passed = 0.0

    def after(seconds: float, work: Any) -> Any:
        def late(*given: Any) -> Any:
            nonlocal passed
            passed += seconds
            return work(*given)

        return late

    monkeypatch.setattr(record, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + passed))
    monkeypatch.setattr(stages, "answer", after(1000, stages.answer))
    monkeypatch.setattr(record, "save_checkpoint", after(100, record.save_checkpoint))
    use(monkeypatch, scripted())
    changes = {"evaluation__every": 2, "evaluation__confidence": 0.5, "output__save_every": 1}
    config = small_config(num_steps=3, preflight__enabled=False, **changes)
    config.output.keep_last = 9
    train(config, tmp_path)
    looks, steps = rows(tmp_path / "metrics.jsonl", "evaluate"), rows(tmp_path / "metrics.jsonl", "train")
    content = summary_of(tmp_path)
    assert [look["step"] for look in looks] == [0, 2, 3]
    assert content["before"]["reward_mean"]["value"] == looks[0]["reward_mean"]
    assert content["after"]["reward_mean"]["value"] == looks[2]["reward_mean"]
    assert content["gain"]["reward_mean"]["value"] == pytest.approx(looks[2]["reward_mean"] - looks[0]["reward_mean"])
    # At 95 % the interval of a gain on two prompts is 1.6 wide at least, at 50 % 0.8 at most
    assert content["gain"]["accuracy"]["high"] - content["gain"]["accuracy"]["low"] < 0.8
    # Time
    assert max(row["seconds"] for row in steps) < 200  # a checkpoint is written beside the next step
    assert content["seconds"] > 3300
    assert content["tokens_per_second"] == pytest.approx(content["tokens"] / sum(row["seconds"] for row in steps))
    # The score of a checkpoint is that of an evaluation after its own step
    manifests = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("checkpoints/*/manifest.json"))]
    scores_of = [(found["step"], found.get("score")) for found in manifests]
    assert scores_of == [(1, None), *((look["step"], look["accuracy"]) for look in looks[1:])]


@pytest.mark.long
def test_an_evaluation_that_lost_scores_says_how_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def verdict(prompt: Prompt, text: str) -> Any:
        return Failure("lost") if prompt.id == "test-0" else varied(prompt, text)

    use(monkeypatch, replace(scripted(verdict)))
    train(small_config(), tmp_path)
    assert [row["num_unscored"] for row in rows(tmp_path / "metrics.jsonl", "evaluate")] == [3, 3]


@pytest.mark.long
def test_rewards_that_grade_in_training_claim_no_accuracy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def verdict(prompt: Prompt, text: str) -> Any:
        worth = float(len(text) % 2)
        return worth if prompt.id.startswith("test") else 0.25 + 0.5 * worth

    use(monkeypatch, scripted(verdict))
    train(small_config(num_steps=2, evaluation__correct_above=1.0), tmp_path)
    first, last = rows(tmp_path / "metrics.jsonl", "evaluate")
    assert "accuracy" in first
    assert "accuracy" not in last
    assert "accuracy" not in summary_of(tmp_path)["gain"]


def test_a_step_without_groups_says_why_answers_could_not_be_judged() -> None:
    lost = Group(group().prompt, (), (Failure("not asked", is_fault=False), Failure("HTTP Error 500")))
    dropped = [Dropped(lost, "unscored_groups")]
    assert why_no_signal({"num_groups": 0.0}, credit_of([]), dropped) == "every group was dropped: HTTP Error 500"
    assert why_no_signal({"num_groups": 0.0}, credit_of([]), []) == "every group was dropped"
