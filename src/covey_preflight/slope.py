"""Check the trainer's gradient against autograd and finite differences.

Both use -A log pi, averaged over loss tokens, in plain transformers (`policy.plain`). Autograd is compared in every
entry. Differences need no backward pass: the loss is computed on both sides of the weights, and its slope must be the
gradient's.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from covey.algorithm.settings import AlgorithmConfig
from covey.policy import sharding
from covey.policy.models.text import ordinary_ids
from covey.policy.plain import Plain, plain_model, rounded_and_exact
from covey.policy.policy import Policy
from covey.run.build import trainer_settings
from covey.system import collectives
from covey.system.lookup import is_out_of_memory
from covey.trainer.layouts import Row
from covey.types import Sampling
from covey_preflight.budget import MIN_PROMPT, affordable_tokens, begin_with_text, tokens_of, uncertain
from covey_preflight.policy import (
    GRADIENT_TOLERANCE,
    HALF_RANGE,
    compute_gradient_only,
    cut_groups,
    dropout_note,
    first_groups,
    gradient_tolerance,
    kind_of,
    laid_out,
    local,
    probe_trainer,
    synthetic_rows,
    without_dropout,
)
from covey_preflight.rounding import allowed_tokens, explained_error, plain_gradient, plain_loss, square
from covey_preflight.subject import Check, PreflightContext

LOGGER = logging.getLogger(__name__)
ROUNDED = "model.precision=%s keeps few digits of this model: its gradient is %s off in transformers too"
SLOPE_TOLERANCE = {"float64": 0.01, "float32": 0.01, "float16": 0.05, "bfloat16": 0.1}
"""Relative error by precision. The loss is computed in float64, so differences are exact to AGREEMENT; the rest is the
gradient's rounding along its own direction. A wrong sign is an error of 2, a factor of two one of 0.5."""
RISE = 1e-4
"""Target rise of the loss over the first step, nats per token: nearly linear, without changes of experts, and a billion
times float64's rounding."""
REACH = 0.05
"""A step is at most this share of the weights that move: where the gradient is nearly 0, the loss rises less."""
AGREEMENT = 1e-3
"""Relative difference of two central differences that is put down to how the loss bends."""
MAX_HALVINGS = 9
TINY = 1e-30
NUM_GROUPS = 2
NUM_FORWARDS = 20
"""Forward passes that the comparison is worth where differences settle at once: two gradients, 4 losses in float64."""
NUM_WEIGHTS = 4
"""Tensors that move, evenly spaced among those that are trained, besides the one with the largest gradient."""
MAX_ENTRIES = 1 << 24
"""Larger tensors stay where they are, if there are others: an embedding takes longer to move than all layers."""


@dataclass(frozen=True, slots=True)
class GradientErrors:
    """Relative errors of a gradient of the trainer's."""

    entries: float
    """Error of all entries, by L2 norms, against plain autograd."""
    slope: float | None
    """Error along one direction, against differences of the loss; None where these fail."""
    plain_slope: float | None
    """The same of plain autograd's gradient."""
    wanted: list[Tensor]
    """Plain autograd's gradient."""


