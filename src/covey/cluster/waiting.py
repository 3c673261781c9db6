"""Waits of the trainer for samplers, under the watchdog."""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from covey.cluster.wire import TicketResult, error_of
from covey.rollouts.buffer import Ticket
from covey.rollouts.saved.journal import KeptGroup
from covey.rollouts.saved.plain import SavedGroup
from covey.system.waits.watchdog import Watchdog
from covey.types import Group

POLL_SECONDS = 0.2
"""Signals are looked at so often while something is waited for."""
HAND_OVER_SECONDS = 1.0
"""The trainer waits so long at most for calls to be sent."""
PASSES = 4
"""Passes of the event loop, from a decision to the calls that follow from it."""


class SamplerWait:
    """The condition on which the trainer's thread waits, notified by the pool's."""

    def __init__(self, watchdog: Watchdog) -> None:
        self.changed = threading.Condition()
        """Guards the state that both threads share."""
        self.is_on = False
        self.seconds = 0.0
        """Seconds the trainer waited for groups, since last taken."""
        self._watchdog = watchdog
        self._error: Exception | None = None
        self._signs = 0

    def notice(self) -> None:
        self._signs += 1

    def note(self, result: TicketResult) -> None:
        """Record a result's error, if any."""
        if result.error is not None and self._error is None:
            self._error = error_of(*result.error)

    def take_whole(
        self, tickets: Sequence[Ticket], take: Callable[[Ticket, Group], bool], kept: Mapping[int, KeptGroup]
    ) -> list[Ticket]:
        """Give whole kept groups to `take`; return the other tickets."""
        left: list[Ticket] = []
        with self.changed:
            for ticket in tickets:
                found = kept[ticket.number].whole
                if found is None or len(found.rollouts) + len(found.failures) != ticket.group_size:
                    left.append(ticket)
                else:
                    take(ticket, found.group(ticket.prompt))
            self.changed.notify_all()
        return left

    def taking(
        self, take: Callable[[Ticket, Group], bool], kept: Mapping[int, KeptGroup]
    ) -> Callable[[Sequence[TicketResult]], None]:
        """Return a callback that gives groups to `take`, and keeps accepted ones."""

        def settle(results: Sequence[TicketResult]) -> None:
            with self.changed:
                for result in results:
                    self.note(result)
                    if result.group is not None and take(result.ticket, result.group):
                        kept[result.ticket.number].add("group", value=SavedGroup.of(result.group))
                        kept[result.ticket.number].add("end")
                self.changed.notify_all()

        return settle

    def until(
        self,
        is_done: Callable[[], bool],
        what: str,
        ended_by: Callable[[], Exception | None],
        setting: str = "timeouts.sampling",
    ) -> float:
        """Wait, and return the seconds; raise the error that ended the samplers.

        `ended_by` returns the pool's error. The watchdog ends a run in which no sampler gives a sign of work for
        `setting`.
        """
        started, signs, self.is_on = time.monotonic(), self._signs, True
        with self._watchdog.deadline(what, setting), self.changed:
            while not is_done():
                if (error := self._error or ended_by()) is not None:
                    raise error
                self.changed.wait(POLL_SECONDS)
                # Any sign of work winds the watchdog up again
                if signs != self._signs:
                    signs = self._signs
                    self._watchdog.progress()
        self.is_on = False
        return time.monotonic() - started

    def take_seconds(self) -> float:
        """Return the seconds waited since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def hand_over(loop: asyncio.AbstractEventLoop, what: Callable[[], None]) -> None:
    """Call `what` in an event loop's thread; wait until its calls start.

    Else that thread would wait for the interpreter, which the trainer keeps busy, while samplers wait for it.
    """

    async def tell() -> None:
        what()
        for _ in range(PASSES):
            await asyncio.sleep(0)

    told = asyncio.run_coroutine_threadsafe(tell(), loop)
    with suppress(TimeoutError):  # calls of Ray block without an answer, until the watch on the cluster ends them
        told.result(HAND_OVER_SECONDS)
