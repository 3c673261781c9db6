"""A case of a policy loss: terms, corrections and a KL put together, with the gradient and what is logged."""

from collections.abc import Sequence
from dataclasses import replace

from .advantages import Inputs
from .exact import MP, Expected, Params, Real, above, clamp, gradient, mean, over, valid
from .kl import penalty
from .losses import LOSSES, Row, bernoulli_kl, is_far, log_ratio, ratio
from .off_policy import importance_weights, proximal
from .reductions import row_weights


def policy_loss(params: Params, inputs: Inputs) -> Expected:
    """Return loss, gradient with respect to the log-probs, and metrics."""
    if "proximal" in params:
        return proximal(params, inputs)
    rows, mask = rows_of(params, inputs), inputs["mask"]
    weights, factors = row_weights([sum(row) for row in mask], params), token_factors(params, inputs)
    slopes, loss = [], MP.mpf(0)
    for i, row in enumerate(rows):

        def part(log_probs: list[Real], i: int = i, row: Row = row) -> Real:
            return weights[i] * row_sum(replace(row, log_probs=log_probs), factors[i], inputs, i)

        loss += part(row.held)
        slopes.append(
            [s if counts else MP.mpf(0) for s, counts in zip(gradient(part, row.held), row.mask, strict=True)]
        )
    return {"loss": loss, "grad_log_probs": slopes, "metrics": metrics(params, inputs, rows)}


def rows_of(params: Params, inputs: Inputs) -> list[Row]:
    """Return the completions of a case, with the tokens its loss singles out over the whole batch."""
    names = {"old": "old_log_probs", "reference": "ref_log_probs", "behaviour": "behaviour_log_probs"}
    against = names[params.get("ratio_denominator", "old")]
    base = inputs.get("proximal_log_probs", inputs.get(against))
    width = len(inputs["mask"][0])
    rows = []
    for i, mask in enumerate(inputs["mask"]):
        advantage = inputs["advantages"][i]
        per_token = advantage if isinstance(advantage, list) else [advantage] * width
        held = inputs["log_probs"][i]
        rows.append(Row(held, held, base[i], per_token, mask, params))
    if params["loss"] not in ("clip_cov", "kl_cov"):
        return rows
    chosen = covariant(params, rows)
    return [replace(row, selected=[(i, t) in chosen for t in range(width)]) for i, row in enumerate(rows)]


def covariant(params: Params, rows: Sequence[Row]) -> set[tuple[int, int]]:
    """Return the tokens whose covariance of advantage and log-prob is in the range (clip_cov) or largest (kl_cov)."""
    places = [(i, t) for i, row in enumerate(rows) for t in row.tokens]
    middle_a = mean([rows[i].advantages[t] for i, t in places])
    middle_p = mean([rows[i].held[t] for i, t in places])
    cov = {(i, t): (rows[i].advantages[t] - middle_a) * (rows[i].held[t] - middle_p) for i, t in places}
    count = max(1, int(MP.floor(params["cov_ratio"] * len(places))))
    if params["loss"] == "kl_cov":
        return set(sorted(cov, key=lambda place: cov[place], reverse=True)[:count])
    low, high = params["cov_low"], params["cov_high"]
    found = {p for p in places if above(cov[p], low) and above(high, cov[p]) and not any(clip_sides(rows[p[0]], p[1]))}
    assert len(found) <= count, "which of more candidates are taken is a matter of the seed"
    return found


def token_factors(params: Params, inputs: Inputs) -> list[list[Real]]:
    """Return the constant each policy term is multiplied by: given weights, or pi_old / mu (arXiv 2110.00641)."""
    mask = inputs["mask"]
    if "behaviour_weight" in params:
        return importance_weights(
            params["behaviour_weight"], inputs["proximal_log_probs"], inputs["behaviour_log_probs"], mask
        )
    return inputs.get("is_weights") or [[MP.mpf(1)] * len(row) for row in mask]


