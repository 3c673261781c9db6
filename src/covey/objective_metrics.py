"""What the objective logs, as averages not yet divided: they add up over micro-batches and ranks, means would not.

Notation: N rollouts, T loss-token positions after padding.
"""

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from covey.corrections import row_mean
from covey.diagnostics import LOG_RATIO_CLAMP, Average, mean_over, merge, off_policy
from covey.kl import k3_forward
from covey.loss_events import Events
from covey.losses import LossInputs

Sums = dict[str, Average]
LOSS_TERMS = ("loss", "policy_loss", "kl_loss", "sampler_kl_loss", "entropy_loss")
"""What the objective adds up."""
MEASURED = (*LOSS_TERMS[:2], "ratio", "approx_kl", "mismatch", "mismatch_kl", "entropy", "ess_fraction")
"""What every step logs: null where no token was scored."""
MAXIMA = ("ratio_max", "mismatch_max")
PER_UPDATE = ("loss", "entropy", "ratio", "ratio_max", "approx_kl", "clip_fraction", "grad_norm")
"""What is logged of the first and of the last update too, where a batch has several."""


def sequence_mean(values_NT: Tensor, mask_NT: Tensor) -> Average:
    """The mean over non-empty sequences of their token means."""
    return mean_over(row_mean(values_NT.detach(), mask_NT), mask_NT.any(1))


def loss_terms(pieces: Mapping[str, Tensor], mask_NT: Tensor) -> Sums:
    """Terms that global totals have already divided: sums, not averages. The denominator only tells whether any token
    is in them; rollouts without gradient may have been left out of it, so it must divide nothing."""
    return {name: Average(piece.detach(), mask_NT.sum().to(piece.dtype)) for name, piece in pieces.items()}


def ratio_sums(inputs: LossInputs) -> Sums:
    """The mean importance ratio, and two estimates of KL(old || policy): how far updates have moved it."""
    delta_NT = inputs.delta.detach()
    return {
        "ratio": mean_over(inputs.ratio, inputs.mask_NT),
        "approx_kl": mean_over(k3_forward(delta_NT, LOG_RATIO_CLAMP), inputs.mask_NT),
        "approx_kl_k1": mean_over(-delta_NT, inputs.mask_NT),
    }


def mismatch_sums(old_NT: Tensor, sampler_NT: Tensor, mask_NT: Tensor) -> Sums:
    """Trainer against sampler on the same tokens: mean gap, `mismatch_kl` = KL(sampler || old), weights, perplexity."""
    measures = off_policy(old_NT, sampler_NT, mask_NT)
    return {
        "mismatch": mean_over((old_NT - sampler_NT).abs(), mask_NT),
        "mismatch_kl": measures.pop("kl_k3"),
        **{f"sampler_{name}": average for name, average in measures.items()},
    }


def event_sums(events: Events, inputs: LossInputs) -> Sums:
    """Share of tokens an event happened to; of sequences where the ratio is theirs."""
    pair = mean_over if inputs.ratio_options.level == "token" else sequence_mean
    return {name: pair(event_NT, inputs.mask_NT) for name, event_NT in events.items()}


def combine(parts: Iterable[Mapping[str, tuple[Tensor, Tensor]]]) -> Sums:
    """The sums of several micro-batches or ranks as one; plain pairs, as they come back from a reduction, will do."""
    return merge({name: Average(*pair) for name, pair in part.items()} for part in parts)


def largest(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the largest value of each name over several micro-batches."""
    found: dict[str, float] = {}
    for part in parts:
        found |= {name: max(value, found.get(name, value)) for name, value in part.items()}
    return found


def summarise(sums: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, float]:
    """The numbers to log, once everything is added up; what has no tokens is left out.

    `ess_fraction` is the effective sample size of the sampler's tokens over their number, 1 on-policy; it is left out
    where all weights are so small that nothing of their squares is left beside 1.
    """
    values = {name: float(n if name in LOSS_TERMS else n / d) for name, (n, d) in sums.items() if float(d) > 0}
    square = values.get("sampler_chi2_token", -1.0) + 1
    if square > 0:
        values["ess_fraction"] = min(1.0, values["sampler_weight_mean"] ** 2 / square)
    return values


def over_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the metrics of all updates on a batch: their mean, the largest maximum, the number that was skipped.

    With several updates `first_update/NAME` and `last_update/NAME` tell how far they went.
    """
    names = dict.fromkeys(name for update in updates for name in update)
    columns = {name: [update[name] for update in updates if name in update] for name in names}
    combined = {name: sum(values) / len(values) for name, values in columns.items()}
    combined |= {name: max(columns[name]) for name in MAXIMA if name in columns}
    combined["skipped"] = sum(columns["skipped"])
    if len(updates) > 1:
        for place, update in (("first_update", updates[0]), ("last_update", updates[-1])):
            combined |= {f"{place}/{name}": update[name] for name in PER_UPDATE if name in update}
    return combined
