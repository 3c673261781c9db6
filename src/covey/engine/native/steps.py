"""Run several steps of decoding in C, or ahead of the host.

A step is layers, head, draw, and the embedding that the next one reads. There are as many as wanted, or up to the first
that ends a row. Their numbers are those of one step at a time.

Shapes: S steps, R rows, K stop tokens, V vocabulary.
"""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from covey.engine.drafts.drafter import Drafted
from covey.engine.native.compiled import CompiledDecodeLayout, DrawsCall, draw_rooms
from covey.engine.native.decode_weights import is_fused
from covey.engine.native.models.fused import FusedModel, StepsCall
from covey.engine.native.panels import CompiledLinear
from covey.engine.native.rows import RowDraws
from covey.policy.policy import Policy, head_modules
from covey.policy.sampling import random_uniform

Sampled = tuple[list[int], list[float]]
"""A token of each of some rows, and its log-probability."""


class DecodeSteps:
    """Steps of a policy that C computes as a whole."""

    def __init__(self, policy: Policy, model: FusedModel, head: CompiledLinear) -> None:
        self._model, self._head, self._first = model, head, policy.first_position

    @staticmethod
    def of(policy: Policy) -> "DecodeSteps | None":
        """Return the steps, None where C computes only parts of the policy."""
        model, heads = policy.causal_lm.base_model, head_modules(policy.causal_lm)
        if not isinstance(model, FusedModel) or not is_fused(policy) or not policy.head_is_linear or len(heads) != 1:
            return None
        embedding, (head,) = model.get_input_embeddings(), heads
        is_plain = type(embedding) is nn.Embedding and embedding.max_norm is None
        is_known = is_plain and embedding.get_parameter("weight").dtype in (torch.float32, torch.bfloat16)
        return DecodeSteps(policy, model, head) if is_known and isinstance(head, CompiledLinear) else None

    def run(
        self, rows: RowDraws, layout: CompiledDecodeLayout, newest_R: Tensor, turn_R: Tensor, num_steps: int
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens (S, R) and log-probs of up to `num_steps` steps."""
        step_S1, num_rows, packed = torch.arange(num_steps)[:, None], len(newest_R), self._head.packed
        uniform_SR, newest_R = random_uniform(rows.key_R, turn_R + step_S1), newest_R.clone()
        token_SR, logprob_SR = torch.empty(num_steps, num_rows, dtype=torch.int64), torch.empty(num_steps, num_rows)
        steps, _held = self._describe(num_rows, uniform_SR, rows.temperature_R, token_SR, logprob_SR)
        steps.newest, steps.stops, steps.steps = newest_R.data_ptr(), rows.stop_RK.data_ptr(), num_steps
        steps.num_stops = rows.stop_RK.shape[1]
        position_SR = layout.position_R + step_S1 + self._first
        done = self._model.run_steps(layout, num_rows, position_SR.view(1, -1), steps, packed.narrow_width)
        return token_SR[:done], logprob_SR[:done]

    def run_drafted(self, drafted: Drafted, layout: CompiledDecodeLayout, num_steps: int) -> int:
        """Run drafted steps until one ends a row; return their number."""
        room, packed = drafted.call.room, self._head.packed
        own_F, angle_F, token_F = torch.empty(3, room, dtype=torch.int64)
        temperature_F, logprob_F = torch.empty(2, room)
        cell_C = torch.empty(room * layout.call.num_groups, dtype=torch.int64)
        uniform_F = torch.empty(room, dtype=torch.float64)
        call = layout.call
        call.own_lengths, call.angle_rows, call.row_of_cell = own_F.data_ptr(), angle_F.data_ptr(), cell_C.data_ptr()
        steps, _held = self._describe(room, uniform_F, temperature_F, token_F, logprob_F)
        steps.newest, steps.steps = drafted.call.fed, num_steps
        steps.drafts = ctypes.addressof(drafted.call)
        position_RS = layout.position_R[:, None] + torch.arange(drafted.call.span) + self._first
        return self._model.run_steps(layout, room, position_RS.view(1, -1), steps, packed.narrow_width)

    def _describe(self, num_positions: int, *tensors: Tensor) -> tuple[ctypes.Structure, list[Tensor]]:
        """Return a call with draws, and the tensors to hold."""
        packed = self._head.packed
        logits_FV = torch.empty(num_positions, packed.product.outer)
        held = [logits_FV, *tensors, *draw_rooms(*logits_FV.shape)]
        draws = DrawsCall(*(tensor.data_ptr() for tensor in held), *logits_FV.shape)
        return StepsCall(draws=draws, head=ctypes.addressof(packed.product)), held


@dataclass(frozen=True, slots=True)
class UnreadSteps:
    """Hold launched steps, whose tokens are on their way to the host."""

    drawn_2SB: Tensor
    """Tokens and log-probs."""
    is_there: Any
    """Event of a GPU after which they are on the host; else None."""

    @staticmethod
    def of(drawn_2SB: Tensor) -> "UnreadSteps":
        if not torch.cuda.is_available():
            return UnreadSteps(drawn_2SB, None)
        host = torch.empty(drawn_2SB.shape, dtype=drawn_2SB.dtype, pin_memory=True)
        host.copy_(drawn_2SB, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return UnreadSteps(host, event)

    @property
    def steps(self) -> int:
        return self.drawn_2SB.shape[1]

    def read(self, num_rows: int) -> list[Sampled]:
        """Wait for the tokens of each step, and for nothing launched later."""
        if self.is_there is not None:
            self.is_there.synchronize()
        token_SR, logprob_SR = self.drawn_2SB[:, :, :num_rows].tolist()
        return [on_host(token_ids, logprobs) for token_ids, logprobs in zip(token_SR, logprob_SR, strict=True)]


def on_host(token_ids: Sequence[float], logprobs: list[float]) -> Sampled:
    """Return the sampled tokens. ValueError where a log-probability is not finite."""
    if not math.isfinite(sum(logprobs)):
        raise ValueError("log-probabilities of sampled tokens must be finite, got nan; the policy has diverged")
    return [int(token_id) for token_id in token_ids], logprobs
