"""Advantages from the rewards of groups.

Each takes (params, inputs) and returns one number per completion, 0 where a completion was not scored.
"""

from collections.abc import Callable, Sequence
from typing import Any

from .exact import MP, Params, Real, clamp, mean, over
from .group_statistics import centered, groups_of, is_scored, scaled, scored, std

Inputs = dict[str, Any]


def rewards_of(params: Params, inputs: Inputs) -> list[Real]:
    """Return one reward per completion: the weighted sum of its parts where it has parts."""
    rewards = inputs.get("rewards") or [MP.mpf(0)] * len(inputs["groups"])
    if not isinstance(rewards[0], list):
        return rewards
    totals = []
    for row in rewards:
        parts = [w * r for w, r in zip(params["weights"], row, strict=True) if is_scored(r)]
        totals.append(sum(parts) if parts else MP.nan)
    return totals


def lengths_of(inputs: Inputs) -> list[int]:
    """Return the loss tokens of each completion, 1 where nothing is said about them."""
    if "mask" in inputs:
        return [sum(row) for row in inputs["mask"]]
    return list(inputs.get("lengths", [1] * len(inputs["groups"])))


def alone(params: Params, rewards: Sequence[Real], raw: Callable[[Real], Real], index: int) -> Real:
    """Return what the only scored member of a group gets; params singleton: zero (default), raw or error."""
    assert params.get("singleton") != "error", "a case of singleton=error needs complete groups"
    return raw(rewards[index]) if params.get("singleton") == "raw" else MP.mpf(0)


def per_group(
    params: Params,
    inputs: Inputs,
    formula: Callable[[list[int]], dict[int, Real]],
    raw: Callable[[Real], Real] = lambda reward: reward,
) -> list[Real]:
    """Apply `formula` to the scored members of each group of two or more."""
    rewards = rewards_of(params, inputs)
    result = [MP.mpf(0)] * len(rewards)
    for members in groups_of(inputs["groups"]):
        present = scored(members, rewards)
        values = formula(present) if len(present) > 1 else {i: alone(params, rewards, raw, i) for i in present}
        for index, value in values.items():
            result[index] = value
    return result


def group_zscore(params: Params, inputs: Inputs) -> list[Real]:
    """Return (r - mean) / (std + eps), or / max(std, eps) (GRPO, arXiv 2402.03300)."""
    rewards, eps, mode = rewards_of(params, inputs), params["eps"], params.get("eps_mode", "add")

    def zscores(members: list[int]) -> dict[int, Real]:
        spread = std([rewards[i] for i in members], params["ddof"])
        return {i: scaled(gap, spread, eps, mode) for i, gap in centered(members, rewards).items()}

    return per_group(params, inputs, zscores, lambda reward: scaled(reward, MP.mpf(1), eps, mode))


def group_center(params: Params, inputs: Inputs) -> list[Real]:
    """Return r - mean (Dr. GRPO, arXiv 2503.20783)."""
    rewards = rewards_of(params, inputs)
    return per_group(params, inputs, lambda members: centered(members, rewards))


def leave_one_out(params: Params, inputs: Inputs) -> list[Real]:
    """Return r minus the mean of the other members (RLOO, arXiv 2402.14740)."""
    rewards = rewards_of(params, inputs)

    def against_others(members: list[int]) -> dict[int, Real]:
        if len({rewards[i] for i in members}) == 1:
            return {i: MP.mpf(0) for i in members}
        return {i: rewards[i] - mean([rewards[j] for j in members if j != i]) for i in members}

    result = per_group(params, inputs, against_others)
    if params.get("post_normalize", "none") == "none":
        return result
    return batch_zscore(result, [is_scored(r) for r in rewards], params["ddof"], params["eps"])


def batch_zscore(values: Sequence[Real], counts: Sequence[bool], ddof: int, eps: Real) -> list[Real]:
    """Return (value - mean) / (std + eps) over the completions that count, 0 for the others."""
    present = [value for value, is_in in zip(values, counts, strict=True) if is_in]
    middle, spread = mean(present), std(present, ddof)
    gaps = (value - middle if len(set(present)) > 1 else MP.mpf(0) for value in values)
    return [scaled(gap, spread, eps) if is_in else MP.mpf(0) for gap, is_in in zip(gaps, counts, strict=True)]


