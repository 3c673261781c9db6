"""The bound of staleness holds whatever the delays, deaths and drops; nothing is lost and nothing trained twice."""

import random
from dataclasses import dataclass, field

import pytest

from covey.rollouts.buffer import Bound, GroupBuffer, Ticket
from covey.types import Group, Prompt, Reward, Rollout, Sampling


def group(ticket: Ticket, version: int) -> Group:
    rollout = Rollout((1,), (2,), (True,), (-0.5,), Reward(1.0), "x", "stop", version)
    return Group(ticket.prompt, (rollout,), ())


@dataclass
class Schedule:
    """One random history of samplers and trainer, driven event by event."""

    bound: Bound
    seed: int
    window_too_wide: int = 0
    """Places by which the buffer under test admits more than its rule."""
    ages: list[int] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)

    def run(self, num_steps: int) -> None:
        rng = random.Random(self.seed)
        buffer = Wide(self.bound, self.window_too_wide) if self.window_too_wide else GroupBuffer(self.bound)
        lags = [rng.choice((0, 0, 1, 3)) for _ in range(3)]
        loaded = [0, 0, 0]
        under_way: dict[int, tuple[Ticket, int]] = {}
        rounds = 0
        while buffer.step < num_steps:
            self.admit(buffer)
            self.start(rng, buffer, under_way, loaded)
            self.happen(rng, buffer, under_way)
            # Each sampler loads the version that is live, some late, but never an older one.
            for sampler, lag in enumerate(lags):
                loaded[sampler] = max(loaded[sampler], buffer.live - rng.randint(0, lag))
            need = buffer._round_left
            if not buffer.is_ready(need):
                continue
            taken = buffer.take(need)
            dropped = sum(rng.random() < 0.2 for _ in taken) if rounds < 3 else 0
            for ticket, found in taken:
                self.ages.append(self.bound.age(found.rollouts[0].policy_version, buffer.step))
                self.trained.append(ticket.number)
            buffer.count(trained=len(taken) - dropped, dropped=dropped)
            rounds += 1
            if dropped and rounds < 4:
                buffer.open_round(dropped)
            else:
                rounds = 0
                buffer.close_step()
                if rng.random() < 0.5:
                    self.admit(buffer)
                buffer.publish(buffer.step)
        assert sorted(self.trained) == list(range(len(self.trained)))
        buffer.check_conservation()

    def admit(self, buffer: GroupBuffer) -> None:
        while buffer.room() > 0:
            buffer.admit(Prompt(f"p{buffer.admitted}", "e", "", {}), Sampling(), 1)

    def start(
        self, rng: random.Random, buffer: GroupBuffer, under_way: dict[int, tuple[Ticket, int]], loaded: list[int]
    ) -> None:
        """Let samplers start what demands no newer version than they have."""
        for ticket in buffer.waiting:
            version = loaded[rng.randrange(3)]
            if ticket.number not in under_way and version >= ticket.least_version and rng.random() < 0.5:
                under_way[ticket.number] = (ticket, version)

    def happen(self, rng: random.Random, buffer: GroupBuffer, under_way: dict[int, tuple[Ticket, int]]) -> None:
        """Finish some of what is under way, in any order, and lose some."""
        for number in rng.sample(sorted(under_way), k=rng.randint(0, len(under_way))):
            ticket, version = under_way.pop(number)
            if rng.random() < 0.1:
                buffer.give_up(ticket)
                assert not buffer.finish(ticket, group(ticket, version)), "a result of a lost sampler was believed"
            else:
                assert buffer.finish(ticket, group(ticket, version))
                assert not buffer.finish(ticket, group(ticket, version)), "a result was taken twice"


class Wide(GroupBuffer):
    """A buffer with a window that is some places too wide, and no check when groups are taken."""

    def __init__(self, bound: Bound, extra: int) -> None:
        super().__init__(bound)
        self.extra = extra

    def room(self) -> int:
        return super().room() + self.extra

    def admit(self, prompt: Prompt, sampling: Sampling, group_size: int) -> Ticket:
        ticket = Ticket(self.admitted, prompt, sampling, group_size, self.live)
        self._pending[ticket.number] = ticket
        self.admitted += 1
        return ticket

    def check_age(self, group: Group) -> None:
        return


BOUNDS = [Bound(g, s, p) for g in (1, 4) for s in (0, 1, 2, 4) for p in (1, 2)]


@pytest.mark.parametrize("bound", BOUNDS, ids=str)
def test_no_random_schedule_trains_a_group_beyond_the_bound(bound: Bound) -> None:
    for seed in range(64):  # 16 bounds x 64 = 1,024 schedules
        schedule = Schedule(bound, seed)
        schedule.run(num_steps=12)
        assert max(schedule.ages) <= bound.max_staleness
        assert min(schedule.ages) >= 0


def test_staleness_counts_the_versions_that_were_published_between() -> None:
    """Every fourth step publishes; an evaluation pushes the weights of now besides."""
    bound = Bound(4, 1, publish_every=4)
    assert [bound.age(version, step) for version, step in ((0, 3), (3, 4), (4, 7), (3, 8), (0, 8))] == [0, 1, 0, 2, 2]
    assert [bound.last_step(live) for live in (0, 3, 4)] == [7, 7, 11]
    assert [bound.least_version(step) for step in (0, 7, 8, 11)] == [0, 0, 4, 4]


