"""Advantages of single tokens. Masked tokens get 0."""

from collections.abc import Sequence

from .advantages import Inputs
from .exact import MP, Params, Real, mean, over, valid
from .group_statistics import groups_of, std

Rows = list[list[Real]]


def rewards_to_go(rewards: Sequence[Sequence[Real]], mask: Sequence[Sequence[int]], gamma: Real) -> Rows:
    """Return the discounted rewards from each token on; masked tokens are passed over without discount."""
    result = [[MP.mpf(0)] * len(row) for row in mask]
    for i, t in valid(mask):
        later = [s for s in range(t, len(mask[i])) if mask[i][s]]
        result[i][t] = sum(gamma**steps * rewards[i][s] for steps, s in enumerate(later))
    return result


def reinforce_plus_plus(params: Params, inputs: Inputs) -> dict[str, Rows]:
    """Return rewards to go, whitened over all tokens, without groups (REINFORCE++, arXiv 2501.03262)."""
    mask = inputs["mask"]
    returns = rewards_to_go(inputs["token_rewards"], mask, params["gamma"])
    values = [returns[i][t] for i, t in valid(mask)]
    variance = std(values, params["ddof"]) ** 2
    floored = variance + params["eps"] if params["eps_mode"] == "var_add" else max(variance, params["eps"])
    whitened = [[MP.mpf(0)] * len(row) for row in mask]
    for i, t in valid(mask):
        whitened[i][t] = (returns[i][t] - mean(values)) / MP.sqrt(floored)
    return {"token_advantages": whitened, "returns": returns}


def remax(params: Params, inputs: Inputs) -> dict[str, Rows]:
    """Return rewards to go minus the reward of the greedy completion (ReMax, arXiv 2310.10505)."""
    mask = inputs["mask"]
    returns = rewards_to_go(inputs["token_rewards"], mask, MP.mpf(1))
    advantages = [[MP.mpf(0)] * len(row) for row in mask]
    for i, t in valid(mask):
        advantages[i][t] = returns[i][t] - inputs["greedy_rewards"][i]
    return {"token_advantages": advantages, "returns": returns}


def optimal_token_baseline(params: Params, inputs: Inputs) -> dict[str, Rows]:
    """Subtract at each position the group's mean reward weighted by gradient energy (arXiv 2602.07078)."""
    mask, rewards = inputs["mask"], inputs["rewards"]
    result = [[MP.mpf(0)] * len(row) for row in mask]
    for members in groups_of(inputs["groups"]):
        for t in range(len(mask[0])):
            alive = [i for i in members if mask[i][t]]
            energy = {i: _energy(inputs, i, t) for i in alive}
            weighted = sum(energy[i] * rewards[i] for i in alive)
            baseline = over(weighted, sum(energy.values()) + params["eps"])
            if params["zero_tail"] and len(alive) == 1:
                baseline = MP.mpf(0)
            for i in alive if len(members) > 1 else []:
                result[i][t] = rewards[i] - baseline
    return {"token_advantages": result}


def _energy(inputs: Inputs, i: int, t: int) -> Real:
    """Return the sum up to t of 1 - 2 pi + sum_v pi_v^2 over the tokens of row i."""
    return sum(
        1 - 2 * MP.exp(inputs["old_log_probs"][i][s]) + inputs["sum_pi_squared"][i][s]
        for s in range(t + 1)
        if inputs["mask"][i][s]
    )
