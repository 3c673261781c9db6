"""Diagnostics of groups, clips and answers."""

from collections.abc import Sequence
from itertools import combinations

from .advantages import Inputs
from .exact import MP, Expected, Params, Real, above, mean, over, valid
from .group_statistics import groups_of, is_scored, scored, std
from .off_policy import effective_samples, off_policy


def clip_fractions(params: Params, inputs: Inputs) -> Expected:
    """Return the share of tokens beyond a bound where A pushes further (clip_*), and beyond a bound at all."""
    low, high, out = [], [], []
    for i, t in valid(inputs["mask"]):
        rho = MP.exp(inputs["log_probs"][i][t] - inputs["old_log_probs"][i][t])
        below, beyond = above(1 - params["eps_low"], rho), above(rho, 1 + params["eps_high"])
        low.append(below and inputs["advantages"][i] < 0)
        high.append(beyond and inputs["advantages"][i] > 0)
        out.append(below or beyond)
    either = [a or b for a, b in zip(low, high, strict=True)]
    named = {"clip_low": low, "clip_high": high, "clip_fraction": either, "out_of_range_fraction": out}
    return {name: mean([int(flag) for flag in flags]) for name, flags in named.items()}


def groups(params: Params, inputs: Inputs) -> Expected:
    """Return how many groups teach nothing, and the mean spread of those that could."""
    rewards = inputs["rewards"]
    members = [[rewards[i] for i in scored(group, rewards)] for group in groups_of(inputs["groups"])]
    members = [values for values in members if values]
    spreads = [std(values, 1) for values in members if len(values) > 1]
    return {
        "reward_mean": mean([reward for reward in rewards if is_scored(reward)]),
        "mean_group_std": mean(spreads),
        "zero_std_fraction": mean([int(len(set(values)) == 1) for values in members]),
        "all_correct_fraction": mean([int(min(values) >= 1) for values in members]),
        "all_wrong_fraction": mean([int(max(values) <= 0) for values in members]),
        "unscored_fraction": mean([int(not is_scored(reward)) for reward in rewards]),
    }


def pass_at_k(params: Params, inputs: Inputs) -> Expected:
    """Return 1 - prod_{j = n-c+1..n} (1 - k/j), 1 where fewer than k are wrong (arXiv 2107.03374)."""
    n, c, k = inputs["n"], inputs["c"], params["k"]
    if n - c < k:
        return {"value": MP.mpf(1)}
    missed = MP.mpf(1)
    for j in range(n - c + 1, n + 1):
        missed *= 1 - over(k, j)
    return {"value": 1 - missed}


def avg_at_k(params: Params, inputs: Inputs) -> Expected:
    """Return the mean over prompts of the mean reward."""
    per_prompt = [mean(row) for row in inputs["rewards"]]
    return {"value": mean(per_prompt), "per_prompt": per_prompt}


def vote(answers: Sequence[str], correct: Sequence[Real]) -> Real:
    """Return whether the most frequent answer is right, ties to the one seen first."""
    winner = min(range(len(answers)), key=lambda i: (-answers.count(answers[i]), i))
    return correct[winner]


def majority_vote(params: Params, inputs: Inputs) -> Expected:
    """Return the vote of all samples."""
    return {"value": vote(inputs["answers"], inputs["correct"])}


def maj_at_k(params: Params, inputs: Inputs) -> Expected:
    """Return the mean vote of all k-subsets, each in the order of the samples."""
    answers, correct = inputs["answers"], inputs["correct"]
    subsets = combinations(range(len(answers)), params["k"])
    return {"value": mean([vote([answers[i] for i in s], [correct[i] for i in s]) for s in subsets])}


def diagnostics(params: Params, inputs: Inputs) -> Expected:
    """Return what a case of the documents "metrics_*" asks for."""
    named = {
        "groups": groups,
        "offpolicy": off_policy,
        "ess": effective_samples,
        "clip": clip_fractions,
        "pass_at_k": pass_at_k,
        "avg_at_k": avg_at_k,
        "majority_vote": majority_vote,
        "maj_at_k": maj_at_k,
    }
    return named[params.get("metric") or params["metrics"]](params, inputs)
