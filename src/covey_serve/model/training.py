"""Forward and backward passes over datums, packed as rollouts are.

Shapes: L scored positions of a micro-batch, N datums, T positions of the longest, K targets of a position.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import groupby

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from covey.algorithm.softmax import log_softmax
from covey.policy.head import linear_layer
from covey.policy.logprobs import Scoring, head_input, logits_of, score_tokens
from covey.policy.policy import Policy, inference
from covey.policy.settings import chunk_within_bound
from covey.trainer.batch import make_batch, unflatten
from covey.trainer.layouts import MIN_SHARED, Row
from covey.types import MicroBatch, Reward, Rollout, Sampling
from covey_serve.model.losses import LOSSES, Inputs
from covey_serve.wire.messages import Array, Datum, TrainingRequest, check_ids, training_result

MICRO_BATCH_TOKENS = 8192
"""Tokens of a pass; it changes memory and time, and no number beyond rounding."""
CHUNK = 2048
"""Scored positions whose logits live at the same time, at most."""
SHARED = "shared"
EMPTY = Reward(0.0)


def vocabulary_of(policy: Policy) -> int:
    return int(policy.causal_lm.config.get_text_config(decoder=True).vocab_size)


def check(request: TrainingRequest, policy: Policy) -> None:
    """Refuse, before any gradient, what cannot be computed. ValueError."""
    loss = LOSSES.get(request.loss)
    if loss is None:
        hint = ": take importance_sampling in its place" if request.loss == "stable_reinforce" else ""
        raise ValueError(f"loss_fn must be one of {', '.join(LOSSES)}, got {request.loss[:40]}{hint}")
    if unknown := sorted(request.options.keys() - {*loss.options}):
        raise ValueError(
            f"loss_fn_config of {request.loss} takes {', '.join(loss.options) or 'nothing'}, got {unknown[0][:40]}"
        )
    if not request.data:
        raise ValueError("data must hold at least one datum, got none")
    for place, datum in enumerate(request.data):
        try:
            _check_datum(datum, loss.reads, policy.max_length, vocabulary_of(policy))
        except ValueError as error:
            raise ValueError(f"datum {place}: {error}") from error
    if len({datum.inputs[TARGETS].shape[1:] for datum in request.data}) > 1:
        raise ValueError("all datums must have equally many targets at each position")
    if request.loss != "cross_entropy" and request.data[0].inputs[TARGETS].ndim == 2:
        raise ValueError(f"target_tokens of {request.loss} must have one axis, got 2")


TARGETS = "target_tokens"


def _check_datum(datum: Datum, reads: Sequence[str], longest: int, vocabulary: int) -> None:
    length = len(datum.token_ids)
    if not 1 <= length <= longest:
        raise ValueError(f"model_input must have 1 to {longest} tokens, got {length}")
    if missing := [name for name in (TARGETS, *reads) if name not in datum.inputs]:
        raise ValueError(f"loss_fn_inputs must have {', '.join((TARGETS, *reads))}, {missing[0]} is missing")
    targets = datum.inputs[TARGETS]
    if targets.dtype.kind != "i":
        raise ValueError(f"{TARGETS} must be int64, got float32")
    for name in (TARGETS, *reads):
        found = datum.inputs[name]
        if found.shape != targets.shape or len(found) != length or found.size == 0:
            raise ValueError(f"{name} must have the length of model_input, {length}, got {list(found.shape)}")
        if found.dtype.kind == "f" and not np.isfinite(found).all():
            raise ValueError(f"{name} must be finite")
    check_ids("model_input", datum.token_ids, vocabulary)
    check_ids(TARGETS, targets, vocabulary)


def forward_backward(request: TrainingRequest, policy: Policy) -> tuple[bytes, dict[str, float]]:
    """Return the result and its metrics; add gradients unless told not to.

    ValueError where the loss or a gradient is not finite: gradients so far then stay as they were.
    """
    parameters = [] if request.forward_only else [p for p in policy.model.parameters() if p.requires_grad]
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        found, total = _passes(request, policy)
        _check_finite(total, parameters)
    except BaseException:
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad
        raise
    for parameter, grad in zip(parameters, before, strict=True):
        if grad is not None:
            parameter.grad = grad if parameter.grad is None else grad.add_(parameter.grad)
    metrics = {"loss:sum": total, "tokens:sum": float(sum(map(np.size, found)))}
    return training_result(found, metrics), metrics


def _check_finite(total: float, parameters: Sequence[torch.nn.Parameter]) -> None:
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads) if grads else torch.zeros(())
    if not np.isfinite(total) or not bool(torch.isfinite(norm)):
        raise ValueError("the loss or its gradient is not finite; nothing was added: check logprobs and advantages")


def _passes(request: TrainingRequest, policy: Policy) -> tuple[list[Array], float]:
    """Return each datum's log-probs and the loss, backward pass by pass."""
    found: list[Array] = [np.empty(0)] * len(request.data)
    total = 0.0
    for batch in pack([datum.token_ids for datum in request.data], policy):
        data = [request.data[int(name)] for name in batch.prompt_ids]
        targets_L = torch.from_numpy(np.concatenate([datum.inputs[TARGETS] for datum in data])).to(policy.device)
        with inference(policy.model) if request.forward_only else nullcontext():
            logprob_L = logprobs_of(policy, batch, targets_L)
            loss = _loss(request, batch, data, logprob_L)
        if not request.forward_only:
            loss.backward()
        total += float(loss.detach())
        values = logprob_L.detach().float().cpu().numpy()
        ends = np.cumsum([len(datum.token_ids) for datum in data])[:-1]
        for name, own in zip(batch.prompt_ids, np.split(values, ends), strict=True):
            found[int(name)] = own
    return found, total


