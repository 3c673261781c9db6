"""Cases of masks, entropy, shaping, filters, metrics of groups and answers, and the documents' formulas."""

from itertools import product
from typing import Any

from .draws import EMPTY, HOLES, INF, NAN, NOTHING, PLAIN, Document, Draw, Given, batch, fouled, mask_of


def masks(draw: Draw) -> list[Given]:
    entropies = draw.table(4, 5, 0.01, 2.5)
    shares = [{"mask": "high_entropy", "keep_fraction": share, "quantile": "linear"} for share in (0.23, 0.5, 1.0)]
    table = {"logits": [draw.table(3, 4, -2.0, 2.0) for _ in range(2)], "mask": [[1, 1, 0], [1, 0, 0]]}
    bonus = {"quantity": "entropy_bonus", "coef": 0.01, "reduction": "token_mean"}
    logits = {"logits": table["logits"]}
    ids = logits | {"token_ids": [draw.wholes(3, 0, 3) for _ in range(2)]}
    filtered = {"logits": [[[-INF, 0.5, 1.25, -INF], [0.0, -INF, -INF, -INF]]]}
    rows = (("padding", PLAIN), ("holes", HOLES), ("one row is empty", EMPTY), ("nothing is valid", NOTHING))
    rows += (("one token is valid", mask_of([0, 1, 0, 0], 5)),)
    steered = {"quantity": "entropy_control", "target": 0.3, "step": 0.005, "low": 0.0, "high": 1.0}
    seen = {"entropies": [0.5, 0.2, 0.3, 0.1, 0.31, 0.9, 0.9, 0.9, 0.25]}
    written = [[1, 0, 1, 1, 1], [1] * 5, [0, 1, 1, 1, 1], [1, 1, 0, 1, 1]]
    return [
        *(Given(note, params, fouled({"entropies": entropies, "mask": mask}, "entropies"))
          for (note, mask), params in product(rows, shares)),
        Given("some were cut", {"mask": "truncated"}, {"mask": PLAIN, "truncated": [False, True, False, True]}),
        Given("all were cut", {"mask": "truncated"}, {"mask": PLAIN, "truncated": [True] * 4}),
        Given("the environment wrote some", {"mask": "tool"}, {"mask": PLAIN, "env_mask": written}),
        Given("gradient to the logits", bonus, table),
        Given("nothing is valid: 0", bonus, table | {"mask": [[0] * 3, [0] * 3]}),
        Given("one token is valid", bonus, table | {"mask": [[0, 0, 1], [0, 0, 0]]}),
        Given("of each position", {"quantity": "entropy"}, logits),
        Given("entries that were filtered out", {"quantity": "entropy"}, filtered),
        Given("of each position", {"quantity": "sum_pi_squared"}, logits),
        Given("up at or below the target, else down", steered | {"init": 0.0}, seen),
        Given("not above 1", steered | {"init": 0.995}, seen),
        *(Given("of the sampled tokens", {"quantity": "token_log_prob", "temperature": temperature}, ids)
          for temperature in (0.8, 1.0, 1.7)),
    ]  # fmt: skip


