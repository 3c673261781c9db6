"""Corrections for data that another policy mu sampled. u = log pi_old - log mu."""

from collections.abc import Sequence

from .advantages import Inputs
from .exact import MP, Expected, Params, Real, above, clamp, mean, over, valid
from .kl import bounded

Table = list[list[Real]]


def log_weights(
    old: Table, sampler: Table, mask: Sequence[Sequence[int]], level: str = "token", bound: Real = None
) -> list[dict[int, Real]]:
    """Return the log weight of every token by row: u, or its sum or mean over the row, clamped to +-bound."""
    result = []
    for i, row in enumerate(mask):
        gaps = {t: old[i][t] - sampler[i][t] for t, counts in enumerate(row) if counts}
        whole = sum(gaps.values(), MP.mpf(0))
        logs = {"token": gaps, "sequence": dict.fromkeys(gaps, whole)}.get(level)
        logs = dict.fromkeys(gaps, over(whole, len(gaps))) if logs is None else logs
        result.append({t: bounded(log, bound) for t, log in logs.items()})
    return result


def importance_weights(options: Params, old: Table, sampler: Table, mask: Sequence[Sequence[int]]) -> Table:
    """Return exp of the log weights, truncated to [min, max], or 0 outside (mask), before normalising."""
    low, high = options.get("min"), options.get("max")
    logs = log_weights(old, sampler, mask, options["level"], options.get("log_ratio_clamp", MP.mpf(20)))
    result = [[MP.mpf(0)] * len(row) for row in mask]
    for i, t in valid(mask):
        weight = MP.exp(logs[i][t])
        is_out = (low is not None and above(low, weight)) or (high is not None and above(weight, high))
        if options["mode"] == "truncate":
            result[i][t] = clamp(weight, low, high)
        else:
            result[i][t] = MP.mpf(0) if is_out else weight
    return result


def weights(params: Params, inputs: Inputs) -> Expected:
    """Return the weights, divided by their mean over tokens or over sequences where asked, and their metrics."""
    mask = inputs["mask"]
    raw = importance_weights(params, inputs["log_probs"], inputs["behaviour_log_probs"], mask)
    values = [raw[i][t] for i, t in valid(mask)]
    per_row = [next(raw[i][t] for t, counts in enumerate(row) if counts) for i, row in enumerate(mask) if any(row)]
    normal = mean(values if params["level"] == "token" else per_row) if params["self_normalize"] else MP.mpf(1)
    found: Expected = {"weights": [[over(value, normal) for value in row] for row in raw]}
    squares = sum(value**2 for value in values)
    if squares:
        found["metrics"] = {"mean": mean(values), "ess_fraction": over(sum(values) ** 2, squares * len(values))}
    return found


def rejection(params: Params, inputs: Inputs) -> Expected:
    """Keep what meets every criterion, where bounds of k1 are on mu / pi_old."""
    mask = inputs["mask"]
    logs = log_weights(inputs["log_probs"], inputs["behaviour_log_probs"], mask, bound=MP.mpf(20))
    result = [list(row) for row in mask]
    for name, bound in zip(params["criteria"].split(","), params["thresholds"].split(","), strict=True):
        scope, _, kind = name.rpartition("_")
        numbers = [MP.mpf(number) for number in bound.split("_")]
        low, high = map(MP.log, numbers) if kind == "k1" else (-MP.inf, numbers[0])
        for i, row in enumerate(logs):
            divergence = {t: _divergence(kind, u) for t, u in row.items()}
            for t in row:
                value = divergence[t] if scope == "token" else _over_row(scope, list(divergence.values()))
                result[i][t] = int(result[i][t] and not above(value, high) and not above(low, value))
    num_valid = sum(map(sum, mask))
    return {"mask": result, "rejected_token_fraction": over(num_valid - sum(map(sum, result)), num_valid)}


def _divergence(kind: str, u: Real) -> Real:
    return {"k1": -u, "k2": u**2 / 2, "k3": MP.exp(u) - 1 - u}[kind]


def _over_row(scope: str, values: list[Real]) -> Real:
    return {"seq_sum": sum, "seq_mean": mean, "seq_max": max}[scope](values)


def sequence_mask(params: Params, inputs: Inputs) -> Expected:
    """Drop far sequences of negative advantage (DeepSeek-V3.2), or the farthest tokens (M2PO)."""
    return m2po(params, inputs) if params["rule"] == "m2po" else negative_and_far(params, inputs)


