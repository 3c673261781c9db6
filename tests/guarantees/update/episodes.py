"""Groups of episodes: as one row each, as branches that repeat what went before, and with a rewritten history."""

import random
from collections.abc import Sequence
from dataclasses import replace

from covey.types import Group, Prompt, Reward, Rollout, Turn

Piece = tuple[tuple[int, ...], tuple[int, ...]]
"""What the environment says, and what the policy answers."""


def episode(prompt: Sequence[int], pieces: Sequence[Piece]) -> Rollout:
    """One sequence with a turn for each piece."""
    ids, chosen, turns = [*prompt], [False] * len(prompt), list[Turn]()
    for said, answered in pieces:
        ids += [*said, *answered]
        chosen += [False] * len(said) + [True] * len(answered)
        start = turns[-1].end if turns else 0
        turns.append(Turn(start, start + len(answered), 0.25 * len(turns)))
    mask = tuple(chosen[1:])
    judged, nothing = Reward(0.0, {}), (0.0,) * len(mask)
    return Rollout(tuple(ids[:-1]), tuple(ids[1:]), mask, nothing, judged, "", "stop", 0, turns=tuple(turns))


def episode_groups(seed: int = 0) -> list[Group]:
    """Group "a" of 1, 3 and 2 turns, long enough to be worth sharing; "b" of two that agree in their first turn."""
    chance = random.Random(f"episodes/{seed}")

    def drawn(length: int) -> tuple[int, ...]:
        return tuple(chance.randrange(1, 40) for _ in range(length))

    first, prompt = drawn(40), drawn(9)
    a = [
        [((), drawn(5))],
        [((), drawn(36)), (drawn(4), drawn(3)), (drawn(2), drawn(6))],
        [((), first), (drawn(1), drawn(4))],
    ]
    b = [[((), first), (drawn(3), drawn(2))], [((), first), (drawn(3), drawn(7))]]
    groups = []
    for name, opening, attempts in (("a", drawn(6), a), ("b", prompt, b)):
        rollouts = tuple(episode(opening, pieces) for pieces in attempts)
        groups.append(Group(Prompt(name, "test", "", {}), rollouts, ()))
    return groups


def as_branches(rollout: Rollout) -> Rollout:
    """The same episode with a sequence for each turn, up to its end, in which that turn alone is learnt."""
    places = [place for place, chosen in enumerate(rollout.loss_mask) if chosen]
    sequences = [(places[turn.end - 1] + 1, {*places[turn.start : turn.end]}) for turn in rollout.turns]
    return joined(rollout, [range(end) for end, _ in sequences], [own for _, own in sequences])


def rewritten(rollout: Rollout) -> Rollout:
    """The episode with every turn after the first read behind the prompt and the last tokens before it alone."""
    places = [place for place, chosen in enumerate(rollout.loss_mask) if chosen]
    kept = [[*range(places[rollout.turns[0].end - 1] + 1)]]
    for turn in rollout.turns[1:]:
        start, end = places[turn.start], places[turn.end - 1] + 1
        kept.append([*range(places[0]), *range(max(places[0], start - 2), end)])
    return joined(rollout, kept, [{*places[turn.start : turn.end]} for turn in rollout.turns])


def joined(rollout: Rollout, kept: Sequence[Sequence[int]], learnt: Sequence[set[int]]) -> Rollout:
    """A rollout of several sequences of the given positions of another, each with what is learnt in it."""
    pairs = [(place, place in own) for positions, own in zip(kept, learnt, strict=True) for place in positions]
    starts = [sum(map(len, kept[:index])) for index in range(len(kept))]
    return replace(
        rollout,
        input_ids=tuple(rollout.input_ids[place] for place, _ in pairs),
        target_ids=tuple(rollout.target_ids[place] for place, _ in pairs),
        loss_mask=tuple(own for _, own in pairs),
        sampler_logprobs=tuple(rollout.sampler_logprobs[place] if own else 0.0 for place, own in pairs),
        branches=tuple(starts),
    )


def changed(groups: Sequence[Group], change: object) -> list[Group]:
    """The groups with every rollout changed."""
    assert callable(change)
    return [replace(group, rollouts=tuple(change(rollout) for rollout in group.rollouts)) for group in groups]


def advantages_of_turns(groups: Sequence[Group]) -> list[list[tuple[float, ...]]]:
    """Numbers that differ from turn to turn."""
    chance = random.Random("advantages of turns")
    return [[tuple(chance.uniform(-2.0, 2.0) for _ in rollout.turns) for rollout in group.rollouts] for group in groups]
