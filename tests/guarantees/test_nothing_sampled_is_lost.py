"""What was sampled and scored before a kill is not sampled again, and the run ends as if nobody had killed it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from covey.config.auto_adjust import add_correction
from covey.environments.base import Environment
from covey.loop import train
from covey.run.records.record import RunRecorder
from covey.types import Prompt, RunStopped
from covey_report.runs.replay import replay

from ..support.fake_ray import fake_ray
from ..support.small import equal, rows, saved_policy, scripted, small_config, use
from .kills import Call, killed_run, prepare_slow, reference, seconds_lost
from .runs import fingerprint
from .test_source_ray import FEATURES, apart, logged, of_ray, settings

Whole = tuple[str, list[Call]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("kills")
    prepare_slow(made)
    return made


@pytest.fixture(scope="module")
def whole(folder: Path) -> Whole:
    return reference(folder)


@pytest.mark.long
def test_a_run_killed_before_its_first_checkpoint_and_after_loses_a_call_at_most(
    folder: Path, whole: tuple[str, list[Call]]
) -> None:
    lives = killed_run(folder, "killed", num_kills=3, seed=2, scale=0.1, most=1.5)
    assert max(seconds_lost(lives, whole[1])) <= 0.1 * 2 + 0.1
    assert fingerprint(folder / "killed") == whole[0]
    assert not (folder / "killed" / "journal").exists()
    log = (folder / "killed" / "covey.log").read_text()
    assert log.count("they are not sampled again; ") == 3


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_kills_of_a_run_with_slow_rewards_lose_two_seconds_each_at_most(
    folder: Path, whole: tuple[str, list[Call]]
) -> None:
    lives = killed_run(folder, "twenty", num_kills=20, seed=0)
    assert max(seconds_lost(lives, whole[1])) <= 2.1  # a call, and the moment until its verdict is written
    assert fingerprint(folder / "twenty") == whole[0]


# ------------------------------------------------------------------------- every kind of run, ended while it samples


class Counted:
    """A verdict that counts its calls, and ends the run at one of them."""

    def __init__(self, verdict: Any, last: int | None = None) -> None:
        self.verdict, self.last, self.calls = verdict, last, 0

    def __call__(self, prompt: Prompt, text: str) -> Any:
        self.calls += 1
        if self.calls == self.last:
            raise RunStopped("the machine is gone")
        return self.verdict(prompt, text)


def counted(make: Callable[[], Environment], last: int | None, patch: pytest.MonkeyPatch) -> Counted:
    """Let runs take this environment with counted verdicts."""
    environment: Any = make()
    verdict = Counted(environment.verdict, last)
    use(patch, replace(environment, verdict=verdict))
    return verdict


@pytest.mark.long
@pytest.mark.parametrize("source", ["local", "ray"])
@pytest.mark.parametrize("feature", FEATURES)
def test_a_run_of_any_kind_that_ends_amid_sampling_keeps_its_groups(
    feature: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, changes = FEATURES[feature]
    chosen = (settings if source == "local" else of_ray)(**changes)
    whole = counted(make, None, monkeypatch)
    with fake_ray():
        train(small_config(**chosen), tmp_path / "whole")
    ended = counted(make, 2 * whole.calls // 3, monkeypatch)
    with fake_ray(), pytest.raises(RunStopped, match="the machine is gone"):
        train(small_config(**chosen), tmp_path / "ended")
    assert not (tmp_path / "ended" / "checkpoints").exists()
    resumed = counted(make, None, monkeypatch)
    with fake_ray():
        train(small_config(**chosen, resume=str(tmp_path / "ended")), tmp_path / "ended")
    under_way = 1 if source == "local" else 3  # groups of at most 5, whose verdicts come at once
    assert ended.calls + resumed.calls <= whole.calls + 5 * under_way
    for name in ("metrics.jsonl", "rollouts.jsonl", "evaluations.jsonl"):
        assert apart(logged(tmp_path / "whole", name), logged(tmp_path / "ended", name)) == [], name
    if source == "local":
        assert equal(saved_policy(tmp_path / "whole"), saved_policy(tmp_path / "ended"))


@pytest.mark.long
def test_a_stale_run_that_ends_three_times_makes_its_steps_again_and_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("covey.engine.native.engine.TURN_SECONDS", 0.0)  # weights change within completions
    config, _ = add_correction(small_config(**of_ray(max_staleness=2, num_steps=8)))
    whole = counted(scripted, None, monkeypatch)
    with fake_ray():
        train(config, tmp_path / "whole")
    run, calls, done = tmp_path / "ended", 0, list[dict[str, Any]]()
    for last in (whole.calls // 2, whole.calls // 4, None):
        verdict = counted(scripted, last, monkeypatch)
        resumed = replace(config, resume=str(run) if calls else None)
        with fake_ray():
            if last is None:
                train(resumed, run)
            else:
                with pytest.raises(RunStopped, match="the machine is gone"):
                    train(resumed, run)
        calls += verdict.calls
        schedule = rows(run / "schedule.jsonl")
        assert schedule[: len(done)] == done, "groups, versions and weights of steps that were finished"
        done = schedule
    assert len(done) == 8
    assert calls <= whole.calls + 2 * 15
    (tmp_path / "again").mkdir()
    with RunRecorder(config, tmp_path / "again") as record:
        assert replay(config, run, record, lambda text: None) == done[-1]["weights"]
