"""Entropies, masks, and the policy that fills in masked positions."""

from collections.abc import Sequence
from itertools import product

from .advantages import Inputs, group_center_batch_std
from .exact import MP, Expected, Params, Real, above, clamp, gradient, valid


def log_softmax(logits: Sequence[Real], temperature: Real = 1) -> list[Real]:
    """Return log-probabilities, -inf where the logit is."""
    scaled = [x / temperature for x in logits]
    log_sum = MP.log(sum(MP.exp(x) for x in scaled))
    return [x - log_sum for x in scaled]


def entropy(logits: Sequence[Real]) -> Real:
    """Return -sum_v p log p, nats."""
    return -sum((MP.exp(x) * x for x in log_softmax(logits) if x > -MP.inf), MP.mpf(0))


# ------------------------------------------------------------------------------------- masks and entropy


def high_entropy(params: Params, inputs: Inputs) -> Expected:
    """Keep tokens from the (1 - rho) quantile up, interpolated linearly (arXiv 2506.01939)."""
    mask = inputs["mask"]
    ordered = sorted(inputs["entropies"][i][t] for i, t in valid(mask))
    result = [[0] * len(row) for row in mask]
    if ordered:
        place = (1 - params["keep_fraction"]) * (len(ordered) - 1)
        below = int(MP.floor(place))
        next_up = ordered[min(below + 1, len(ordered) - 1)]
        threshold = ordered[below] + (place - below) * (next_up - ordered[below])
        for i, t in valid(mask):
            result[i][t] = int(not above(threshold, inputs["entropies"][i][t]))
    return {"mask": result}


def truncated(params: Params, inputs: Inputs) -> Expected:
    """Take rows that were cut out of the loss (DAPO, arXiv 2503.14476)."""
    rows = zip(inputs["mask"], inputs["truncated"], strict=True)
    return {"mask": [[0 if cut else counts for counts in row] for row, cut in rows]}


def tool(params: Params, inputs: Inputs) -> Expected:
    """Take tokens of the environment out of the mask."""
    rows = zip(inputs["mask"], inputs["env_mask"], strict=True)
    return {"mask": [[m * e for m, e in zip(row, written, strict=True)] for row, written in rows]}


def entropy_bonus(params: Params, inputs: Inputs) -> Expected:
    """Return -coef times the token mean of the entropy, with its gradient."""
    mask, logits = inputs["mask"], inputs["logits"]
    weight = -params["coef"] / max(sum(map(sum, mask)), 1)
    entropies = [[entropy(x) for x in row] for row in logits]
    slopes = [[[MP.mpf(0)] * len(x) for x in row] for row in logits]
    for i, t in valid(mask):
        slopes[i][t] = [weight * slope for slope in gradient(entropy, logits[i][t])]
    loss = weight * sum((entropies[i][t] for i, t in valid(mask)), MP.mpf(0))
    return {"entropy": entropies, "loss": loss, "grad_logits": slopes}


def entropy_control(params: Params, inputs: Inputs) -> Expected:
    """Return the coefficient after each entropy, and what of it is applied (Skywork-OR1, arXiv 2505.22312)."""
    coef, path, applied = params["init"], [], []
    for seen in inputs["entropies"]:
        is_low = not above(seen, params["target"])
        coef = clamp(coef + (params["step"] if is_low else -params["step"]), params["low"], params["high"])
        path.append(coef)
        applied.append(coef if is_low else MP.mpf(0))
    return {"coef": path, "applied": applied}


def token_quantity(params: Params, inputs: Inputs) -> Expected:
    """Return entropy, log-prob at the sampling temperature, or sum of squared probabilities, by position."""
    if params["quantity"] == "entropy":
        return {"entropy": [[entropy(x) for x in row] for row in inputs["logits"]]}
    if params["quantity"] == "sum_pi_squared":
        return {"value": [[sum(MP.exp(2 * p) for p in log_softmax(x)) for x in row] for row in inputs["logits"]]}
    rows = zip(inputs["logits"], inputs["token_ids"], strict=True)
    temperature = params["temperature"]
    return {
        "log_probs": [
            [log_softmax(x, temperature)[token] for x, token in zip(row, ids, strict=True)] for row, ids in rows
        ]
    }


