"""Groups between admission and training: bounded staleness, none lost or trained twice.

Staleness of a group is the number of versions published between the weights its oldest token was sampled on and those
that the step which trains it starts from. It is bounded by admission, not by dropping: a prompt is admitted only while
the step that will train it starts from a version at most `max_staleness` newer than the one that is live now, and it
may only start on the version that this step demands. Proof: groups are trained in the order of admission, so the place
of a group among those that are pending says the step that trains it at the latest. Dropped groups only bring later ones
forward, and weights that are live are replaced by newer ones alone, so the difference can only shrink.

Nothing here knows of processes, time or tensors: every rule is tested without them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from covey.types import Group, Prompt, Sampling


@dataclass(frozen=True, slots=True)
class Ticket:
    """An admitted prompt, which will become one group.

    >>> Ticket(number=17, prompt=prompt, sampling=sampling, group_size=8, least_version=3)
    """

    number: int
    """Place in the order of admission, from 0."""
    prompt: Prompt
    sampling: Sampling
    """Sampling settings with the seed of this prompt's completions."""
    group_size: int
    least_version: int
    """Training steps behind the oldest weights it may start on."""
    attempt: int = 0
    """Number of earlier attempts, which were lost with their sampler."""

    def next_attempt(self) -> "Ticket":
        """Return the ticket of a new attempt; results of this one are refused."""
        return replace(self, attempt=self.attempt + 1)


