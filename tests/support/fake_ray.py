"""A Ray of one process: actors live in the event loop that calls them. Tests put it in the place of the package."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any

import pytest


class RayError(Exception):
    """What every call of a dead actor raises."""


class RayTaskError(RayError):
    """What a call raises that the actor's own code failed in; as Ray does, with the cause's class among its own."""

    @staticmethod
    def of(cause: BaseException) -> BaseException:
        both: Any = type(f"RayTaskError({type(cause).__name__})", (RayTaskError, type(cause)), {})
        return both(f"ray::SamplerActor() (pid=1)\n  File x.py\n{type(cause).__name__}: {cause}")


DIED = "The actor died unexpectedly before finishing this task."


class Ready:
    """A reference to something that is there; it may be awaited again and again."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __await__(self) -> Iterator[Any]:
        yield from ()
        return self.value


@dataclass(eq=False)
class Method:
    actor: "Actor"
    name: str

    def remote(self, *given: Any) -> "asyncio.Future[Any]":
        return self.actor.call(self.name, given)


@dataclass(eq=False)
class Actor:
    """An object whose methods are called as tasks, until it is killed."""

    target: Any
    options: dict[str, Any]
    is_dead: bool = False
    is_frozen: bool = False
    """It answers nobody any more, and nobody is told."""
    is_deaf: bool = False
    """Whoever kills it is told that it died, and it goes on working, as on a node that is cut off."""
    epitaph: str = DIED
    calls: set["asyncio.Future[Any]"] = field(default_factory=set)
    tasks: set["asyncio.Task[None]"] = field(default_factory=set)

    def __getattr__(self, name: str) -> Method:
        return Method(self, name)

    def call(self, name: str, given: tuple[Any, ...]) -> "asyncio.Future[Any]":
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # called by a program without a loop, which waits with `get`
            value = getattr(self.target, name)(*given)
            if asyncio.iscoroutine(value):
                value = asyncio.run(value)
            return Ready(value)  # type: ignore[return-value]
        answer: asyncio.Future[Any] = loop.create_future()
        if self.is_dead:
            answer.set_exception(RayError(self.epitaph))
            return answer
        self.calls.add(answer)

        async def work() -> None:
            try:
                value = getattr(self.target, name)(*given)
                value = await value if asyncio.iscoroutine(value) else value
            except (Exception, KeyboardInterrupt) as error:
                if not answer.done() and not self.is_frozen:
                    answer.set_exception(error if isinstance(error, RayError) else RayTaskError.of(error))
            else:
                if not answer.done() and not self.is_frozen:
                    answer.set_result(value)
            finally:
                self.calls.discard(answer)

        self.tasks.add(loop.create_task(work()))
        return answer

    def die_soon(self) -> None:
        """Die in the loop of whoever calls it, as another thread may not settle futures."""
        for answer in list(self.calls):
            answer.get_loop().call_soon_threadsafe(self.die)
            return
        self.is_dead = True

    def die(self) -> None:
        """End as a process does that is killed."""
        self.is_dead = True
        for answer in list(self.calls):
            if not answer.done():
                answer.set_exception(RayError(DIED))
                answer.exception()  # nobody may be left to ask
        for task in self.tasks:
            task.cancel()


@dataclass(eq=False)
class Place:
    """A placement group."""

    bundles: list[dict[str, float]]
    strategy: str
    is_there: bool

    def wait(self, seconds: float) -> bool:
        return self.is_there


@dataclass
class FakeRay:
    """The functions of the package that covey calls."""

    resources: dict[str, float] = field(default_factory=lambda: {"CPU": 16.0, "GPU": 8.0})
    started_with: dict[str, Any] = field(default_factory=dict)
    actors: list[Actor] = field(default_factory=list)
    puts: int = 0
    is_cut_off: bool = False
    """The cluster answers nobody."""
    alive: bool = True
    """Of its only node."""
    is_full: bool = False
    """Of the object store."""
    groups: list["Place"] = field(default_factory=list)
    """Placement groups that hold devices."""
    is_taken: bool = False
    """Others hold all devices."""

    def __post_init__(self) -> None:
        self.exceptions = SimpleNamespace(RayError=RayError)
        strategies = SimpleNamespace(PlacementGroupSchedulingStrategy=lambda **given: SimpleNamespace(**given))
        self.util = SimpleNamespace(
            get_node_ip_address=lambda: "127.0.0.1",
            placement_group=self.place,
            remove_placement_group=self.groups.remove,
            scheduling_strategies=strategies,
        )
        self.__spec__ = ModuleSpec("ray", None)  # whoever asks whether the package is there looks for it

    def is_initialized(self) -> bool:
        return False

    def init(self, **given: Any) -> None:
        self.started_with = given

    def shutdown(self) -> None:
        self.started_with = {}

    def place(self, bundles: list[dict[str, float]], strategy: str) -> "Place":
        self.groups.append(Place(bundles, strategy, not self.is_taken))
        return self.groups[-1]

    def available_resources(self) -> dict[str, float]:
        return {} if self.is_taken else self.resources

    def get_gpu_ids(self) -> list[int]:
        return [0]

    def get_actor(self, name: str, namespace: str) -> Actor:
        return next(actor for actor in self.actors if actor.options.get("name") == name)

    def cluster_resources(self) -> dict[str, float]:
        return self.resources

    def get(self, refs: Any, timeout: float | None = None) -> Any:
        return [ref.value for ref in refs] if isinstance(refs, list) else refs.value

    def wait(self, refs: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        return refs, []

    def nodes(self) -> list[dict[str, Any]]:
        while self.is_cut_off:
            time.sleep(0.01)
        return [{"Alive": self.alive}]

    def put(self, value: Any) -> Ready:
        if self.is_full:
            raise RayError("The object store is full.")
        self.puts += 1
        return Ready(value)

    def remote(self, kind: type) -> Any:
        def start(options: dict[str, Any], given: tuple[Any, ...]) -> Actor:
            actor = Actor(None, options)
            self.actors.append(actor)
            try:
                actor.target = kind(*given)
            except Exception as error:  # callers are told, not who starts it
                actor.is_dead, actor.epitaph = True, f"The actor died because of {type(error).__name__}: {error}"
            return actor

        return SimpleNamespace(
            options=lambda **options: SimpleNamespace(remote=lambda *given: start(options, given)),
        )

    def kill(self, actor: Actor, no_restart: bool = True) -> None:
        if not actor.is_deaf:
            actor.die()


@contextmanager
def fake_ray(**given: Any) -> Iterator[FakeRay]:
    """Put the fake in the place of Ray."""
    fake = FakeRay(**given)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "ray", fake)
        patch.delenv("RAY_ADDRESS", raising=False)
        yield fake