def negative_and_far(params: Params, inputs: Inputs) -> Expected:
    """Drop a sequence iff A < 0 and its mean of log mu - log pi > delta (arXiv 2512.02556)."""
    keep = []
    for i, row in enumerate(inputs["mask"]):
        gaps = [inputs["old_log_probs"][i][t] - inputs["log_probs"][i][t] for t, counts in enumerate(row) if counts]
        keep.append(int(not (inputs["advantages"][i] < 0 and above(mean(gaps), params["delta"]))))
    return {"keep": keep}


def m2po(params: Params, inputs: Inputs) -> Expected:
    """Drop the largest u^2 until the mean of the rest is below the threshold (arXiv 2510.01161)."""
    logs = log_weights(inputs["log_probs"], inputs["behaviour_log_probs"], inputs["mask"])
    squares = {(i, t): u**2 for i, row in enumerate(logs) for t, u in row.items()}
    while len(squares) > 1 and not above(params["threshold"], mean(list(squares.values()))):
        del squares[max(squares, key=lambda place: squares[place])]
    return {"mask": [[int((i, t) in squares) for t in range(len(row))] for i, row in enumerate(inputs["mask"])]}


def proximal(params: Params, inputs: Inputs) -> Expected:
    """Guess pi_old between mu and pi by the age of each token, -1 unknown (A-3PO, arXiv 2512.06547)."""
    now = inputs["current_version"]
    rows = zip(inputs["log_probs"], inputs["behaviour_log_probs"], inputs["versions"], strict=True)
    return {"proximal_log_probs": [[_between(params, *token, now) for token in zip(*row, strict=True)] for row in rows]}


def _between(params: Params, log_prob: Real, sampler: Real, version: int, now: int) -> Real:
    alpha = clamp(over(now - 1 - version, now - version), 0, 1) if 0 <= version < now else MP.mpf(0)
    if params["proximal"] == "loglinear":
        return sampler + alpha * (log_prob - sampler)
    return MP.log((1 - alpha) * MP.exp(sampler) + alpha * MP.exp(log_prob))


# ------------------------------------------------------------------------------------- what is measured


def off_policy(params: Params, inputs: Inputs) -> Expected:
    """Return how far the policy is from its sampler, with ratios cut at e^20, without empty sequences."""
    mask, now, then = inputs["mask"], inputs["log_probs"], inputs["behaviour_log_probs"]
    tokens = [gap for row in log_weights(now, then, mask) for gap in row.values()]
    cut = [clamp(gap, -20, 20) for gap in tokens]
    rows = [[t for t, counts in enumerate(row) if counts] for row in mask]
    means = [(mean([now[i][t] for t in ts]), mean([then[i][t] for t in ts])) for i, ts in enumerate(rows) if ts]
    whole = [next(iter(row.values())) for row in log_weights(now, then, mask, "sequence", MP.mpf(20)) if row]
    return {
        "kl_k1": mean([-gap for gap in tokens]),
        "kl_k3": mean([MP.exp(gap) - 1 - gap for gap in cut]),
        "weight_mean": mean([MP.exp(gap) for gap in cut]),
        "chi2_token": mean([MP.exp(2 * gap) - 1 for gap in cut]),
        "chi2_sequence": mean([MP.exp(2 * gap) - 1 for gap in whole]),
        "ppl": mean([MP.exp(-pi) for pi, _ in means]),
        "behaviour_ppl": mean([MP.exp(-mu) for _, mu in means]),
        "log_ppl_abs_diff": mean([abs(pi - mu) for pi, mu in means]),
    }


def effective_samples(params: Params, inputs: Inputs) -> Expected:
    """Return (sum w)^2 / sum w^2 of raw weights, over tokens or over sequences."""
    logs = log_weights(inputs["log_probs"], inputs["behaviour_log_probs"], inputs["mask"], params["level"])
    if params["level"] == "sequence":
        values = [MP.exp(next(iter(row.values()))) for row in logs if row]
    else:
        values = [MP.exp(log) for row in logs for log in row.values()]
    ess = over(sum(values) ** 2, sum(value**2 for value in values))
    return {"ess": ess, "ess_fraction": over(ess, len(values))}
