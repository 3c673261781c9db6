"""Cases of policy losses."""

from itertools import product
from typing import Any

from .draws import EMPTY, HOLES, INF, NAN, Document, Draw, Given, batch, fouled, per_token

Batches = dict[str, dict[str, Any]]


def crossed(batches: Batches, *settings: dict[str, Any]) -> list[Given]:
    """Return a case for every batch under every setting."""
    return [Given(note, params, inputs) for (note, inputs), params in product(batches.items(), settings)]


def batches(draw: Draw) -> Batches:
    """Return the policy near and far from the old one, without padding, with holes, and where they agree."""
    return {
        "near": batch(draw, 0.3),
        "far": batch(draw, 1.6),
        "holes": fouled(batch(draw, 0.8, HOLES), "log_probs", "old_log_probs"),
        "on-policy: the branches tie": batch(draw, 0.0),
    }


def with_empty_row(draw: Draw) -> Batches:
    """Return a batch in which one completion has no loss token."""
    return {"one row is empty": fouled(batch(draw, 0.5, EMPTY), "log_probs", "old_log_probs")}


def clipping(low: float = 0.2, high: float = 0.28, **others: Any) -> dict[str, Any]:
    """Return settings of the clipped loss; token mean unless another aggregation is named."""
    params = {"loss": "clip", "ratio": "token", "eps_low": low, "eps_high": high, "dual_clip": None}
    return params | {"aggregation": "token_mean", "count_empty": False} | others


def clip(draw: Draw) -> list[Given]:
    means = ("token_mean", "seq_mean_token_mean")
    four, empty = batches(draw), with_empty_row(draw)
    token = {"an advantage for each token": per_token(draw, batch(draw, 0.8))}
    extreme = batch(draw, 0.2)
    shifted = [
        [-60.0, *row[1:]] if i % 2 else [*row[:1], -45.5, *row[2:]] for i, row in enumerate(extreme["log_probs"])
    ]
    extreme |= {"log_probs": shifted}
    far = {"log ratios of 45 and more, clamped": extreme}
    return [
        *(case for mean in means for case in crossed(four, clipping(0.2, 0.2, aggregation=mean))),
        *(case for mean in means for case in crossed(four | empty | token, clipping(aggregation=mean))),
        *crossed(four, clipping(0.1, 0.1)),
        *crossed(empty, clipping(aggregation="seq_mean_token_mean", count_empty=True)),
        *crossed(far, clipping(log_ratio_clamp=20.0), clipping(dual_clip=3.0, log_ratio_clamp=20.0)),
    ]


def dual_clip(draw: Draw) -> list[Given]:
    wide = {"far": batch(draw, 1.6), "further": batch(draw, 2.2)}
    token = {"an advantage for each token": per_token(draw, batch(draw, 1.6))}
    duals = [clipping(dual_clip=bound) for bound in (3.0, 1.5)]
    caps = [clipping(two_sided_delta=4.0), clipping(two_sided_delta=1.6), clipping(dual_clip=3.0, two_sided_delta=2.0)]
    return [*crossed(wide | token, *duals), *crossed(wide, *caps)]


def reinforce(draw: Draw) -> list[Given]:
    def options(aggregation: str, loss: str = "reinforce", count_empty: bool = False) -> dict[str, Any]:
        return {"loss": loss, "aggregation": aggregation, "count_empty": count_empty}

    plain = {"padding": batch(draw, 0.2), "holes": fouled(batch(draw, 0.2, HOLES), "log_probs")}
    others = with_empty_row(draw) | {"an advantage for each token": per_token(draw, batch(draw, 0.2))}
    weighted = {
        f"{note}, detached weights": inputs | {"is_weights": draw.table(4, 5, 0.1, 2.0)}
        for note, inputs in (plain | others).items()
    }
    means = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum")
    return [
        *crossed(plain | others, *map(options, means)),
        *crossed(weighted, options("token_mean")),
        *crossed(plain, options("seq_mean_token_mean", "reinforce_ratio"), options("seq_sum_token_sum")),
        *crossed(others, options("seq_mean_token_sum", count_empty=True)),
        *crossed(plain, options("token_mean", "nll")),
    ]


def gmpo(draw: Draw) -> list[Given]:
    params = {"loss": "gmpo", "eps_low": 0.4, "eps_high": 0.4, "aggregation": "seq_mean", "count_empty": True}
    uneven = params | {"eps_low": 0.2, "eps_high": 0.5, "count_empty": False}
    return [*crossed(batches(draw), params), *crossed(with_empty_row(draw) | {"far": batch(draw, 1.6)}, uneven)]


