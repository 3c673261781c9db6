"""One layer of a public model, its live bytes counted and nothing computed: tensors have shapes and no numbers."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from covey.policy.attention import varlen
from covey.policy.attention.base import ATTENTION, register
from covey.policy.kernels.gpu import liger
from covey.policy.policy import DTYPES
from covey.run.memory.model_shapes import PUBLIC
from covey_preflight import passes

NUM_TOKENS = 8192


@dataclass(frozen=True)
class Counted:
    """Bytes of one layer over `NUM_TOKENS` tokens."""

    kept: int
    """By autograd, between the passes; copies of weights included."""
    peak: int
    """In the backward pass. Gradients of weights are let go as soon as they are whole."""


class _Keeps(torch.autograd.Function):
    """An operation whose gradients are as large as what it was given, which is saved first."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[: len(ctx.needs_input_grad)])


class _Flash(_Keeps):
    """What FlashAttention keeps, and the sizes of what it returns."""

    @staticmethod
    def forward(ctx: Any, query_THD: Tensor, key_SKD: Tensor, value_SKD: Tensor) -> Tensor:
        out_THD = torch.empty_like(query_THD)
        sum_HT = torch.empty(query_THD.shape[1], len(query_THD), dtype=torch.float32)
        ctx.save_for_backward(query_THD, key_SKD, value_SKD, out_THD, sum_HT)
        return out_THD


class _Norm(_Keeps):
    """What Liger's norm keeps: its input, the weight, and a number of each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_C: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight_C, torch.empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)


class _Gate(torch.autograd.Function):
    """What Liger's gate keeps: both factors. Their gradients take their place."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return ctx.saved_tensors


class _Turns(torch.autograd.Function):
    """Liger's rotary positions turn queries and keys, and their gradients, in place."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return query, key

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


def _use_liger(model: nn.Module, patch: pytest.MonkeyPatch, precision: str) -> None:
    """Let the model's layers keep what they keep through Liger on a GPU."""
    patch.setattr(liger._OnGpu, "_computes", lambda self, x: True)
    patch.setattr(liger._OnGpu, "_cast_once", lambda self, x: x.to(DTYPES[precision]))
    patch.setattr(liger._Norm, "_norm_input", lambda self, x: _Norm.apply(x, self.weight))
    patch.setattr(liger._Mlp, "_gate", lambda self, gate, up: _Gate.apply(gate, up))
    patch.setattr(liger._Attention, "_rotate", lambda self, query, key, cos, sin: _Turns.apply(query, key))
    liger.use_liger(model, torch.device("cuda"))


def count_layer(name: str, precision: str, lora_rank: int, by_liger: bool = False) -> Counted:
    """Count a layer of a model of `model_shapes.PUBLIC` as it trains under varlen attention."""
    model = _model(name, precision, lora_rank)
    layer, width, stored = model.model.layers[0], model.config.hidden_size, next(model.parameters()).dtype
    with _fake(model), pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen, "reference", lambda query, key, value, lengths, rule: _Flash.apply(query, key, value))
        patch.setattr(passes, "OWN_MEMORY", (*passes.OWN_MEMORY, FakeTensor))
        if by_liger:
            _use_liger(model, patch, precision)
        end_N = torch.zeros(2, dtype=torch.int32)
        place_S = torch.zeros(NUM_TOKENS, dtype=torch.int64)
        layout = varlen.VarlenLayout(varlen.Lengths(end_N, end_N, NUM_TOKENS, NUM_TOKENS), place_S)
        before_BTC = torch.empty(1, NUM_TOKENS, width, dtype=stored, requires_grad=True)
        turns = model.model.rotary_emb(before_BTC.detach(), place_S[None])
        half = torch.autocast("cpu", dtype=DTYPES[precision], enabled=precision == "bfloat16")
        for weight in layer.parameters():
            if weight.requires_grad:
                weight.register_post_accumulate_grad_hook(_let_go)
        with passes.LiveBytes() as live:
            with half:
                after_BTC = layer(before_BTC * 1, position_embeddings=turns, layout=layout, attention_mask=None)
            kept, live.peak = live._now - after_BTC.nbytes, 0
            after_BTC.backward(torch.empty_like(after_BTC))
        return Counted(kept, live.peak)


def _let_go(weight: Tensor) -> None:
    weight.grad = None


def _model(name: str, precision: str, lora_rank: int) -> Any:
    register()
    sizes = dict(PUBLIC[name])
    kind = sizes.pop("kind")
    config = AutoConfig.for_model(kind, **{**sizes, "num_hidden_layers": 1})
    stored = DTYPES[precision] if lora_rank else torch.float32
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION, dtype=stored)
        if lora_rank:
            get_peft_model(model, LoraConfig(r=lora_rank, target_modules="all-linear"))
    return model


@contextlib.contextmanager
def _fake(model: nn.Module) -> Iterator[None]:
    """Tensors without numbers inside, those of the model too. Adapters are float32, and cast nothing back and forth."""
    with FakeTensorMode():
        for module in model.modules():
            if hasattr(module, "cast_input_dtype_enabled"):
                module.cast_input_dtype_enabled = False
            for name, weight in module.named_parameters(recurse=False):
                dtype = torch.float32 if weight.requires_grad else weight.dtype
                own = nn.Parameter(torch.empty(weight.shape, dtype=dtype), requires_grad=weight.requires_grad)
                module.register_parameter(name, own)
            for name, buffer in module.named_buffers(recurse=False):
                module.register_buffer(name, torch.empty(buffer.shape, dtype=buffer.dtype))
        yield
