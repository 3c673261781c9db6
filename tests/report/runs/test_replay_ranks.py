"""An asynchronous run of several ranks replayed by as many ends with the same weights, bit for bit."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from covey.cli.main import main
from covey.config.auto_adjust import add_correction
from covey.config.schema import Config
from covey.engine.base import digest_of
from covey.loop import train
from covey.run.records.record import RunRecorder
from covey.system import collectives
from covey.types import RunStopped
from covey_report.runs.replay import PastStep, check_replayable, replay

from ...support.fake_ray import fake_ray
from ...support.processes import are_gone, children, on_two_ranks
from ...support.small import rows, scripted, small_config, use

STEPS = 5
STRATEGIES = ["ddp", "fsdp"]


def config(**changes: object) -> Config:
    usual = {"num_steps": STEPS, "source": "ray", "max_staleness": 2, "devices__sampler": 2, "groups_per_step": 3}
    chosen, _ = add_correction(
        small_config(**usual | {"sampling__max_tokens": 24, "preflight__enabled": False} | changes)
    )
    return chosen


def trained(folder: Path, chosen: Config) -> Path:
    """Train on two ranks over a Ray of one process, where rank 0 has the samplers."""

    def work() -> str:
        with fake_ray():
            train(chosen, folder)
        return ""

    stores = folder.with_name(f"{folder.name}-stores")
    stores.mkdir()
    on_two_ranks(work, stores, seconds=200.0)
    return folder


def replayed(folder: Path, chosen: Config, scratch: Path) -> list[str]:
    """What each of two ranks ends with: a digest, or what it failed of."""
    scratch.mkdir()

    def work() -> str:
        try:
            with RunRecorder(chosen, scratch) as record:
                return replay(chosen, folder, record, lambda text: None)
        except (ValueError, RunStopped) as error:
            return str(error)

    found: list[str] = on_two_ranks(work, scratch, seconds=200.0)
    return found


def rewritten(folder: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    path = folder / "schedule.jsonl"
    found = rows(path)
    change(found)
    path.write_text("".join(json.dumps(row) + "\n" for row in found))


@pytest.fixture
def _short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the event loop after each token, so that weights change within completions."""
    monkeypatch.setattr("covey.engine.native.engine.TURN_SECONDS", 0.0)
    use(monkeypatch, scripted())


@pytest.mark.long
@pytest.mark.usefixtures("_short_turns")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_of_two_ranks_replays_on_two_to_the_same_weights(strategy: str, tmp_path: Path) -> None:
    chosen = config(parallel__strategy=strategy)
    run = trained(tmp_path / "run", chosen)
    schedule = rows(run / "schedule.jsonl")
    assert [row["ranks"] for row in schedule] == [[0, 1, 1]] * STEPS
    assert len({row["weights"] for row in schedule}) == STEPS, "every step changed the weights"
    assert replayed(run, chosen, tmp_path / "again") == [schedule[-1]["weights"]] * 2


@pytest.mark.usefixtures("_short_turns")
def test_groups_in_other_hands_and_other_weights_are_found_at_their_step(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", config(model__nano_hidden_size=32))
    last = rows(run / "schedule.jsonl")[-1]["weights"]

    def share_otherwise(found: list[dict[str, Any]]) -> None:
        found[2]["ranks"] = [0, 0, 1]

    def weigh_otherwise(found: list[dict[str, Any]]) -> None:
        found[2]["ranks"] = [0, 1, 1]
        found[3]["weights"] = digest_of({})

    rewritten(run, share_otherwise)
    said = replayed(run, config(model__nano_hidden_size=32), tmp_path / "shared")
    assert all("step 3 ends with other weights" in text for text in said), said
    rewritten(run, weigh_otherwise)
    said = replayed(run, config(model__nano_hidden_size=32), tmp_path / "weighed")
    assert all("step 4 ends with other weights" in text and f"recorded {digest_of({})}" in text for text in said), said
    assert last not in said


@pytest.mark.slow
def test_the_command_starts_the_ranks_of_a_replay_of_which_one_speaks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = trained(tmp_path / "run", config(num_steps=2))
    capfd.readouterr()
    assert main(["replay", str(run)]) == 0
    said = capfd.readouterr().out.split()
    assert said.count("step") == 2, "rank 0 alone speaks"
    assert said[-1] == rows(run / "schedule.jsonl")[-1]["weights"]


@pytest.mark.long
def test_the_command_starts_the_ranks_and_tells_which_step_differs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = trained(tmp_path / "run", config(num_steps=2))

    def weigh_otherwise(found: list[dict[str, Any]]) -> None:
        found[0]["weights"] = digest_of({})

    rewritten(run, weigh_otherwise)
    capfd.readouterr()
    before = children(os.getpid())
    assert main(["replay", str(run)]) == 2
    (line,) = (line for line in capfd.readouterr().err.splitlines() if line.startswith("covey: "))
    assert "step 1 ends with other weights" in line
    assert are_gone(children(os.getpid()) - before)


@pytest.mark.long
def test_as_many_ranks_replay_a_run_as_trained_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def share(found: list[dict[str, Any]]) -> None:
        for row in found:
            row |= {"ranks": [0, 0, 1], "threads": [1, 1]}

    use(monkeypatch, scripted())
    with fake_ray():
        train(config(num_steps=1), tmp_path / "run")
    rewritten(tmp_path / "run", share)
    assert collectives.world_size() == 1
    (tmp_path / "again").mkdir()
    with (
        RunRecorder(config(), tmp_path / "again") as record,
        pytest.raises(ValueError, match="2 trainer ranks is replayed by as many, got 1"),
    ):
        replay(config(), tmp_path / "run", record, lambda text: None)


def test_a_run_that_was_resumed_with_another_number_of_ranks_is_refused() -> None:
    steps = [PastStep(1, None, ()), PastStep(2, None, (), threads=(2, 1))]
    with pytest.raises(ValueError, match="step 2 was trained by 2 ranks and step 1 by 1"):
        check_replayable(config(), steps)


@pytest.mark.long
def test_a_launcher_is_refused_as_the_command_starts_the_ranks_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, scripted())
    with fake_ray():
        train(config(num_steps=1), tmp_path / "run")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert main(["replay", str(tmp_path / "run")]) == 2
    assert "a launcher has started 2 already: leave the launcher out" in capsys.readouterr().err