def group_center_batch_std(params: Params, inputs: Inputs) -> list[Real]:
    """Return r - mean of the group, over one std of the whole batch (Lite PPO, arXiv 2508.08221)."""
    rewards = rewards_of(params, inputs)
    gaps = group_center({}, inputs)
    present = [i for i, reward in enumerate(rewards) if is_scored(reward)]
    spread = std([rewards[i] if params["std_of"] == "rewards" else gaps[i] for i in present], params["ddof"])
    shift = mean([gaps[i] for i in present]) if params.get("recenter") else MP.mpf(0)
    eps, mode = params["eps"], params.get("eps_mode", "add")
    return [scaled(g - shift, spread, eps, mode) if i in present else MP.mpf(0) for i, g in enumerate(gaps)]


def group_center_token_whiten(params: Params, inputs: Inputs) -> list[Real]:
    """Return r - mean, whitened over tokens (REINFORCE++-baseline, arXiv 2501.03262)."""
    counts = [is_scored(reward) for reward in rewards_of(params, inputs)]
    return token_whiten(group_center({}, inputs), counts, lengths_of(inputs), params)


def token_whiten(values: Sequence[Real], counts: Sequence[bool], lengths: Sequence[int], params: Params) -> list[Real]:
    """Subtract the mean over tokens and divide by sqrt(var + eps) (var_add) or sqrt(max(var, eps)) (var_floor)."""
    copies = [v for v, is_in, n in zip(values, counts, lengths, strict=True) if is_in for _ in range(n)]
    if len(copies) <= params["ddof"]:
        return [MP.mpf(0)] * len(values)
    middle, variance = mean(copies), std(copies, params["ddof"]) ** 2
    floored = variance + params["eps"] if params["eps_mode"] == "var_add" else max(variance, params["eps"])
    return [(v - middle) / MP.sqrt(floored) if i else MP.mpf(0) for v, i in zip(values, counts, strict=True)]


def reinforce_plus_plus(params: Params, inputs: Inputs) -> list[Real]:
    """Return rewards whitened over tokens, without groups (REINFORCE++, arXiv 2501.03262)."""
    rewards = rewards_of(params, inputs)
    counts = [is_scored(reward) for reward in rewards]
    return token_whiten(rewards, counts, lengths_of(inputs), params | {"eps_mode": "var_add"})


def opo(params: Params, inputs: Inputs) -> list[Real]:
    """Return r minus the mean weighted by length, or the plain mean of empty completions (OPO, arXiv 2505.23585)."""
    rewards, lengths = rewards_of(params, inputs), lengths_of(inputs)

    def against_weighted(members: list[int]) -> dict[int, Real]:
        written = sum(lengths[i] for i in members)
        weights = {i: lengths[i] if written else 1 for i in members}
        baseline = over(sum(weights[i] * rewards[i] for i in members), sum(weights.values()))
        equal = len({rewards[i] for i in members}) == 1
        return {i: MP.mpf(0) if equal else rewards[i] - baseline for i in members}

    return per_group(params, inputs, against_weighted)


def gpg(params: Params, inputs: Inputs) -> list[Real]:
    """Return alpha (r - mean) / F, alpha = N over the completions that carry a gradient (GPG, arXiv 2504.02546)."""
    rewards = rewards_of(params, inputs)
    spread = {}
    for members in groups_of(inputs["groups"]):
        spread |= {i: std([rewards[j] for j in scored(members, rewards)], 1) for i in scored(members, rewards)}
    informative = sum(s > 0 for s in spread.values())
    nonzero = sum(rewards[i] != 0 for i in spread)
    counted = informative if params["alpha"] == "informative_groups" else nonzero
    alpha = over(len(spread), counted) if counted else MP.mpf(1)
    norm = params["f_norm"]
    return [
        over(alpha * gap, spread.get(i, MP.mpf(1)) if norm == "group_std" else norm)
        for i, gap in enumerate(group_center(params, inputs))
    ]


