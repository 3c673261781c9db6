"""Do the work that a finished step leaves while the next samples."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext


class Behind:
    """Does work in one thread, in order.

    After an error nothing more is done, and `settle` raises it. Work is done at once unless it is `apart`.

    >>> behind = Behind()
    >>> behind.do("the row to be written", lambda: write(row))
    >>> behind.settle()
    """

    def __init__(self, waits: Callable[[str], AbstractContextManager[object]] = lambda name: nullcontext()) -> None:
        self.apart = False
        self._waits = waits  # around the wait for what has this name
        self._thread = ThreadPoolExecutor(1, "behind")
        self._given: list[tuple[str, Future[None]]] = []

    def do(self, name: str, work: Callable[[], object]) -> None:
        """Do the work after all that was given before."""
        if not self.apart:
            self.settle()
            work()
            return
        before = self._given[-1][1] if self._given else None

        def after() -> None:
            if before is not None:
                before.result()
            work()

        self._given.append((name, self._thread.submit(after)))

    def settle(self) -> None:
        """Wait until all work is done. Raises its first error, once."""
        while self._given:
            name, work = self._given[0]
            with self._waits(name):
                error = work.exception()  # a signal may end the wait, and then it is still to be waited for
            self._given.pop(0)
            if error is not None:
                self._given.clear()
                raise error

    def close(self) -> None:
        """Finish what was begun, and settle."""
        self._thread.shutdown()
        self.settle()
