"""An asynchronous run replayed in one process ends with the same weights, bit for bit."""

import asyncio
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from covey.cluster.source import RaySource
from covey.config.auto_adjust import add_correction
from covey.config.schema import Config
from covey.engine.native.rows import DecodeRow
from covey.engine.native.scheduler import Scheduler
from covey.loop import train
from covey.run.folder import CHANGES
from covey.run.records.record import RunRecorder
from covey.types import Message, Prompt
from covey_report.runs.replay import best_evaluations, read_schedule, replay

from ...support.fake_ray import FakeRay, fake_ray
from ...support.scripted import Scripted
from ...support.small import rows, scripted, small_config, timeless, use, varied

STEPS = 6


def config(**changes: object) -> Config:
    usual = {"num_steps": STEPS, "source": "ray", "max_staleness": 2, "devices__sampler": 2, "groups_per_step": 3}
    chosen, _ = add_correction(
        small_config(**usual | {"sampling__max_tokens": 24, "preflight__enabled": False} | changes)
    )
    return chosen


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the event loop after each token, so that weights change within completions."""
    monkeypatch.setattr("covey.engine.native.engine.TURN_SECONDS", 0.0)
    use(monkeypatch, scripted())


def trained(folder: Path, chosen: Config, meddle: Callable[[FakeRay, int], None] = lambda ray, step: None) -> Path:
    """Train over a Ray of one process; `meddle` is called before each publication."""
    publish = RaySource.publish
    with fake_ray() as ray, pytest.MonkeyPatch.context() as patch:

        def meddled(source: RaySource, version: int) -> None:
            meddle(ray, version)
            publish(source, version)

        patch.setattr(RaySource, "publish", meddled)
        train(chosen, folder)
    return folder


def replayed(folder: Path, chosen: Config, scratch: Path) -> str:
    scratch.mkdir()
    with RunRecorder(chosen, scratch) as record:
        return replay(chosen, folder, record, lambda text: None)


def last_digest(folder: Path) -> str:
    return str(rows(folder / "schedule.jsonl")[-1]["weights"])


def test_a_run_with_stale_groups_and_mixed_versions_replays_to_the_same_weights(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", config())
    steps = read_schedule(run)
    assert len(steps) == STEPS
    assert len({step.digest for step in steps}) == STEPS, "every step changed the weights"
    assert replayed(run, config(), tmp_path / "scratch") == last_digest(run)


@dataclass(frozen=True)
class Asks(Scripted):
    """Answers the first turn, so that there is another."""

    async def reply(self, prompt: Prompt, messages: Sequence[Message]) -> Message | None:
        turns = sum(message["role"] == "assistant" for message in messages)
        await asyncio.sleep(0.001 * (len(messages[-1]["content"]) % 3))
        return {"role": "user", "content": f" and {prompt.text}"} if turns == 1 else None


def test_turns_replay_to_the_same_weights_though_sessions_waited_over_updates_and_gave_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gave_way: list[int] = []
    rest = Scheduler.rest

    def give_way(scheduler: Scheduler, row: DecodeRow) -> None:
        rest(scheduler, row)
        if row.sample_index % 2:
            gave_way.append(row.read)
            scheduler.give_up(row)

    plain = scripted()
    use(monkeypatch, Asks(plain.texts, plain.verdict))
    # Heads wide enough for compiled kernels, whose bits do not depend on the rows beside
    letters = tuple("abcdefghijklmnopqrstuvwxyz")
    chosen = config(model__nano_hidden_size=32, sampling__stop=letters, sampling__max_tokens=32, num_steps=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "rest", give_way)
        run = trained(tmp_path / "run", chosen)
    assert sum(gave_way) > 0
    assert max(len(row["turns"]) for row in rows(run / "rollouts.jsonl")) == 2
    assert replayed(run, chosen, tmp_path / "scratch") == last_digest(run)


class Follows(Scripted):
    """Keeps what it is told of how far training is."""

    def follow(self, step: int, max_steps: int, epoch: float) -> None:
        state["told"] = (step, max_steps, epoch)


state: dict[str, tuple[int, int, float]] = {}


@pytest.mark.long
def test_rewards_that_go_by_the_step_are_told_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def verdict(prompt: Prompt, text: str) -> float:
        step, _, epoch = state["told"]
        return (-1) ** step * varied(prompt, text) if epoch == step / 2 else 0.0

    use(monkeypatch, Follows(scripted().texts, verdict))
    chosen = config(max_staleness=0, num_steps=2)
    run = trained(tmp_path / "run", chosen)
    assert state["told"] == (2, 2, 1.0)
    state["told"] = (0, 0, 0.0)
    assert replayed(run, chosen, tmp_path / "scratch") == last_digest(run)


@pytest.mark.long
def test_rewards_that_go_by_the_epoch_are_told_that_of_dropped_groups_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verdict(prompt: Prompt, text: str) -> float:
        epoch = state["told"][2]
        return 0.0 if prompt.id == "train-0" else (1 + epoch**2) * varied(prompt, text) ** (1 + epoch)

    use(monkeypatch, Follows(scripted().texts, verdict))
    chosen = config(max_staleness=0, num_steps=3, algorithm__group_filter="zero_std", algorithm__advantage="none")
    run = trained(tmp_path / "run", chosen)
    assert state["told"][2] > 3 * 3 / 6, "more groups were drawn than trained"
    state["told"] = (0, 0, 0.0)
    assert replayed(run, chosen, tmp_path / "scratch") == last_digest(run)


def test_a_run_that_lost_a_sampler_replays_too(tmp_path: Path) -> None:
    def kill(ray: FakeRay, version: int) -> None:
        if version == 2:
            ray.actors[0].die_soon()

    run = trained(tmp_path / "run", config(), kill)
    found = [row for row in rows(run / "metrics.jsonl", "train") if row.get("samplers/lost")]
    assert len(found) == 1
    assert replayed(run, config(), tmp_path / "scratch") == last_digest(run)


@pytest.mark.long
def test_a_reference_that_the_best_evaluations_took_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the second look and the fourth, of which there is one before the first step and one after each."""
    monkeypatch.setattr("covey.run.stages.is_best", lambda accuracies: len(accuracies) in (2, 4))
    chosen = config(evaluation__every=1, algorithm__kl_coef=0.5, algorithm__reference_refresh_on_best=True)
    run = trained(tmp_path / "run", chosen)
    assert best_evaluations(run) == {1, 3}
    assert replayed(run, chosen, tmp_path / "scratch") == last_digest(run)