def shaping(draw: Draw) -> list[Given]:
    group = {"rewards": [1.0, 0.0, 1.0, 0.5, 0.25, 0.0], "groups": [0, 0, 0, 1, 1, 1]}
    group |= {
        "output_tokens": [12, 40, 7, 9, 0, 30],
        "total_tokens": [20, 55, 18, 19, 12, 61],
        "turns": [1, 2, 1, 3, 1, 2],
    }
    rate = {"shaping": "pass_rate_linear", "estimator": "group_center", "w_out": 0.25, "w_in": 0.1, "w_turns": 0.1}
    lengths = {"lengths": [0, 13, 14, 15, 17, 20, 23]}
    over = {"shaping": "soft_overlong", "max_len": 20, "cache": 6}
    cut = {"rewards": [1.0, -0.5, 0.25, NAN], "truncated": [True, False, True, True]}
    ids = {"token_ids": [[1, 2, 3, 4], [5, 5, 5, 5], [1, 2, 1, 2, 1, 2], [7], []]}
    normal = {"advantages": draw.numbers(6, -1.0, 1.0), "lengths": [3, 40, 0, 11, 1, 25]}
    return [
        Given("length, context and turns", rate, group),
        Given("length alone", rate | {"w_out": 0.5, "w_in": 0.0, "w_turns": 0.0}, group),
        Given("not all scored", rate, group | {"rewards": [1.0, NAN, 0.0, NAN, NAN, 0.5]}),
        Given("one turn and no context", rate, group | {"turns": [1] * 6, "total_tokens": group["output_tokens"]}),
        *(Given("before, inside and beyond the last tokens", over | {"factor": factor, "floor": floor}, lengths)
          for factor, floor in ((1.0, True), (0.5, True), (0.5, False))),
        *(Given("some were cut", {"shaping": "stop_properly", "coef": coef}, cut) for coef in (-0.5, 0.3, 0.0)),
        Given("all were cut", {"shaping": "stop_properly", "coef": 0.3}, cut | {"truncated": [True] * 4}),
        *(Given("repeated and too short", {"shaping": "repetition", "ngram": n, "max_penalty": worst}, ids)
          for n, worst in ((1, -1.0), (2, -1.0), (3, -0.5))),
        *(Given("one is empty", {"shaping": "length_normalizer", "alpha": alpha}, normal) for alpha in (1.0, 0.75)),
        *(Given(note, {"shaping": "length_normalizer", "alpha": 1.0}, {"advantages": [0.5, -0.5], "lengths": lengths})
          for note, lengths in (("all but one are empty", [0, 7]), ("all are empty", [0, 0]))),
    ]  # fmt: skip


