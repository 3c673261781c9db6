"""Cases of aggregations, corrections and off-policy metrics."""

from itertools import product
from typing import Any

from .draws import EMPTY, HOLES, NOTHING, PLAIN, Document, Draw, Given, batch, fouled

MODES = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum")


def aggregation(draw: Draw) -> list[Given]:
    values = draw.table(4, 5, -2.0, 2.0)
    masks = {"padding": PLAIN, "holes": HOLES, "one row is empty": EMPTY}
    rows = {note: {"values": values, "mask": mask} for note, mask in masks.items()}
    nothing = {"nothing is valid: 0": {"values": values, "mask": NOTHING}}
    foul = {"NaN and infinity outside the mask": fouled(rows["holes"], "values")}
    normed = [
        {"mode": mode, "norm_length": n} for mode in ("seq_mean_token_sum_norm", "token_sum_norm") for n in (6, 100)
    ]
    plain = [*({"mode": mode} for mode in (*MODES, "seq_sum_token_sum")), *normed]
    empty = [{"mode": mode, "count_empty": True} for mode in MODES[1:3]]
    empty.append({"mode": "seq_mean_token_sum_norm", "norm_length": 6, "count_empty": True})
    constant = [[row[0]] * 5 for row in values]
    whole = {"a value for each sequence": {"values": constant, "mask": EMPTY}}
    pairs = [
        *product((rows | nothing | foul).items(), plain),
        *product((rows | nothing).items(), empty),
        *product(whole.items(), [{"mode": "seq_mean"}, {"mode": "seq_mean", "count_empty": True}, {"mode": "seq_sum"}]),
    ]
    return [Given(note, {"count_empty": False} | params, inputs) for (note, inputs), params in pairs]


def accumulation(draw: Draw) -> list[Given]:
    uneven = [[1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 1, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 0]]
    empty = [row if i not in (1, 4) else [0] * 5 for i, row in enumerate(uneven)]
    splits = (
        {"micro_batches": [[0], [1, 2, 3], [4, 5]], "ranks": [[0, 1, 2], [3, 4, 5]]},
        {"micro_batches": [[0, 1, 2, 3], [4, 5]], "ranks": [[0, 1], [2], [3, 4, 5]]},
    )
    modes = [{"mode": mode, "norm_length": None} for mode in MODES[:3]]
    modes.append({"mode": "seq_mean_token_sum_norm", "norm_length": 5})
    return [
        Given(note, params | {"count_empty": False, "dp_size": len(split["ranks"])},
              {"values": draw.table(6, 5, -2.0, 2.0), "mask": mask} | split)
        for (note, mask), split, params in product(
            (("uneven", uneven), ("rows are empty", empty)), splits, modes)
    ]  # fmt: skip


def sampled(draw: Draw, spread: float, mask: list[list[int]] = PLAIN) -> dict[str, Any]:
    """Return log-probs of trainer and sampler, with NaN and infinities outside the mask."""
    rows = batch(draw, spread, mask, "behaviour_log_probs")
    named = {name: rows[name] for name in ("log_probs", "behaviour_log_probs", "mask")}
    return fouled(named, "log_probs", "behaviour_log_probs")


def weights(draw: Draw) -> list[Given]:
    rows = {"near": sampled(draw, 0.3), "far": sampled(draw, 1.2), "one row is empty": sampled(draw, 0.4, EMPTY)}
    bounds = (("truncate", None, 2.0), ("truncate", 0.5, 1.5), ("mask", 0.5, 2.0))
    common = [
        {"level": level, "mode": mode, "min": low, "max": high, "self_normalize": own, "log_ratio_clamp": 20.0}
        for level in ("token", "sequence", "sequence_mean")
        for mode, low, high in bounds
        for own in ((False, True) if mode == "truncate" else (False,))
    ]
    open_ended = {"level": "sequence", "mode": "truncate", "min": None, "max": None, "self_normalize": False}
    outside = common[0] | {"mode": "mask", "min": 50.0, "max": 60.0, "self_normalize": True}
    extreme = {
        "log_probs": [[-30.5, -0.25, -1.0], [-0.5, -0.75, -60.0]],
        "behaviour_log_probs": [[-0.5, -30.25, -1.5], [-0.25, -31.0, -1.0]],
        "mask": [[1, 0, 1], [1, 1, 0]],
    }
    cut = [open_ended | {"level": level, "log_ratio_clamp": 20.0} for level in ("token", "sequence", "sequence_mean")]
    return [
        *(Given(note, params, inputs) for (note, inputs), params in product(rows.items(), common)),
        Given("bounded below", open_ended | {"level": "token", "min": 0.8}, rows["far"]),
        Given("all of weight 0, normalised", outside, rows["near"]),
        Given("without bounds and clamp", open_ended | {"log_ratio_clamp": None}, rows["far"]),
        *(Given("log ratios of 30, clamped after summing", params, extreme) for params in cut),
    ]