def gspo(draw: Draw) -> list[Given]:
    sequence = {"ratio": "sequence_mean", "aggregation": "seq_mean_token_mean"}
    narrow, wide = clipping(3e-4, 4e-4, **sequence), clipping(0.2, 0.28, **sequence)
    by_token = wide | {"aggregation": "token_mean"}
    luspo = wide | {"aggregation": "seq_mean_token_sum", "count_empty": True}
    single = wide | {"ratio": "sequence_mean_token"}
    token = {"GSPO-token, an advantage for each token": per_token(draw, batch(draw, 0.8))}
    return [
        *crossed(batches(draw), narrow, wide, by_token, luspo),
        *crossed(with_empty_row(draw), wide, luspo),
        *crossed(token | {"GSPO-token": batch(draw, 0.8)}, single),
    ]


def cispo(draw: Draw) -> list[Given]:
    bounds = ((0.8, 1.28), (0.0, 1.5), (0.0, 5.0), (0.0, 1.3))
    settings = [
        {"loss": "cispo", "ratio_min": low, "ratio_max": high, "aggregation": "token_mean", "count_empty": False}
        for low, high in bounds
    ]
    token = {"an advantage for each token": per_token(draw, batch(draw, 0.8))}
    some = {note: inputs for note, inputs in batches(draw).items() if not note.startswith("on-policy")}
    return [*crossed(some, *settings), *crossed(token, *settings[:2])]


def sapo(draw: Draw) -> list[Given]:
    soft = {"loss": "sapo", "tau_pos": 1.0, "tau_neg": 1.05, "aggregation": "seq_mean_token_mean", "count_empty": False}
    hard = soft | {"tau_pos": 2.0, "tau_neg": 3.0, "aggregation": "token_mean"}
    return crossed(batches(draw), soft, hard)


def cov(draw: Draw) -> list[Given]:
    def clipped(low: float) -> dict[str, Any]:
        given = {"loss": "clip_cov", "eps_low": 0.2, "eps_high": 0.28, "cov_ratio": 1.0, "cov_low": low}
        return given | {"cov_high": 50.0, "aggregation": "token_mean", "count_empty": False}

    def penalised(share: float, coef: float) -> dict[str, Any]:
        given = {"loss": "kl_cov", "cov_ratio": share, "kl_coef": coef}
        return given | {"aggregation": "token_mean", "count_empty": False}

    token = {"an advantage for each token": per_token(draw, batch(draw, 0.8))}
    some = {"near": batch(draw, 0.3), "holes": fouled(batch(draw, 0.8, HOLES), "log_probs", "old_log_probs")}
    none = {"no token is candidate": batch(draw, 0.3)}
    return [
        *crossed(some | token, clipped(0.3), clipped(0.6), penalised(0.2, 0.1), penalised(0.4, 1.0)),
        *crossed(none, clipped(20.0), penalised(0.001, 0.5)),
    ]


def decoupled(draw: Draw) -> list[Given]:
    def weighted(level: str, mode: str, low: float | None, high: float) -> dict[str, Any]:
        return clipping(0.2, 0.2, behaviour_weight={"level": level, "mode": mode, "min": low, "max": high})

    settings = [
        weighted("token", "truncate", None, 5.0),
        weighted("token", "truncate", 0.8, 1.2),
        weighted("token", "mask", 0.7, 1.4),
        weighted("sequence_mean", "mask", 0.8, 1.25),
        weighted("sequence_mean", "truncate", 0.8, 1.25),
    ]

    def sampled(spread: float) -> dict[str, Any]:
        rows = batch(draw, spread, base="proximal_log_probs")
        return rows | {"behaviour_log_probs": draw.near(rows["proximal_log_probs"], spread)}

    aged = {
        "log_probs": draw.table(2, 4, -2.5, -0.05),
        "behaviour_log_probs": draw.table(2, 4, -2.5, -0.05),
        "versions": [[3, 3, 4, 5], [1, 2, 0, -1]],
        "current_version": 5,
    }
    near, far = sampled(0.3), sampled(1.0)
    rows = {"near": near, "far": far, "an advantage for each token": per_token(draw, far)}
    between = [Given("guessed from the age of tokens", {"proximal": p}, aged) for p in ("loglinear", "linear")]
    return [*crossed(rows, *settings), *between]


