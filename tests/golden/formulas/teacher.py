"""Terms of a teacher, who teaches whom, and the supervised term."""

from collections.abc import Callable, Sequence

from .advantages import Inputs
from .distributions import log_softmax, position_kl
from .exact import MP, Expected, Params, Real, clamp, gradient, mean, valid
from .off_policy import importance_weights
from .reductions import row_weights

LARGEST = 20


def gap(params: Params, inputs: Inputs, base: Real, i: int, t: int) -> Real:
    """Return x = base - teacher, held within the clip."""
    bound = params.get("clip") or LARGEST
    tea = inputs["teacher_log_probs"][i][t]
    return clamp(MP.mpf(bound) if tea == -MP.inf else base - tea, -bound, bound)


def base_of(params: Params, inputs: Inputs, i: int, t: int) -> Real:
    name = {"current": "log_probs", "old": "old_log_probs", "behaviour": "behaviour_log_probs"}[params["base"]]
    return inputs[name][i][t]


def judged(inputs: Inputs) -> list[list[int]]:
    """Return the mask of the tokens that a teacher judges."""
    speaks = inputs.get("teacher_mask", [1] * len(inputs["mask"]))
    return [[int(m and own > 0) for m in row] for row, own in zip(inputs["mask"], speaks, strict=True)]


def advantages(params: Params, inputs: Inputs) -> list[list[Real]]:
    """Return reward_weight A - coef x, with discount or prefix weight."""
    mask, taught, found = inputs["mask"], judged(inputs), []
    for i, row in enumerate(mask):
        x = [gap(params, inputs, base_of(params, inputs, i, t), i, t) if own else MP.mpf(0)
             for t, own in enumerate(taught[i])]  # fmt: skip
        if "prefix_weight" in params:
            options, sizes = params["prefix_weight"], [abs(value) for value in x]
            total = max(sum(sizes), options["eps"])
            x = [value * (1 + options["gamma"] * (1 - sum(sizes[:t], MP.mpf(0)) / total)) for t, value in enumerate(x)]
        gamma, at = params["discount"], inputs.get("positions", [range(len(row))] * len(mask))[i]
        sums = [sum((gamma ** (at[s] - at[t]) * x[s] for s in range(t, len(x))), MP.mpf(0)) for t in range(len(x))]
        of_rewards = params.get("reward_weight", 1) * inputs.get("advantages", [MP.mpf(0)] * len(mask))[i]
        found.append([(of_rewards if m else 0) - (params["coef"] * value if own else 0)
                      for m, own, value in zip(row, taught[i], sums, strict=True)])  # fmt: skip
    return found


def policy_term(params: Params, inputs: Inputs, a: Real, lp: Real, i: int, t: int) -> Real:
    """Return the loss of one token with this advantage."""
    held = inputs["log_probs"][i][t]
    if params["loss"] == "reinforce":
        return -a * lp
    names = {"old": "old_log_probs", "behaviour": "behaviour_log_probs"}
    base = inputs.get(names[params["ratio_denominator"]], inputs["log_probs"])[i][t]
    rho = MP.exp(clamp(lp - base, -LARGEST, LARGEST))
    if params["loss"] == "clip":
        return max(-rho * a, -clamp(rho, 1 - params["eps_low"], 1 + params["eps_high"]) * a)
    falls = "drop_below" in params and MP.exp(base) - MP.exp(held) > params["drop_below"]
    return (MP.mpf(0) if falls else -rho * a) + params.get("drift_coef", 0) * (lp - base) ** 2


def teacher_loss(params: Params, inputs: Inputs, lp: Real, i: int, t: int) -> Real:
    """Return the loss of one sampled token, with the weight of stale samples."""
    held = inputs["log_probs"][i][t]
    form, x = params["form"], gap(params, inputs, lp, i, t)
    value = {
        "reinforce": lambda: gap(params, inputs, held, i, t) * lp,
        "k2": lambda: x**2 / 2,
        "k3": lambda: MP.exp(-x) - 1 + x,
    }[form]()
    return stale(params, inputs, held, i, t) * value


def stale(params: Params, inputs: Inputs, held: Real, i: int, t: int) -> Real:
    options = params.get("stale_weight")
    return MP.mpf(1) if options is None else min(MP.exp(held - inputs["old_log_probs"][i][t]), options["max"])


def summed(
    params: Params, inputs: Inputs, mask: list[list[int]], term: Callable[..., Real], counted: list[list[int]]
) -> tuple[Real, list[list[Real]]]:
    """Return a reduction of `term` over the mask and its gradient, with the totals of `counted`."""
    weights = row_weights([sum(row) for row in counted], params)
    loss = sum((weights[i] * term(inputs["log_probs"][i][t], i, t) for i, t in valid(mask)), MP.mpf(0))
    slopes = [[MP.mpf(0)] * len(row) for row in mask]
    for i, t in valid(mask):
        slopes[i][t] = weights[i] * gradient(lambda x, i=i, t=t: term(x, i, t), inputs["log_probs"][i][t])
    return loss, slopes


