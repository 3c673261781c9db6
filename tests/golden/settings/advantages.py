"""Cases of advantages and selections."""

from itertools import product
from typing import Any

from .draws import NAN, Document, Draw, Given, mask_of

Rewards = dict[str, dict[str, Any]]


def rewards(draw: Draw) -> Rewards:
    """Return batches of rewards: ordinary ones."""
    return {
        "right or wrong": {"rewards": [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0], "groups": [0] * 4 + [1] * 4},
        "any reward": {"rewards": draw.numbers(12, -2.0, 3.0), "groups": [0] * 4 + [1] * 4 + [2] * 4},
        "groups interleave and differ in size": {
            "rewards": draw.numbers(9, 0.0, 1.0),
            "groups": ["b", "a", "b", "c", "a", "b", "c", "a", "b"],
        },
    }


def degenerate(draw: Draw) -> Rewards:
    """Return batches of rewards in which a group has nothing, or little, to compare."""
    some = draw.numbers(3, -1.0, 1.0)
    return {
        "one group of equal rewards": {"rewards": [0.1, 0.1, 0.1, *some], "groups": [0] * 3 + [1] * 3},
        "all groups of equal rewards": {"rewards": [0.7] * 3 + [0.0] * 3, "groups": [0] * 3 + [1] * 3},
        "groups of one": {"rewards": [*some, -0.25], "groups": [0, 1, 1, 2]},
        "not scored (NaN)": {"rewards": [NAN, *some, 0.5, NAN], "groups": [0, 0, 0, 1, 1, 1]},
        "one member scored, and none": {"rewards": [NAN, 0.8, NAN, NAN, *some], "groups": [0, 0, 1, 1, 2, 2, 2]},
        "nothing scored": {"rewards": [NAN] * 4, "groups": [0, 0, 1, 1]},
        "one scored of all": {"rewards": [NAN, 0.8, NAN], "groups": [0, 0, 1]},
        "a large common offset": {"rewards": [1e8 + 1, 1e8, 1e8 + 2, 1e8 + 1], "groups": [0] * 4},
    }


def crossed(batches: Rewards, *settings: dict[str, Any]) -> list[Given]:
    """Return a case for every batch under every setting."""
    return [Given(note, params, inputs) for (note, inputs), params in product(batches.items(), settings)]


def group_zscore(draw: Draw) -> list[Given]:
    def options(ddof: int, eps: float, eps_mode: str = "add", singleton: str = "zero") -> dict[str, Any]:
        return {"estimator": "group_zscore", "ddof": ddof, "eps": eps, "eps_mode": eps_mode, "singleton": singleton}

    raw, complete = options(1, 1e-6, singleton="raw"), options(1, 1e-6, "floor", "error")
    ordinary, edge = rewards(draw), degenerate(draw)
    pairs = {"groups of two: the size of the gap is lost": {"rewards": [0.9, 0.2, 5.0, -5.0], "groups": [0, 0, 1, 1]}}
    return [
        *crossed(ordinary, options(1, 1e-6), options(1, 1e-4), options(0, 1e-8), complete),
        *crossed(edge, options(1, 1e-6), raw, options(0, 0.0)),
        *crossed(pairs, options(0, 1e-8), options(1, 1e-8)),
    ]


def group_center(draw: Draw) -> list[Given]:
    zero, raw = ({"estimator": "group_center", "singleton": singleton} for singleton in ("zero", "raw"))
    ordinary = rewards(draw)
    return [
        *crossed(ordinary, zero),
        *crossed(degenerate(draw), zero, raw),
        *crossed(ordinary, zero | {"advantage_clip": 0.2}),
    ]


def leave_one_out(draw: Draw) -> list[Given]:
    zero, raw = ({"estimator": "leave_one_out", "singleton": singleton} for singleton in ("zero", "raw"))
    normal = {"post_normalize": "batch_zscore", "ddof": 1, "eps": 1e-4}
    edge = degenerate(draw)
    alone = {note: edge[note] for note in ("groups of one", "one scored of all")}
    return [
        *crossed(rewards(draw), zero, zero | normal),
        *crossed(edge, zero, raw, zero | normal),
        *crossed(alone, raw | normal),
    ]


