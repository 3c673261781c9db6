"""Trainer ranks beside this process: devices.trainer=N starts N - 1 Ray actors.

This process is rank 0, with the terminal, the run folder, the buffer and the signals: an end of Ray's daemons, as by a
plain `scancel`, leaves it time to save. The ranks run the code that torchrun would start.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch

from covey.cluster.roles import NODE_SHARE, Allotment, role_of
from covey.cluster.settings import DevicesConfig
from covey.cluster.slot import last_line
from covey.cluster.start import (
    ClusterLost,
    connect,
    disconnect,
    import_ray,
    loss_of_cluster,
    prepare_actor,
    worker_environment,
)
from covey.system import ranks
from covey.types import RunStopped

LOGGER = logging.getLogger(__name__)

START_SECONDS = 120.0
"""Seconds for the processes of all ranks to start."""
END_SECONDS = 30.0
"""Seconds for the other ranks to end once this one is done."""

LOOK_SECONDS = 5.0
"""Seconds for the cluster to answer once a rank is lost, or done."""
EXIT_LOST = 2
WHY_SECONDS = 2.0
"""Time for a failed rank to report why."""


class TrainerRank:
    """The process of one rank."""

    def gpus(self) -> list[str]:
        """Return the process's GPUs, as CUDA_VISIBLE_DEVICES names them."""
        return [str(number) for number in import_ray().get_gpu_ids()]

    def ready(self) -> int:
        return os.getpid()

    def run(self, work: Callable[[], None]) -> None:
        """Train with the other ranks; a process that lost the cluster exits."""
        prepare_actor()
        try:
            work()
        finally:
            if loss_of_cluster(LOOK_SECONDS) is not None:
                os._exit(EXIT_LOST)  # what a node starts lives for up to a minute more without its cluster


@contextmanager
def trainer_ranks(devices: DevicesConfig, work: Callable[[], None]) -> Iterator[None]:
    """Start the other ranks, which run `work`, and be rank 0 inside.

    If GPUs are requested, this process's own is held too, so that Ray gives it to no other. Nothing happens if neither
    ranks nor GPUs are requested. ValueError where a launcher has started ranks already, or the cluster has no
    devices for them. RunStopped where they do not start.
    """
    if devices.trainer == 1 and devices.gpus_per_trainer == 0:
        yield
        return
    if ranks.world_size() > 1:
        raise ValueError(_started_twice(devices))
    is_own = connect(devices, 0)
    ray = import_ray()
    place: Allotment | None = None
    try:
        place = _allot(ray, devices)
        own = _own_gpu(ray, devices, place)
        if devices.trainer == 1:
            if torch.cuda.is_available():
                torch.cuda.set_device(own)
            yield
            return
        meeting_place = ranks.new_meeting_place(ray.util.get_node_ip_address())  # here
        with _environment(meeting_place | _numbers(0, devices.trainer, own)):
            others = [meeting_place | _numbers(rank, devices.trainer) for rank in _others(devices)]
            with _running(ray, devices, place, others, work):
                yield
    except ClusterLost:  # no cluster takes the devices back
        place = None
        raise
    finally:
        if place is not None and loss_of_cluster(LOOK_SECONDS) is None:
            with suppress(Exception):
                place.close()
        disconnect(is_own)


def _started_twice(devices: DevicesConfig) -> str:
    by_gpus = f"devices.gpus_per_trainer={devices.gpus_per_trainer:g}"
    asked = f"devices.trainer={devices.trainer}" if devices.trainer > 1 else by_gpus
    started = f"a launcher has started {ranks.world_size()} already"
    return f"{asked} starts the ranks itself, and {started}: leave one of both out"


@contextmanager
def _running(
    ray: Any, devices: DevicesConfig, place: Allotment, variables: list[dict[str, str]], work: Callable[[], None]
) -> Iterator[None]:
    """Run `work` on the other ranks until the end of the block."""
    actors = [_start(ray, place, rank, own) for rank, own in zip(_others(devices), variables, strict=True)]
    is_there = True
    try:
        _await_all(ray, [actor.ready.remote() for actor in actors])
        running = [actor.run.remote(work) for actor in actors]
        try:
            yield
        except ClusterLost:
            raise
        except RunStopped as stopped:
            # Ray's calls wait for a cluster that is gone until Ray ends this process without a word
            if (lost := loss_of_cluster(LOOK_SECONDS)) is not None:
                raise lost from stopped
            _say_why(ray, ray.wait(running, num_returns=len(running), timeout=WHY_SECONDS)[0])
            raise
        if is_there := loss_of_cluster(LOOK_SECONDS) is None:  # else the run is done all the same
            _end(ray, running)
    except ClusterLost:
        is_there = False
        raise
    finally:
        for actor in actors if is_there else ():  # else no cluster is left to ask
            with suppress(Exception):
                ray.kill(actor, no_restart=True)


def _allot(ray: Any, devices: DevicesConfig) -> Allotment:
    """Hold the devices of all ranks, this process's on its own node."""
    role = role_of(devices, "trainer")
    gpus = {"GPU": role.gpus} if role.gpus > 0 else {}
    here = {f"node:{ray.util.get_node_ip_address()}": NODE_SHARE}
    return Allotment(ray, devices, role, [gpus | here, *({"CPU": 1.0} | gpus for _ in _others(devices))])


def _own_gpu(ray: Any, devices: DevicesConfig, place: Allotment) -> int:
    """Return the index of this process's GPU among the visible ones."""
    if devices.gpus_per_trainer == 0:
        return 0
    finder = ray.remote(TrainerRank).options(**place.options(0) | {"num_cpus": 0}).remote()
    number: str = _await_all(ray, [finder.gpus.remote()])[0][0]
    ray.kill(finder, no_restart=True)
    seen = [word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
    return seen.index(number) if number in seen else int(number)


def _others(devices: DevicesConfig) -> range:
    return range(1, devices.trainer)


def _start(ray: Any, place: Allotment, rank: int, variables: Mapping[str, str]) -> Any:
    environment = worker_environment(1)
    environment["env_vars"] |= variables
    return ray.remote(TrainerRank).options(runtime_env=environment, **place.options(rank)).remote()


def _await_all(ray: Any, refs: list[Any]) -> list[Any]:
    """Return the ranks' first answers. RunStopped where one does not start."""
    try:
        found: list[Any] = ray.get(refs, timeout=START_SECONDS)
    except ray.exceptions.RayError as error:
        is_late = isinstance(error, TimeoutError)
        why = f"within {START_SECONDS:g} s; `ray status` shows what they wait for" if is_late else last_line(error)
        raise RunStopped(f"{len(refs)} processes of devices.trainer did not start: {why}") from error
    return found


def _end(ray: Any, running: list[Any]) -> None:
    """Wait for the other ranks, and report failures."""
    done, late = ray.wait(running, num_returns=len(running), timeout=END_SECONDS)
    if late:
        LOGGER.warning("%d trainer ranks did not exit within %g s; killing them", len(late), END_SECONDS)
    _say_why(ray, done)


def _say_why(ray: Any, done: list[Any]) -> None:
    for ref in done:
        try:
            ray.get(ref)
        except ray.exceptions.RayError as error:
            LOGGER.warning("a trainer rank ended with: %s", last_line(error))


def _numbers(rank: int, world_size: int, local_rank: int = 0) -> dict[str, str]:
    # Ray shows each actor its own GPUs alone, so every rank but this one takes the first that it sees.
    return {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(local_rank)}


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