def group_filter(draw: Draw) -> list[Given]:
    rewards = [*draw.numbers(4, 0.1, 0.9), 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    rewards += [0.3, 0.3, NAN, 0.3, NAN, NAN, NAN, NAN, 0.25, 0.125, 0.0, 0.25]
    groups = {"rewards": [*rewards, 0.5], "groups": [g for g in range(7) for _ in range(4)] + ["alone"]}
    bounds = [{"filter": "mean_bounds", "low": low, "high": high} for low, high in ((0.0, 1.0), (0.2, 0.8))]
    pool = {"any reward": draw.numbers(8, 0.0, 1.0), "right or wrong": [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0]}
    few = {"fewer than asked for": [0.5, 0.25, 1.0]}
    middle = {"filter": "balanced_subset", "group_size": 4, "low": 0.1, "high": 0.9}
    return [
        Given("spread, equal, missing, alone", {"filter": "zero_std", "atol": 1e-8}, groups),
        *(Given("spread, equal, missing, alone", params, groups) for params in bounds),
        *(Given(note, middle, {"rewards": values}) for note, values in (pool | few).items()),
        Given("half right", middle | {"low": 0.0, "high": 1.0}, {"rewards": pool["any reward"]}),
    ]


def groups(draw: Draw) -> list[Given]:
    sizes = [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    rewards = [*draw.numbers(4, 0.1, 0.9), *[1.0] * 4, *[0.0] * 4, 1.0, 0.0, 0.0, 1.0]
    gaps = [NAN if i in (0, 5, 6, 7, 12, 13, 14, 15) else reward for i, reward in enumerate(rewards)]
    return [
        Given("right, wrong and between", {"metric": "groups"}, {"rewards": rewards, "groups": sizes}),
        Given("not all scored", {"metric": "groups"}, {"rewards": gaps, "groups": sizes}),
        Given("two scored of a group", {"metric": "groups"}, {"rewards": [0.25, NAN, 1.0, *gaps[3:]], "groups": sizes}),
    ]


def answers(draw: Draw) -> list[Given]:
    counts = ((10, 3, 2), (10, 0, 5), (10, 10, 1), (5, 1, 5), (8, 6, 3), (1, 1, 1), (6, 2, 6))
    large = ((200, 3, 100), (64, 1, 64), (1000, 1, 10), (1000, 999, 2), (400, 7, 64))
    ask = {"metric": "pass_at_k"}
    votes = (["x", "y", "x", "z"], ["y", "x", "x", "y", "z"], ["only"], ["c", "b", "a"])
    right = {"x": 1.0, "y": 0.0, "z": 1.0, "only": 1.0, "a": 1.0, "b": 0.0, "c": 0.0}
    cases = [{"answers": list(given), "correct": [right[answer] for answer in given]} for given in votes]
    six = {"answers": ["x", "y", "z", "y", "x", "y"], "correct": [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]}
    return [
        *(Given("a few", ask | {"k": k}, {"n": n, "c": c}) for n, c, k in counts),
        *(Given("binomials beyond float64", ask | {"k": k}, {"n": n, "c": c}) for n, c, k in large),
        Given("mean of means", {"metric": "avg_at_k"}, {"rewards": draw.table(3, 4, 0.0, 1.0)}),
        *(Given("ties go to the first seen", {"metric": "majority_vote", "tie": "first_seen"}, one) for one in cases),
        *(Given("over all subsets", {"metric": "maj_at_k", "k": k, "tie": "first_seen"}, six) for k in (1, 2, 3, 6)),
    ]


# ------------------------------------------------------------------------------------- the documents


def documents(draw: Draw) -> list[Given]:
    readings: list[dict[str, Any]] = [
        *({"document": "machines", "kl_per_sequence": f"sequence_{reduction}"} for reduction in ("sum", "mean")),
        *(
            {"document": "code", "beta": 0.04, "ddof": ddof, "eps": 1e-8, "kl": kl}
            for ddof in (0, 1)
            for kl in ("k1", "k3")
        ),
        *({"document": "trl", "beta": 0.05, "eps": 0.2, "zscore": zscore} for zscore in ("formula", "code")),
    ]
    shapes = {
        "one group": (mask_of([4, 2, 3, 4], 4), [0] * 4),
        "two groups, one row empty": (mask_of([4, 3, 4, 1, 0, 2], 4), [0, 0, 0, 1, 1, 1]),
    }
    cases = []
    for note, (mask, labels) in shapes.items():
        rows = batch(draw, 0.25, mask, "ref_log_probs")
        scored = {name: rows[name] for name in ("log_probs", "ref_log_probs", "mask")}
        scored |= {"rewards": draw.numbers(len(mask), -1.0, 1.0), "groups": labels}
        cases += [Given(note, params, scored) for params in readings]
        inference = {"document": "torchrl", "kl_in_loss": True, "kl_to_ref_coeff": 0.01, "kl_to_inference_coeff": 0.02}
        old = {"old_log_probs": draw.near(rows["log_probs"], 0.4)}
        cases += [Given(note, inference, rows | old), Given(f"{note}, from rewards", inference, scored | old)]
    equal = {"rewards": [0.5] * 4, "groups": [0] * 4} | {
        name: value[:4] for name, value in rows.items() if name in ("log_probs", "ref_log_probs", "mask")
    }
    return cases + [Given("equal rewards: the KL alone", params, equal) for params in readings]


DOCUMENTS = (
    Document("masks", "Masks and entropy, arXiv 2503.14476, 2506.01939 and 2505.22312", masks),
    Document("reward_length_penalty", "Reward shaping, arXiv 2503.14476, 2502.03373 and 2509.07558", shaping),
    Document("group_filter", "Dynamic sampling, arXiv 2503.14476", group_filter),
    Document("metrics_groups", "Groups without signal", groups),
    Document("metrics_pass_at_k", "pass@k, arXiv 2107.03374, and votes", answers),
    Document("document_formulas", "The presets that follow a document to the letter", documents),
)