def batch_scaled(draw: Draw) -> list[Given]:
    of_rewards = {
        "estimator": "group_center_batch_std",
        "std_of": "rewards",
        "ddof": 1,
        "eps": 1e-4,
        "eps_mode": "add",
    }
    of_centered = of_rewards | {"std_of": "centered", "eps": 1e-8, "recenter": True}
    adding = {"estimator": "group_center_token_whiten", "ddof": 1, "eps": 1e-8, "eps_mode": "var_add"}
    flooring = adding | {"ddof": 0, "eps_mode": "var_floor"}
    batches = rewards(draw) | degenerate(draw)
    masked = with_masks(draw, batches)
    pair = {"rewards": [1.0, 0.0], "groups": [0, 0]}
    few = {note: pair | {"mask": mask_of([n, 0], 2)} for note, n in (("nothing written", 0), ("one token", 1))}
    return [*crossed(batches, of_rewards, of_centered), *crossed(masked | few, adding, flooring)]


def with_masks(draw: Draw, batches: Rewards) -> Rewards:
    """Return the same batches with up to four loss tokens for each completion."""
    lengths = {note: draw.wholes(len(inputs["groups"]), 0, 4) for note, inputs in batches.items()}
    return {note: inputs | {"mask": mask_of(lengths[note], 4)} for note, inputs in batches.items()}


def with_lengths(draw: Draw, batches: Rewards) -> Rewards:
    """Return the same batches with a length for each completion."""
    return {note: inputs | {"lengths": draw.wholes(len(inputs["groups"]), 1, 90)} for note, inputs in batches.items()}


def opo(draw: Draw) -> list[Given]:
    zero, raw = ({"estimator": "opo", "singleton": singleton} for singleton in ("zero", "raw"))
    four = {"rewards": [1.0, 0.0, 0.5, 0.25], "groups": [0] * 4}
    empty = {
        "an empty completion has no weight": four | {"lengths": [7, 0, 3, 12]},
        "nothing written: the plain mean": four | {"lengths": [0, 0, 0, 0]},
    }
    return [
        *crossed(with_lengths(draw, rewards(draw)) | empty, zero),
        *crossed(with_lengths(draw, degenerate(draw)), zero, raw),
    ]


def gpg(draw: Draw) -> list[Given]:
    informative = {"estimator": "gpg", "alpha": "informative_groups", "f_norm": 1.0, "singleton": "zero"}
    nonzero = informative | {"alpha": "nonzero_rewards", "singleton": "raw"}
    nothing = {"all rewards are 0": {"rewards": [0.0] * 6, "groups": [0, 0, 0, 1, 1, 1]}}
    alone = {"nothing but groups of one: alpha is 1": {"rewards": [0.5, 0.25], "groups": [0, 1]}}
    return [
        *crossed(rewards(draw), informative, nonzero, *(informative | {"f_norm": norm} for norm in ("group_std", 2.5))),
        *crossed(degenerate(draw) | nothing, informative, nonzero),
        *crossed(alone, informative | {"singleton": "raw"}),
    ]


