"""Do the work that a finished step leaves while the next samples."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Behind:
    """Does work in one thread, in order.

    After an error nothing more is done, and `settle` raises it. Work is done at once unless it is `apart`.

    >>> behind = Behind()
    >>> behind.do(lambda: write(row))
    >>> behind.settle()
    """

    def __init__(self) -> None:
        self.apart = False
        self._thread = ThreadPoolExecutor(1, "behind")
        self._last: Future[None] | None = None

    def do(self, work: Callable[[], object]) -> None:
        """Do the work after all that was given before."""
        if not self.apart:
            self.settle()
            work()
            return
        before = self._last

        def after() -> None:
            if before is not None:
                before.result()
            work()

        self._last = self._thread.submit(after)

    def settle(self) -> None:
        """Wait until all work is done. Raises its first error, once."""
        if self._last is not None:
            error = self._last.exception()  # a signal may end the wait, and then it is still to be waited for
            self._last = None
            if error is not None:
                raise error

    def close(self) -> None:
        """Finish what was begun, and settle."""
        self._thread.shutdown()
        self.settle()
