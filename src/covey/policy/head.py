"""Log-probs, entropies and gradients under a head of one linear layer.

A head takes three products: the logits, then from their gradient that of the hidden states and that of the weight. No
[tokens, vocabulary] tensor longer than a chunk may live, so with several chunks the logits would have to be computed
again in the backward pass, a fourth product. Instead, the first that applies:

- The weight is frozen: gradients of hidden states are made in the forward pass, up to a factor, d loss / d log-prob.
- One chunk: its probabilities (or logits) are kept, and the backward pass makes gradients of them, in place.
- d loss / d log-prob has been predicted: gradients are made while the logits are there. The backward pass compares the
  prediction with what has come, and takes these gradients only if every value is the same.
- Else, and where a gradient flows through the entropy of several chunks, the logits are computed again.

Shapes: L loss tokens, of all chunks or of one; C hidden width, V vocabulary. Functions that end in _ work in place.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from covey.algorithm.softmax import SLICE, log_softmax_
from covey.policy.kernels import blocks, linear
from covey.policy.kernels.elementwise import compiled_gradient_, compiled_scores
from covey.policy.kernels.gpu.softmax import fused_gradient, fused_scores
from covey.policy.kernels.linear import PLAIN, OneDnnLinear, TiledLinear
from covey.policy.policy import Policy, head_modules, is_half

LARGE = 2**24
"""Numbers of a weight whose copies are worth an order of summation of its own."""
MIN_ROWS = 16
"""However long the vocabulary: threads share out rows."""


@dataclass(frozen=True, slots=True)
class Head:
    layer: nn.Linear
    precision: torch.dtype
    """Type of matrix products; float32 and float64 leave their factors as they are."""
    temperature: float
    """Divisor of the logits."""
    chunk: int
    """Loss tokens whose logits live at the same time."""
    entropy_gradient: bool = False
    """Let gradients flow through the entropy."""
    fused: bool = False
    """Compute the softmax in few passes on a GPU (`kernels.gpu.softmax`)."""
    in_place: bool = False
    """Add the weight's gradient to its `.grad` without a copy, as `backward` would; nothing else may ask for it."""

    @property
    def adds(self) -> bool:
        """Return True if the gradient is added in place."""
        return self.in_place and not is_heard(self.layer.weight)

    @property
    def compiled(self) -> bool:
        """Return True where C computes the softmax, of float32 or bfloat16."""
        if isinstance(self.layer, TiledLinear):
            return self.precision == torch.bfloat16
        return self.through_c

    @property
    def through_c(self) -> bool:
        """Return True where C computes gradients of the layer."""
        weight = self.layer.weight
        is_known = weight.dtype == torch.float32 or (weight.dtype == self.precision and not weight.requires_grad)
        return (
            self.precision in (torch.float32, torch.bfloat16)
            and is_known
            and isinstance(self.layer, OneDnnLinear)
            and self.layer.through_c
        )

    def own_weight(self, weight_VC: Tensor) -> Tensor:
        """Return the weight for products: cast, unless C rounds it itself."""
        return weight_VC if self.through_c else _cast(weight_VC, self.precision)

    def product(self, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """Compute x @ w.T + b in the layer's type and library."""
        x_NI, weight_OI = _cast(x_NI, self.precision), self.own_weight(weight_OI)
        if self.through_c and is_half(self.precision):
            return blocks.multiply(x_NI, weight_OI.t(), dtype=torch.bfloat16, bias_M=bias_O)
        bias_O = None if bias_O is None else _cast(bias_O, self.precision)
        multiply = linear.product if isinstance(self.layer, OneDnnLinear) else F.linear
        return multiply(x_NI, weight_OI, bias_O)

    def is_wide(self, x: Tensor) -> bool:
        """Return True where products of half-precision factors may come in float32."""
        return is_half(self.precision) and x.device.type == "cuda"

    def hidden_gradient(self, gradient_LV: Tensor, weight_VC: Tensor) -> Tensor:
        """Compute gradient @ weight, (L, C)."""
        multiply = blocks.multiply if self.through_c else lambda x, w: self.product(x, w.t())
        return multiply(_cast(gradient_LV, self.precision), weight_VC)

    def weight_gradient(self, gradient_LV: Tensor, rows_LC: Tensor, sum_VC: Tensor | None) -> Tensor:
        """Compute gradient^T @ rows, (V, C), added to a sum."""
        if self.compiled:
            return blocks.weight_gradient(_cast(gradient_LV, self.precision), _cast(rows_LC, self.precision), sum_VC)
        more_VC = self.product(gradient_LV.t(), rows_LC.t()).to(self.layer.weight.dtype)
        return more_VC if sum_VC is None else sum_VC.add_(more_VC)


def linear_layer(policy: Policy) -> nn.Linear | None:
    """Return the policy's head if it is one linear layer, else None."""
    modules = head_modules(policy.causal_lm) if policy.head_is_linear else []
    if len(modules) != 1 or type(modules[0]) not in PLAIN:
        return None
    (layer,) = modules
    assert isinstance(layer, nn.Linear)
    return layer


def score_rows(
    head: Head, rows_LC: Tensor, target_L: Tensor, predicted_L: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return log-probs of the targets and entropies, in float32 at least.

    `predicted_L` is the expected d loss / d log-prob. It affects the order of the work, never the result.
    """
    layer = head.layer
    if torch.is_grad_enabled():
        logprob_L, entropy_L = _HeadScores.apply(rows_LC, layer.weight, layer.bias, target_L, predicted_L, head)
        return logprob_L, entropy_L
    chunks = _split(head.chunk, rows_LC, target_L)
    scored = [_score_(head, _logits(head, rows, layer.weight, layer.bias), target).scores for rows, target in chunks]
    return _concatenate(scored)


@dataclass(slots=True)
class Gradients:
    """Sums of gradients of hidden states, weight and bias, where needed."""

    head: Head
    needed: tuple[bool, bool, bool]
    weight_VC: Tensor | None = None
    bias_V: Tensor | None = None
    _chunks: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, head: Head, needed: tuple[bool, bool, bool]) -> "Gradients":
        """Begin sums at 0, or where the weight's own gradient stands."""
        return cls(head, needed, head.layer.weight.grad if head.adds and needed[1] else None)

    def add(self, gradient_LV: Tensor, rows_LC: Tensor, weight_VC: Tensor) -> None:
        """Add the gradients of one chunk, given that of its logits."""
        of_rows, of_weight, of_bias = self.needed
        if of_rows:
            self._chunks.append(self.head.hidden_gradient(gradient_LV, weight_VC).to(rows_LC.dtype))
        if of_weight:
            self._add_weight(gradient_LV, rows_LC)
        if of_bias:
            more_V = gradient_LV.sum(dim=0).to(self.head.layer.weight.dtype)
            self.bias_V = more_V if self.bias_V is None else self.bias_V.add_(more_V)

    def _add_weight(self, gradient_LV: Tensor, rows_LC: Tensor) -> None:
        if self.head.is_wide(gradient_LV) and self.head.layer.weight.dtype == torch.float32:
            gradient_VL, rows_LC = gradient_LV.t().to(self.head.precision), rows_LC.to(self.head.precision)
            self.weight_VC = wide_product(gradient_VL, rows_LC, self.weight_VC)
            return
        self.weight_VC = self.head.weight_gradient(gradient_LV, rows_LC, self.weight_VC)

    def hidden(self) -> Tensor | None:
        """Return the gradient of the hidden states of all chunks, (L, C)."""
        return torch.cat(self._chunks) if self._chunks else None


class _HeadScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        rows_LC, weight_VC, bias_V, target_L, predicted_L, head = given
        held_VC = head.own_weight(weight_VC)
        # Gradients are computed now where weights are frozen or the gradient of log-probs is predicted
        needed, is_one = ctx.needs_input_grad[:3], len(target_L) <= head.chunk
        ctx.is_frozen = not any(needed[1:]) and not head.entropy_gradient
        is_predicted = predicted_L is not None and not is_one and not head.entropy_gradient
        ctx.made = Gradients.of(head, needed) if ctx.is_frozen or is_predicted else None
        ctx.adds = head.adds and weight_VC.grad is not None
        ctx.head, ctx.kept, scores = head, None, []
        # Chunk by chunk: logits of all tokens never exist at once
        for rows, target, coefficient in _split(head.chunk, rows_LC, target_L, None if ctx.is_frozen else predicted_L):
            scored = _score_(head, _logits(head, rows, held_VC, bias_V), target)
            scores.append(scored.scores)
            if ctx.made is not None:
                ctx.made.add(_gradient_(head, scored, target, coefficient), rows, held_VC)
            elif is_one:
                ctx.kept = scored
            del scored  # before the next are made
        ctx.save_for_backward(rows_LC, weight_VC, bias_V, target_L, predicted_L)
        logprob_L, entropy_L = _concatenate(scores)
        if not head.entropy_gradient:
            ctx.mark_non_differentiable(entropy_L)
        return logprob_L, entropy_L

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *coefficients: Tensor) -> tuple[Tensor | None, ...]:
        coefficient_L, of_entropy_L = coefficients
        if ctx.is_frozen:
            hidden_LC = ctx.made.hidden()
            return hidden_LC * coefficient_L[:, None].to(hidden_LC.dtype), None, None, None, None, None
        # Handed over without a copy, so there is nothing left for a second backward pass, which computes it again.
        made, ctx.made = ctx.made, None
        if made is not None and not torch.equal(coefficient_L, ctx.saved_tensors[-1]):
            if ctx.adds:  # take back what was predicted
                _made_now(ctx, -ctx.saved_tensors[-1], None, (False, ctx.needs_input_grad[1], False))
            made = None
        if made is None:
            of_entropy = of_entropy_L if ctx.head.entropy_gradient else None
            made = _made_now(ctx, coefficient_L, of_entropy, ctx.needs_input_grad[:3])
        if ctx.head.adds and made.weight_VC is not None:
            ctx.head.layer.weight.grad, made.weight_VC = made.weight_VC, None
        return made.hidden(), made.weight_VC, made.bias_V, None, None, None


def _made_now(
    ctx: Any, coefficient_L: Tensor, of_entropy_L: Tensor | None, needed: tuple[bool, bool, bool]
) -> Gradients:
    """Compute gradients from the kept chunk, or from recomputed logits."""
    rows_LC, weight_VC, bias_V, target_L, _ = ctx.saved_tensors
    head, made = ctx.head, Gradients.of(ctx.head, needed)
    weight_VC = head.own_weight(weight_VC)
    kept, ctx.kept = ctx.kept, None
    for rows, target, *coefficients in _split(head.chunk, rows_LC, target_L, coefficient_L, of_entropy_L):
        scored = kept or _score_(head, _logits(head, rows, weight_VC, bias_V), target)
        made.add(_gradient_(head, scored, target, *coefficients), rows, weight_VC)
        del scored
    return made


class _Rows(torch.autograd.Function):
    """Rows of an embedding; their gradients go into `.grad`."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight_VC: Tensor, padding_id: int | None) -> Tensor:
        ctx.save_for_backward(ids, weight_VC)
        ctx.padding_id = padding_id
        return F.embedding(ids, weight_VC)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ids, weight_VC = ctx.saved_tensors
        ids_N, gradient_NC = ids.flatten(), gradient.flatten(0, -2).to(weight_VC.dtype)
        if ctx.padding_id is not None:
            kept_N = ids_N != ctx.padding_id
            ids_N, gradient_NC = ids_N[kept_N], gradient_NC[kept_N]
        if weight_VC.grad is None:
            weight_VC.grad = torch.zeros_like(weight_VC)
        weight_VC.grad.index_add_(0, ids_N, gradient_NC)
        return None, None, None


class AddingEmbedding(nn.Embedding):
    """An embedding with no gradient of its own whole size."""

    def forward(self, input: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and self.weight.requires_grad) or is_heard(self.weight):
            return super().forward(input)
        return _Rows.apply(input, self.weight, self.padding_idx)


def is_heard(weight: Tensor) -> bool:
    """Return True if hooks wait for the weight's gradient."""
    return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)