def check_slope(subject: PreflightContext) -> Check:
    """Check that the trainer's gradient is that of the loss."""
    config, policy = subject.config, subject.run.policy
    kind = kind_of(config.model)
    trainer = probe_trainer(subject, AlgorithmConfig(loss="reinforce", router_aux_loss_coef=0.0))
    groups = first_groups(subject.groups)[:NUM_GROUPS]
    num_tokens = affordable_tokens(subject, NUM_FORWARDS)
    if tokens_of(groups) > num_tokens:  # of a large model, each sequence costs another reading of all weights
        groups = groups[:1]
    groups = cut_groups(subject, groups, num_tokens, num_rollouts=1)
    room = policy.max_length - max(len(rollout.input_ids) for group in groups for rollout in group.rollouts)
    if not policy.computes_whole and room >= MIN_PROMPT:
        groups = begin_with_text(groups, ordinary_ids(policy, MIN_PROMPT))
    rows = synthetic_rows(groups, HALF_RANGE if config.model.precision == "float16" else 1.0)
    with without_dropout(policy.model):
        compute_gradient_only(trainer, laid_out(subject, rows, config.packing, config.micro_batch_tokens))
        flat = [row for group in rows for row in group]
        sampling = trainer_settings(config).sampling
        found = gradient_errors(policy, flat, sampling, trainer.loss_scale)
        error, slope_error = found.entries, found.slope
        # Eager attention takes its softmax in float32, so float64 helps no further.
        default = max(gradient_tolerance(config.model, policy), GRADIENT_TOLERANCE["float32"])
        limit = config.preflight.gradient_tolerance or default
        limit = explained_error(config.preflight.gradient_tolerance, policy, rows, sampling, error, limit, found.wanted)
        passed, rounding = error <= limit and (slope_error or 0.0) <= SLOPE_TOLERANCE[kind], ""
        is_right = (found.plain_slope or 0.0) <= SLOPE_TOLERANCE[kind]
        if is_right and not (passed or policy.computes_whole or config.preflight.gradient_tolerance):
            # Where transformers rounds as much, its gradient in the run's own precision is the measure
            alike = gradient_errors(policy, flat, sampling, trainer.loss_scale, rounded=True)
            passed = alike.entries <= default and (alike.slope or 0.0) <= SLOPE_TOLERANCE[kind]
            rounding = f"; {alike.entries:.2g} against transformers in {config.model.precision}"
    if passed and rounding:
        LOGGER.warning(ROUNDED, config.model.precision, f"{error:.2g}")
    slope = "differences of the loss say nothing (unsettled, or layers without a gradient, or none in float64)"
    if slope_error is not None:
        slope = f"{slope_error:.2g} against differences of the loss"
    seen = f"against plain transformers over {tokens_of(groups):,} tokens"
    note = "" if any(map(uncertain, groups)) else ", each of them certain, so that the gradient is 0"
    figure = f"relative error {error:.2g} {seen}{note}, {slope}{rounding}{dropout_note(config.model)}"
    remedy = (
        "a kernel has no right backward pass here: model.kernels=torch, model.attention=sdpa, "
        "packing=padded or a model that is not in 4 bits may have one, and model.precision=float32 tells rounding from "
        "a defect"
    )
    values = {"gradient": error, "tokens": float(tokens_of(groups))}
    values |= {} if slope_error is None else {"slope": slope_error}
    return Check(passed, figure, f"{limit:.3g}, {SLOPE_TOLERANCE[kind]:g}", "" if passed else remedy, values)


def gradient_errors(
    policy: Policy, rows: Sequence[Row], sampling: Sampling, scale: float, *, rounded: bool = False
) -> GradientErrors:
    """Return relative errors of the trainer's gradient, `scale` times the loss's.

    With `rounded` they are against autograd in the policy's own precision. Collective, with the same rows.
    """
    trained = {name: weight for name, weight in policy.model.named_parameters() if weight.requires_grad}
    # Weights without a gradient are learnt with 0.
    gradients = {name: torch.zeros_like(w) if w.grad is None else w.grad for name, w in trained.items()}
    left = gradients if scale == 1 else {name: gradient / scale for name, gradient in gradients.items()}
    found = {name: sharding.whole(left[name]).detach().double() for name in _few(left)}
    direction = _direction(found, _padding_rows(policy))
    expected = sum(float((found[name] * moved).sum()) for name, moved in direction.items())
    with sharding.gather_weights(policy):
        weights = dict(policy.model.named_parameters())
        plain = rounded_and_exact(policy)[0] if rounded else plain_model(policy)
        kept = allowed_tokens(plain, rows, sampling)
        with _noting_cuts(plain.model) as cut:
            wanted = plain_gradient(policy, plain, rows, sampling, kept)
        of_name = dict(zip(trained, wanted, strict=True))
        along: dict[Tensor, Tensor] = {weights[name]: moved for name, moved in direction.items()}
        # A slope that should be 0 is measured over the longest step.
        reach = REACH * _norm([weights[name].detach() for name in direction])
        unit = max(abs(row.advantages[0]) for row in rows)
        step = min(reach, RISE * unit / (2 * abs(expected))) if expected else reach
        of_plain = sum(float((of_name[name].double() * moved).sum()) for name, moved in direction.items())
        slope = of_plain if rounded and not cut else None
        if not (rounded or cut):
            try:
                slope = _slope(_rise(policy, along, lambda plain: plain_loss(plain, rows, sampling, kept)), step)
            except RuntimeError as error:  # GPT-2's, if it casts scores, insists on float32
                if is_out_of_memory(error):
                    raise
    errors = [(left[name], gradient) for name, gradient in zip(trained, wanted, strict=True)]
    return GradientErrors(_relative_error(errors), _apart(slope, expected), _apart(slope, of_plain), wanted)


