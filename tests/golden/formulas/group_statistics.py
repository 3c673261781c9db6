"""Statistics of groups and batches that leave out what was not scored (NaN)."""

from collections.abc import Hashable, Sequence

from .exact import MP, Real, mean, over


def groups_of(labels: Sequence[Hashable]) -> list[list[int]]:
    """Return the members of each group, in the order in which groups first appear."""
    members: dict[Hashable, list[int]] = {}
    for index, label in enumerate(labels):
        members.setdefault(label, []).append(index)
    return list(members.values())


def is_scored(reward: Real) -> bool:
    """Return False for NaN."""
    return not MP.isnan(reward)


def scored(members: Sequence[int], rewards: Sequence[Real]) -> list[int]:
    """Return the members whose reward is a number."""
    return [i for i in members if is_scored(rewards[i])]


def std(values: Sequence[Real], ddof: int) -> Real:
    """Return the standard deviation; 0 where fewer than ddof + 1 values are left."""
    if len(values) <= ddof:
        return MP.mpf(0)
    middle = mean(values)
    return MP.sqrt(over(sum((value - middle) ** 2 for value in values), len(values) - ddof))


def scaled(value: Real, spread: Real, eps: Real, mode: str = "add") -> Real:
    """Return value / (spread + eps), or / max(spread, eps) for mode "floor"; 0 / 0 is 0."""
    return over(value, spread + eps if mode == "add" else max(spread, eps))


def centered(members: Sequence[int], rewards: Sequence[Real]) -> dict[int, Real]:
    """Return reward minus mean of the scored members; exactly 0 where all rewards are equal."""
    present = scored(members, rewards)
    values = [rewards[i] for i in present]
    if len(set(values)) == 1:
        return {i: MP.mpf(0) for i in present}
    return {i: rewards[i] - mean(values) for i in present}
