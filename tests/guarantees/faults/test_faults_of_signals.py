"""SIGTERM, SIGHUP and Ctrl-C: the last finished step is saved, the status says why, and no process is left."""

import asyncio
import gc
import json
import os
import pty
import random
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from covey.loop import train
from covey.run.evaluate import Evaluation
from covey.run.given import RunObjects
from covey.run.records.callbacks import Callback
from covey.system.waits import signals
from covey.system.waits.signals import Stopper, StopRequested, quiet_event_loop
from covey.types import Prompt

from ...support.processes import are_gone, descendants
from ...support.small import equal, saved_weights, scripted, small_config, use, varied
from ..runs import (
    KEEP_LAST,
    NUM_STEPS,
    SETTINGS,
    Process,
    fingerprint,
    finish,
    finish_well,
    new_run,
    num_trained,
    resume,
    rows,
    saved_step,
    start,
    wait_until,
)

GRACE_SECONDS = 120.0
"""The default of output.shutdown_timeout."""
WORKERS = ("environment.in_process=false", "environment.num_workers=2")
SLOWLY = {"REWARD_SECONDS": 0.02}
SIGNALS = {
    "SIGTERM": [signal.SIGTERM],
    "SIGHUP": [signal.SIGHUP],
    "SIGINT": [signal.SIGINT],
    "two SIGINTs": [signal.SIGINT, signal.SIGINT],
}


def send(process: Process, signals: list[signal.Signals], pause: float) -> None:
    """SIGINT to the whole group, as a terminal does; SIGTERM to the run alone, as a batch system does."""
    for number in signals:
        if number == signal.SIGINT:
            with suppress(ProcessLookupError):  # it has ended already
                os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        time.sleep(pause)


def stop_and_resume(folder: Path, name: str, signals: list[signal.Signals], seed: int) -> None:
    """Stop a run at a random moment and see to it that it ends well; then let it go on to its end."""
    generator = random.Random(seed)
    run = folder / name
    process = new_run(folder, name, *WORKERS, "output.save_every=0", environment=SLOWLY)
    step = generator.randint(1, NUM_STEPS - 8)
    assert wait_until(lambda: num_trained(run) >= step, process)
    family = descendants(process.pid)
    assert len(family) >= 2, "the workers of the reward are there"
    time.sleep(generator.uniform(0.0, 0.05))
    asked = time.monotonic()
    send(process, signals, pause=generator.uniform(0.0, 0.05))
    status, output = finish(process)
    assert status == 128 + signals[0], output
    assert time.monotonic() - asked < GRACE_SECONDS
    assert are_gone(family)
    done = saved_step(run)
    assert done >= step
    assert [row["step"] for row in rows(run) if row["kind"] == "train"] == list(range(1, done + 1))
    assert f"covey train resume={name} continues after step {done}\n" in output
    assert "Traceback" not in output
    assert f"covey: stopped by {signals[0].name}\n" in output
    finish_well(resume(folder, name))
    assert fingerprint(run) == fingerprint(folder / "whole")


@pytest.mark.parametrize(
    "name",
    [
        "SIGTERM",
        pytest.param("SIGHUP", marks=pytest.mark.long),
        *(pytest.param(name, marks=pytest.mark.slow) for name in SIGNALS if "INT" in name),
    ],
)
def test_a_signal_saves_the_last_finished_step_leaves_no_process_and_changes_nothing(
    reference: Path, name: str
) -> None:
    stop_and_resume(reference, f"stopped-{name.replace(' ', '-')}", SIGNALS[name], seed=5)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(10))
def test_signals_at_ten_random_moments_leave_the_same_run(reference: Path, seed: int) -> None:
    signals = list(SIGNALS.values())[seed % len(SIGNALS)]
    stop_and_resume(reference, f"stopped-{seed}", signals, seed + 100)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_during_the_cold_start_says_that_it_begins_again(tmp_path: Path, number: signal.Signals) -> None:
    words = ("recipe=arithmetic", "cold_start.num_steps=100000", "cold_start.target_accuracy=null")
    process = start(tmp_path, *words, "cold_start.check_every=1", "hydra.run.dir=run")
    log = tmp_path / "run" / "covey.log"
    assert wait_until(lambda: log.exists() and "cold start 1/100000" in log.read_text(), process)
    process.send_signal(number)
    status, output = finish(process)
    assert status == 128 + number, output
    assert "interrupted during the cold start; it is not saved until finished and will restart\n" in output
    assert "no checkpoint was saved; remove run and start again\n" in output
    assert list((tmp_path / "cache").glob("*")) == []


