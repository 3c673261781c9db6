"""A logging service that refuses, fails or hangs: training is unaffected, and the rows are in the run folder."""

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from covey.loop import train
from covey.run.records import trackers
from covey.run.records.rollout_log import AnswerRow
from covey.run.records.trackers import BackgroundTracker, Tracker

from ...support.processes import are_gone, descendants
from ...support.small import equal, rows, saved_weights, scripted, small_config, timeless, use
from ..runs import finish, new_run, num_trained, prepare, wait_until


class Remembering:
    """A service that works, and what it was told."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.num_closed = 0

    def log(self, step: int, metrics: Mapping[str, float], kind: str = "train") -> None:
        self.steps.append(step)

    def answers(self, step: int, rows: Sequence[AnswerRow], kind: str = "train") -> None:
        return

    def close(self) -> None:
        self.num_closed += 1


class Failing(Remembering):
    def log(self, step: int, metrics: Mapping[str, float], kind: str = "train") -> None:
        raise ConnectionError("500 Internal Server Error")


class HangingAtRow(Remembering):
    def log(self, step: int, metrics: Mapping[str, float], kind: str = "train") -> None:
        threading.Event().wait()


class HangingAtClose(Remembering):
    def close(self) -> None:
        threading.Event().wait()


class Slow(Remembering):
    """Takes a while for each row."""

    def log(self, step: int, metrics: Mapping[str, float], kind: str = "train") -> None:
        time.sleep(0.05)
        super().log(step, metrics, kind)


def refuse(*arguments: object) -> Tracker:
    raise ConnectionRefusedError("connection refused")


def hang(*arguments: object) -> Tracker:
    threading.Event().wait()
    raise AssertionError("unreachable")


FAULTS: dict[str, tuple[Callable[..., Tracker], str]] = {
    "refuses": (refuse, "wandb could not start (connection refused); metrics.jsonl has every row"),
    "fails": (lambda *_: Failing(), "wandb stopped logging (500 Internal Server Error); metrics.jsonl continues"),
    "hangs at its start": (hang, "wandb has not answered for 0.5 s (timeouts.tracker); metrics.jsonl has every row"),
    "hangs at a row": (lambda *_: HangingAtRow(), "wandb has not answered for 0.5 s (timeouts.tracker)"),
    "hangs at its end": (lambda *_: HangingAtClose(), "wandb has not answered for 0.5 s (timeouts.tracker)"),
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run without any service."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        use(patch, scripted())
        train(small_config(num_steps=3, preflight__enabled=False), folder)
    return folder


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failing_tracker_changes_nothing_and_is_warned_of_once(
    fault: str, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make, warning = FAULTS[fault]
    monkeypatch.setitem(trackers.SERVICES, "wandb", make)
    use(monkeypatch, scripted())
    began = time.monotonic()
    settings = {"output__trackers": ["wandb"], "timeouts__tracker": 0.5}
    train(small_config(num_steps=3, preflight__enabled=False, **settings), tmp_path)
    assert time.monotonic() - began < 60
    assert timeless(rows(tmp_path / "metrics.jsonl")) == timeless(rows(undisturbed / "metrics.jsonl"))
    assert equal(saved_weights(tmp_path), saved_weights(undisturbed))
    said = [record.message for record in caplog.records if record.name == "covey.run.records.trackers"]
    assert len(said) == 1
    assert said[0].startswith(warning)


def test_a_service_that_works_has_every_row_at_the_end_however_slow_it_is() -> None:
    slow = Slow()
    aside = BackgroundTracker("wandb", lambda: slow, deadline=60)
    for step in range(10):
        aside.log(step, {"loss": 0.5})
    aside.close()
    assert slow.steps == list(range(10))
    assert slow.num_closed == 1


def test_a_service_slower_than_the_run_misses_rows_and_does_not_hold_it_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trackers, "MAX_WAITING_ROWS", 3)
    gate = threading.Event()

    class Gated(Remembering):
        def log(self, step: int, metrics: Mapping[str, float], kind: str = "train") -> None:
            gate.wait()
            super().log(step, metrics, kind)

    gated = Gated()
    aside = BackgroundTracker("wandb", lambda: gated, deadline=60)
    for step in range(100):
        aside.log(step, {})
    gate.set()
    aside.close()
    assert gated.steps[0] == 0
    assert 3 <= len(gated.steps) <= 5
    assert [r.message for r in caplog.records] == [
        "wandb cannot keep up; some rows were dropped there (metrics.jsonl is complete)"
    ]


def test_a_service_that_was_given_up_gets_no_more_rows_though_it_answers_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate, answered = threading.Event(), threading.Event()

    class Late(Remembering):
        def log(self, step: int, metrics: Mapping[str, float], kind: str = "train") -> None:
            gate.wait()
            super().log(step, metrics, kind)
            answered.set()

    late = Late()
    aside = BackgroundTracker("wandb", lambda: late, deadline=0.2)
    aside.log(0, {})
    time.sleep(0.5)
    aside.log(1, {})
    gate.set()
    assert answered.wait(60)
    aside.log(2, {})
    aside.close()
    assert late.steps == [0]
    assert len(caplog.records) == 1


# ------------------------------------------------------------------------------------------------ the real client


def serve(mode: str, listening: socket.socket) -> None:
    """Takes connections, and answers none of them, or each with a failure of its own."""
    held = []
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:  # the test is over
            return
        if mode == "hangs":
            held.append(connection)
            continue
        with connection:
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["refuses", "hangs", "fails"])
def test_the_real_client_of_a_server_in_trouble_keeps_no_run_and_no_process(mode: str, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        if mode == "refuses":
            listening.close()
        else:
            threading.Thread(target=serve, args=(mode, listening), daemon=True).start()
        variables: dict[str, Any] = {"WANDB_BASE_URL": f"http://127.0.0.1:{port}", "WANDB_API_KEY": "a" * 40}
        prepare(tmp_path)
        words = ("num_steps=2", "preflight.enabled=false", "output.trackers=[wandb]", "timeouts.tracker=3")
        process = new_run(tmp_path, "run", *words, environment=variables)
        assert wait_until(lambda: num_trained(tmp_path / "run") == 2, process)
        started = descendants(process.pid)
        status, output = finish(process)
    assert status == 0, output
    assert "WARNING: wandb has not answered for 3 s (timeouts.tracker); metrics.jsonl has every row" in output
    assert [row["step"] for row in rows(tmp_path / "run" / "metrics.jsonl", "train")] == [1, 2]
    assert are_gone(started)