def pairwise_scores(params: Params, inputs: Inputs) -> list[Real]:
    """Return the mean outcome of each completion against its siblings, 1/2 without any (difference: 0)."""
    rewards, form = rewards_of(params, inputs), params["form"]

    def outcome(i: int, j: int) -> Real:
        if form == "matrix":
            return inputs["preferences"][i][j]
        gap = rewards[i] - rewards[j]
        if form == "difference":
            return gap
        if form == "bradley_terry":
            return 1 / (1 + MP.exp(-gap / params["temperature"]))
        return MP.mpf(1) if gap > 0 else MP.mpf(0) if gap < 0 else MP.mpf("0.5")

    result = [MP.mpf(0) if form == "difference" else MP.mpf("0.5")] * len(rewards)
    for members in groups_of(inputs["groups"]):
        present = scored(members, rewards)
        for i in present if len(present) > 1 else []:
            result[i] = mean([outcome(i, j) for j in present if j != i])
    return result


def pairwise(params: Params, inputs: Inputs) -> list[Real]:
    """Return the outcomes minus 1/2, or z-scored within the group (Pref-GRPO, arXiv 2508.20751)."""
    rewards, outcomes = rewards_of(params, inputs), pairwise_scores(params, inputs)
    if params["post"] == "none":
        neutral = MP.mpf(0) if params["form"] == "difference" else MP.mpf("0.5")
        return [w - neutral if is_scored(r) else MP.mpf(0) for w, r in zip(outcomes, rewards, strict=True)]
    known = [w if is_scored(r) else MP.nan for w, r in zip(outcomes, rewards, strict=True)]
    return group_zscore(params, {"rewards": known, "groups": inputs["groups"]})


def gdpo(params: Params, inputs: Inputs) -> list[Real]:
    """Z-score each reward function on its own, add up and normalise once more (GDPO, arXiv 2601.05242)."""
    total = [MP.mpf(0)] * len(inputs["rewards"])
    for k, weight in enumerate(params["weights"]):
        column = {"rewards": [row[k] for row in inputs["rewards"]], "groups": inputs["groups"]}
        total = [s + weight * z for s, z in zip(total, group_zscore(params, column), strict=True)]
    counts = [any(map(is_scored, row)) for row in inputs["rewards"]]
    if params["post"] == "batch_zscore":
        return batch_zscore(total, counts, params["ddof"], params["eps"])
    whitening = {"ddof": 1, "eps": MP.mpf("1e-8"), "eps_mode": "var_add"}
    return token_whiten(total, counts, lengths_of(inputs), whitening)


def maxrl(params: Params, inputs: Inputs) -> list[Real]:
    """Return (r - mean) / mean, 0 where the mean is not positive (MaxRL, arXiv 2602.02710)."""
    rewards = rewards_of(params, inputs)

    def relative(members: list[int]) -> dict[int, Real]:
        middle = mean([rewards[i] for i in members])
        return {i: over(gap, max(middle, 0)) for i, gap in centered(members, rewards).items()}

    return per_group(params, inputs, relative)


def role_ema(params: Params, inputs: Inputs) -> list[Real]:
    """Return r - b of the role, in order, after which b moves towards r (SPIRAL, arXiv 2506.24119)."""
    baselines: dict[str, Real] = {}
    result = []
    for role, reward in zip(inputs["roles"], inputs["rewards"], strict=True):
        baseline = baselines.get(role, MP.mpf(0))
        result.append(reward - baseline if is_scored(reward) else MP.mpf(0))
        if is_scored(reward):
            baselines[role] = params["decay"] * baseline + (1 - params["decay"]) * reward
    return result


def none(params: Params, inputs: Inputs) -> list[Real]:
    """Return the rewards themselves."""
    return [r if is_scored(r) else MP.mpf(0) for r in rewards_of(params, inputs)]


def clipped(params: Params, values: Sequence[Real]) -> list[Real]:
    """Clamp to [-advantage_clip, advantage_clip] where that is set."""
    bound = params.get("advantage_clip")
    return list(values) if bound is None else [clamp(value, -bound, bound) for value in values]