def dppo(draw: Draw) -> list[Given]:
    common = {"aggregation": "token_mean", "count_empty": False}
    settings = [
        {"loss": "dppo_tv", "div_low": 0.15, "div_high": 0.18, "ratio_cap": 2.0},
        {"loss": "dppo_kl", "div_low": 0.05, "div_high": 0.06, "ratio_cap": 2.0},
        {"loss": "dppo_tv_ratio", "div_low": 0.1, "div_high": 0.15, "adv_tau": 1.5, "kl_tau": 0.01},
        {"loss": "ipo_mask", "div": 0.1, "adv_tau": 0.5, "kl_tau": 0.02},
        {"loss": "dro", "beta": 0.3},
    ]
    rows = {"near": batch(draw, 0.3), "far": batch(draw, 1.6)}
    token = {"an advantage for each token": per_token(draw, batch(draw, 0.8))}
    return crossed(rows | token, *(given | common for given in settings))


def sequence_ratio(draw: Draw) -> list[Given]:
    to_old = clipping(0.2, 0.2, ratio="sequence", aggregation="seq_mean", count_empty=True)
    to_ref = to_old | {"ratio_denominator": "reference"}
    rows = {note: batch(draw, spread) for note, spread in (("near", 0.1), ("far", 0.6), ("on-policy", 0.0))}
    refs = {note: inputs | {"ref_log_probs": draw.near(inputs["log_probs"], 0.2)} for note, inputs in rows.items()}
    sampled = {
        note: inputs | {"behaviour_log_probs": draw.near(inputs["log_probs"], 0.2)} for note, inputs in rows.items()
    }
    bypass = clipping(ratio_denominator="behaviour")
    return [*crossed(rows | with_empty_row(draw), to_old), *crossed(refs, to_ref), *crossed(sampled, bypass)]