@dataclass(frozen=True, slots=True)
class Bound:
    """The bound on how far sampling may run ahead of training."""

    groups_per_step: int
    max_staleness: int
    publish_every: int = 1
    """Steps from one published version to the next."""

    def last_step(self, live: int) -> int:
        """Return the last step that weights of `live` steps may sample for."""
        return (live // self.publish_every + self.max_staleness + 1) * self.publish_every - 1

    def least_version(self, step: int) -> int:
        """Return the oldest version that may sample for a step."""
        return max(0, step // self.publish_every - self.max_staleness) * self.publish_every

    def age(self, version: int, step: int) -> int:
        """Count the versions published between `version` and the step's own."""
        return step // self.publish_every - version // self.publish_every


@dataclass
class GroupBuffer:
    """Tickets and groups in order, and the one rule of admission.

    A step is filled in rounds: the first takes `groups_per_step` groups, each later one as many as the filter refused.
    """

    bound: Bound
    step: int = 0
    """The step that is filled now, or next."""
    live: int = 0
    """Training steps behind the weights that are sampled on."""
    admitted: int = 0
    trained: int = 0
    dropped: int = 0
    """Tickets so far: conservation is admitted = trained + dropped + pending."""
    finished: dict[int, Group] = field(default_factory=dict)
    """Finished groups by number."""
    _pending: dict[int, Ticket] = field(default_factory=dict)
    """Tickets by number, in the order of admission."""
    _round_left: int = field(init=False)
    """Groups that the present round still takes."""

    def __post_init__(self) -> None:
        self._round_left = self.bound.groups_per_step

    @property
    def pending(self) -> Sequence[Ticket]:
        """Return the admitted tickets that are not taken, in order."""
        return tuple(self._pending.values())

    @property
    def waiting(self) -> Sequence[Ticket]:
        """Return the admitted tickets that are not finished, in order."""
        return tuple(ticket for number, ticket in self._pending.items() if number not in self.finished)

    def room(self) -> int:
        """Count the prompts that may be admitted now."""
        steps_after_this = self.bound.last_step(self.live) - self.step
        return self._round_left + steps_after_this * self.bound.groups_per_step - len(self._pending)

    def next_step(self) -> int:
        """Return the step that trains the next admitted prompt at the latest."""
        return self._step_of(len(self._pending))

    def _step_of(self, place: int) -> int:
        """Return the step that trains this pending place at the latest."""
        ahead = place - self._round_left
        return self.step if ahead < 0 else self.step + 1 + ahead // self.bound.groups_per_step

    def admit(self, prompt: Prompt, sampling: Sampling, group_size: int) -> Ticket:
        """Admit a prompt. There must be room for it."""
        assert self.room() > 0, f"no room for a prompt more: step {self.step}, live {self.live}"
        least_version = self.bound.least_version(self.next_step())
        ticket = Ticket(self.admitted, prompt, sampling, group_size, least_version)
        self._pending[ticket.number] = ticket
        self.admitted += 1
        return ticket

    def release(self, held: Sequence[Ticket]) -> tuple[list[Ticket], list[Ticket]]:
        """Split unsampled tickets by whether they may start on live weights.

        Each demands the weights of the step that trains it now: the bound may have changed since it was admitted, and
        a round of the present step may reach it sooner than was thought.
        """
        numbers, due, later = {ticket.number for ticket in held}, list[Ticket](), list[Ticket]()
        for place, ticket in enumerate(self.pending):
            if ticket.number not in numbers:
                continue
            least_version = self.bound.least_version(self._step_of(place))
            self._pending[ticket.number] = replace(ticket, least_version=least_version)
            (due if least_version <= self.live else later).append(self._pending[ticket.number])
        return due, later

    def give_up(self, ticket: Ticket) -> Ticket:
        """Return a ticket for sampling again; the old one's results are refused."""
        assert self._pending[ticket.number] == ticket, f"ticket {ticket.number} is not pending"
        self._pending[ticket.number] = ticket.next_attempt()
        return self._pending[ticket.number]

    def finish(self, ticket: Ticket, group: Group) -> bool:
        """Store a ticket's group; return False for a given-up attempt."""
        if self._pending.get(ticket.number) != ticket or ticket.number in self.finished:
            return False
        self.finished[ticket.number] = group
        return True

    def is_ready(self, n: int) -> bool:
        """Return True if the first n pending tickets are finished."""
        first = list(self._pending)[:n]
        return len(first) == n and all(number in self.finished for number in first)

    def complete(self, n: int) -> list[tuple[Ticket, Group]]:
        """Return the finished of the first n pending tickets, without taking them."""
        first = list(self._pending.values())[:n]
        return [(ticket, self.finished[ticket.number]) for ticket in first if ticket.number in self.finished]

    def open_round(self, n: int) -> None:
        """Let the present step take n groups more."""
        assert self._round_left == 0, "the round before is not over"
        self._round_left = n

    def take(self, n: int) -> list[tuple[Ticket, Group]]:
        """Take the first n groups for this step, none older than the bound."""
        assert self.is_ready(n), "wait until they are ready"
        assert n <= self._round_left, f"{n} groups taken, the round has {self._round_left} left"
        taken = []
        for number in list(self._pending)[:n]:
            ticket, group = self._pending.pop(number), self.finished.pop(number)
            self.check_age(group)
            taken.append((ticket, group))
        self._round_left -= n
        return taken

    def check_age(self, group: Group) -> None:
        """Assert that no token of a group is older than the bound."""
        age = self._age(group, self.step)
        assert 0 <= age <= self.bound.max_staleness, (
            f"a group of prompt {group.prompt.id} is {age} versions old, max_staleness={self.bound.max_staleness}"
        )

    def count(self, *, trained: int, dropped: int) -> None:
        """Count taken groups, and assert that none is lost."""
        self.trained += trained
        self.dropped += dropped
        self.check_conservation()

    def check_conservation(self) -> None:
        """Assert that every prompt handed out is trained, dropped or pending."""
        known = self.trained + self.dropped + len(self._pending)
        assert self.admitted == known, f"{self.admitted} prompts admitted, {known} trained, dropped or pending"

    def close_step(self) -> None:
        """End the present step: it takes no more groups."""
        self.step += 1
        self._round_left = self.bound.groups_per_step

    def publish(self, version: int) -> None:
        """Mark the weights after `version` training steps as live."""
        assert version >= self.live, f"version {version} published after version {self.live}"
        self.live = version

    def restore(
        self, step: int, counts: tuple[int, int, int], pending: Sequence[Ticket], finished: Mapping[int, Group]
    ) -> None:
        """Restore the state between two steps, possibly under another bound.

        Groups unfinished, or too old for the step that would train them, are to be sampled again (`release`).
        """
        self.step, self.live, (self.admitted, self.trained, self.dropped) = step, 0, counts
        self._pending = {ticket.number: ticket for ticket in pending}
        self._round_left = self.bound.groups_per_step
        self.finished = {
            number: finished[number]
            for place, number in enumerate(self._pending)
            if number in finished and self._age(finished[number], self._step_of(place)) <= self.bound.max_staleness
        }
        self.check_conservation()

    def _age(self, group: Group, step: int) -> int:
        oldest = min((rollout.policy_version for rollout in group.rollouts), default=step)
        return self.bound.age(oldest, step)
