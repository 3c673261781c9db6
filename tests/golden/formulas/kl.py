"""KL penalties, and what steers them. q = log pi - log ref at a sampled token."""

from collections.abc import Sequence

from .advantages import Inputs, group_center, leave_one_out
from .distributions import log_softmax
from .exact import MP, Expected, Params, Real, clamp, gradient, mean, valid
from .reductions import row_weights


def bounded(value: Real, bound: Real) -> Real:
    """Clamp to +-bound; None does not."""
    return value if bound is None else clamp(value, -bound, bound)


def estimate(estimator: str, q: Real, clamp_q: Real) -> Real:
    """Return an estimate of the KL from one token, q clamped where it is exponentiated (arXiv 2510.01555)."""
    cut = bounded(q, clamp_q)
    return {
        "k1": lambda: q,
        "k2": lambda: q**2 / 2,
        "k3": lambda: MP.exp(-cut) - 1 + cut,
        "abs": lambda: abs(q),
        "k1_forward": lambda: -q,
        "k3_forward": lambda: MP.exp(cut) - 1 - cut,
    }[estimator]()


def penalty(options: Params, log_prob: Real, held: Real, ref: Real, old: Real = None) -> Real:
    """Return the KL of one token with the gradient asked for: naive, straight_through_k2 or is_weighted."""
    clamp_q = options.get("clamp_log_ratio", MP.mpf(20))

    def value(x: Real) -> Real:
        return bounded(estimate(options["estimator"], x - ref, clamp_q), options.get("clamp_value"))

    if options["gradient"] == "naive":
        return value(log_prob)
    if options["gradient"] == "straight_through_k2":
        return value(held) + (log_prob - ref) ** 2 / 2 - (held - ref) ** 2 / 2
    assert options["gradient"] == "is_weighted"
    return value(log_prob) * MP.exp(bounded(log_prob - old, clamp_q))


def estimators(params: Params, inputs: Inputs) -> Expected:
    """Return values and gradients at every token, of the sum or of coef times the mean."""
    log_probs, refs = inputs["log_probs"], inputs["ref_log_probs"]
    mask = inputs.get("mask", [[1] * len(row) for row in log_probs])
    kl, slopes = ([[MP.mpf(0)] * len(row) for row in mask] for _ in range(2))
    for i, t in valid(mask):
        held, ref = log_probs[i][t], refs[i][t]
        kl[i][t] = penalty(params, held, held, ref)
        slopes[i][t] = gradient(lambda x, held=held, ref=ref: penalty(params, x, held, ref), held)
    if "coef" not in params:
        return {"kl": kl, "grad_log_probs_of_sum": slopes}
    weight = params["coef"] / max(sum(map(sum, mask)), 1)
    average = mean([kl[i][t] for i, t in valid(mask)])
    return {
        "kl": kl,
        "kl_mean": average,
        "loss": params["coef"] * average,
        "grad_log_probs": [[weight * slope for slope in row] for row in slopes],
    }


def exact_kl(logits: Sequence[Real], ref_logits: Sequence[Real], direction: str = "reverse") -> Real:
    """Return sum_v p_v (log p_v - log r_v) of one position, to which entries of probability 0 add nothing."""
    log_p, log_r = log_softmax(logits), log_softmax(ref_logits)
    if direction == "forward":
        log_p, log_r = log_r, log_p
    return sum((MP.exp(p) * (p - r) for p, r in zip(log_p, log_r, strict=True) if p > -MP.inf), MP.mpf(0))


def full(params: Params, inputs: Inputs) -> Expected:
    """Return the exact KL of every position, its token mean and the gradient of that."""
    if params["estimator"] == "expectations":
        return expectations(inputs["logits"], inputs["ref_logits"])
    refs, mask, direction = inputs["ref_logits"], inputs["mask"], params["direction"]
    zeros = [MP.mpf(0)] * len(inputs["logits"][0][0])
    weight = row_weights([sum(row) for row in mask], {"mode": "token_mean"})[0]
    kl = [[exact_kl(x, r, direction) for x, r in zip(xs, rs, strict=True)] for xs, rs in _rows(inputs["logits"], refs)]
    slopes = [[list(zeros) for _ in row] for row in mask]
    for i, t in valid(mask):
        at, ref = inputs["logits"][i][t], refs[i][t]
        per_entry = gradient(lambda x, ref=ref: exact_kl(x, ref, direction), at)
        slopes[i][t] = [weight * slope for slope in per_entry]
    return {"kl": kl, "loss": weight * sum(kl[i][t] for i, t in valid(mask)), "grad_logits": slopes}