def whole_sequences(draw: Draw) -> list[Given]:
    vespo = {"loss": "vespo", "k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}
    vespo |= {"aggregation": "token_mean", "count_empty": False}
    topr = {"loss": "topr", "pos": [1.0, 1.0], "aggregation": "seq_mean_token_sum", "count_empty": True}
    return crossed(batches(draw), vespo, topr | {"neg": [0.0, 1.0]}, topr | {"pos": [0.5, 2.0], "neg": [0.0, 0.5]})


def with_kl(draw: Draw) -> list[Given]:
    def penalised(estimator: str, gradient: str, coef: float, aggregation: str = "token_mean") -> dict[str, Any]:
        kl = {"estimator": estimator, "coef": coef, "gradient": gradient}
        return clipping(kl=kl, aggregation=aggregation)

    def anchored(rows: dict[str, Any]) -> dict[str, Any]:
        return rows | {"ref_log_probs": draw.near(rows["log_probs"], 0.7)}

    rows = {"padding": anchored(batch(draw, 0.4)), "holes": anchored(batch(draw, 0.8, HOLES))}
    still = anchored(batch(draw, 0.0)) | {"advantages": [0.0] * 4}
    sequence = penalised("k3", "naive", 0.04, "seq_mean_token_mean")
    return [
        *crossed(rows, sequence, penalised("k3", "naive", 0.04), penalised("k3", "is_weighted", 0.04)),
        *crossed(rows, penalised("k3", "straight_through_k2", 0.001), penalised("k2", "naive", 0.1)),
        *crossed({"zero advantages: the KL alone": still}, sequence, penalised("k1", "straight_through_k2", 0.1)),
    ]


# ------------------------------------------------------------------------------------- the edges

EVERY_LOSS: tuple[dict[str, Any], ...] = (
    {"loss": "clip", "eps_low": 0.2, "eps_high": 0.28, "dual_clip": 3.0},
    {"loss": "clip", "ratio": "sequence", "eps_low": 0.2, "eps_high": 0.28},
    {"loss": "clip", "ratio": "sequence_mean", "eps_low": 0.2, "eps_high": 0.28},
    {"loss": "reinforce"},
    {"loss": "reinforce_ratio"},
    {"loss": "gmpo", "eps_low": 0.4, "eps_high": 0.4},
    {"loss": "cispo", "ratio_min": 0.0, "ratio_max": 5.0},
    {"loss": "sapo", "tau_pos": 1.0, "tau_neg": 1.05},
    {"loss": "dppo_tv", "div_low": 0.15, "div_high": 0.15, "ratio_cap": 20.0},
    {"loss": "dppo_kl", "div_low": 0.05, "div_high": 0.05, "ratio_cap": 20.0},
    {"loss": "dppo_tv_ratio", "div_low": 0.2, "div_high": 0.2, "adv_tau": 1.0, "kl_tau": 0.001},
    {"loss": "ipo_mask", "div": 0.1, "adv_tau": 1.0, "kl_tau": 0.001},
    {"loss": "vespo", "k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0},
    {"loss": "topr", "pos": [1.0, 1.0], "neg": [0.0, 1.0]},
    {"loss": "dro", "beta": 0.3},
)


def edges(draw: Draw) -> list[Given]:
    mask, two = [[1, 1, 0], [1, 0, 1]], [-0.75, 1.5]
    log_probs = draw.table(2, 3, -2.0, -0.1)
    rows = {"log_probs": log_probs, "old_log_probs": draw.near(log_probs, 0.4), "advantages": two, "mask": mask}
    sure = {"log_probs": [[0.0, -0.5, -1.0], [0.0, 0.0, 0.0]], "old_log_probs": [[0.0, 0.0, 0.0], [-0.7, 0.0, 0.0]]}
    far = [[round(x / 4, 3) for x in log_probs[0]], [round(x * 4, 3) for x in log_probs[1]]]
    low, nothing = [[x - 1000.0 for x in row] for row in log_probs], [[0, 0, 0], [0, 0, 0]]
    found = {
        "nothing is valid": rows | {"mask": nothing},
        "nothing is valid, all is NaN": {
            "log_probs": [[NAN, INF, -INF]] * 2,
            "old_log_probs": [[NAN] * 3] * 2,
            "advantages": two,
            "mask": nothing,
        },
        "NaN and infinity outside the mask": fouled(rows, "log_probs", "old_log_probs"),
        "one row is empty": fouled(rows | {"mask": [[1, 1, 1], [0, 0, 0]]}, "log_probs", "old_log_probs"),
        "zero advantages": rows | {"advantages": [0.0, 0.0]},
        "zero advantages, far": rows | {"old_log_probs": far, "advantages": [0.0, 0.0]},
        "one token": {"log_probs": [[-1.25]], "old_log_probs": [[-1.5]], "advantages": [-1.0], "mask": [[1]]},
        "certain tokens": rows | sure,
        "the ratio explodes": rows | {"old_log_probs": low},
        "the ratio vanishes": rows | {"log_probs": low},
    }
    settings = [{"aggregation": "token_mean", "count_empty": False} | params for params in EVERY_LOSS]
    return crossed(found, *settings)


DOCUMENTS = (
    Document("loss_clip", "PPO, arXiv 1707.06347, and DAPO, 2503.14476", clip),
    Document("loss_dual_clip", "Dual clip, arXiv 1912.09729, and INTELLECT-2, 2505.07291", dual_clip),
    Document("loss_reinforce", "The policy gradient, and the likelihood of demonstrations", reinforce),
    Document("loss_gspo", "GSPO, arXiv 2507.18071, and LUSPO, 2602.05261", gspo),
    Document("loss_gmpo", "GMPO, arXiv 2507.20673", gmpo),
    Document("loss_cispo", "CISPO, arXiv 2506.13585", cispo),
    Document("loss_sapo", "SAPO, arXiv 2511.20347", sapo),
    Document(
        "loss_sequence_ratio", "RLOO with a clip, arXiv 2402.14740, and the denominators of ratios", sequence_ratio
    ),
    Document("loss_cov", "Clip-Cov and KL-Cov, arXiv 2505.22617", cov),
    Document("loss_dppo", "DPPO, arXiv 2602.04879, prime-rl (2602.02276) and DRO, 2405.19107", dppo),
    Document("loss_vespo_topr", "VESPO, arXiv 2602.10693, and TOPR, 2503.14286", whole_sequences),
    Document("loss_decoupled", "Decoupled PPO, arXiv 2110.00641 and 2505.24298, and A-3PO, 2512.06547", decoupled),
    Document("loss_with_kl", "A KL beside the loss, arXiv 2402.03300 and 2512.02556", with_kl),
    Document("loss_edges", "Every loss where nothing is valid, under NaN outside the mask, at ratios of e^1000", edges),
)