@pytest.mark.slow
def test_a_signal_before_the_first_step_says_that_nothing_is_saved(reference: Path) -> None:
    process = new_run(reference, "early", *WORKERS, environment={"REWARD_SECONDS": 30, "STRIKE_AT": 0})
    log = reference / "early" / "covey.log"
    assert wait_until(lambda: log.exists() and len(descendants(process.pid)) >= 2, process)
    family = descendants(process.pid)
    process.send_signal(signal.SIGTERM)
    status, output = finish(process)
    assert status == 143, output
    assert "no checkpoint was saved; remove early and start again\n" in output
    assert are_gone(family)
    status, output = finish(resume(reference, "early"))
    assert status == 2
    assert "early has no checkpoint to resume from: it saves one after every 5 steps and every half an hour " in output


@pytest.mark.slow
def test_a_signal_before_a_resumed_runs_first_step_keeps_its_checkpoint(reference: Path) -> None:
    name = "twice"
    run = reference / name
    process = new_run(reference, name, *WORKERS, "output.save_every=0", environment=SLOWLY)
    assert wait_until(lambda: num_trained(run) >= 3, process)
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 143
    done = saved_step(run)
    process = resume(reference, name, environment={"REWARD_SECONDS": 30})
    log = run / "covey.log"
    assert wait_until(lambda: f"resumed after step {done}" in log.read_text(), process)
    process.send_signal(signal.SIGTERM)
    status, output = finish(process)
    assert status == 143, output
    assert f"covey train resume={name} continues after step {done}\n" in output
    assert saved_step(run) == done
    assert len(list((run / "checkpoints").iterdir())) <= KEEP_LAST


