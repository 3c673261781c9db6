"""Cases of KL penalties, of what steers them, and of the policy that fills in masked positions."""

from itertools import product
from typing import Any

from .draws import INF, NAN, PLAIN, Document, Draw, Given, batch, fouled, mask_of


def estimators(draw: Draw) -> list[Given]:
    def options(estimator: str, gradient: str, clamp_value: float | None = None, **others: Any) -> dict[str, Any]:
        bounds = {"clamp_log_ratio": 20.0, "clamp_value": clamp_value}
        return {"estimator": estimator, "gradient": gradient} | bounds | others

    names = ("k1", "k2", "k3", "abs", "k1_forward", "k3_forward")
    naive = [options(name, "naive") for name in names]
    through = [options(name, "straight_through_k2") for name in ("k1", "k3")]
    cut = [options(name, "naive", 10.0, clamp_log_ratio=None) for name in ("k1", "k2", "k3")]
    log_probs = draw.table(2, 4, -2.5, -0.05)
    near = {"log_probs": log_probs, "ref_log_probs": draw.near(log_probs, 0.3)}
    far = {"log_probs": log_probs, "ref_log_probs": draw.near(log_probs, 2.4)}
    equal = {"log_probs": log_probs, "ref_log_probs": log_probs}
    extreme = {"log_probs": [[-35.5, -0.25, -12.5]], "ref_log_probs": [[-0.5, -40.25, -0.5]]}
    rows = batch(draw, 0.4, PLAIN, "ref_log_probs")
    holes = fouled({name: rows[name] for name in ("log_probs", "ref_log_probs", "mask")}, "log_probs", "ref_log_probs")
    means = [options(name, "naive", coef=0.1, reduction="token_mean") for name in ("k3", "k1_forward", "k3_forward")]
    none = holes | {"mask": mask_of([0] * 4, 5)}
    return [
        *(Given(note, p, g) for (note, g), p in product((("near", near), ("far", far)), [*naive, *through, *cut])),
        *(Given("equal policies: the gradient of k1 is 1, of k2 and k3 0", p, equal) for p in [*naive, *through]),
        *(Given("log ratios of 12 to 40", p, extreme) for p in [*naive, *through, *cut, options("k3", "naive", 10.0)]),
        *(Given("NaN and infinity outside the mask", p, holes) for p in means),
        *(Given("nothing is valid", p, none) for p in means[:1]),
    ]


def full(draw: Draw) -> list[Given]:
    def rows(v: int) -> dict[str, Any]:
        logits, refs = ([draw.table(3, v, -2.0, 2.0) for _ in range(2)] for _ in range(2))
        return {"logits": logits, "ref_logits": refs, "mask": [[1, 1, 0], [1, 0, 1]]}

    ways = [{"estimator": "full", "direction": d, "reduction": "token_mean"} for d in ("reverse", "forward")]
    both = rows(4)
    for name in ("logits", "ref_logits"):
        both[name] = [[[-INF, *entries[1:]] for entries in row] for row in both[name]]
    vocabulary = [
        Given(f"{v} entries", {"estimator": "expectations"}, {name: draw.numbers(v, -2.0, 2.0) for name in names})
        for v, names in product((4, 9), [("logits", "ref_logits")])
    ]
    plain = [Given("gradient to the logits", way, rows(v)) for v in (3, 5) for way in ways]
    return [*plain, *(Given("an entry both have filtered out", way, both) for way in ways), *vocabulary]


def in_reward(draw: Draw) -> list[Given]:
    def rows(mask: list[list[int]]) -> dict[str, Any]:
        given = batch(draw, 0.5, mask, "ref_log_probs")
        named = {"old_log_probs": given["log_probs"], "ref_log_probs": given["ref_log_probs"], "mask": mask}
        return named | {"rewards": draw.numbers(len(mask), -2.0, 2.0)}

    tokens = [{"estimator": name, "coef": 0.05, "level": "token"} for name in ("k1", "k3")]
    clips = [params | {"reward_clip": [-1.0, 1.0]} for params in tokens]
    sums = [{"estimator": "k1", "coef": 0.05, "level": "sequence_sum", "then": then}
            for then in ("leave_one_out", "group_center")]  # fmt: skip
    group, holes = rows(PLAIN) | {"groups": [0, 0, 1, 1]}, rows([[1, 0, 1, 0], [0, 1, 1, 0], [1, 0, 0, 0]])
    return [
        *(Given("the reward on the last token", params, rows(mask_of([4, 2, 3], 4))) for params in [*tokens, *clips]),
        *(Given("gaps", params, holes) for params in tokens),
        Given("one row has a token", tokens[0], rows(mask_of([0, 1, 0], 4))),
        *(Given("summed and taken off before the baseline", params, group) for params in sums),
    ]