def sampled(params: Params, inputs: Inputs) -> Expected:
    """Return what a case of sampled tokens asks for."""
    taught, mask, coef = judged(inputs), inputs["mask"], params.get("coef", 1)
    counted = taught if params.get("denominator") == "teacher_tokens" else mask
    base = params | {"base": params["base"]}
    kl = mean([gap(params, inputs, base_of(base, inputs, i, t), i, t) for i, t in valid(taught)])
    if params["term"] == "sampled":
        loss, slopes = summed(params, inputs, taught, lambda x, i, t: teacher_loss(params, inputs, x, i, t), counted)
        return {"loss": coef * loss, "grad_log_probs": _times(slopes, coef), "teacher_kl": kl}
    if params["term"] == "advantage":
        a = advantages(params, inputs)
        factors = [[MP.mpf(1)] * len(row) for row in mask]
        if "behaviour_weight" in params:
            pair = inputs["old_log_probs"], inputs["behaviour_log_probs"]
            factors = importance_weights(params["behaviour_weight"], *pair, mask)

        def term(x: Real, i: int, t: int) -> Real:
            return factors[i][t] * policy_term(params, inputs, a[i][t], x, i, t)

        own = taught if params.get("denominator") == "teacher_tokens" else mask
        loss, slopes = summed(params, inputs, own, term, counted)
        return {"loss": loss, "grad_log_probs": slopes, "teacher_kl": kl, "token_advantages": a}
    rewarded = inputs["advantages"]
    policy, first = summed(
        params, inputs, mask, lambda x, i, t: policy_term(params, inputs, rewarded[i], x, i, t), mask
    )
    teacher, second = summed(params, inputs, taught, lambda x, i, t: teacher_loss(params, inputs, x, i, t), counted)
    weight = 1 - coef if params["mix"] == "convex" else MP.mpf(1)
    pairs = zip(first, second, strict=True)
    slopes = [[weight * a + coef * b for a, b in zip(*rows, strict=True)] for rows in pairs]
    loss = weight * policy + coef * teacher
    return {"policy_loss": policy, "teacher_loss": teacher, "loss": loss, "grad_log_probs": slopes}


def _times(table: list[list[Real]], factor: Real) -> list[list[Real]]:
    return [[factor * value for value in row] for row in table]


def entry(p: Real, q: Real, log_p: Real, log_q: Real, beta: Real) -> Real:
    """Return one outcome's part of the divergence."""
    if beta == 1:
        return p * (log_p - log_q)
    if beta == 0:
        return q * (log_q - log_p)
    log_m = MP.log((1 - beta) * p + beta * q)
    return beta * q * (log_q - log_m) + (1 - beta) * p * (log_p - log_m)


def likeliest(values: Sequence[Real], k: int) -> set[int]:
    return set(sorted(range(len(values)), key=lambda v: (-values[v], v))[:k])


def support_of(params: Params, held: Sequence[Real], teacher: Sequence[Real]) -> set[int]:
    """Return the outcomes that are compared."""
    k = params["top_k"]
    if k is None or k >= len(held):
        return set(range(len(held)))
    own, its = likeliest(held, k), likeliest(teacher, k)
    return {"student": own, "teacher": its, "union": own | its}[params["support"]]


def position(params: Params, logits: Sequence[Real], teacher: Sequence[Real], chosen: set[int]) -> Real:
    """Return the divergence at one position."""
    tau = params["temperature"]
    log_p = log_softmax(logits, tau)
    log_q = log_softmax(teacher, params.get("teacher_temperature", tau))
    floor = params.get("log_prob_floor")
    if floor is not None:
        log_p, log_q = ([max(value, floor) for value in values] for values in (log_p, log_q))
    tail, is_whole = params.get("tail"), len(chosen) == len(log_p)
    if tail == "renormalise" and not is_whole:
        sums = [MP.log(sum(MP.exp(values[v]) for v in chosen)) for values in (log_p, log_q)]
        log_p, log_q = [x - sums[0] for x in log_p], [x - sums[1] for x in log_q]
    beta = params["beta"]
    total = sum(
        (entry(MP.exp(log_p[v]), MP.exp(log_q[v]), log_p[v], log_q[v], beta) for v in sorted(chosen)), MP.mpf(0)
    )
    if tail == "bucket" and not is_whole:
        p, q = (sum(MP.exp(values[v]) for v in range(len(values)) if v not in chosen) for values in (log_p, log_q))
        total += entry(p, q, MP.log(p), MP.log(q), beta)
    if tail == "none" and not is_whole:
        total = max(total, MP.mpf(0))
    return total if params["clip"] is None else min(total, params["clip"])