def test_the_best_evaluations_are_those_of_the_metrics_with_a_verdict(tmp_path: Path) -> None:
    looks = [(0, 0.2), (2, None), (4, 0.3), (6, 0.3), (8, 0.1), (10, 0.4)]
    lines = [{"step": step, "kind": "evaluate", "accuracy": accuracy} for step, accuracy in looks]
    lines.insert(1, {"step": 1, "kind": "train"})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert best_evaluations(tmp_path) == {4, 10}
    with pytest.raises(ValueError, match=r"has no metrics\.jsonl"):
        best_evaluations(tmp_path / "elsewhere")


def test_a_schedule_that_names_another_version_is_found_at_its_step(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", config(max_staleness=1))
    path = run / "schedule.jsonl"
    changed = rows(path)
    group = changed[3]["groups"][0]
    group["versions"] = [0 if group["versions"] != [0] else 1]
    path.write_text("".join(json.dumps(row) + "\n" for row in changed))
    with pytest.raises(ValueError, match="step 4 ends with other weights"):
        replayed(run, config(max_staleness=1), tmp_path / "scratch")


@pytest.mark.long
def test_a_replay_that_differs_names_the_settings_that_a_resume_changed(tmp_path: Path) -> None:
    chosen = config(num_steps=2)
    run = trained(tmp_path / "run", chosen)
    change = {"optimizer.lr": {"from": chosen.optimizer.lr, "to": 2 * chosen.optimizer.lr}}
    (run / CHANGES).write_text(json.dumps({"after_step": 1, "changes": change}) + "\n")
    faster = config(num_steps=2, optimizer__lr=2 * chosen.optimizer.lr)
    with pytest.raises(ValueError, match=r"step 1 .*: settings that a resume changed \(optimizer.lr\), other code"):
        replayed(run, faster, tmp_path / "scratch")


def test_a_row_of_a_schedule_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    whole = [{"step": step, "weights": None, "epoch": 0.0, "groups": []} for step in (1, 2)]
    path = tmp_path / "schedule.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in whole) + '{"step": 3, "weights": "xxh3:f0')
    assert [step.step for step in read_schedule(tmp_path)] == [1, 2]


@pytest.mark.long
def test_a_run_in_process_has_no_schedule_and_needs_none(tmp_path: Path) -> None:
    train(config(source="local", max_staleness=0, devices__sampler=1), tmp_path / "run")
    with pytest.raises(ValueError, match="runs with samplers of their own"):
        read_schedule(tmp_path / "run")


@pytest.mark.long
def test_without_staleness_samplers_give_the_run_in_process(tmp_path: Path) -> None:
    chosen = {"max_staleness": 0, "model__precision": "float64", "num_steps": 4}
    train(config(**chosen | {"source": "local", "devices__sampler": 1}), tmp_path / "local")
    trained(tmp_path / "ray", config(**chosen))
    local, ray = (timeless(rows(tmp_path / name / "metrics.jsonl", "train")) for name in ("local", "ray"))
    for first, second in zip(local, ray, strict=True):
        numbers = [name for name in first if isinstance(first[name], float)]
        apart = [name for name in numbers if first[name] != pytest.approx(second[name], rel=1e-9, abs=1e-9)]
        assert apart == []
    assert all(row["staleness/max"] == 0 for row in ray)


def test_a_resumed_run_trains_every_group_that_was_in_the_buffer(tmp_path: Path) -> None:
    whole = config(output__save_every=2)
    run = trained(tmp_path / "run", whole)
    for late in ("step-000004", "step-000006"):
        shutil.rmtree(run / "checkpoints" / late)
    admitted = [group["prompt"] for row in rows(run / "schedule.jsonl") for group in row["groups"]]
    trained(run, config(output__save_every=2, resume="run"))
    again = [group["prompt"] for row in rows(run / "schedule.jsonl") for group in row["groups"]]
    assert again == admitted, "the same prompts in the same order, those of the buffer included"
    assert replayed(run, whole, tmp_path / "scratch") == last_digest(run)


@pytest.mark.long
def test_groups_of_samplers_are_refused_in_a_run_without_samplers(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", config(num_steps=2))
    named = ["num_steps", "source", "max_staleness", "devices", "algorithm"]
    alone = config(num_steps=4, source="local", max_staleness=0, devices__sampler=1, resume="run", resume_changes=named)
    line = r"^the checkpoint holds unfinished groups of samplers: resume with source=ray and devices.sampler >= 1$"
    with pytest.raises(ValueError, match=line):
        train(alone, run)


def test_an_evaluation_looks_at_the_weights_of_now_also_where_few_versions_are_published(tmp_path: Path) -> None:
    often = config(evaluation__every=1, publish_every=4, num_steps=3)
    evaluated = rows(trained(tmp_path / "run", often) / "metrics.jsonl", "evaluate")
    once = config(evaluation__every=1, num_steps=3)
    same = rows(trained(tmp_path / "other", once) / "metrics.jsonl", "evaluate")
    assert [row["step"] for row in evaluated] == [0, 1, 2, 3]
    assert evaluated[0]["reward_mean"] == same[0]["reward_mean"]
    assert len({row["reward_mean"] for row in evaluated}) > 1, "each looks at other weights"