def rejection(draw: Draw) -> list[Given]:
    rows = {
        "near": sampled(draw, 0.25),
        "far": sampled(draw, 0.9),
        "one row is empty": sampled(draw, 0.3, EMPTY),
        "holes": sampled(draw, 0.4, HOLES),
    }
    criteria = {
        "token_k1": ("0.5_2.0", "0.9_1.1"),
        "token_k2": ("0.02",),
        "token_k3": ("0.05",),
        "seq_mean_k1": ("0.9_1.1",),
        "seq_sum_k1": ("0.5_2.0",),
        "seq_sum_k2": ("0.06",),
        "seq_mean_k3": ("0.02",),
        "seq_max_k2": ("0.1",),
        "token_k1,seq_max_k3": ("0.5_2.0,0.2",),
    }
    settings = [{"criteria": c, "thresholds": bound} for c, bounds in criteria.items() for bound in bounds]
    nothing = {"nothing is valid": sampled(draw, 0.3, NOTHING)}
    return [
        *(Given(note, params, inputs) for (note, inputs), params in product(rows.items(), settings)),
        *(Given(note, params, inputs) for (note, inputs), params in product(nothing.items(), settings[:2])),
    ]


def sequence_mask(draw: Draw) -> list[Given]:
    def far(mask: list[list[int]]) -> dict[str, Any]:
        return fouled(batch(draw, 0.8, mask), "log_probs", "old_log_probs")

    negative = [{"rule": "negative_and_far", "delta": delta} for delta in (0.02, 0.1, 0.5)]
    token = [{"rule": "m2po", "threshold": threshold} for threshold in (0.01, 0.2, 50.0)]
    masks = {"padding": PLAIN, "holes": HOLES, "one row is empty": EMPTY}
    no_advantage = far(PLAIN) | {"advantages": [0.0] * 4}
    all_far = sampled(draw, 0.1)
    all_far["behaviour_log_probs"] = [[x - 3.0 for x in row] for row in all_far["behaviour_log_probs"]]
    return [
        *(Given(note, params, far(mask)) for (note, mask), params in product(masks.items(), negative)),
        *(Given(note, params, sampled(draw, 0.9, mask)) for (note, mask), params in product(masks.items(), token)),
        Given("one token stays, however far", token[0], all_far),
        Given("no advantage, however far", negative[0], no_advantage),
    ]


def metrics(draw: Draw) -> list[Given]:
    rows = {"near": sampled(draw, 0.25), "far": sampled(draw, 1.2), "holes": sampled(draw, 0.4, HOLES)}
    empty = {"one row is empty": sampled(draw, 0.4, EMPTY)}
    same = {"on-policy: as many as there are": sampled(draw, 0.0)}
    ess = [{"metrics": "ess", "level": level, "weights": "raw"} for level in ("token", "sequence")]
    clips = {note: batch(draw, spread) for note, spread in (("near", 0.3), ("far", 1.2))}
    clip = {"metrics": "clip", "eps_low": 0.2, "eps_high": 0.28}
    return [
        *(Given(note, {"metrics": "offpolicy"}, inputs) for note, inputs in (rows | empty | same).items()),
        *(Given(note, p, inputs) for (note, inputs), p in product((rows | empty | same).items(), ess)),
        *(Given(note, clip, inputs) for note, inputs in clips.items()),
    ]


DOCUMENTS = (
    Document("aggregation", "Aggregations, arXiv 2402.03300, 2503.14476 and 2503.20783", aggregation),
    Document("aggregation_accumulation", "Micro-batches and ranks", accumulation),
    Document("offpolicy_weights", "Importance weights: TIS and IcePop", weights),
    Document("offpolicy_rejection", "Rejection by divergence from the sampler", rejection),
    Document("offpolicy_sequence_mask", "DeepSeek-V3.2, arXiv 2512.02556, and M2PO, 2510.01161", sequence_mask),
    Document("metrics_offpolicy", "Clip fractions, off-policy metrics and effective sample size", metrics),
)
