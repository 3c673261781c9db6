"""The policy computed by transformers alone, the reference of covey's computation.

A skeleton of the same class is made from the configuration, with eager attention, and reads the policy's weights. It
computes one sequence at a time, without padding, in float32 at least. Weights held otherwise (bfloat16, 4 or 8 bits,
under adapters, in shards) become plain numbers layer by layer.

Shapes: T tokens, K positions whose logits are wanted, V vocabulary, L loss tokens, O x I a linear layer's weight.
"""

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from covey.policy import sharding
from covey.policy.models.quantized import dequantize
from covey.policy.own import OwnModel
from covey.policy.policy import Policy
from covey.policy.sampling import chosen_logprobs
from covey.types import Rollout, Sampling

Shift = Mapping[Tensor, Tensor]
"""Offsets added to a policy's weights, keyed by weight."""
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
Maker = Callable[[Tensor | slice], Tensor]
"""Makes plain numbers of a weight's rows."""
ALL = slice(None)
MAKING = threading.RLock()
"""Lock held while models are made: a patch of torch, shared by all threads, gives a skeleton no weight storage."""


@dataclass(frozen=True, slots=True)
class Plain:
    """A model that shares only its weights with a policy."""

    model: PreTrainedModel
    is_masked: bool
    device: torch.device
    half: torch.dtype | None = None
    """Type of matrix products under autocast, in place of float32."""

    def logits(self, token_ids: Sequence[int], keep: Sequence[int]) -> Tensor:
        """Return logits (K, V) at the positions `keep`, in float32 at least."""
        ids_1T = torch.tensor([list(token_ids)], device=self.device)
        keep_K = torch.tensor(list(keep), dtype=torch.int64, device=self.device)
        inputs: dict[str, Any] = {"input_ids": ids_1T, "attention_mask": torch.ones_like(ids_1T)}
        halved = torch.autocast(self.device.type, dtype=self.half, enabled=self.half is not None)
        with halved, _exactly(self.model.dtype):
            if not self.is_masked:
                inputs["use_cache"] = False
            if self.is_masked or "logits_to_keep" not in signature(self.model.forward).parameters:
                return self.model(**inputs).logits[0, keep_K]
            return self.model(**inputs, logits_to_keep=keep_K).logits[0]


def plain_model(policy: Policy, shift: Shift | None = None, dtype: torch.dtype = torch.float32) -> Plain:
    """Return a transformers model with the policy's weights, moved by `shift`.

    It computes in `dtype`, or in the policy's type where that is wider. Gradients flow to the policy's parameters.
    Sharded weights are either gathered around making and using it, or put away (`sharding.reshard`) around both: its
    passes are then collective.
    """
    dtype = torch.promote_types(policy.precision, dtype)
    with MAKING, init_empty_weights(include_buffers=False), torch.random.fork_rng(devices=[]):
        own = policy.causal_lm
        if isinstance(own, OwnModel):
            model: PreTrainedModel = own.skeleton(dtype)
        else:
            model = type(own)._from_config(copy.deepcopy(own.config), dtype=dtype, **EAGER)
    for weight in model.parameters():  # routers of some are in float32 whatever is asked for
        weight.data = weight.data.to(torch.promote_types(weight.dtype, dtype))
    _take_weights(model, policy, shift or {})
    return Plain(model.eval(), policy.mask_id is not None, policy.device)