def _apart(slope: float | None, other: float) -> float | None:
    return None if slope is None else abs(slope - other) / max(abs(slope), abs(other), TINY)


@contextmanager
def _noting_cuts(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Note layers that run without gradient by design, as HRM's do."""
    found: list[nn.Module] = []

    def note(module: nn.Module, given: object) -> None:
        if not torch.is_grad_enabled():
            found.append(module)

    hooks = [module.register_forward_pre_hook(note) for module in model.modules() if module._parameters]
    yield found
    for hook in hooks:
        hook.remove()


def _few(left: Mapping[str, Tensor]) -> list[str]:
    names = [name for name, gradient in left.items() if gradient.numel() <= MAX_ENTRIES] or list(left)
    evenly = names[:: max(1, len(names) // NUM_WEIGHTS)][:NUM_WEIGHTS]
    norms = {name: _norm([sharding.whole(left[name])]) for name in names}
    return list(dict.fromkeys([*evenly, max(norms, key=lambda name: norms[name])]))


def _direction(found: Mapping[str, Tensor], still: Mapping[str, int]) -> dict[str, Tensor]:
    """Return a unit direction, half along the gradient and half random.

    Entries missing from the gradient must not be missing here. The rows `still` do not move.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(g.shape, generator=generator, dtype=g.dtype).to(g.device) for name, g in found.items()}
    size, width = _norm(list(found.values())), _norm(list(drawn.values()))
    both = {name: gradient / (size or 1.0) + drawn[name] / width for name, gradient in found.items()}
    for name, row in still.items():
        if name in both:
            both[name][row] = 0.0
    length = _norm(list(both.values()))
    return {name: moved / length for name, moved in both.items()}


def _padding_rows(policy: Policy) -> dict[str, int]:
    """Return embeddings' padding rows, to which torch gives no gradient."""
    embeddings = [module for module in policy.model.modules() if isinstance(module, nn.Embedding)]
    rows = {id(one.weight): one.padding_idx for one in embeddings if one.padding_idx is not None}
    return {name: rows[id(weight)] for name, weight in policy.model.named_parameters() if id(weight) in rows}


def _rise(
    policy: Policy, direction: Mapping[Tensor, Tensor], loss: Callable[[Plain], Tensor]
) -> Callable[[float], float]:
    """Return the loss's difference across a distance along the direction.

    In float64: float32's rounding over thirty layers is as large as a straight rise.
    """
    shift = {weight: torch.zeros_like(moved) for weight, moved in direction.items()}
    plain = plain_model(policy, shift, torch.float64)

    @torch.no_grad()
    # Move the weights along the direction in place: `shift` is added to them inside of `plain`
    def loss_at(step: float) -> float:
        for weight, moved in direction.items():
            shift[weight].copy_(moved).mul_(step)
        return float(loss(plain))

    return lambda step: loss_at(step) - loss_at(-step)


def _slope(rise: Callable[[float], float], step: float) -> float | None:
    """Return the derivative from central differences, None where they do not settle.

    Steps are halved until two in a row agree. If a token changed experts in both, a shorter step would double the
    error.
    """
    before = rise(step) / (2 * step)
    for halvings in range(1, MAX_HALVINGS + 1):
        length = step / 2**halvings
        slope = rise(length) / (2 * length)
        if abs(slope - before) <= AGREEMENT * max(abs(slope), abs(before)):
            return (4 * slope - before) / 3  # without the error of second order, which is in both
        before = slope
    return None


def _relative_error(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return the relative error over all entries of all ranks. 0 where both are 0, else infinite beside 0."""
    apart, size = 0.0, 0.0
    for left, whole in pairs:
        wanted = sharding.placed_like(whole.to(left.dtype), left)
        apart += square(local(left) - local(wanted))
        size += square(local(wanted))
    apart, size = collectives.all_sum(torch.tensor([apart, size], dtype=torch.float64)).tolist()
    if not size:
        return math.inf if apart else 0.0
    return float((apart / size) ** 0.5)


def _norm(tensors: Sequence[Tensor]) -> float:
    return float(sum(square(tensor) for tensor in tensors) ** 0.5)
