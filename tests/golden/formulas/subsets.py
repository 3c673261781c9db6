"""Advantages and selections that look at subsets of a group, all of them written out."""

from collections.abc import Callable, Sequence
from itertools import combinations

from .advantages import Inputs, clipped, group_center, none, per_group, rewards_of
from .exact import MP, Params, Real, above, mean, over
from .group_statistics import groups_of, scaled, scored, std

Subset = tuple[int, ...]


def best(rewards: Sequence[Real], members: Sequence[int], k: int) -> dict[Subset, Real]:
    """Return the largest reward of every k-subset of the members."""
    return {subset: max(rewards[i] for i in subset) for subset in combinations(members, k)}


def passk(params: Params, inputs: Inputs) -> list[Real]:
    """Z-score all k-subsets and give each member the mean over its own (Chen et al., arXiv 2508.10751)."""
    rewards = rewards_of(params, inputs)

    def advantages(members: list[int]) -> dict[int, Real]:
        if len(members) < params["k"]:
            return {}
        of_subset = best(rewards, members, params["k"])
        values = list(of_subset.values())
        middle, spread = mean(values), std(values, 0)
        if len(set(values)) == 1:
            return {i: MP.mpf(0) for i in members}
        return {
            i: scaled(mean([v for s, v in of_subset.items() if i in s]) - middle, spread, params["eps"])
            for i in members
        }

    return per_group(params, inputs, advantages)


def passk_by_products(params: Params, inputs: Inputs) -> dict[str, Real]:
    """Return mean and population std of the k-subsets' rewards, of the one group there is."""
    values = list(best(inputs["rewards"], range(len(inputs["rewards"])), params["k"]).values())
    return {"pass_at_k": mean(values), "subset_std": std(values, 0)}


def pkpo(params: Params, inputs: Inputs) -> list[Real]:
    """Return each member's share of the expected best of k, less a baseline (PKPO, arXiv 2505.15201)."""
    rewards, k, variant = rewards_of(params, inputs), params["k"], params["variant"]

    def transformed(members: list[int]) -> dict[int, Real]:
        n = len(members)
        if n < k + (variant == "loo"):
            return {}
        of_subset = best(rewards, members, k)
        result = {}
        for i in members:
            # s_i = (k/n) m_i is the sum over the subsets that contain i, over the number of all subsets.
            own = over(sum(v for s, v in of_subset.items() if i in s), len(of_subset))
            result[i] = own - _baseline(params, rewards, [j for j in members if j != i], n)
        return {i: (n if params["scale"] == "mean" else 1) * s for i, s in result.items()}

    return per_group(params, inputs, transformed)


def _baseline(params: Params, rewards: Sequence[Real], others: Sequence[int], n: int) -> Real:
    k, variant = params["k"], params["variant"]
    if variant == "none":
        return MP.mpf(0)
    # k = 1 with loo_minus_one is leave-one-out: there is no best of 0, so the baseline is the best of 1.
    drawn = k if variant == "loo" else max(k - 1, 1)
    share = over(k, n - 1) if variant == "loo" and params["loo_scale"] == "published" else over(k, n)
    return share * mean(list(best(rewards, others, drawn).values()))


def best_minus_second(params: Params, inputs: Inputs) -> list[Real]:
    """Give the best member its lead over the second, over the std if asked, and others 0 (arXiv 2503.19595)."""
    rewards = rewards_of(params, inputs)

    def lead(members: list[int]) -> dict[int, Real]:
        order = sorted(members, key=lambda i: rewards[i], reverse=True)
        gap = rewards[order[0]] - rewards[order[1]]
        if params["scale"] == "group_std":
            gap = scaled(gap, std([rewards[i] for i in members], params["ddof"]), params["eps"])
        return {order[0]: gap}

    return per_group(params, inputs, lead)


# ------------------------------------------------------------------------------------- selection


def kept_members(params: Params, inputs: Inputs) -> set[int]:
    """Return which completions a selection keeps; all scored ones of a group that is not larger."""
    rewards = rewards_of(params, inputs)
    choose = {"top_k": _top_k, "max_variance": _max_variance, "balanced_subset": _balanced}[params["select"]]
    return {i for members in groups_of(inputs["groups"]) for i in choose(params, inputs, scored(members, rewards))}


def _top_k(params: Params, inputs: Inputs, members: list[int]) -> Sequence[int]:
    rewards, by = rewards_of(params, inputs), params.get("rank_by", "reward")

    def rank(i: int) -> Real:
        if by == "reward":
            return rewards[i]
        length = inputs["lengths"][i]
        return -length if by == "length" else over(rewards[i], max(length, 1))

    return sorted(members, key=rank, reverse=True)[: params["k"]]  # stable: ties to the lower index


def _max_variance(params: Params, inputs: Inputs, members: list[int]) -> Sequence[int]:
    rewards, m = rewards_of(params, inputs), params["m"]
    if len(members) <= m:
        return members
    return _widest(list(combinations(members, m)), rewards)


def _widest(subsets: list[Subset], rewards: Sequence[Real]) -> Subset:
    """Return the first subset of largest variance."""
    spread = {subset: std([rewards[i] for i in subset], 0) for subset in subsets}
    chosen = subsets[0]
    for subset in subsets[1:]:
        chosen = subset if above(spread[subset], spread[chosen]) else chosen
    return chosen


def _balanced(params: Params, inputs: Inputs, members: list[int]) -> Sequence[int]:
    return balanced(params, rewards_of(params, inputs), members)


def balanced(params: Params, rewards: Sequence[Real], members: list[int]) -> Subset:
    """Return the subset whose mean is nearest the middle of the interval, then of widest spread, then first."""
    middle = (params["low"] + params["high"]) / 2
    subsets = list(combinations(members, min(params["group_size"], len(members))))
    distance = {subset: abs(mean([rewards[i] for i in subset]) - middle) for subset in subsets}
    nearest = min(distance.values())
    return _widest([subset for subset in subsets if not above(distance[subset], nearest)], rewards)


def selected(params: Params, inputs: Inputs) -> dict[str, list[Real] | Real]:
    """Return advantages of the kept completions, with the baseline over the group or over the kept ones."""
    estimate: Callable[[Params, Inputs], list[Real]] = {"group_center": group_center, "none": none}[params["estimator"]]
    kept, rewards = kept_members(params, inputs), rewards_of(params, inputs)
    seen = rewards if params.get("baseline_over", "selected") == "group" else _without(rewards, kept)
    values = clipped(params, estimate(params, inputs | {"rewards": seen}))
    return {
        "advantages": [value if i in kept else MP.mpf(0) for i, value in enumerate(values)],
        "keep": [int(i in kept) for i in range(len(rewards))],
        "variance": std([rewards[i] for i in sorted(kept)], 0) ** 2,
    }


def _without(rewards: Sequence[Real], kept: set[int]) -> list[Real]:
    return [reward if i in kept else MP.nan for i, reward in enumerate(rewards)]
