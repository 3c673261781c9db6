"""A run whose cluster is lost: stopped as by a signal, saved, and ended in one line by a deadline."""

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from covey.cluster import ending, start
from covey.cluster.ending import Ending, ended_with_cluster
from covey.cluster.settings import DevicesConfig
from covey.cluster.start import ClusterLost
from covey.cluster.trainers import TrainerRank
from covey.loop import train
from covey.system.waits.signals import Stopper, StopRequested
from covey.trainer.trainer import Trainer
from covey.types import Prompt, RunStopped

from ..guarantees.runs import saved_step
from ..support.fake_ray import FakeRay, fake_ray
from ..support.small import rows, scripted, small_config, use, varied

DEVICES = DevicesConfig(sampler=0, trainer=2)
LOST = r"^no node of the Ray cluster is alive$"
PATIENCE = 20.0


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    monkeypatch.setattr(start, "LOOK_SECONDS", 0.02)
    with fake_ray() as ray:
        yield ray


def run_watched(work: Callable[[Stopper], None]) -> None:
    """Do it on two ranks' devices, with the signals of a run."""
    with Stopper().installed() as stopper, ended_with_cluster(DEVICES, stopper):
        work(stopper)


def run_with_samplers(work: Callable[[Ending], None]) -> Stopper:
    """Do it in a run whose samplers' pool looks at the cluster."""
    with Stopper().installed() as stopper, ended_with_cluster(DevicesConfig(sampler=1), stopper) as end:
        work(end)
    return stopper


def await_stop() -> None:
    """What is under way, until something stops it."""
    time.sleep(PATIENCE)