def _rows(logits: Sequence, refs: Sequence) -> list[tuple[Sequence, Sequence]]:
    return list(zip(logits, refs, strict=True))


def expectations(logits: Sequence[Real], refs: Sequence[Real]) -> Expected:
    """Return what the estimators are worth on average over the vocabulary, in value and in gradient."""
    at = list(logits)
    chances, log_refs = [MP.exp(x) for x in log_softmax(at)], log_softmax(refs)
    places = range(len(at))
    names = ("k1", "k2", "k3")

    def average(estimator: str, x: Sequence[Real]) -> Real:
        log_p = log_softmax(x)
        return sum(chances[v] * estimate(estimator, log_p[v] - log_refs[v], MP.mpf(20)) for v in places)

    def scored(x: Sequence[Real]) -> Real:
        held, log_p = log_softmax(at), log_softmax(x)
        return sum(chances[v] * (held[v] - log_refs[v]) * log_p[v] for v in places)

    return {
        "exact_kl": exact_kl(at, refs),
        "expected_value": {name: average(name, at) for name in names},
        "exact_grad": gradient(lambda x: exact_kl(x, refs), at),
        "expected_grad_as_loss": {name: gradient(lambda x, n=name: average(n, x), at) for name in names},
        "expected_grad_k1_in_reward": gradient(scored, at),
        "exact_forward_kl_grad": gradient(lambda x: exact_kl(x, refs, "forward"), at),
    }


# ------------------------------------------------------------------------------------- in the reward, and steering


def in_reward(params: Params, inputs: Inputs) -> Expected:
    """Return the penalty token by token with the reward on the last one, or summed and taken off the reward."""
    mask, options = inputs["mask"], {"estimator": params["estimator"], "gradient": "naive"}
    kl = [[MP.mpf(0)] * len(row) for row in mask]
    for i, t in valid(mask):
        old = inputs["old_log_probs"][i][t]
        kl[i][t] = penalty(options, old, old, inputs["ref_log_probs"][i][t])
    if params["level"] == "sequence_sum":
        shaped = [r - params["coef"] * sum(row) for r, row in zip(inputs["rewards"], kl, strict=True)]
        then = {"leave_one_out": leave_one_out, "group_center": group_center}[params["then"]]
        return {"shaped_rewards": shaped, "advantages": then({}, {"rewards": shaped, "groups": inputs["groups"]})}
    low, high = params.get("reward_clip") or (None, None)
    per_token = [[-params["coef"] * value for value in row] for row in kl]
    for i, row in enumerate(mask):
        if any(row):
            last = max(t for t, counts in enumerate(row) if counts)
            per_token[i][last] += clamp(inputs["rewards"][i], low, high)
    return {"token_rewards": per_token, "controller_kl": sequence_mean(kl, mask)}


def sequence_mean(values: Sequence[Sequence[Real]], mask: Sequence[Sequence[int]]) -> Real:
    """Return the mean over sequences with tokens of their token means."""
    rows = [[values[i][t] for t, counts in enumerate(row) if counts] for i, row in enumerate(mask)]
    return mean([mean(row) for row in rows if row])


def controller(params: Params, inputs: Inputs) -> Expected:
    """Return the coefficient after each observation (arXiv 1909.08593 and 1707.06347)."""
    coef, path = params["init"], []
    for kl in inputs["kl"]:
        if not MP.isfinite(kl):
            path.append(coef)
            continue
        if params["controller"] == "proportional":
            error = bounded(kl / params["target"] - 1, params["error_clip"])
            coef = coef * (1 + error * inputs["n_steps"] / params["horizon"])
        elif params["controller"] == "doubling" and kl > params["band"] * params["target"]:
            coef = coef * params["factor"]
        elif params["controller"] == "doubling" and kl < params["target"] / params["band"]:
            coef = coef / params["factor"]
        coef = clamp(coef, params.get("coef_min"), params.get("coef_max"))
        path.append(coef)
    return {"coef": path}


def refreshed(params: Params, inputs: Inputs) -> Expected:
    """Return (1 - alpha) ref + alpha policy (TR-DPO, arXiv 2404.09656)."""
    alpha = params["alpha"]
    pairs = zip(inputs["reference"], inputs["policy"], strict=True)
    return {"reference": [[(1 - alpha) * r + alpha * p for r, p in zip(rs, ps, strict=True)] for rs, ps in pairs]}