class Exact(TorchFunctionMode):
    """Keeps float64 where models cast to float32 for norms and softmax."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.full and isinstance(args[-1], float):  # XGLM's lowest number of float64
            given.setdefault("dtype", torch.float64)
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            given = {key: torch.float64 if arg is torch.float32 else arg for key, arg in given.items()}
        return func(*args, **given)


def _exactly(dtype: torch.dtype) -> AbstractContextManager[object]:
    return Exact() if dtype == torch.float64 else nullcontext()


def rounded_and_exact(policy: Policy) -> tuple[Plain, Plain]:
    """Return plain models in the policy's precision and in a higher one.

    No code of covey's takes part in their difference.
    """
    exact = plain_model(policy, dtype=torch.float64 if policy.computes_whole else torch.float32)
    if policy.computes_whole:
        return plain_model(policy), exact
    # Weights that are half as wide leave so much of what flows between layers, too
    return replace(plain_model(policy, dtype=policy.causal_lm.dtype), half=policy.precision), exact


def rollout_logprobs(plain: Plain, rollout: Rollout, sampling: Sampling) -> Tensor:
    """Return log-probs (L,) of loss tokens under the sampled distribution."""
    return chosen_logprobs(*rollout_logits(plain, rollout), sampling)


def rollout_logits(plain: Plain, rollout: Rollout) -> tuple[Tensor, Tensor]:
    """Return logits (L, V) of a rollout's loss tokens, and tokens (L,)."""
    logits, targets = [], []
    for start, stop in rollout.sequences:
        keep = [place for place, chosen in enumerate(rollout.loss_mask[start:stop]) if chosen]
        if keep:
            logits.append(plain.logits(rollout.input_ids[start:stop], keep))
            targets += [rollout.target_ids[start + place] for place in keep]
    return torch.cat(logits), torch.tensor(targets, device=plain.device)


def _take_weights(model: PreTrainedModel, policy: Policy, shift: Shift) -> None:
    own: dict[str, nn.Module] = {}
    made: dict[nn.Module, list[tuple[nn.Module, dict[str, Maker]]]] = {}
    for name, module in policy.causal_lm.named_modules():
        own.setdefault(name.replace(".base_layer", ""), module)  # the outermost wrapper of adapters comes first
    saved = model.state_dict().keys()
    for name, module in model.named_modules():
        source = own[name]
        for key, buffer in module._buffers.items():
            if buffer is not None:
                held = _inner_layer(source).get_buffer(key) if f"{name}.{key}".lstrip(".") in saved else buffer
                module._buffers[key] = held.detach().to(policy.device, buffer.dtype)
        lazy: dict[str, Maker] = {}
        for key, held in list(module._parameters.items()):
            if held is None:
                continue
            module._parameters[key], make = _share_weight(source, key, held, shift)
            if make is not None and isinstance(module, Conv1D) and isinstance(_inner_layer(source), nn.Linear):
                make = partial(_turn, make)  # in 4 or 8 bits the layer is a linear one
            lazy |= {} if make is None else {key: make}
        # Code of one's own may read a layer's weight past the layer, and keep it for its backward pass
        caller = model if isinstance(model, OwnModel) else module
        if lazy:
            made.setdefault(caller, []).append((module, lazy))
    for caller, lazy_weights in made.items():
        _make_at_each_call(caller, lazy_weights, model.dtype)
        for module, lazy in lazy_weights:
            _make_when_read(module, lazy)


def _turn(make: Maker, rows: Tensor | slice) -> Tensor:
    return make(ALL).mT[rows]


def _inner_layer(module: nn.Module) -> nn.Module:
    while (inner := getattr(module, "base_layer", None)) is not None:
        module = inner
    return module


def _share_weight(source: nn.Module, key: str, empty: nn.Parameter, shift: Shift) -> tuple[nn.Parameter, Maker | None]:
    """Return the policy's plain weight, else an empty one and its maker."""
    base, adapters = source, []
    while (inner := getattr(base, "base_layer", None)) is not None:  # of experts, each parameter has a wrapper
        adapters += _adapters(base) if getattr(base, "parameter_name", "weight") == key else []
        base = inner
    weight = base._parameters[key]
    assert isinstance(weight, nn.Parameter), f"{type(base).__name__} has no {key}"
    moved = any(part in shift for part in (weight, *(part for a, b, _ in adapters for part in (a, b))))
    if weight.dtype == empty.dtype and not adapters and not moved and not sharding.is_shard(weight):
        return weight, None

    def shifted(part: Tensor, rows: Tensor | slice = ALL) -> Tensor:
        layer = base if part is weight and key == "weight" else None
        chosen = rows if part.dim() else ...
        plain = dequantize(sharding.whole(part), layer)[chosen].to(empty.dtype)
        return plain + shift[part][chosen].to(plain.dtype) if part in shift else plain

    def make(rows: Tensor | slice) -> Tensor:
        made_OI = shifted(weight, rows)
        for a_RI, b_OR, adapter in adapters:
            made_OI = adapter.added_to(made_OI, shifted(a_RI), shifted(b_OR, rows))
        return made_OI

    # It takes no memory, and tells type and device to who asks
    nothing = torch.full((), torch.nan, dtype=empty.dtype, device=weight.device).expand(empty.shape)
    return nn.Parameter(nothing, requires_grad=False), make