def divergences(params: Params, inputs: Inputs) -> Expected:
    """Return what a case over the vocabulary asks for."""
    taught, tau = judged(inputs), params["temperature"]
    counted = taught if params.get("denominator") == "teacher_tokens" else inputs["mask"]
    weights, loss = row_weights([sum(row) for row in counted], params), MP.mpf(0)
    shown = [[MP.mpf(0)] * len(row) for row in taught]
    slopes = [[[MP.mpf(0)] * len(cell) for cell in row] for row in inputs["logits"]]
    for i, t in valid(taught):
        own, its = inputs["logits"][i][t], inputs["teacher_logits"][i][t]
        chosen, weight = support_of(params, own, its), weights[i]
        if "stale_weight" in params:
            held = log_softmax(own, tau)[int(inputs["token_ids"][i][t])]
            weight *= stale(params, inputs, held, i, t)
        shown[i][t] = position(params, own, its, chosen)
        loss += weight * shown[i][t]
        slopes[i][t] = [
            weight * s for s in gradient(lambda z, its=its, c=chosen: position(params, z, its, c), list(own))
        ]
    return {"divergence": shown, "loss": loss, "grad_logits": slopes}


def supervised(params: Params, inputs: Inputs) -> Expected:
    """Return -coef times the reduction of log-probs over an answer's tokens but the first."""
    kept = []
    for row in inputs["mask"]:
        places = [t for t, own in enumerate(row) if own][int(params.get("skip_first", 0)) :]
        kept.append([int(t in places) for t in range(len(row))])
    weights = row_weights([sum(row) for row in kept], params)
    loss = sum((-params["coef"] * weights[i] * inputs["log_probs"][i][t] for i, t in valid(kept)), MP.mpf(0))
    return {
        "loss": loss,
        "grad_log_probs": [[-params["coef"] * weights[i] * m for m in row] for i, row in enumerate(kept)],
    }


def selection(params: Params, inputs: Inputs) -> Expected:
    """Return who is shown a solved sibling, and whose feedback is used (arXiv 2601.20802)."""
    rewards, groups = inputs["rewards"], inputs["groups"]
    words = inputs.get("feedback", [False] * len(rewards)) if params["feedback"] else [False] * len(rewards)
    shown, used = [], []
    for i, group in enumerate(groups):
        siblings = [j for j, own in enumerate(groups) if own == group and not (params["exclude_self"] and i == j)]
        solved = [j for j in siblings if rewards[j] == rewards[j] and rewards[j] >= params["threshold"]]
        shown.append(solved[0] if solved else -1)
        used.append(int(bool(words[i]) and not (params["feedback_only_without_solution"] and bool(solved))))
    mask = [int(s >= 0 or u > 0) for s, u in zip(shown, used, strict=True)]
    return {"demonstration": shown, "feedback_used": used, "teacher_mask": mask}


def follow(params: Params, inputs: Inputs) -> Expected:
    """Return the weights of a running average, or the logits of a trust region."""
    names = ("teacher", "policy") if params["follow"] == "ema" else ("base_logits", "logits")
    rate = params["rate"]
    between = [
        [(1 - rate) * a + rate * b for a, b in zip(*rows, strict=True)]
        for rows in zip(*(inputs[name] for name in names), strict=True)
    ]
    if params["follow"] == "ema":
        return {"teacher": between}
    return {"teacher_logits": between, "teacher_log_probs": [log_softmax(row) for row in between]}


def expectations(params: Params, inputs: Inputs) -> Expected:
    """Return exact divergences, and average gradients of the forms, samples from the policy."""
    z, its = list(inputs["logits"]), inputs["teacher_logits"]
    held, log_q = log_softmax(z), log_softmax(its)
    p = [MP.exp(value) for value in held]

    def average(form: Callable[[Real, int], Real]) -> list[Real]:
        return gradient(lambda w: sum(p[v] * form(log_softmax(w)[v], v) for v in range(len(p))), z)

    return {
        "reverse_kl": position_kl(z, its),
        "forward_kl": position_kl(its, z),
        "grad_advantage": average(lambda lp, v: (held[v] - log_q[v]) * lp),
        "grad_k1": average(lambda lp, v: lp - log_q[v]),
        "grad_k2": average(lambda lp, v: (lp - log_q[v]) ** 2 / 2),
        "grad_k3": average(lambda lp, v: MP.exp(log_q[v] - lp) - 1 + lp - log_q[v]),
        "grad_reverse_kl": gradient(lambda w: position_kl(w, its), z),
        "grad_forward_kl": gradient(lambda w: position_kl(its, w), z),
    }


TERMS: dict[str, Callable[[Params, Inputs], Expected]] = {
    **dict.fromkeys(("advantage", "sampled", "mix"), sampled),
    "divergence": divergences,
    "sft": supervised,
    "selection": selection,
    "follow": follow,
    "expectations": expectations,
}


def teacher(params: Params, inputs: Inputs) -> Expected:
    """Return what a case of a teacher must give."""
    return TERMS[params["term"]](params, inputs)
