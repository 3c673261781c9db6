"""Reward shaping and group filters."""

from collections.abc import Sequence

from .advantages import Inputs, group_center
from .exact import MP, Expected, Params, Real, above, mean, over
from .group_statistics import groups_of, is_scored, scored
from .subsets import balanced


def soft_overlong(params: Params, inputs: Inputs) -> Expected:
    """Return 0, then linearly down to -factor at max_len, and with floor no further (DAPO, arXiv 2503.14476)."""
    start = params["max_len"] - params["cache"]
    shares = [over(max(n - start, 0), params["cache"]) for n in inputs["lengths"]]
    return {"penalty": [-params["factor"] * (min(share, 1) if params["floor"] else share) for share in shares]}


def stop_properly(params: Params, inputs: Inputs) -> Expected:
    """Multiply a truncated completion's reward by coef >= 0, or put coef < 0 in its place (ProRL, OpenRLHF)."""
    coef = params["coef"]
    pairs = zip(inputs["rewards"], inputs["truncated"], strict=True)
    punished = ((r if not cut or not is_scored(r) else r * coef if coef >= 0 else coef) for r, cut in pairs)
    return {"rewards": list(punished)}


def repetition(params: Params, inputs: Inputs) -> Expected:
    """Return max_penalty times the share of n-grams that were there before (arXiv 2502.03373)."""
    return {"penalty": [params["max_penalty"] * _repeated(ids, params["ngram"]) for ids in inputs["token_ids"]]}


def _repeated(ids: Sequence[int], size: int) -> Real:
    grams = [tuple(ids[start : start + size]) for start in range(len(ids) - size + 1)]
    return 1 - over(len(set(grams)), len(grams)) if grams else MP.mpf(0)


def pass_rate_linear(params: Params, inputs: Inputs) -> Expected:
    """Return r minus the group's mean times its cost in tokens and turns, and that minus its mean (prime-rl)."""
    rewards, shaped = inputs["rewards"], list(inputs["rewards"])
    written, everything, turns = (inputs[name] for name in ("output_tokens", "total_tokens", "turns"))
    read = [total - own for total, own in zip(everything, written, strict=True)]
    costs = ((params["w_out"], written), (params["w_in"], read), (params["w_turns"], turns))
    for members in groups_of(inputs["groups"]):
        middle = mean([rewards[i] for i in scored(members, rewards)])
        for i in members:
            cost = sum(weight * over(counts[i], max(counts[j] for j in members)) for weight, counts in costs)
            shaped[i] = rewards[i] - middle * cost
    return {"rewards": shaped, "advantages": group_center({}, {"rewards": shaped, "groups": inputs["groups"]})}


def length_normalizer(params: Params, inputs: Inputs) -> Expected:
    """Return A times n^-alpha over the mean of that, 0 for empty completions (VL-Norm, arXiv 2509.07558)."""
    lengths = inputs["lengths"]
    weights = [MP.mpf(n) ** -params["alpha"] if n else MP.mpf(0) for n in lengths]
    middle = mean([weight for weight, n in zip(weights, lengths, strict=True) if n])
    return {"advantages": [a * over(w, middle) for a, w in zip(inputs["advantages"], weights, strict=True)]}


def shaping(params: Params, inputs: Inputs) -> Expected:
    """Return what a case of the document "reward_length_penalty" asks for."""
    named = (soft_overlong, stop_properly, repetition, pass_rate_linear, length_normalizer)
    return {function.__name__: function for function in named}[params["shaping"]](params, inputs)


def group_filter(params: Params, inputs: Inputs) -> Expected:
    """Return which groups are dropped, or which members of an over-sampled one are kept."""
    rewards = inputs["rewards"]
    if params["filter"] == "balanced_subset":
        return {"indices": list(balanced(params, rewards, scored(range(len(rewards)), rewards)))}
    members = [[rewards[i] for i in scored(group, rewards)] for group in groups_of(inputs["groups"])]
    return {"drop": [int(not _is_kept(params, values)) for values in members]}


def _is_kept(params: Params, values: Sequence[Real]) -> bool:
    if params["filter"] == "zero_std":
        return len(values) > 1 and above(max(values) - min(values), params["atol"])
    return bool(values) and above(mean(values), params["low"]) and above(params["high"], mean(values))