def pack(texts: Sequence[Array], policy: Policy) -> Sequence[MicroBatch]:
    """Pack sequences into micro-batches, what they begin with in common once."""
    rows = [Row(str(place), _rollout(ids), (0.0,) * len(ids)) for place, ids in enumerate(texts)]
    alike = sorted(rows, key=_beginning)
    groups = sorted((list(own) for _, own in groupby(alike, _beginning)), key=lambda own: int(own[0].prompt_id))
    batch = make_batch(
        groups,
        packing=SHARED,
        micro_batch_tokens=MICRO_BATCH_TOKENS,
        totals=(1, 1, 1),
        device=policy.device,
        attention=policy.attention,
    )
    return batch.micro_batches


def _beginning(row: Row) -> tuple[int, ...]:
    return row.rollout.input_ids[:MIN_SHARED]


def _rollout(ids: Array) -> Rollout:
    """Return a rollout whose every position is scored; targets come apart."""
    inputs, count = tuple(ids.tolist()), len(ids)
    return Rollout(inputs, (0,) * count, (True,) * count, (0.0,) * count, EMPTY, "", "stop", 0)


def logprobs_of(policy: Policy, batch: MicroBatch, targets_L: Tensor) -> Tensor:
    """Score targets, (L,) or (L, K), at the positions of a micro-batch."""
    if targets_L.ndim == 2:
        return _plain_logprobs(policy, batch.source_L, batch, targets_L)
    # What sequences share is scored once
    width = int(targets_L.max()) + 1
    pair_U, inverse_L = torch.unique(batch.source_L * width + targets_L, return_inverse=True)
    source_U, target_U = pair_U // width, pair_U % width
    if linear_layer(policy) is None:
        found_U = _plain_logprobs(policy, source_U, batch, target_U[:, None])[:, 0]
    else:
        unique = replace(batch, source_L=source_U, target_L=target_U)
        found_U = score_tokens(policy, unique, Scoring.of(policy, Sampling(), CHUNK)).logprob_L
    return found_U.index_select(0, inverse_L)


def _plain_logprobs(policy: Policy, source_L: Tensor, batch: MicroBatch, targets_LK: Tensor) -> Tensor:
    """Score K targets of each position under any head."""

    def score(rows: Tensor, targets: Tensor) -> Tensor:
        return log_softmax(logits_of(policy, rows)).gather(1, targets)

    rows_L = rows_of(policy, replace(batch, source_L=source_L))
    again = torch.is_grad_enabled() and len(rows_L) > 1  # logits of one chunk are kept
    pieces = [
        checkpoint(score, rows, targets, use_reentrant=False) if again else score(rows, targets)
        for rows, targets in zip(rows_L, targets_LK.split(len(rows_L[0])), strict=True)
    ]
    return torch.cat(pieces)


def rows_of(policy: Policy, batch: MicroBatch) -> Sequence[Tensor]:
    """Return the head's input at scored positions, in bounded chunks."""
    return head_input(policy, batch).split(chunk_within_bound(CHUNK, vocabulary_of(policy)))


def _loss(request: TrainingRequest, batch: MicroBatch, data: Sequence[Datum], logprob_L: Tensor) -> Tensor:
    """Return the loss of a micro-batch, a sum in float64."""
    served = LOSSES[request.loss]
    values = {name: np.concatenate([datum.inputs[name] for datum in data]) for name in served.reads}
    given_L = {name: torch.from_numpy(found).double().to(logprob_L.device) for name, found in values.items()}
    if logprob_L.ndim == 2:  # a row of targets is like that of a datum
        mask = torch.ones_like(logprob_L, dtype=torch.bool)
        return served.function(Inputs(logprob_L.double(), given_L, mask), request.options).sum()
    mask_NT = unflatten(torch.ones_like(logprob_L, dtype=torch.bool), batch)
    rows: Mapping[str, Tensor] = {name: unflatten(found, batch) for name, found in given_L.items()}
    return served.function(Inputs(unflatten(logprob_L.double(), batch), rows, mask_NT), request.options).sum()