@pytest.mark.long
def test_a_lost_cluster_without_samplers_saves_the_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray: FakeRay
) -> None:
    run, seen = tmp_path / "run", 0

    def verdict(prompt: Prompt, text: str) -> float:
        nonlocal seen
        seen += 1
        if seen == 40:
            ray.alive = False
            await_stop()
        return varied(prompt, text)

    use(monkeypatch, scripted(verdict))
    settings = {
        "source": "ray",
        "devices__sampler": 0,
        "devices__gpus_per_trainer": 1.0,
        "num_steps": 6,
        "preflight__enabled": False,
        "output__save_every": 0,
    }
    with pytest.raises(ClusterLost, match=LOST):
        train(small_config(**settings), run)
    done = saved_step(run)
    assert done >= 1
    assert len(rows(run / "metrics.jsonl", "train")) == done
    ray.alive = True
    train(small_config(**settings, resume=str(run)), run)
    assert [row["step"] for row in rows(run / "metrics.jsonl", "train")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.long
@pytest.mark.parametrize("is_in_update", [False, True])
def test_a_lost_cluster_saves_the_last_step_even_during_a_long_update(
    is_in_update: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray: FakeRay
) -> None:
    """An update of a minute would be ended by Ray, without a word."""
    step = Trainer.step

    def step_and_lose(self: Trainer, batches: Any, number: int, *given: Any) -> dict[str, float]:
        if number == 3:
            ray.alive = False
            if is_in_update:
                await_stop()
        return step(self, batches, number, *given)

    use(monkeypatch, scripted(varied))
    monkeypatch.setattr(Trainer, "step", step_and_lose)
    settings = {"source": "ray", "num_steps": 400, "preflight__enabled": False, "output__save_every": 0}
    started = time.monotonic()
    with pytest.raises(ClusterLost, match=LOST):
        train(small_config(**settings), tmp_path / "run")
    assert time.monotonic() - started < PATIENCE
    done = saved_step(tmp_path / "run")
    assert done == len(rows(tmp_path / "run" / "metrics.jsonl", "train"))
    assert done == 3 if is_in_update else done >= 3
    # It goes on from there
    ray.alive = True
    monkeypatch.setattr(Trainer, "step", step)
    more = {"num_steps": done + 2, "resume": str(tmp_path / "run"), "resume_changes": ["num_steps"]}
    train(small_config(**settings | more), tmp_path / "run")
    assert [row["step"] for row in rows(tmp_path / "run" / "metrics.jsonl", "train")] == list(range(1, done + 3))


def test_a_loss_is_heard_where_the_state_is_whole_again(ray: FakeRay) -> None:
    def work(stopper: Stopper) -> None:
        stopper.hold()
        ray.alive = False
        while not stopper.is_asked:
            time.sleep(0.01)
        stopper.release()

    with pytest.raises(ClusterLost, match=LOST):
        run_watched(work)


def test_a_loss_is_heard_at_a_release_where_signals_are_left_to_others(ray: FakeRay) -> None:
    """As in a thread that is not the main one."""

    def work() -> None:
        stopper = Stopper()
        with ended_with_cluster(DEVICES, stopper):
            ray.alive = False
            while True:
                stopper.release()
                time.sleep(0.01)

    with ThreadPoolExecutor(1) as threads, pytest.raises(ClusterLost, match=LOST):
        threads.submit(work).result(PATIENCE)


def test_a_stop_before_the_cluster_is_lost_keeps_its_exit_code(ray: FakeRay) -> None:
    def work(stopper: Stopper) -> None:
        stopper.hold()
        signal.raise_signal(signal.SIGINT)
        ray.alive = False
        time.sleep(0.2)
        stopper.release()

    with pytest.raises(StopRequested) as stopped:
        run_watched(work)
    assert stopped.value.status == 130


@pytest.mark.parametrize(
    ("is_alive", "line"), [(False, LOST), (True, "^a process of devices.reference was lost 5 times")]
)
def test_any_loss_with_the_cluster_ends_the_run_in_the_clusters_line(
    is_alive: bool, line: str, ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "LOOK_SECONDS", 60.0)  # the watch is later

    def work(stopper: Stopper) -> None:
        ray.alive = is_alive
        raise RunStopped("a process of devices.reference was lost 5 times")

    with pytest.raises(RunStopped, match=line):
        run_watched(work)


def test_work_that_outlives_a_lost_cluster_is_ended_with_its_exit_code(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ending, "GRACE_SECONDS", 0.2)

    def hang() -> None:
        with Stopper(together=lambda number: number).installed() as stopper, ended_with_cluster(DEVICES, stopper):
            ray.alive = False
            await_stop()  # the signal that would end it waits for the vote of the ranks

    process = multiprocessing.get_context("fork").Process(target=hang)
    process.start()
    process.join(PATIENCE / 2)
    assert process.exitcode == 2
    line = "covey: no node of the Ray cluster is alive, and what was under way did not end within 0.2 s\n"
    assert capfd.readouterr().err.endswith(line)


@pytest.mark.parametrize(("is_alive", "status"), [(True, 0), (False, 2)])
def test_a_finished_rank_exits_without_a_cluster(is_alive: bool, status: int, ray: FakeRay) -> None:
    ray.alive = is_alive
    process = multiprocessing.get_context("fork").Process(target=TrainerRank().run, args=(lambda: None,))
    process.start()
    process.join(PATIENCE / 2)
    assert process.exitcode == status


@pytest.mark.parametrize("devices", [DevicesConfig(sampler=1, trainer=2), DevicesConfig(sampler=0)])
def test_no_cluster_watch_while_waiting_for_samplers_or_without_ray(devices: DevicesConfig, ray: FakeRay) -> None:
    with Stopper().installed() as stopper, ended_with_cluster(devices, stopper):
        ray.alive = False
        time.sleep(0.2)
        assert not stopper.is_asked
        assert ray.started_with == {}


def test_who_ends_by_himself_is_not_stopped(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "ITSELF_SECONDS", 0.2)
    lost = ClusterLost("no node of the Ray cluster is alive")
    stopper = run_with_samplers(lambda end: end.stop_later(lost))
    time.sleep(0.4)
    assert not stopper.is_asked

    def go_on(end: Ending) -> None:
        end.stop_later(lost)
        await_stop()

    with pytest.raises(ClusterLost, match=LOST):
        run_with_samplers(go_on)


def test_what_samplers_end_a_run_for_keeps_its_line(ray: FakeRay) -> None:
    """The pool has looked whether the cluster is lost, and the run may have left it."""

    def work(end: Ending) -> None:
        ray.alive = False
        raise RunStopped("sampler 0 was lost 5 times in a row")

    with pytest.raises(RunStopped, match=r"^sampler 0 was lost 5 times in a row$"):
        run_with_samplers(work)


def test_a_lost_cluster_after_the_run_stops_nothing(ray: FakeRay) -> None:
    """The signal would end the program that called covey.train."""
    with Stopper().installed() as stopper, ended_with_cluster(DEVICES, stopper):
        pass
    ray.alive = False
    time.sleep(0.2)
    assert not stopper.is_asked


def test_agents_of_a_node_that_died_are_found_by_their_logs(tmp_path: Path) -> None:
    def process(number: int, name: str, log: str) -> None:
        fds = tmp_path / "proc" / str(number) / "fd"
        fds.mkdir(parents=True)
        (fds.parent / "cmdline").write_bytes(name.encode())
        for fd, file in enumerate(("/dev/null", "pipe:[4711]", log)):
            os.symlink(file, fds / str(fd))

    def ray_that_started(programs: dict[str, list[int]]) -> SimpleNamespace:
        node = SimpleNamespace(get_session_dir_path=lambda: "/tmp/ray/session_1", all_processes=programs)
        return SimpleNamespace(_private=SimpleNamespace(worker=SimpleNamespace(_global_node=node)))

    process(11, "ray::DashboardAgent", "/tmp/ray/session_1/logs/dashboard_agent.out")
    process(12, "ray::RuntimeEnvAgent", "/tmp/ray/session_1/logs/runtime_env_agent.out")
    process(13, "ray::RuntimeEnvAgent", "/tmp/ray/session_2/logs/runtime_env_agent.out")
    process(14, "ray::SamplerActor", "/tmp/ray/session_1/logs/worker.out")
    process(15, "python", "/tmp/ray/session_1/logs/worker.out")
    assert sorted(start.agents_of(ray_that_started({"raylet": [1]}), tmp_path / "proc")) == [11, 12]
    assert start.agents_of(ray_that_started({}), tmp_path / "proc") == []


SAYS = "covey: the Ray node of this machine is gone, and Ray ended this process with it\n"


@pytest.mark.parametrize(
    ("dies", "is_told", "said"), [("before", False, SAYS), ("after", False, ""), ("before", True, "")]
)
def test_an_end_that_ray_makes_with_a_dead_node_is_told_by_another_process(
    dies: str, is_told: bool, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ray ends whoever reads or writes the node's store then, so that no handler runs: its end of the pipe closes."""
    with socket.socket(socket.AF_UNIX) as store:
        store.bind(str(tmp_path / "store"))
        store.listen()
        start.leave_last_word(str(tmp_path / "store"))
        speaker = start._speakers[-1]
        connection, _ = store.accept()
        if dies == "before":
            connection.close()
        if is_told:
            start.hush()
        else:
            assert speaker.stdin is not None
            speaker.stdin.close()
            speaker.wait(PATIENCE)
        connection.close()
    start._speakers.clear()
    assert capfd.readouterr().err == said
