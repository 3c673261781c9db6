"""How busy a cluster is, and how old what it trains on, as a function of `max_staleness`: simulated, not measured.

Two models. `predict` is twenty lines: groups with known service times, a number of places, a trainer. `simulate` is a
simulation of discrete events: replicas that decode in continuous batches, rewards that take their time, a trainer,
pushes of weights in flight or after draining. Both admit by the rule that real runs use
(`covey.rollouts.buffer.GroupBuffer` admits, hands out the least version and asserts the bound in `simulate`).
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from statistics import fmean
from typing import Literal

from covey.rollouts.buffer import Bound, GroupBuffer, Ticket
from covey.types import Group, Prompt, Reward, Rollout, Sampling

PROMPT = Prompt("any", "none", "", {})
SAMPLING = Sampling()
OLDEST = Rollout((0,), (0,), (True,), (0.0,), Reward(0.0), "", "stop", 0)
"""What a group holds here: the age of its oldest token is all that the buffer looks at."""


# ------------------------------------------------------------------------------------------------------ predictor


@dataclass(frozen=True)
class Prediction:
    """What a run of so many groups would take."""

    step_seconds: float
    """Mean over the steps after the first `max_staleness + 1`, in which the pipeline fills."""
    waited_share: float
    """Share of the time in which the trainer waits for groups, over all steps."""
    ages: tuple[int, ...]
    """Versions behind, of each group when its step begins, had it kept the weights it started on."""


def predict(
    seconds: Sequence[float],
    places: int,
    bound: Bound,
    train_seconds: float,
    push_seconds: float = 0.0,
) -> Prediction:
    """Return how long steps take where group k takes seconds[k] in any of `places` places.

    Group k starts once a place is free and the version that its step demands is live; a step starts once its groups
    are there, and its weights are live `push_seconds` after it is over. Measured service times give a prediction for
    a measured run; a multiple of `bound.groups_per_step` is used.
    """
    free = [0.0] * places
    live = [0.0]  # the time at which so many optimiser steps are behind the live weights
    waited, ends, ages = 0.0, [0.0], []
    for step in range(len(seconds) // bound.groups_per_step):
        demanded = live[bound.least_version(step)]
        ready = 0.0
        for k in range(step * bound.groups_per_step, (step + 1) * bound.groups_per_step):
            start = max(heapq.heappop(free), demanded)
            newest = max(version for version in range(step + 1) if live[version] <= start)
            ages.append(bound.age(newest, step))
            heapq.heappush(free, start + seconds[k])
            ready = max(ready, start + seconds[k])
        waited += max(0.0, ready - ends[-1])
        ends.append(max(ends[-1], ready) + train_seconds)
        is_published = (step + 1) % bound.publish_every == 0
        live.append(ends[-1] + push_seconds if is_published else math.inf)
    first = min(bound.max_staleness + 1, len(ends) - 2)
    return Prediction((ends[-1] - ends[first]) / (len(ends) - 1 - first), waited / ends[-1], tuple(ages))


def least_bound(longest: float, train_seconds: float, push_seconds: float, seconds_per_batch: float) -> int:
    """Return the smallest bound at which the trainer need not wait: more than that only ages the data.

    `longest` is the time of the slowest group of a batch, `seconds_per_batch` what all samplers together take for one.
    """
    around = longest + train_seconds + push_seconds
    return max(0, math.ceil(around / max(train_seconds, seconds_per_batch)) - 1)


# ----------------------------------------------------------------------------------------------------- simulation


@dataclass(frozen=True)
class Cluster:
    """Devices, model and work of a run; seconds, tokens."""

    samplers: int
    trainers: int
    groups_per_step: int = 64
    group_size: int = 8
    max_staleness: int = 0
    places: int = 64
    """Completions that one sampler decodes at a time."""
    decode_seconds: float = 0.010
    """Of one token of every completion under way, and for each of these ..."""
    decode_seconds_each: float = 0.0001
    """... so much more."""
    mean_tokens: float = 2000.0
    sigma: float = 1.0
    """Lengths are lognormal: the deviation of their logarithm."""
    most_tokens: int = 16000
    reward_seconds: float = 0.0
    """Mean of an exponential distribution; a completion has left its place meanwhile."""
    train_seconds_per_token: float = 0.00045
    """Of one device; devices share the tokens of a step evenly."""
    push_seconds: float = 2.0
    """From the end of a step to new weights in all samplers, which decode nothing meanwhile."""
    drain: Literal["none", "each", "all", "blocking"] = "none"
    """Weights change in flight; or each sampler ends what is under way first; or all of them do and push together; or
    the trainer also waits for that push before its next step."""
    switch_seconds: float = 0.0
    """Of colocated devices (as many `samplers` as `trainers`, bound 0) from one role to the other, in a step."""


@dataclass(frozen=True)
class Utilisation:
    """What a simulated run was like once its pipeline was full."""

    step_seconds: float
    trainer_busy: float
    """Share of the time in which the trainer trains or pushes."""
    sampler_busy: float
    """Share of the time in which a sampler decodes anything, mean over samplers."""
    mean_age: float
    """Versions, of the oldest token of each group when its step begins."""
    max_age: int
    tokens_per_second: float


@dataclass(eq=False)
class _Group:
    ticket: Ticket
    lengths: tuple[int, ...]
    version: int = 0
    left: int = 0
    tokens: int = 0


@dataclass(eq=False)
class _Replica:
    """One sampler: completions share its decoding, so its clock counts tokens of each and runs slower when full."""

    version: int = 0
    tokens: float = 0.0
    seen: float = 0.0
    is_stalled: bool = False
    busy: float = 0.0
    active: list[tuple[float, int, _Group]] = field(default_factory=list)
    """By the token at which it ends."""
    epoch: int = 0
    """Of its next event; events of older ones are void."""


class Simulation:
    """One run, event by event."""

    def __init__(self, cluster: Cluster, seed: int = 0) -> None:
        self.cluster, self.now = cluster, 0.0
        self.buffer = GroupBuffer(Bound(cluster.groups_per_step, cluster.max_staleness))
        self._random = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._replicas = [_Replica() for _ in range(cluster.samplers)]
        self._queue: deque[_Group] = deque()
        self._pushed = 0
        self._is_training = False
        self._is_dispatch_due = False
        self._ready = 0
        """Number of the first group that is not finished."""
        self._finished_tokens: dict[int, int] = {}
        self.ends: list[float] = []
        self.train_seconds: list[float] = []
        self.ages: list[list[int]] = []
        self.trained_tokens: list[int] = []
        self.busy: list[float] = []
        """Seconds that all samplers together have decoded, at the end of each step."""

    def run(self, steps: int) -> None:
        """Go on until so many steps are over."""
        self._admit()
        while len(self.ends) < steps:
            self.now, _, event = heapq.heappop(self._events)
            event()

    # ----------------------------------------------------------------------------------------------- sampling

    def _at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), event))

    def _admit(self) -> None:
        for _ in range(self.buffer.room()):
            ticket = self.buffer.admit(PROMPT, SAMPLING, self.cluster.group_size)
            lengths = tuple(self._length() for _ in range(self.cluster.group_size))
            self._queue.append(_Group(ticket, lengths))
        self._dispatch(self._replicas)

    def _length(self) -> int:
        middle = math.log(self.cluster.mean_tokens) - self.cluster.sigma**2 / 2
        drawn = self._random.lognormvariate(middle, self.cluster.sigma)
        return max(1, min(self.cluster.most_tokens, round(drawn)))

    def _dispatch(self, among: Sequence[_Replica]) -> None:
        """Start groups, in their order, in the sampler among these that has least to do."""
        if not self._queue:
            return
        free = [(len(replica.active), place) for place, replica in enumerate(among)]
        heapq.heapify(free)
        while self._queue and free:
            _, place = heapq.heappop(free)
            replica = among[place]
            if self._may_start(replica, self._queue[0]):
                self._start(replica, self._queue.popleft())
                heapq.heappush(free, (len(replica.active), place))

    def _dispatch_to_all(self) -> None:
        self._is_dispatch_due = False
        self._dispatch(self._replicas)

    def _start(self, replica: _Replica, group: _Group) -> None:
        self._advance(replica)
        group.version, group.left, group.tokens = replica.version, len(group.lengths), sum(group.lengths)
        for length in group.lengths:
            heapq.heappush(replica.active, (replica.tokens + length, next(self._numbers), group))
        self._schedule(replica)

    def _may_start(self, replica: _Replica, group: _Group) -> bool:
        has_room = len(replica.active) + len(group.lengths) <= max(self.cluster.places, len(group.lengths))
        is_new_enough = replica.version >= group.ticket.least_version
        waits_to_drain = self.cluster.drain != "none" and replica.version < self._pushed
        return has_room and is_new_enough and not replica.is_stalled and not waits_to_drain

    def _advance(self, replica: _Replica) -> None:
        """Bring the clock of a sampler up to now."""
        if replica.active and not replica.is_stalled:
            replica.tokens += (self.now - replica.seen) / self._seconds_per_token(replica)
            replica.busy += self.now - replica.seen
        replica.seen = self.now

    def _seconds_per_token(self, replica: _Replica) -> float:
        return self.cluster.decode_seconds + self.cluster.decode_seconds_each * len(replica.active)

    def _schedule(self, replica: _Replica) -> None:
        replica.epoch += 1
        if not replica.active or replica.is_stalled:
            return
        epoch = replica.epoch
        left = max(0.0, replica.active[0][0] - replica.tokens)
        self._at(self.now + left * self._seconds_per_token(replica), lambda: self._end_one(replica, epoch))

    def _end_one(self, replica: _Replica, epoch: int) -> None:
        if epoch != replica.epoch:
            return
        self._advance(replica)
        end, _, group = heapq.heappop(replica.active)
        replica.tokens = end
        group.left -= 1
        if group.left == 0:
            seconds = self._random.expovariate(1 / self.cluster.reward_seconds) if self.cluster.reward_seconds else 0.0
            self._at(self.now + seconds, lambda: self._finish(group))
        self._schedule(replica)
        if not replica.active and replica.version < self._pushed:
            self._load_where_due()
        self._dispatch((replica,))

    def _finish(self, group: _Group) -> None:
        number = group.ticket.number
        self._finished_tokens[number] = group.tokens
        self.buffer.finish(group.ticket, Group(PROMPT, (replace(OLDEST, policy_version=group.version),), ()))
        while self._ready in self.buffer.finished:
            self._ready += 1
        self._train()

    # ----------------------------------------------------------------------------------------------- training

    def _train(self) -> None:
        """Start the next step where its groups are there."""
        n = self.cluster.groups_per_step
        if self._is_training or self._ready < n * (self.buffer.step + 1):
            return
        if self.cluster.drain == "blocking" and any(replica.version < self._pushed for replica in self._replicas):
            return
        taken = self.buffer.take(n)
        step = self.buffer.step
        self.ages.append([self.buffer.bound.age(group.rollouts[0].policy_version, step) for _, group in taken])
        tokens = sum(self._finished_tokens.pop(ticket.number) for ticket, _ in taken)
        self.trained_tokens.append(tokens)
        seconds = tokens * self.cluster.train_seconds_per_token / self.cluster.trainers + self.cluster.switch_seconds
        self.train_seconds.append(seconds)
        self._is_training = True
        self._at(self.now + seconds, self._end_step)

    def _end_step(self) -> None:
        self.buffer.count(trained=self.cluster.groups_per_step, dropped=0)
        self.buffer.close_step()
        self._is_training = False
        self._pushed = self.buffer.step
        self.buffer.publish(self._pushed)
        for replica in self._replicas:
            self._advance(replica)
        self._load_where_due()
        self.ends.append(self.now)
        self.busy.append(sum(replica.busy for replica in self._replicas))
        self._admit()
        self._train()

    def _load_where_due(self) -> None:
        """Have samplers with old weights take the newest, where they need not be drained first."""
        if self.cluster.drain in ("all", "blocking") and any(replica.active for replica in self._replicas):
            return
        for replica in self._replicas:
            if replica.version < self._pushed and not (self.cluster.drain == "each" and replica.active):
                self._load(replica)

    def _load(self, replica: _Replica) -> None:
        """Take new weights: nothing is decoded meanwhile."""
        if replica.is_stalled:
            return
        self._advance(replica)
        replica.is_stalled = True
        self._schedule(replica)
        version = self._pushed
        self._at(self.now + self.cluster.push_seconds, lambda: self._loaded(replica, version))

    def _loaded(self, replica: _Replica, version: int) -> None:
        self._advance(replica)
        replica.is_stalled, replica.version = False, version
        if replica.version < self._pushed:
            self._load(replica)
        self._schedule(replica)
        self._train()
        if not self._is_dispatch_due:  # once all that load at this moment are done
            self._is_dispatch_due = True
            self._at(self.now, self._dispatch_to_all)


def simulate(cluster: Cluster, steps: int = 40, seed: int = 0) -> Utilisation:
    """Return how busy the parts of a cluster are, over at least `steps` steps after the pipeline has filled.

    Where samplers are slow, steps come in bursts of max_staleness + 1: whole bursts are looked at.
    """
    burst = cluster.max_staleness + 1
    fill, steps = burst + 1, burst * max(2, math.ceil(steps / burst))
    simulation = Simulation(cluster, seed)
    simulation.run(fill + steps)
    span = simulation.ends[-1] - simulation.ends[fill - 1]
    ages = [age for ages in simulation.ages[fill : fill + steps] for age in ages]
    trained = sum(simulation.train_seconds[fill : fill + steps]) + steps * cluster.push_seconds
    return Utilisation(
        step_seconds=span / steps,
        trainer_busy=min(1.0, trained / span),
        sampler_busy=(simulation.busy[-1] - simulation.busy[fill - 1]) / span / cluster.samplers,
        mean_age=fmean(ages),
        max_age=max(ages),
        tokens_per_second=sum(simulation.trained_tokens[fill : fill + steps]) / span,
    )


def splits(devices: int, parts: int = 16) -> Iterator[tuple[int, int]]:
    """Yield ways to share devices between samplers and trainers: sixteenths of them, or fewer parts."""
    for part in range(1, parts):
        samplers = devices * part // parts
        if 0 < samplers < devices and (devices * (part - 1) // parts != samplers):
            yield samplers, devices - samplers


def best_split(cluster: Cluster, steps: int = 40, parts: int = 16) -> tuple[Cluster, Utilisation]:
    """Return the split of a cluster's devices with the shortest step, and what it is like.

    Steps get shorter up to the best split and longer after it, so the search halves.
    """
    devices = cluster.samplers + cluster.trainers
    choices = [replace(cluster, samplers=samplers, trainers=trainers) for samplers, trainers in splits(devices, parts)]
    tried: dict[int, Utilisation] = {}

    def seconds(place: int) -> float:
        if place not in tried:
            tried[place] = simulate(choices[place], steps)
        return tried[place].step_seconds

    low, high = 0, len(choices) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if seconds(middle) <= seconds(middle + 1) else (middle + 1, high)
    seconds(low)
    best = min(tried, key=lambda place: tried[place].step_seconds)
    return choices[best], tried[best]