def controller(draw: Draw) -> list[Given]:
    seen = [*draw.numbers(4, 0.0, 0.3), 0.14, 0.16, 0.06, 0.07]
    steady = {"controller": "proportional", "init": 0.05, "target": 0.1, "horizon": 1000.0, "error_clip": 0.2}
    doubling = {"controller": "doubling", "init": 0.05, "target": 0.1, "factor": 2.0, "band": 1.5}
    bounds = {"coef_min": 0.03, "coef_max": 0.12}
    path = {"kl": seen, "n_steps": 64}
    return [
        Given("follows the error", steady, path),
        Given("another target", steady | {"init": 0.001, "target": 0.02, "horizon": 10000.0}, path),
        Given("more completions than the horizon", steady | {"horizon": 100.0}, {"kl": seen[:4], "n_steps": 128}),
        Given("doubles and halves", doubling, path),
        Given(
            "doubles and halves between bounds", doubling | bounds, {"kl": [0.5, 0.5, 0.01, 0.01, 0.1], "n_steps": 8}
        ),
        Given("follows the error between bounds", steady | bounds | {"horizon": 32.0}, path),
        Given("fixed", {"controller": "fixed", "init": 0.02}, path),
        Given("what is not finite moves nothing", doubling, {"kl": [0.5, NAN, INF, 0.5], "n_steps": 8}),
    ]


def reference(draw: Draw) -> list[Given]:
    weights = {"policy": draw.table(2, 3, -1.0, 1.0), "reference": draw.table(2, 3, -1.0, 1.0)}
    notes = {0.6: "moved", 1.0: "a hard refresh", 0.05: "a moving average", 0.0: "left alone"}
    return [Given(note, {"alpha": alpha}, weights) for alpha, note in notes.items()]


def masked_policy(draw: Draw) -> list[Given]:
    def fills(groups: int, size: int, masked: int) -> list[list[list[int]]]:
        return [[draw.wholes(masked, 0, 2) for _ in range(size)] for _ in range(groups)]

    def table() -> list[list[list[float]]]:
        return [draw.table(5, 3, -2.0, 2.0) for _ in range(2)]

    one = {"logits": draw.table(4, 3, -2.0, 2.0), "ref_logits": draw.table(4, 3, -2.0, 2.0)}
    several = {"masked_positions": [0, 2, 3], "samples": fills(1, 4, 3)[0]}
    loss = {"quantity": "loss", "beta": 0.1, "kl": "full", "estimator": "group_center_batch_std"}
    loss |= {"std_of": "centered", "ddof": 1, "eps": 1e-8}
    batch_of = {"logits": table(), "ref_logits": table(), "rewards": draw.table(2, 3, 0.0, 1.0)}
    even = {"masked_positions": [[1, 2, 4], [0, 2, 3]], "samples": fills(2, 3, 3)}
    uneven = {"masked_positions": [[1, 3, -1], [0, 2, 4]], "samples": fills(2, 3, 3)}
    step = batch(draw, 0.4, mask_of([4, 2, 3], 4))
    anchored = step | {"ref_log_probs": draw.near(step["log_probs"], 0.4)}
    diffusion = {"quantity": "diffu_grpo_loss", "eps_low": 0.2, "eps_high": 0.2, "kl": "k3", "beta": 0.04}
    return [
        Given("against all fills", {"quantity": "distribution"}, one | several),
        Given("one masked position", {"quantity": "distribution"},
              one | {"masked_positions": [1], "samples": [[0], [2]]}),
        *(Given(note, loss | {"kl_reduction": reduction}, batch_of | places)
          for note, places in (("one pass for the group", even), ("unequal numbers of gaps", uneven))
          for reduction in ("masked_mean", "masked_sum")),
        Given("one-step log-probs", diffusion | {"aggregation": "token_mean"}, anchored),
    ]  # fmt: skip


DOCUMENTS = (
    Document("kl_estimators", "KL from sampled tokens, arXiv 2510.01555", estimators),
    Document("kl_full", "The exact KL, and what its estimators are worth on average", full),
    Document("kl_in_reward", "KL in the reward, arXiv 2402.14740", in_reward),
    Document("kl_controller", "KL controllers, arXiv 1909.08593 and 1707.06347", controller),
    Document("reference_update", "TR-DPO, arXiv 2404.09656", reference),
    Document("masked_policy", "The policy that fills in masked positions, arXiv 2504.12216", masked_policy),
)