@pytest.mark.parametrize("max_staleness", [1, 2, 4])
def test_the_bound_is_reached_where_samplers_are_ahead(max_staleness: int) -> None:
    schedule = Schedule(Bound(4, max_staleness), seed=1)
    schedule.run(num_steps=30)
    assert max(schedule.ages) == max_staleness


def test_a_window_one_place_too_wide_is_found() -> None:
    found = 0
    for seed in range(50):
        schedule = Schedule(Bound(4, 1), seed, window_too_wide=1)
        schedule.run(num_steps=20)
        found += max(schedule.ages) > 1
    assert found >= 40


def test_a_group_that_is_too_old_is_refused_when_it_is_taken() -> None:
    buffer = GroupBuffer(Bound(1, 1))
    for step in range(3):
        ticket = buffer.admit(Prompt(f"p{step}", "e", "", {}), Sampling(), 1)
        buffer.finish(ticket, group(ticket, 0))
        if step == 2:
            with pytest.raises(AssertionError, match="2 versions old, max_staleness=1"):
                buffer.take(1)
            return
        buffer.take(1)
        buffer.count(trained=1, dropped=0)
        buffer.close_step()
        buffer.publish(step + 1)


def test_nothing_starts_before_the_weights_are_live_where_nothing_may_be_stale() -> None:
    buffer = GroupBuffer(Bound(2, 0))
    assert buffer.room() == 2
    tickets = [buffer.admit(Prompt(f"p{i}", "e", "", {}), Sampling(), 1) for i in range(2)]
    assert buffer.room() == 0
    for ticket in tickets:
        buffer.finish(ticket, group(ticket, 0))
    buffer.take(2)
    buffer.count(trained=2, dropped=0)
    buffer.close_step()
    assert buffer.room() == 0
    buffer.publish(1)
    assert buffer.room() == 2
    assert buffer.admit(Prompt("p2", "e", "", {}), Sampling(), 1).least_version == 1


def test_a_prompt_that_got_lost_is_noticed() -> None:
    buffer = GroupBuffer(Bound(2, 0))
    ticket = buffer.admit(Prompt("p", "e", "", {}), Sampling(), 1)
    buffer._pending.pop(ticket.number)
    with pytest.raises(AssertionError, match="1 prompts admitted, 0 trained, dropped or pending"):
        buffer.check_conservation()


def tickets(number: int, first: int = 0) -> list[Ticket]:
    return [Ticket(first + place, Prompt(f"p{place}", "e", "", {}), Sampling(), 1, 0) for place in range(number)]


def test_an_unsampled_ticket_waits_for_the_weights_its_step_needs() -> None:
    """Four groups of two steps that were admitted for version 0, in a run of one group a step that is never stale."""
    buffer = GroupBuffer(Bound(1, 0))
    buffer.publish(9)
    buffer.restore(5, (14, 10, 0), tickets(4, first=10), {})
    assert (buffer.step, buffer.live) == (5, 0)
    buffer.publish(5)
    due, later = buffer.release(buffer.waiting)
    assert [(ticket.number, ticket.least_version) for ticket in due] == [(10, 5)]
    assert [(ticket.number, ticket.least_version) for ticket in later] == [(11, 6), (12, 7), (13, 8)]
    assert buffer.pending == (*due, *later)
    buffer.publish(6)
    assert [ticket.number for ticket in buffer.release(later[:2])[0]] == [11]


def test_a_stale_finished_group_is_resampled_after_a_resume() -> None:
    buffer, pending = GroupBuffer(Bound(1, 1)), tickets(3)
    versions = zip(pending, (4, 4, 6), strict=True)  # for steps 5, 6 and 7
    buffer.restore(5, (3, 0, 0), pending, {ticket.number: group(ticket, version) for ticket, version in versions})
    assert list(buffer.finished) == [0, 2]
    assert [ticket.number for ticket in buffer.waiting] == [1]


def test_a_groups_age_is_of_its_oldest_token() -> None:
    buffer, (ticket,) = GroupBuffer(Bound(1, 1), step=5), tickets(1)
    buffer.check_age(group(ticket, 4))
    mixed = Group(ticket.prompt, (*group(ticket, 3).rollouts, *group(ticket, 5).rollouts), ())
    for found, age in ((mixed, 2), (group(ticket, 6), -1)):
        with pytest.raises(AssertionError, match=f"is {age} versions old, max_staleness=1"):
            buffer.check_age(found)


def test_a_round_takes_its_own_groups_and_shows_which_of_them_are_complete() -> None:
    buffer = GroupBuffer(Bound(2, 1))
    admitted = [buffer.admit(ticket.prompt, ticket.sampling, 1) for ticket in tickets(4)]
    for place in (0, 3):
        buffer.finish(admitted[place], group(admitted[place], 0))
    assert [ticket.number for ticket, _ in buffer.complete(2)] == [0]
    assert [ticket.number for ticket, _ in buffer.complete(4)] == [0, 3]
    assert not buffer.is_ready(2)
    for place in (1, 2):
        buffer.finish(admitted[place], group(admitted[place], 0))
    with pytest.raises(AssertionError, match="3 groups taken, the round has 2 left"):
        buffer.take(3)
    buffer.publish(2)
    with pytest.raises(AssertionError, match="version 1 published after version 2"):
        buffer.publish(1)