@pytest.mark.long
@pytest.mark.parametrize("num_looks", [2, 3], ids=["in mid-run", "at the end"])
def test_an_interrupted_evaluation_is_made_by_the_resumed_run(
    num_looks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looks before the first step, after the second of four, and at the end."""
    seen: list[str] = []

    def verdict(prompt: Prompt, text: str) -> float:
        seen.extend([prompt.id] if prompt.id == "test-0" else [])
        if len(seen) == 3 * num_looks - 1:  # each look samples it once greedily, and twice not
            seen.append("")
            os.kill(os.getpid(), signal.SIGTERM)
        return varied(prompt, text)

    settings = {"num_steps": 4, "evaluation__every": 2, "preflight__enabled": False}
    use(monkeypatch, scripted(verdict))
    with pytest.raises(StopRequested):
        train(small_config(**settings), tmp_path / "stopped")
    use(monkeypatch, scripted())
    train(small_config(**settings, resume=str(tmp_path / "stopped")), tmp_path / "stopped")
    train(small_config(**settings), tmp_path / "whole")
    assert rows(tmp_path / "stopped") == rows(tmp_path / "whole")
    assert equal(saved_weights(tmp_path / "stopped"), saved_weights(tmp_path / "whole"))
    with pytest.raises(ValueError, match="is finished"):
        train(small_config(**settings, resume=str(tmp_path / "stopped")), tmp_path / "stopped")


class Uploads(Callback):
    """Is stopped while it looks at the evaluation after some step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_evaluation(self, step: int, evaluation: Evaluation) -> None:
        if step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.long
@pytest.mark.parametrize("step", [2, 4], ids=["in mid-run", "at the end"])
def test_an_evaluation_that_a_signal_stopped_while_it_was_written_down_is_there_once(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"num_steps": 4, "evaluation__every": 2, "preflight__enabled": False}
    use(monkeypatch, scripted())
    with pytest.raises(StopRequested):
        train(small_config(**settings), tmp_path / "stopped", RunObjects(callbacks=(Uploads(step),)))
    train(small_config(**settings, resume=str(tmp_path / "stopped")), tmp_path / "stopped")
    train(small_config(**settings), tmp_path / "whole")
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        assert rows(tmp_path / "stopped", name) == rows(tmp_path / "whole", name)
    assert json.loads((tmp_path / "stopped" / "summary.json").read_text())["status"] == "completed"


STUCK = """
import signal, sys, time
from covey.system.waits.signals import Stopper

with Stopper(shutdown_timeout=0.5).installed() as stopper:
    stopper.hold()
    print("held", flush=True)
    for _ in range(600):
        time.sleep(0.1)
"""


def test_a_hanging_save_is_given_up_after_the_grace_period_with_stacks() -> None:
    process = subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    asked = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert 0.4 < time.monotonic() - asked < 30
    assert "Timeout (0:00:00.500000)!" in errors
    assert 'File "<string>", line 9' in errors


def test_a_signal_within_a_callback_leaves_no_future_unawaited(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As between `gather` and its `await`: asyncio would log an exception that was never retrieved."""
    resumed: list[str] = []

    async def judged() -> None:
        outcomes = asyncio.gather(asyncio.sleep(60), asyncio.sleep(60))
        signal.raise_signal(signal.SIGINT)
        resumed.append("to the await")
        await outcomes

    async def together() -> None:
        await asyncio.gather(judged())

    quiet = asyncio.Runner(loop_factory=quiet_event_loop)
    with pytest.raises(StopRequested) as stopped, Stopper().installed(), quiet:
        quiet.run(together())
    del quiet
    gc.collect()
    assert (stopped.value.status, resumed, caplog.text) == (130, ["to the await"], "")


@pytest.mark.parametrize("again", [False, True])
def test_a_blocked_loop_is_interrupted_in_time_or_by_a_second_signal(
    monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    monkeypatch.setattr(signals, "PATIENCE", 60.0 if again else 0.2)

    async def blocks() -> None:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        if again:
            threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT)).start()
        time.sleep(30)

    began = time.monotonic()
    with pytest.raises(StopRequested), Stopper().installed(), asyncio.Runner(loop_factory=quiet_event_loop) as runner:
        runner.run(blocks())
    assert 0.25 < time.monotonic() - began < 20


def test_a_signal_in_the_last_callback_is_heard_once_at_the_next_release() -> None:
    async def last() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(lambda _: signal.raise_signal(signal.SIGTERM))  # behind the callback that ends the loop

    with Stopper().installed() as stopper, asyncio.Runner(loop_factory=quiet_event_loop) as runner:
        runner.run(last())
        with pytest.raises(StopRequested) as stopped:
            stopper.release()
        runner.run(asyncio.sleep(0))
    assert stopped.value.status == 143


def test_a_signal_that_comes_while_the_ranks_vote_is_heard_at_the_next_vote() -> None:
    """The vote has begun without it, so its outcome is 0: the signal must outlive that."""
    votes: list[int] = []

    def vote(number: int) -> int:
        votes.append(number)
        if len(votes) == 1:
            signal.raise_signal(signal.SIGINT)
        return number

    with Stopper(together=vote).installed() as stopper:
        stopper.hold()
        stopper.release()
        stopper.hold()
        with pytest.raises(StopRequested) as stopped:
            stopper.release()
    assert votes == [0, signal.SIGINT]
    assert stopped.value.status == 130


def test_a_stop_while_signals_are_held_sends_none_to_other_handlers() -> None:
    """As Ray's, while it shuts down: the signal would end the process."""
    with Stopper().installed() as stopper:
        stopper.hold()
        ours = signal.signal(signal.SIGTERM, signal.SIG_DFL)
        stopper.ask()
        time.sleep(0.05)
        signal.signal(signal.SIGTERM, ours)
        assert stopper.is_asked
        with pytest.raises(StopRequested) as stopped:
            stopper.release()
    assert stopped.value.status == 143


def test_the_end_of_a_terminal_is_heard_unless_nohup_has_it_ignored() -> None:
    usual = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
    try:
        with Stopper().installed() as stopper:
            stopper.hold()
            signal.raise_signal(signal.SIGHUP)
            with pytest.raises(StopRequested, match="stopped by SIGHUP") as stopped:
                stopper.release()
        assert stopped.value.status == 129
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with Stopper().installed() as stopper:
            signal.raise_signal(signal.SIGHUP)
            assert not stopper.is_asked
    finally:
        signal.signal(signal.SIGHUP, usual)


@pytest.mark.slow
def test_a_run_whose_terminal_is_closed_saves_its_last_finished_step(reference: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.chdir(reference)
        words = [*SETTINGS, *WORKERS, "output.save_every=0", "hydra.run.dir=closed"]
        environment = os.environ | {"REWARD_SECONDS": "0.02", "COVEY_CACHE": str(reference / "cache")}
        os.execve(sys.executable, [sys.executable, "-m", "covey", "train", *words], environment)
    run, until = reference / "closed", time.monotonic() + 120
    while num_trained(run) < 3:
        assert time.monotonic() < until
        while select.select([terminal], [], [], 0.1)[0]:
            os.read(terminal, 65536)
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 129
    assert saved_step(run) == num_trained(run) >= 3
