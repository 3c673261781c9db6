"""A sampler's slot; calls end with an answer or its loss."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from covey.cluster.wire import Jobs, SampledBatch, TicketResult
from covey.rollouts.buffer import Ticket
from covey.rollouts.saved.journal import NOTHING_KEPT, KeptGroup
from covey.types import RunStopped


class SamplerLost(Exception):
    """A sampler's process is gone or was given up."""


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Seconds that the pool waits."""

    loading: float
    """Seconds for a sampler to load model and data."""
    silence: float
    """Seconds for a sign of life, and for weights to be taken."""


@dataclass(frozen=True, slots=True)
class TicketCall:
    """A ticket with callbacks for its result, called in the pool's thread."""

    ticket: Ticket
    settle: Callable[[Sequence[TicketResult]], None]
    give_up: Callable[[Ticket], Ticket]
    """Returns the ticket of the next attempt."""
    kept: KeptGroup = NOTHING_KEPT
    """Known parts of the group; it is given new ones."""


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A running call of a sampler, and its start."""

    call: TicketCall
    since: float


@dataclass(eq=False)
class SamplerSlot:
    """The place of one sampler and its successors."""

    index: int
    incarnation: int = 0
    actor: Any = None
    is_alive: bool = False
    version: int = -1
    """Version of the weights it was proved to sample on."""
    under_way: dict[int, UnderWay] = field(default_factory=dict)
    """Calls in progress by ticket number."""
    unsent: list[TicketCall] = field(default_factory=list)
    """Calls of these not sent to the sampler yet."""
    is_collecting: bool = False
    seconds_per_group: float = 0.0
    losses: int = 0
    """Losses since it last finished a group."""
    tokens: int = 0
    pid: int = 0
    idle_since: float = field(default_factory=time.monotonic)
    lost: "asyncio.Future[None] | None" = None
    """Done when this incarnation is given up."""
    pushing: asyncio.Lock = field(default_factory=asyncio.Lock)
    late_results: int = 0
    """Groups that came after their sampler was given up. Ray hands over none of an actor that it killed."""

    async def call(self, method: str, *given: Any) -> Any:
        """Call the actor. SamplerLost where it fails, dies or is given up."""
        assert self.lost is not None
        try:
            ref = getattr(self.actor, method).remote(*given)
        except Exception as error:  # what cannot be pickled is found here
            raise RunStopped(f"{method} cannot be asked of sampler {self.index}: {last_line(error)}") from error
        answer = asyncio.ensure_future(_answer(ref))
        try:
            await asyncio.wait({answer, self.lost}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            answer.cancel()
            raise
        if not answer.done():
            answer.add_done_callback(self._refuse)
            raise SamplerLost("it was given up")
        if answer.cancelled():
            raise SamplerLost(f"its answer to {method} was cancelled")
        return answer.result()

    async def update(self, version: int, weights: Any, silence: float) -> str:
        """Push weights; return the reason for a refusal, "" without one."""
        try:
            async with asyncio.timeout(silence):
                return str(await self.call("update", [weights]))
        except TimeoutError:
            return f"version {version} was not taken within {silence:g} s"
        except SamplerLost as lost:
            return str(lost)

    def expected_end(self) -> tuple[float, int, int]:
        """Return the expected end of one more group, with a tie-breaker."""
        num = len(self.under_way)
        return (num + 1) * max(self.seconds_per_group, 1e-3), num, self.index

    def status(self) -> dict[str, Any]:
        return {
            "sampler": self.index,
            "pid": self.pid,
            "state": "sampling" if self.under_way else "waiting" if self.is_alive else "starting",
            "version": self.version,
            "groups_under_way": len(self.under_way),
            "tokens": self.tokens,
            "restarts": self.incarnation - 1,
        }

    def begin(self, call: TicketCall) -> None:
        self.under_way[call.ticket.number] = UnderWay(call, time.monotonic())
        self.unsent.append(call)

    def take_unsent(self) -> Jobs:
        calls, self.unsent = self.unsent, []
        kept = {call.ticket.number: replace(call.kept, tell=None) for call in calls if call.kept.tell is not None}
        return Jobs(tuple(call.ticket for call in calls), self.incarnation, kept or None)

    def finish(self, batch: SampledBatch) -> list[tuple[TicketCall, TicketResult]]:
        """Return the results of calls, given-up ones left out."""
        self.tokens += batch.stats.sampled_tokens
        found = []
        for part in batch.parts if batch.incarnation == self.incarnation else ():
            call = self.under_way[part.number].call if part.number in self.under_way else None
            if call is not None and call.ticket.attempt == part.attempt:
                call.kept.add(part.kind, part.index, part.value)
        for sampled in batch.sampled:
            known = self.under_way.get(sampled.number)
            if known is None or batch.incarnation != self.incarnation or known.call.ticket.attempt != sampled.attempt:
                self.late_results += 1  # given up, or of a lost incarnation
                continue
            self._learn_speed(time.monotonic() - known.since)
            del self.under_way[sampled.number]
            found.append((known.call, TicketResult.of(known.call.ticket, sampled)))
        if not self.under_way:
            self.idle_since = time.monotonic()
        return found

    def give_up(self) -> list[TicketCall]:
        """Drop all calls of a lost process, and return them."""
        calls = [known.call for known in self.under_way.values()]
        self.under_way, self.unsent = {}, []
        return calls

    def _learn_speed(self, seconds: float) -> None:
        share = seconds / len(self.under_way)
        self.seconds_per_group = share if self.seconds_per_group == 0 else 0.8 * self.seconds_per_group + 0.2 * share
        self.losses = 0

    def take_late_results(self) -> int:
        """Count results that came too late since the last call."""
        late, self.late_results = self.late_results, 0
        return late

    def take_idle_seconds(self) -> float:
        """Return the sampler's idle seconds until now, counted once."""
        if not self.is_alive or self.under_way:
            return 0.0
        since, self.idle_since = self.idle_since, time.monotonic()
        return self.idle_since - since

    async def environment_metrics(self) -> dict[str, float]:
        """Return the environment's metrics since the last call, none without an answer."""
        if not self.is_alive:
            return {}
        try:
            return dict(await self.call("environment_metrics"))
        except SamplerLost:
            return {}

    def _refuse(self, answer: "asyncio.Task[Any]") -> None:
        if not answer.cancelled() and answer.exception() is None and isinstance(answer.result(), SampledBatch):
            self.late_results += len(answer.result().sampled)


async def _answer(ref: Any) -> Any:
    """Wait for an actor; anything but an answer is its loss."""
    try:
        return await ref
    except (Exception, KeyboardInterrupt) as error:  # Ray raises the actor's own classes; the latter would end the loop
        raise SamplerLost(last_line(error)) from None


def last_line(error: BaseException) -> str:
    """Return the last line of a Ray error's traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
