"""Training from the cell of a notebook, where an event loop runs, and from threads."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from covey.loop import train
from covey.run.build import build_environment, build_run
from covey.run.checkpoints.checkpoint import newest_valid
from covey.system.waits.signals import StopRequested
from covey.system.waits.timer import PhaseTimer

from ..support.small import equal, rows, saved_weights, scripted, small_config, timeless, use, varied


def in_a_cell(work: Callable[[], Any]) -> Any:
    async def cell() -> Any:
        return work()

    return asyncio.run(cell())


@pytest.fixture(autouse=True)
def _prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, scripted())


@pytest.mark.long
def test_a_cell_trains_as_a_script_does(tmp_path: Path) -> None:
    config = small_config(preflight__enabled=False)
    train(config, tmp_path / "script")
    in_a_cell(lambda: train(config, tmp_path / "cell"))
    assert equal(saved_weights(tmp_path / "script"), saved_weights(tmp_path / "cell"))
    metrics = [timeless(rows(tmp_path / name / "metrics.jsonl")) for name in ("script", "cell")]
    assert metrics[0] == metrics[1]


def test_so_does_a_thread_and_leaves_signals_alone(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=train, args=(small_config(preflight__enabled=False), tmp_path / "run"))
    thread.start()
    while thread.is_alive():
        assert signal.getsignal(signal.SIGINT) is before
        time.sleep(0.01)
    assert newest_valid(tmp_path / "run" / "checkpoints") is not None


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "line"), [(signal.SIGINT, "stopped by SIGINT"), (signal.SIGTERM, "stopped by SIGTERM")]
)
def test_interrupting_a_cell_saves_the_last_finished_step(
    number: signal.Signals, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def interrupted(prompt: Any, text: str) -> float:
        calls.append(text)
        if len(calls) == 60:
            os.kill(os.getpid(), number)
        return varied(prompt, text)

    use(monkeypatch, scripted(interrupted))
    config = small_config(num_steps=50, preflight__enabled=False)
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(StopRequested) as stop:
        in_a_cell(lambda: train(config, tmp_path / "run"))
    assert str(stop.value) == line
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
    saved = newest_valid(tmp_path / "run" / "checkpoints")
    assert saved is not None
    step = int(saved.name[-6:])
    assert 3 <= step < 50
    config.resume, config.num_steps, config.resume_changes = str(tmp_path / "run"), step + 1, ["num_steps"]
    in_a_cell(lambda: train(config, tmp_path / "run"))
    assert [row["step"] for row in rows(tmp_path / "run" / "metrics.jsonl", "train")] == list(range(1, step + 2))


def test_interrupting_a_cell_ends_what_comes_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stuck(prompt: Any, text: str) -> float:
        os.kill(os.getpid(), signal.SIGINT)
        until = time.monotonic() + 30
        while time.monotonic() < until:
            time.sleep(0.001)
        return 0.0

    use(monkeypatch, scripted(stuck))
    started = time.monotonic()
    with pytest.raises(StopRequested):
        in_a_cell(lambda: train(small_config(preflight__enabled=False), tmp_path / "run"))
    assert time.monotonic() - started < 20


def test_what_is_refused_in_a_cell_is_refused_as_elsewhere(tmp_path: Path) -> None:
    in_a_cell(lambda: train(small_config(preflight__enabled=False), tmp_path / "run"))
    with pytest.raises(ValueError, match="already holds a run"):
        in_a_cell(lambda: train(small_config(preflight__enabled=False), tmp_path / "run"))


def test_the_parts_of_a_run_sample_in_a_cell(tmp_path: Path) -> None:
    config = small_config()

    def sampled() -> list[str]:
        run = build_run(config, build_environment(config), PhaseTimer())
        try:
            groups = run.source.run(run.test_prompts, 2, run.source.sampling)
            return [rollout.text for group in groups for rollout in group.rollouts]
        finally:
            run.close()

    assert in_a_cell(sampled) == sampled()