def row_sum(row: Row, factors: Sequence[Real], inputs: Inputs, i: int) -> Real:
    """Return the sum over a row's tokens of factor * term + coef * KL."""
    term, kl = LOSSES[row.params["loss"]], row.params.get("kl")
    if row.params["aggregation"] == "seq_mean" and row.tokens and not kl:
        # The value of a per-sequence loss stands at each of its tokens.
        return len(row.tokens) * factors[row.tokens[0]] * term(row, row.tokens[0])
    total = sum((factors[t] * term(row, t) for t in row.tokens), MP.mpf(0))
    if not kl:
        return total
    return total + kl["coef"] * sum((_kl(row, t, inputs, i) for t in row.tokens), MP.mpf(0))


def _kl(row: Row, t: int, inputs: Inputs, i: int) -> Real:
    return penalty(row.params["kl"], row.log_probs[t], row.held[t], inputs["ref_log_probs"][i][t], row.base[t])


# ------------------------------------------------------------------------------------- metrics


def clip_sides(row: Row, t: int) -> tuple[bool, bool]:
    """Return (below the lower bound with A < 0, above the upper one with A > 0)."""
    p, advantage = row.params, row.advantages[t]
    if p["loss"] == "gmpo":
        log = log_ratio(row, t, "token")
        return above(-p["eps_low"], log) and advantage < 0, above(log, p["eps_high"]) and advantage > 0
    rho = ratio(row, t)
    if p["loss"] == "cispo":
        return above(p["ratio_min"], rho), above(rho, p["ratio_max"])
    return above(1 - p["eps_low"], rho) and advantage < 0, above(rho, 1 + p["eps_high"]) and advantage > 0


def metrics(params: Params, inputs: Inputs, rows: Sequence[Row]) -> dict[str, Real]:
    """Return the ratio, estimates of KL(old || pi), and what the loss cut off, as shares of tokens or sequences."""
    places = [(rows[i], t) for i, t in valid(inputs["mask"])]
    found = {
        "ratio": mean([ratio(row, t) for row, t in places]),
        "approx_kl_k1": mean([-row.gap(t) for row, t in places]),
        "approx_kl": mean([MP.exp(d) - 1 - d for d in (clamp(row.gap(t), -20, 20) for row, t in places)]),
    }
    if "kl" in params:
        found["kl"] = mean([_kl(row, t, inputs, i) for i, row in enumerate(rows) for t in row.tokens])
    return found | events(params, places, rows)


def events(params: Params, places: Sequence[tuple[Row, int]], rows: Sequence[Row]) -> dict[str, Real]:
    """Return the shares of what happened inside the loss."""
    loss = params["loss"]
    if loss in ("dppo_tv", "dppo_kl"):
        far = [is_far(row, t, _distance(row, t)) for row, t in places]
        return {"dropped_fraction": _share(far)}
    if loss == "kl_cov":
        return {"cov_fraction": _share([row.selected[t] for row, t in places])}
    if loss not in ("clip", "gmpo", "cispo", "clip_cov"):
        return {}
    if params.get("ratio", "token") not in ("token", "sequence_mean_token"):
        sides = [clip_sides(row, row.tokens[0]) for row in rows if row.tokens]
        return {"clip_low": _share([low for low, _ in sides]), "clip_high": _share([high for _, high in sides])}
    sides = [clip_sides(row, t) for row, t in places]
    found = {
        "clip_low": _share([low for low, _ in sides]),
        "clip_high": _share([high for _, high in sides]),
        "clip_fraction": _share([low or high for low, high in sides]),
    }
    if loss == "clip_cov":
        found["cov_fraction"] = _share([row.selected[t] for row, t in places])
    caps = [params[name] for name in ("dual_clip", "two_sided_delta") if params.get(name)]
    if caps:
        cap = min(caps)
        found["dual_clip_fraction"] = _share([row.advantages[t] < 0 and above(ratio(row, t), cap) for row, t in places])
    return found


def _distance(row: Row, t: int) -> Real:
    if row.params["loss"] == "dppo_kl":
        return bernoulli_kl(row, t)
    return abs(MP.exp(row.held[t]) - MP.exp(row.base[t]))


def _share(flags: Sequence[bool]) -> Real:
    return over(sum(flags), len(flags))