def best_of(draw: Draw) -> Rewards:
    """Return groups that k-subsets are taken of."""
    return {
        "right or wrong": {"rewards": [0.0, 1.0, 0.0, 0.0, 1.0, 0.0], "groups": [0] * 6},
        "all right": {"rewards": [1.0] * 5, "groups": [0] * 5},
        "all wrong": {"rewards": [0.0] * 5, "groups": [0] * 5},
        "any reward": {"rewards": draw.numbers(7, -1.0, 2.0), "groups": [0] * 7},
        "ties": {"rewards": [0.5, 0.2, 0.5, 0.2, 0.9], "groups": [0] * 5},
        "a large common offset": {"rewards": [1e8 + 1, 1e8, 1e8 + 2, 1e8 + 4], "groups": [0] * 4},
        "groups interleave and differ in size": {
            "rewards": draw.numbers(9, 0.0, 1.0),
            "groups": [1, 0, 1, 0, 0, 1, 0, 1, 0],
        },
        "not scored (NaN)": {
            "rewards": [NAN, *draw.numbers(6, 0.0, 1.0), NAN, NAN, NAN],
            "groups": [0] * 5 + [1] * 5,
        },
    }


def passk(draw: Draw) -> list[Given]:
    options = [{"estimator": "passk", "k": k, "eps": 1e-6} for k in (1, 2, 4)]
    batches = best_of(draw)
    whole = {"k is the whole group: all 0": {"rewards": draw.numbers(5, 0.0, 1.0), "groups": [0] * 5}}
    return [*crossed(batches, *options), *crossed(whole, {"estimator": "passk", "k": 5, "eps": 1e-6})]


def pkpo(draw: Draw) -> list[Given]:
    settings = [
        {"estimator": "pkpo", "variant": "none", "k": 3, "scale": "sum"},
        {"estimator": "pkpo", "variant": "none", "k": 2, "scale": "mean"},
        {"estimator": "pkpo", "variant": "loo", "k": 3, "scale": "sum", "loo_scale": "published"},
        {"estimator": "pkpo", "variant": "loo", "k": 2, "scale": "mean", "loo_scale": "matched"},
        {"estimator": "pkpo", "variant": "loo_minus_one", "k": 3, "scale": "sum"},
        {"estimator": "pkpo", "variant": "loo_minus_one", "k": 1, "scale": "mean"},
    ]
    whole = {"k is the whole group": {"rewards": draw.numbers(5, 0.0, 1.0), "groups": [0] * 5}}
    last = {"estimator": "pkpo", "variant": "loo_minus_one", "k": 5, "scale": "sum"}
    return [*crossed(best_of(draw), *settings), *crossed(whole, last)]


def best_minus_second(draw: Draw) -> list[Given]:
    options = [{"estimator": "best_minus_second", "scale": scale, "ddof": 1, "eps": 1e-6}
               for scale in ("group_std", "none")]  # fmt: skip
    tie = {"a tie for the best": {"rewards": [0.3, 0.9, 0.9, 0.1], "groups": [0] * 4}}
    return crossed(best_of(draw) | tie, *options)


def select(draw: Draw) -> list[Given]:
    center = {"estimator": "group_center", "singleton": "zero", "select": "top_k"}
    batches = rewards(draw)
    ties = {"ties go to the lower index": {"rewards": [0.5, 0.9, 0.5, 0.5, 0.1], "groups": [0] * 5}}
    edge = {note: inputs for note, inputs in degenerate(draw).items() if note != "nothing scored"}
    top = [center | {"k": k, "baseline_over": over} for k in (1, 2, 6) for over in ("group", "selected")]
    shortest = [center | {"k": 2, "baseline_over": "selected", "rank_by": by} for by in ("length", "reward_per_token")]
    spread = [{"estimator": "none", "select": "max_variance", "m": m} for m in (2, 4)]
    middle = {"estimator": "none", "select": "balanced_subset", "group_size": 2, "low": 0.0, "high": 1.0}
    per_token = {"one token": {"rewards": [0.5, 0.9, 0.4, 0.86], "groups": [0] * 4, "lengths": [1, 2, 1, 2]}}
    distinct = {"any reward": {"rewards": draw.numbers(10, -1.0, 1.0), "groups": [0] * 6 + [1] * 4}}
    return [
        *crossed(batches | ties, *top),
        *crossed(edge, *top[:4]),
        *crossed(with_lengths(draw, distinct) | per_token, *shortest),
        *crossed(distinct, *spread, middle),
    ]