def masks(params: Params, inputs: Inputs) -> Expected:
    """Return what a case of the document "masks" asks for."""
    name = params.get("mask") or params["quantity"]
    named = (high_entropy, truncated, tool, entropy_bonus, entropy_control)
    return {function.__name__: function for function in named}.get(name, token_quantity)(params, inputs)


# ------------------------------------------------------------------------------------- the masked policy


def position_kl(logits: Sequence[Real], refs: Sequence[Real]) -> Real:
    """Return KL(pi || ref) at one position."""
    pairs = zip(log_softmax(logits), log_softmax(refs), strict=True)
    return sum(MP.exp(p) * (p - r) for p, r in pairs)


def fill_log_prob(logits: Sequence[Sequence[Real]], positions: Sequence[int], tokens: Sequence[int]) -> Real:
    """Return the log-prob of one fill, the sum over its masked positions (padding is -1)."""
    pairs = zip(positions, tokens, strict=True)
    return sum((log_softmax(logits[p])[token] for p, token in pairs if p >= 0), MP.mpf(0))


def fill_distribution(params: Params, inputs: Inputs) -> Expected:
    """Return log-probs of fills, and KL and entropy from the joint distribution over all V^m fills."""
    logits, refs, positions = inputs["logits"], inputs["ref_logits"], inputs["masked_positions"]
    fills = list(product(range(len(logits[0])), repeat=len(positions)))
    joint = [(fill_log_prob(logits, positions, f), fill_log_prob(refs, positions, f)) for f in fills]
    kl = sum(MP.exp(p) * (p - r) for p, r in joint)
    return {
        "total_probability": sum(MP.exp(p) for p, _ in joint),
        "sequence_log_probs": [fill_log_prob(logits, positions, s) for s in inputs["samples"]],
        "ref_sequence_log_probs": [fill_log_prob(refs, positions, s) for s in inputs["samples"]],
        "kl_sum": kl,
        "kl_per_position": [position_kl(logits[p], refs[p]) for p in positions],
        "kl_mean": kl / len(positions),
        "entropy_sum": -sum(MP.exp(p) * p for p, _ in joint),
    }


def fill_loss(params: Params, inputs: Inputs) -> Expected:
    """Return -mean(log-prob of the fill times A) + beta times the mean KL, with gradients to the logits."""
    rewards = [r for row in inputs["rewards"] for r in row]
    groups = [b for b, row in enumerate(inputs["rewards"]) for _ in row]
    advantages = group_center_batch_std(params, {"rewards": rewards, "groups": groups})
    size, at = len(inputs["rewards"][0]), inputs["logits"]

    def kl(b: int, logits: Sequence[Sequence[Real]]) -> Real:
        masked = [p for p in inputs["masked_positions"][b] if p >= 0]
        total = sum((position_kl(logits[p], inputs["ref_logits"][b][p]) for p in masked), MP.mpf(0))
        return total if params["kl_reduction"] == "masked_sum" else total / max(len(masked), 1)

    def log_probs(b: int, logits: Sequence[Sequence[Real]]) -> list[Real]:
        return [fill_log_prob(logits, inputs["masked_positions"][b], s) for s in inputs["samples"][b]]

    def policy_part(b: int, logits: Sequence[Sequence[Real]]) -> Real:
        own = zip(advantages[b * size :], log_probs(b, logits), strict=False)
        return -sum(a * p for a, p in own) / len(rewards)

    def part(b: int, logits: Sequence[Sequence[Real]]) -> Real:
        return policy_part(b, logits) + params["beta"] * kl(b, logits) / len(at)

    batch = range(len(at))
    return {
        "advantages": advantages,
        "sequence_log_probs": [p for b in batch for p in log_probs(b, at[b])],
        "pg_loss": sum(policy_part(b, at[b]) for b in batch),
        "kl": [kl(b, at[b]) for b in batch for _ in range(size)],
        "loss": sum(part(b, at[b]) for b in batch),
        "grad_logits": [gradient(lambda x, b=b: part(b, x), at[b]) for b in batch],
    }
