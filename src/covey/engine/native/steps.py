"""Run several steps of decoding in one call of C.

A step is layers, head, draw, and the embedding that the next one reads. There are as many as wanted, or up to the first
that ends a row. Their numbers are those of one step at a time.

Shapes: S steps, R rows, K stop tokens, V vocabulary.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from covey.engine.native.compiled import CompiledDecodeLayout, DrawsCall, draw_rooms
from covey.engine.native.decode_weights import is_fused
from covey.engine.native.models.fused import FusedModel, StepsCall
from covey.engine.native.panels import CompiledLinear
from covey.engine.native.rows import DecodeRow
from covey.policy.policy import Policy, head_modules
from covey.policy.sampling import random_uniform

NOBODY = -1
"""Stands for a stop token where a row has fewer than others; never drawn."""


@dataclass(frozen=True, slots=True)
class RowDraws:
    """Numbers of rows that steps read, none of them greedy or filtered."""

    key_R: Tensor
    temperature_R: Tensor
    stop_RK: Tensor

    @staticmethod
    def of(rows: Sequence[DecodeRow]) -> "RowDraws | None":
        """Return the numbers, None where another draw is wanted."""
        if any(row.sampling.filters or not row.sampling.temperature for row in rows):
            return None
        most = max(len(row.request.stop_ids) for row in rows)
        stops = [sorted(row.request.stop_ids) + [NOBODY] * (most - len(row.request.stop_ids)) for row in rows]
        temperatures = [row.sampling.temperature for row in rows]
        return RowDraws(torch.tensor([row.key for row in rows]), torch.tensor(temperatures), torch.tensor(stops))

    def at(self, index_F: Tensor) -> "RowDraws":
        """Return the numbers of some rows."""
        return RowDraws(self.key_R[index_F], self.temperature_R[index_F], self.stop_RK[index_F])


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
        logits_RV = torch.empty(num_rows, packed.product.outer)
        rooms = draw_rooms(*logits_RV.shape)
        tensors = logits_RV, uniform_SR, rows.temperature_R, token_SR, logprob_SR, *rooms
        draws = DrawsCall(*(tensor.data_ptr() for tensor in tensors), *logits_RV.shape)
        steps = StepsCall(newest=newest_R.data_ptr(), stops=rows.stop_RK.data_ptr(), draws=draws, steps=num_steps)
        steps.head, steps.num_stops = ctypes.addressof(packed.product), rows.stop_RK.shape[1]
        position_SR = layout.position_R + step_S1 + self._first
        done = self._model.run_steps(layout, position_SR, steps, packed.narrow_width)
        return token_SR[:done], logprob_SR[:done]