def pairwise(draw: Draw) -> list[Given]:
    def options(form: str, **others: Any) -> dict[str, Any]:
        return {"estimator": "pairwise", "form": form, "post": "none"} | others

    won, spread = options("win_rate"), {"post": "group_zscore", "ddof": 1, "eps": 1e-6}
    sure = options("bradley_terry", temperature=0.5)
    upper = {(i, j): draw.number(0.05, 0.95) for i in range(4) for j in range(4) if i < j}
    beats = [[0.5 if i == j else upper[i, j] if i < j else round(1 - upper[j, i], 3) for j in range(4)]
             for i in range(4)]  # fmt: skip
    judged = {"a judge says which is better": {"preferences": beats, "groups": [0] * 4}}
    return [
        *crossed(rewards(draw), won, won | spread, options("difference"), sure, sure | spread),
        *crossed(degenerate(draw), won, won | spread, options("difference"), sure),
        *crossed(judged, options("matrix"), options("matrix", **spread)),
    ]


def gdpo(draw: Draw) -> list[Given]:
    last = {"estimator": "gdpo", "ddof": 1, "eps": 1e-4, "eps_mode": "add", "post": "batch_zscore"}
    tokens = last | {"eps": 1e-6, "post": "token_whiten"}
    two, three = {"weights": [1.0, 1.0]}, {"weights": [1.0, 0.5, 2.0]}
    coupled = {"estimator": "group_zscore", "ddof": 1, "eps": 1e-4, "eps_mode": "add", "singleton": "zero"}
    pair = {"rewards": draw.table(8, 2, 0.0, 1.0), "groups": [0] * 4 + [1] * 4}
    wide = {"rewards": draw.table(9, 3, -1.0, 1.0), "groups": [0, 1, 2] * 3}
    lengths = {"mask": mask_of(draw.wholes(8, 1, 4), 4)}, {"mask": mask_of(draw.wholes(9, 0, 4), 4)}
    flat = [[0.25, row[1]] if g == 0 else row for row, g in zip(pair["rewards"], pair["groups"], strict=True)]
    gaps = [[NAN, r[1]] if i in (1, 6) else [NAN, NAN] if i == 3 else r for i, r in enumerate(pair["rewards"])]
    return [
        Given("two rewards", last | two, pair),
        Given("three rewards of unequal weight", last | three, wide),
        Given("whitened over tokens", tokens | two, pair | lengths[0]),
        Given("whitened over tokens, one row empty", tokens | three, wide | lengths[1]),
        Given("one reward is the same for a whole group: it adds 0 there", last | two, pair | {"rewards": flat}),
        Given("a reward that does not apply (NaN), and a row of none", last | two, pair | {"rewards": gaps}),
        Given("whitened over tokens, not all scored", tokens | two, pair | {"rewards": gaps} | lengths[0]),
        Given("groups of one", last | two, {"rewards": pair["rewards"][:3], "groups": [0, 1, 2]}),
        Given("coupled: the weighted sum first", coupled | three, wide),
        Given("coupled, not all scored", coupled | {"weights": [1.0, 0.25]}, pair | {"rewards": gaps}),
    ]


def maxrl(draw: Draw) -> list[Given]:
    wrong = {"nothing right: all 0": {"rewards": [0.0] * 4, "groups": [0] * 4}}
    below = {"a mean below 0: all 0": {"rewards": [-1.0, 0.25, -0.5], "groups": [0] * 3}}
    ordinary = rewards(draw) | {"rare": {"rewards": [0.0, 0.0, 1.0, 0.0, 0.0, 0.0], "groups": [0] * 6}}
    return crossed(ordinary | wrong | below | degenerate(draw), {"estimator": "maxrl"})


