"""Work that is done beside the next step."""

import threading
from contextlib import AbstractContextManager, nullcontext

import pytest

from covey.system.behind import Behind


def test_work_is_done_in_order_in_one_other_thread() -> None:
    behind, done = Behind(), list[tuple[int, str]]()
    behind.apart = True
    for number in range(3):
        behind.do("work", lambda number=number: done.append((number, threading.current_thread().name)))
    behind.settle()
    assert done == [(0, "behind_0"), (1, "behind_0"), (2, "behind_0")]
    behind.close()


def test_work_that_is_not_apart_is_done_at_once() -> None:
    behind, done = Behind(), list[str]()
    behind.do("work", lambda: done.append(threading.current_thread().name))
    assert done == ["MainThread"]
    behind.close()


def test_the_first_error_ends_what_follows_and_is_raised_once() -> None:
    behind, done = Behind(), list[int]()
    behind.apart = True

    def fail() -> None:
        raise OSError("disk full")

    behind.do("work", fail)
    behind.do("work", lambda: done.append(1))
    with pytest.raises(OSError, match="disk full"):
        behind.settle()
    behind.settle()
    behind.do("work", lambda: done.append(2))
    behind.close()
    assert done == [2]


def test_who_stops_waiting_can_wait_again() -> None:
    behind, gate, done = Behind(), threading.Event(), list[int]()
    behind.apart = True
    behind.do("work", lambda: done.append(int(gate.wait(10))))

    class Stopping:
        """A wait that a signal ends."""

        def exception(self) -> None:
            raise KeyboardInterrupt

        def result(self) -> None:
            return

    under_way, behind._given = behind._given, [("work", Stopping())]  # type: ignore[list-item]
    with pytest.raises(KeyboardInterrupt):
        behind.settle()
    assert len(behind._given) == 1
    behind._given = under_way
    gate.set()
    behind.settle()
    behind.close()
    assert done == [1]


def test_a_wait_has_the_name_of_the_work_that_it_is_for() -> None:
    waited: list[str] = []

    def wait(name: str) -> AbstractContextManager[None]:
        waited.append(name)
        return nullcontext()

    behind = Behind(wait)
    behind.apart = True
    for name in ("logs", "checkpoint"):
        behind.do(name, lambda: None)
    behind.close()
    assert waited == ["logs", "checkpoint"]
