"""Stateless processes that answer requests; lost ones are restarted and asked again."""

import threading
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from covey.cluster.roles import Allotment, role_of
from covey.cluster.settings import DevicesConfig
from covey.cluster.slot import last_line
from covey.cluster.start import (
    ClusterLost,
    connect,
    disconnect,
    import_ray,
    loss_of_cluster,
    watch_cluster,
    worker_environment,
)
from covey.engine.base import MOST_LOSSES
from covey.types import RunStopped

LOOK_SECONDS = 2.0
"""Seconds for the cluster to answer before it is asked to end processes, which end with the driver at the latest."""
POLL_SECONDS = 0.5
"""Signals, and whether the cluster lives, are looked at so often while an answer is waited for."""


@dataclass(frozen=True)
class Answerers:
    """Handles by which every process finds the answering actors."""

    role: str
    names: tuple[str, ...]

    def actors(self) -> list[Any]:
        """Return the actors, from any process of the cluster."""
        ray = import_ray()
        return [ray.get_actor(name, namespace="covey") for name in self.names]


class Serving:
    """The processes of one role, on rank 0 alone."""

    def __init__(
        self, devices: DevicesConfig, role: str, kind: type, given: Sequence[Any], loading: float, num_threads: int = 1
    ) -> None:
        """Start actors of `kind`, and wait at most `loading` seconds for them.

        ValueError where the cluster has no devices for them. RunStopped where they do not start.
        """
        self._is_own = connect(devices, 0)
        self._ray = import_ray()
        self._is_over = threading.Event()
        self._error: ClusterLost | None = None
        self._place: Allotment | None = None
        self._actors: list[Any] = []
        wanted = role_of(devices, role)
        names = tuple(f"{role}-{index}-{uuid.uuid4().hex}" for index in range(wanted.count))
        self.answerers = Answerers(role, names)
        try:
            self._place = Allotment(self._ray, devices, wanted)
            for index, name in enumerate(names):
                self._actors.append(self._start(kind, given, name, self._place.options(index), num_threads))
            self._await_all(loading)
        except Exception:
            self.close()
            raise
        watch_cluster(loading, self._lose, self._is_over)

    def answer(self, refs: list[Any]) -> list[Any]:
        """Return answers. RunStopped where the actors or the cluster are lost."""
        return answers_of(self._ray, refs, self.answerers.role, self.check)

    def check(self) -> None:
        """Raise ClusterLost where the cluster is gone."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End all processes, and a cluster that was started for them."""
        self._is_over.set()
        # Nobody is to be told where the cluster is lost, and calls of Ray may block
        if self._error is None and loss_of_cluster(LOOK_SECONDS) is None:
            for actor in self._actors:
                with suppress(Exception):
                    self._ray.kill(actor, no_restart=True)
            with suppress(Exception):
                if self._place is not None:
                    self._place.close()
        disconnect(self._is_own)

    def _lose(self, error: ClusterLost) -> None:
        self._error = error

    def _start(self, kind: type, given: Sequence[Any], name: str, place: dict[str, Any], num_threads: int) -> Any:
        return (
            self._ray.remote(kind)
            .options(
                **place,
                name=name,
                namespace="covey",
                max_restarts=MOST_LOSSES,
                max_task_retries=MOST_LOSSES,  # the same question has the same answer
                max_concurrency=1000 if self.answerers.role == "judge" else 1,
                runtime_env=worker_environment(num_threads),
            )
            .remote(*given)
        )

    def _await_all(self, loading: float) -> None:
        role = self.answerers.role
        try:
            self._ray.get([actor.ready.remote() for actor in self._actors], timeout=loading)
        except self._ray.exceptions.RayError as error:
            raise RunStopped(f"devices.{role}={len(self._actors)} could not start: {last_line(error)}") from error


def answers_of(ray: Any, refs: list[Any], role: str, check: Callable[[], None]) -> list[Any]:
    """Return the answers of a role's actors. RunStopped where they are lost.

    `check` is called while waiting, and raises to end the wait.
    """
    while True:
        check()  # before Ray is called, which may end the process where the cluster is lost
        done, late = ray.wait(refs, num_returns=len(refs), timeout=POLL_SECONDS)
        if not late:
            break
    try:
        found: list[Any] = ray.get(done)
    except ray.exceptions.RayError as error:
        raise lost(role, error) from error
    return found


def lost(role: str, error: Exception) -> Exception:
    """Return an actor's error: its own, or the loss of its process."""
    if isinstance(cause := getattr(error, "cause", None), Exception):
        return cause
    return RunStopped(f"a process of devices.{role} was lost {MOST_LOSSES} times, or its node: {last_line(error)}")