@dataclass(frozen=True, slots=True)
class _Adapter:
    """An adapter's offset of a weight."""

    scaling: float
    num_experts: int
    is_turn: bool
    """The weight is held the other way round: GPT-2's, and experts' whose outputs come last."""

    def added_to(self, made: Tensor, a_RI: Tensor, b_OR: Tensor) -> Tensor:
        """Return the weight plus scaling * B@A, of each expert."""
        if self.num_experts == 1:
            left, right = (a_RI.mT, b_OR.mT) if self.is_turn else (b_OR, a_RI)
            return torch.addmm(made, left, right, alpha=self.scaling)
        a_ERI = a_RI.reshape(self.num_experts, -1, a_RI.shape[-1])
        b_ORE = b_OR.reshape(b_OR.shape[0], -1, self.num_experts)
        added = torch.einsum("ore,eri->eoi", b_ORE, a_ERI)
        return made + self.scaling * (added.mT if self.is_turn else added)


def _adapters(source: Any) -> list[tuple[Tensor, Tensor, _Adapter]]:
    """Return (A, B, how they are added) of active adapters."""
    if source.disable_adapters:
        return []
    num_experts = getattr(source, "num_experts", 1)
    turned = not source._did_swap_in_out_features if num_experts > 1 else getattr(source, "fan_in_fan_out", False)
    names = [name for name in source.active_adapters if name in source.lora_A]
    hows = [_Adapter(source.scaling[name], num_experts, turned) for name in names]
    return [
        (source.lora_A[name].weight, source.lora_B[name].weight, how) for name, how in zip(names, hows, strict=True)
    ]


def _make_when_read(module: nn.Module, lazy: Mapping[str, Maker]) -> None:
    """Make weights also for who reads them past their layer.

    As layers with a state read their convolution's.
    """
    kind, empty = type(module), dict(module._parameters)

    def read(self: nn.Module, name: str) -> Any:
        found = kind.__getattr__(self, name)
        return lazy[name](ALL) if name in lazy and found is empty[name] else found

    module.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, "__getattr__": read})


def _make_at_each_call(
    module: nn.Module, lazy: Sequence[tuple[nn.Module, Mapping[str, Maker]]], dtype: torch.dtype
) -> None:
    """Make weights at each call of a module, and in backward passes.

    The plain numbers of one layer live at a time if each makes its own.
    """
    forward, is_embedding = module.forward, type(module) is nn.Embedding

    def call(*inputs: Any, **keywords: Any) -> Any:
        if is_embedding and not torch.is_grad_enabled():
            rows, ids = torch.unique(inputs[0], return_inverse=True)
            return lazy[0][1]["weight"](rows)[ids]
        held = [(holder, dict(holder._parameters)) for holder, _ in lazy]
        for holder, makers in lazy:
            holder._parameters.update({key: make(ALL) for key, make in makers.items()})  # type: ignore[misc]
        try:
            with _exactly(dtype):  # also in the backward pass, outside of what was called
                return forward(*inputs, **keywords)
        finally:
            for holder, parameters in held:
                holder._parameters.update(parameters)

    # Checkpointing makes them again in the backward pass
    def remade(*inputs: Any, **keywords: Any) -> Any:
        with set_checkpoint_early_stop(False):  # which is an exception, for others' code to catch
            return checkpoint(call, *inputs, use_reentrant=False, preserve_rng_state=False, **keywords)

    module.forward = remade