def add_rows_in_place(model: nn.Module, *, at_least: int = LARGE) -> None:
    """Let large plain embeddings add to `.grad`; only `backward` may follow."""
    for module in model.modules():
        is_plain = type(module) is nn.Embedding and module.max_norm is None and not module.sparse
        if is_plain and not module.scale_grad_by_freq and next(module.parameters()).numel() >= at_least:
            module.__class__ = AddingEmbedding


def _split(num_rows: int, first: Tensor, *others: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Split each tensor into chunks of rows; None is repeated."""
    pieces = first.split(num_rows)
    none: Sequence[None] = [None] * len(pieces)
    return zip(pieces, *(none if other is None else other.split(num_rows) for other in others), strict=True)


def wide_product(x_NI: Tensor, y_IO: Tensor, sum_NO: Tensor | None = None) -> Tensor:
    """Compute half-precision x @ y, added to `sum_NO`, in float32 (GPUs only)."""
    if sum_NO is None:
        return torch.mm(x_NI, y_IO, out_dtype=torch.float32)
    return torch.addmm(sum_NO, x_NI, y_IO, out_dtype=torch.float32)


def _logits(head: Head, rows_LC: Tensor, weight_VC: Tensor, bias_V: Tensor | None) -> Tensor:
    if head.is_wide(rows_LC) and bias_V is None:
        return wide_product(_cast(rows_LC, head.precision), _cast(weight_VC, head.precision).t())
    logits_LV = head.product(rows_LC, weight_VC, bias_V)
    return logits_LV if logits_LV.dtype == torch.float64 or head.compiled else logits_LV.float()


@dataclass(frozen=True, slots=True)
class Scored:
    """A chunk whose logits are scored."""

    values_LV: Tensor
    """Its probabilities; its logits where the softmax is fused."""
    scores: tuple[Tensor, Tensor]
    """Log-probs of the targets, and entropies."""
    logsum_L: Tensor | None = None
    """Log-sum-exp that the log-softmax subtracts, where it is fused."""


def _score_(head: Head, logits_LV: Tensor, target_L: Tensor) -> Scored:
    """Score logits in place: they become probabilities, unless the softmax is fused."""
    if not (head.fused or head.compiled):
        return Scored(
            logits_LV, _concatenate([_score_slice_(head, *slices) for slices in _slices(logits_LV, target_L)])
        )
    score = compiled_scores if head.compiled else fused_scores
    logprob_L, entropy_L, logsum_L = score(logits_LV, target_L, head.temperature)
    return Scored(logits_LV, (logprob_L, entropy_L), logsum_L)


def _score_slice_(head: Head, logits_LV: Tensor, target_L: Tensor) -> tuple[Tensor, Tensor]:
    tempered_LV = logits_LV if head.temperature == 1.0 else logits_LV.div_(head.temperature)
    all_LV = log_softmax_(tempered_LV)
    logprob_L = all_LV.gather(1, target_L[:, None])[:, 0]
    probability_LV = torch.exp(all_LV, out=logits_LV)
    return logprob_L, -all_LV.mul_(probability_LV).sum(dim=-1)


def _gradient_(
    head: Head, scored: Scored, target_L: Tensor, coefficient_L: Tensor | None, of_entropy_L: Tensor | None = None
) -> Tensor:
    """Return the gradient of logits, in place or in half precision.

    A `coefficient_L` of None stands for 1.
    """
    values_LV = scored.values_LV
    if coefficient_L is None:
        coefficient_L = values_LV.new_ones(len(target_L))
    if head.compiled and scored.logsum_L is not None:
        sums = scored.logsum_L, scored.scores[1]
        compiled_gradient_(values_LV, target_L, coefficient_L, of_entropy_L, sums, head.temperature)
        return values_LV
    of_entropy_L = None if of_entropy_L is None else of_entropy_L / head.temperature
    coefficient_L = coefficient_L / head.temperature
    if scored.logsum_L is not None:
        out_LV = values_LV if head.precision.itemsize > 2 else torch.empty_like(values_LV, dtype=head.precision)
        sums = scored.logsum_L, scored.scores[1]
        fused_gradient(values_LV, target_L, coefficient_L, of_entropy_L, sums, head.temperature, out_LV)
        return out_LV
    for slices in _slices(values_LV, target_L, coefficient_L, of_entropy_L):
        _gradient_slice_(*slices)
    return values_LV


def _gradient_slice_(
    probability_LV: Tensor, target_L: Tensor, coefficient_L: Tensor, of_entropy_L: Tensor | None
) -> None:
    """Compute coefficient (1 at the target - p) - of_entropy p (log p + H) in place."""
    factor_L, terms_LV = -coefficient_L, None
    if of_entropy_L is not None:
        terms_LV = torch.xlogy(probability_LV, probability_LV)
        factor_L = factor_L + of_entropy_L * terms_LV.sum(dim=-1)
    probability_LV.mul_(factor_L[:, None])
    if of_entropy_L is not None and terms_LV is not None:
        probability_LV.sub_(terms_LV.mul_(of_entropy_L[:, None]))
    at_target_L1 = probability_LV.gather(1, target_L[:, None]) + coefficient_L[:, None]
    probability_LV.scatter_(1, target_L[:, None], at_target_L1)


def _slices(first_LV: Tensor, *others: Tensor | None) -> Iterator[tuple[Any, ...]]:
    num_entries = SLICE.get(first_LV.device.type, SLICE["cuda"])
    return _split(max(num_entries // first_LV.shape[1], MIN_ROWS), first_LV, *others)


def _concatenate(scores: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    logprobs, entropies = zip(*scores, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _cast(tensor: Tensor, precision: torch.dtype) -> Tensor:
    return tensor.to(precision) if is_half(precision) else tensor
