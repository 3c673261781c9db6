"""Cases of teachers: their terms, who teaches whom, and the supervised term."""

from itertools import product
from typing import Any

from .draws import EMPTY, HOLES, INF, NOTHING, PLAIN, Document, Draw, Given, batch, fouled, mask_of


def rows(draw: Draw, mask: list[list[int]] = PLAIN) -> dict[str, Any]:
    """Return tokens with the log-probs of a policy, two earlier ones and a teacher."""
    given = batch(draw, 0.3, mask)
    for name, spread in (("behaviour_log_probs", 0.2), ("teacher_log_probs", 1.5)):
        given[name] = draw.near(given["log_probs"], spread)
    return given


def sampled(draw: Draw) -> list[Given]:
    plain, holes, empty = rows(draw), rows(draw, HOLES), rows(draw, EMPTY)
    alone, torn, thin = (
        {name: values for name, values in given.items() if name != "advantages"} for given in (plain, holes, empty)
    )
    places = {"positions": [[3, 4, 9, 10, 17], [0, 2, 3, 4, 5], [1, 2, 3, 40, 41], [5, 9, 10, 11, 12]]}
    some = {"teacher_mask": [1.0, 0.0, 1.0, 1.0]}
    log_probs = [name for name in plain if name.endswith("log_probs")]
    never = [[-INF, *row[1:]] for row in plain["teacher_log_probs"]]
    of_loss = {"loss": "ratio", "ratio_denominator": "old", "aggregation": "token_mean"}
    clipped = of_loss | {"loss": "clip", "eps_low": 0.2, "eps_high": 0.28}
    a = {"term": "advantage", "base": "current", "coef": 0.5, "discount": 0.0, "clip": None} | of_loss
    own = {"denominator": "teacher_tokens"}
    stale = {"stale_weight": {"base": "old", "max": 2.0}}
    s = {"term": "sampled", "coef": 0.7, "base": "current", "clip": None, "aggregation": "token_mean"}
    forms = [s | {"form": form} for form in ("reinforce", "k2", "k3")]
    mixes = [{"term": "mix", "form": "k2", "base": "current", "mix": mix, "coef": 0.3} for mix in ("sum", "convex")]
    return [
        *(Given("three bases", a | {"base": base}, plain) for base in ("current", "old", "behaviour")),
        *(Given("a discount, also over holes", a | {"discount": 0.8}, given) for given in (plain, holes)),
        Given("a discount over places, between which others wrote", a | {"discount": 0.8}, plain | places),
        Given("early tokens weigh more", a | {"prefix_weight": {"gamma": 0.5, "eps": 1e-8}}, holes),
        Given("a clipped gap", a | clipped | {"clip": 0.4}, plain),
        Given("rewards weigh less", a | clipped | {"reward_weight": 0.25}, plain),
        Given("a row without a teacher keeps its reward", a, plain | some),
        Given("a teacher alone, over its own tokens", a | own, alone | some),
        Given("a token the teacher never writes", a, plain | {"teacher_log_probs": never}),
        *(Given("forms of a loss", p, given) for p, given in product(forms, (alone, torn, thin))),
        *(Given("stale samples, over the teacher's tokens", p | own | stale, alone | some) for p in forms),
        *(Given("NaN and infinity outside the mask", p, fouled(torn, *log_probs)) for p in (a, *forms)),
        *(Given("nothing is valid", p, alone | {"mask": NOTHING}) for p in (a, *forms)),
        *(Given("with rewards", p | clipped, plain) for p in mixes),
    ]


def over_vocabulary(draw: Draw) -> list[Given]:
    def logits() -> list[list[list[float]]]:
        return [draw.table(3, 6, -1.5, 1.5) for _ in range(3)]

    given: dict[str, Any] = {"logits": logits(), "teacher_logits": logits(), "mask": mask_of([3, 2, 0], 3)}
    d = {"term": "divergence", "top_k": None, "temperature": 1.0, "clip": None, "aggregation": "token_mean"}
    betas = [d | {"beta": beta} for beta in (0.0, 0.1, 0.5, 1.0)]
    tails = [
        d | {"beta": beta, "top_k": 2, "support": support, "tail": tail}
        for beta, support, tail in product(
            (0.0, 0.5, 1.0), ("student", "teacher", "union"), ("bucket", "renormalise", "none")
        )
    ]
    hot = {"temperature": 0.7, "teacher_temperature": 1.3}
    stale = {
        "token_ids": [[0, 1, 2], [3, 4, 5], [0, 0, 0]],
        "old_log_probs": draw.table(3, 3, -2.0, -1.0),
        "teacher_mask": [0.0, 1.0, 1.0],
    }
    weighted = {"stale_weight": {"base": "old", "max": 1.1}, "denominator": "teacher_tokens"}
    vocabulary = {name: draw.numbers(5, -2.0, 2.0) for name in ("logits", "teacher_logits")}
    return [
        *(Given("the whole vocabulary", p, given) for p in betas),
        *(Given("supports and tails", p, given) for p in tails),
        Given("two temperatures", betas[3] | hot, given),
        Given("a bound", betas[3] | {"clip": 0.3}, given),
        Given("stale samples", betas[2] | weighted, given | stale),
        Given("averages over the vocabulary", {"term": "expectations"}, vocabulary),
    ]


def others(draw: Draw) -> list[Given]:
    answers = {"log_probs": draw.table(4, 5, -2.5, -0.05), "mask": PLAIN}
    s = {"term": "sft", "coef": 0.4, "aggregation": "token_mean"}
    asked = {"rewards": [0.0, 1.0, 0.5, 1.0, 0.0, 0.0], "groups": [0, 0, 0, 1, 1, 2], "feedback": [True] * 5 + [False]}
    weights = {"teacher": draw.table(2, 3, -1.0, 1.0), "policy": draw.table(2, 3, -1.0, 1.0)}
    logits = {"base_logits": weights["teacher"], "logits": weights["policy"]}
    choices = [
        {"term": "selection", "threshold": t, "exclude_self": e, "feedback": f, "feedback_only_without_solution": o}
        for t, e, f, o in product((0.5, 1.0), (True, False), (True, False), (True, False))
    ]
    return [
        Given("all tokens of answers", s, answers),
        Given("but the first two", s | {"skip_first": 2, "aggregation": "seq_mean_token_mean"}, answers),
        *(Given("siblings and feedback", p, asked) for p in choices),
        Given("a running average", {"term": "follow", "follow": "ema", "rate": 0.1}, weights),
        Given("a trust region", {"term": "follow", "follow": "trust_region", "rate": 0.3}, logits),
    ]


def teacher(draw: Draw) -> list[Given]:
    return [*sampled(draw), *over_vocabulary(draw), *others(draw)]


SOURCE = "on-policy distillation (arXiv 2306.13649, 2306.08543, 2601.20802, 2606.22600)"
DOCUMENTS: tuple[Document, ...] = (Document("teacher", SOURCE, teacher),)