def role_ema(draw: Draw) -> list[Given]:
    inputs = {"rewards": draw.numbers(7, -1.0, 2.0), "roles": ["a", "b", "a", "b", "b", "a", "c"]}
    gaps = {"rewards": [0.5, NAN, 1.0, NAN, -0.25], "roles": ["a", "a", "a", "b", "b"]}
    return [
        *(Given("roles take turns", {"estimator": "role_ema", "decay": decay}, inputs) for decay in (0.95, 0.5)),
        Given("what is not scored moves nothing", {"estimator": "role_ema", "decay": 0.9}, gaps),
    ]


def token_level(draw: Draw) -> list[Given]:
    mask = [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 0], [1, 1, 0, 0, 0]]
    old = draw.table(5, 5, -2.5, -0.1)
    energy = {
        "rewards": draw.numbers(5, -2.0, 2.0),
        "groups": [0, 0, 1, 1, 2],
        "mask": mask,
        "old_log_probs": old,
        "sum_pi_squared": draw.table(5, 5, 0.7, 0.95),
    }
    baseline = {"estimator": "optimal_token_baseline", "eps": 1e-8}
    plus = {"estimator": "reinforce_plus_plus", "ddof": 1, "eps": 1e-8, "eps_mode": "var_add"}
    whole = {"estimator": "reinforce_plus_plus", "ddof": 1, "eps": 1e-8}
    tokens = {"token_rewards": draw.table(3, 4, -0.5, 0.5), "mask": mask_of([4, 4, 2], 4)}
    holes = {"token_rewards": draw.table(3, 4, -0.5, 0.5), "mask": [[1, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0]]}
    return [
        Given("a group of one gets 0", baseline | {"zero_tail": False}, energy),
        Given("no baseline where one is left alive", baseline | {"zero_tail": True}, energy),
        Given("no group", plus | {"gamma": 1.0}, tokens),
        Given("discounted", plus | {"gamma": 0.95}, tokens),
        Given("gaps are passed over without discount", plus | {"gamma": 0.9}, holes),
        Given("population variance, floored", plus | {"gamma": 1.0, "ddof": 0, "eps_mode": "var_floor"}, tokens),
        *crossed(with_masks(draw, rewards(draw) | degenerate(draw)), whole),
        Given("against the greedy completion", {"estimator": "remax"}, tokens | {"greedy_rewards": [0.5, 0.0, -0.3]}),
        Given("gaps", {"estimator": "remax"}, holes | {"greedy_rewards": [0.25, 1.0, 0.5]}),
    ]


DOCUMENTS = (
    Document("adv_group_zscore", "GRPO, arXiv 2402.03300", group_zscore),
    Document("adv_group_center", "Dr. GRPO, arXiv 2503.20783", group_center),
    Document("adv_leave_one_out", "RLOO, arXiv 2402.14740", leave_one_out),
    Document("adv_batch_scaled", "Lite PPO, arXiv 2508.08221, and REINFORCE++-baseline, 2501.03262", batch_scaled),
    Document("adv_opo", "OPO, arXiv 2505.23585", opo),
    Document("adv_gpg", "GPG, arXiv 2504.02546", gpg),
    Document("adv_passk", "Pass@k training, arXiv 2508.10751", passk),
    Document("adv_pkpo", "PKPO, arXiv 2505.15201", pkpo),
    Document("adv_best_minus_second", "Best minus second, arXiv 2503.19595", best_minus_second),
    Document("adv_topk_select", "PODS, arXiv 2504.13818, GFPO, 2508.09726, and over-sampled groups", select),
    Document("adv_pairwise", "Pref-GRPO, arXiv 2508.20751", pairwise),
    Document("adv_gdpo", "GDPO, arXiv 2601.05242", gdpo),
    Document("adv_maxrl", "MaxRL, arXiv 2602.02710", maxrl),
    Document("adv_rae", "SPIRAL, arXiv 2506.24119", role_ema),
    Document(
        "adv_token_level",
        "The optimal token baseline, arXiv 2602.07078, REINFORCE++, 2501.03262, and ReMax, 2310.10505",
        token_level,
    ),
)
