"""The formulas of four documents that describe such training; those of the fifth are `distributions.fill_loss`."""

from collections.abc import Callable, Sequence

from .advantages import Inputs, group_zscore
from .exact import MP, Expected, Params, Real, clamp, gradient, mean, valid
from .group_statistics import centered, groups_of

Table = list[list[Real]]


def document(params: Params, inputs: Inputs) -> Expected:
    """Return advantages, loss and gradient of a document under one of its readings."""
    formula = {"machines": machines, "code": code, "torchrl": torchrl, "trl": trl}[params["document"]]
    advantages, loss = formula(params, inputs)
    log_probs = inputs["log_probs"]
    slopes = gradient(loss, log_probs)
    given = {} if "advantages" in inputs else {"advantages": advantages}
    return given | {"loss": loss(log_probs), "grad_log_probs": slopes}


Formula = tuple[list[Real], Callable[[Table], Real]]


def machines(params: Params, inputs: Inputs) -> Formula:
    """Clip the ratio of whole sequences to the reference, for centred rewards cut at 0.2, and add 0.001 of a k1."""
    advantages = [MP.mpf(0)] * len(inputs["rewards"])
    for members in groups_of(inputs["groups"]):
        for i, gap in centered(members, inputs["rewards"]).items():
            advantages[i] = clamp(gap, MP.mpf("-0.2"), MP.mpf("0.2"))

    def loss(log_probs: Table) -> Real:
        terms, kls = [], []
        for i in rows_with_tokens(inputs):
            gaps = row_gaps(log_probs, inputs, i)
            terms.append(-clipped_term(sum(gaps), advantages[i]))
            kls.append(sum(gaps) if params["kl_per_sequence"] == "sequence_sum" else mean(gaps))
        return mean(terms) + MP.mpf("0.001") * mean(kls)

    return advantages, loss


def code(params: Params, inputs: Inputs) -> Formula:
    """Return -sum A log pi(y), with z-scored rewards, plus beta times the token mean of a KL estimate."""
    advantages = group_zscore(params, inputs)

    def loss(log_probs: Table) -> Real:
        policy = -sum(advantages[i] * log_probs[i][t] for i, t in valid(inputs["mask"]))
        return policy + params["beta"] * token_kl(params["kl"], log_probs, inputs)

    return advantages, loss


def torchrl(params: Params, inputs: Inputs) -> Formula:
    """Add token means of the clip, of expm1(ref - cur) - (ref - cur) and of prev - cur."""
    places = list(valid(inputs["mask"]))
    old, flooring = inputs["old_log_probs"], {"ddof": 1, "eps": MP.mpf("1e-6"), "eps_mode": "floor"}
    advantages = inputs.get("advantages") or group_zscore(flooring, inputs)

    def loss(log_probs: Table) -> Real:
        clipped = mean([-clipped_term(log_probs[i][t] - old[i][t], advantages[i]) for i, t in places])
        to_inference = mean([old[i][t] - log_probs[i][t] for i, t in places])
        to_ref = token_kl("k3", log_probs, inputs)
        return clipped + params["kl_to_ref_coeff"] * to_ref + params["kl_to_inference_coeff"] * to_inference

    return advantages, loss


def trl(params: Params, inputs: Inputs) -> Formula:
    """Sum over the group of the sequence clip against the reference, plus beta times the token mean of k3."""
    reading = {"formula": {"ddof": 0, "eps": MP.mpf(0)}, "code": {"ddof": 1, "eps": MP.mpf("1e-8")}}
    advantages = group_zscore(reading[params["zscore"]], inputs)

    def loss(log_probs: Table) -> Real:
        rows = rows_with_tokens(inputs)
        policy = -sum(clipped_term(sum(row_gaps(log_probs, inputs, i)), advantages[i]) for i in rows)
        return policy + params["beta"] * token_kl("k3", log_probs, inputs)

    return advantages, loss


def clipped_term(log_ratio: Real, advantage: Real) -> Real:
    """Return min(R A, clamp(R, 0.8, 1.2) A)."""
    rho = MP.exp(clamp(log_ratio, -20, 20))
    return min(rho * advantage, clamp(rho, MP.mpf("0.8"), MP.mpf("1.2")) * advantage)


def token_kl(estimator: str, log_probs: Table, inputs: Inputs) -> Real:
    """Return the token mean of k1 or k3 against the reference."""
    gaps = [log_probs[i][t] - inputs["ref_log_probs"][i][t] for i, t in valid(inputs["mask"])]
    return mean([gap if estimator == "k1" else MP.exp(-gap) - 1 + gap for gap in gaps])


def rows_with_tokens(inputs: Inputs) -> Sequence[int]:
    """Return the rows that have loss tokens."""
    return [i for i, row in enumerate(inputs["mask"]) if any(row)]


def row_gaps(log_probs: Table, inputs: Inputs, i: int) -> list[Real]:
    """Return log pi - log ref of a row's tokens."""
    return [log_probs[i][t] - inputs["ref_log_probs"][i][t] for t, counts in enumerate(inputs["mask"][i]) if counts]
