"""Work that is done beside the next step."""

import threading

import pytest

from covey.system.behind import Behind


def test_work_is_done_in_order_in_one_other_thread() -> None:
    behind, done = Behind(), list[tuple[int, str]]()
    behind.apart = True
    for number in range(3):
        behind.do(lambda number=number: done.append((number, threading.current_thread().name)))
    behind.settle()
    assert done == [(0, "behind_0"), (1, "behind_0"), (2, "behind_0")]
    behind.close()


def test_work_that_is_not_apart_is_done_at_once() -> None:
    behind, done = Behind(), list[str]()
    behind.do(lambda: done.append(threading.current_thread().name))
    assert done == ["MainThread"]
    behind.close()


def test_the_first_error_ends_what_follows_and_is_raised_once() -> None:
    behind, done = Behind(), list[int]()
    behind.apart = True

    def fail() -> None:
        raise OSError("disk full")

    behind.do(fail)
    behind.do(lambda: done.append(1))
    with pytest.raises(OSError, match="disk full"):
        behind.settle()
    behind.settle()
    behind.do(lambda: done.append(2))
    behind.close()
    assert done == [2]


def test_who_stops_waiting_can_wait_again() -> None:
    behind, gate, done = Behind(), threading.Event(), list[int]()
    behind.apart = True
    behind.do(lambda: done.append(int(gate.wait(10))))

    class Stopping:
        """A wait that a signal ends."""

        def exception(self) -> None:
            raise KeyboardInterrupt

        def result(self) -> None:
            return

    under_way, behind._last = behind._last, Stopping()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        behind.settle()
    assert isinstance(behind._last, Stopping)
    behind._last = under_way
    gate.set()
    behind.settle()
    behind.close()
    assert done == [1]
