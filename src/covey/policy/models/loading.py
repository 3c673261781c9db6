"""Load a policy: weights, precision, quantisation, adapters."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from covey.policy.attention.base import ATTENTION, register
from covey.policy.attention.choice import choose_attention
from covey.policy.kernels import adapted, linear
from covey.policy.kernels.gpu import inductor, liger
from covey.policy.kernels.layers import choose_kernels
from covey.policy.kernels.support import unsupported_reason
from covey.policy.models.adapters import add_adapters, load_adapters, model_inside, saved_adapters
from covey.policy.models.chat_template import set_template_defaults
from covey.policy.models.lazy_weights import MetaModel, find_unread
from covey.policy.models.made import make_model, restore_buffers
from covey.policy.models.naming import ONE_DEVICE, check_device, check_name
from covey.policy.models.nano import (
    NANO,
    NANO_MASKED,
    NanoShape,
    nano_masked_model,
    nano_masked_tokenizer,
    nano_model,
    nano_tokenizer,
)
from covey.policy.models.probe import detect_capabilities, remove_dropout, tell
from covey.policy.models.quantized import check_form, keep_promises, quantization_config, quantized_bits
from covey.policy.models.saved import (
    NO_CODE,
    SAVE_TOKENIZER,
    UNREADABLE,
    check_code,
    code_beside,
    explain_unreadable,
    read_weights,
    refuse_encoder,
    refuse_rowless,
    trusted_code,
)
from covey.policy.models.text_part import beside_text, hear_text, is_composite, read_processor
from covey.policy.own import OwnModel
from covey.policy.plain import MAKING
from covey.policy.policy import DTYPES, Policy, is_adapted
from covey.policy.recurrence import compiled, mixers, plain
from covey.policy.recurrence.base import Operations
from covey.policy.settings import FOLDER, ModelConfig
from covey.system.hub import silence
from covey.system.machine import silence_bitsandbytes


def load_policy(
    settings: ModelConfig | str | Path, *, seed: int = 0, trainable: bool = True, on_host: bool = False
) -> Policy:
    """Load the policy that `settings`, or a name, describe.

    `seed` decides random weights (nano, adapters). With `on_host` it is to be sharded (`sharding.shard`): where its
    files allow, weights have no storage yet and each rank reads its own rows, else it is in the host's memory.

    Raises ValueError where a setting cannot be met: no such model, no bitsandbytes, unsupported attention.
    """
    described = settings if isinstance(settings, ModelConfig) else ModelConfig(name=str(settings))
    with MAKING:
        return _load_policy(described, seed, trainable, on_host)


def _load_policy(settings: ModelConfig, seed: int, trainable: bool, on_host: bool) -> Policy:
    register()
    silence_bitsandbytes()
    device = choose_device(settings.device)
    settings = computable(settings, device)
    if settings.activation_offload and device.type == "cpu":
        raise ValueError("model.activation_offload=true needs a GPU, got model.device=cpu")
    if settings.deterministic:
        if device.type == "cpu":
            raise ValueError("model.deterministic=true is for GPUs, a CPU repeats bit for bit without it")
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else its products would not repeat
    check_name(settings.name, settings.code)
    saved = saved_adapters(settings)
    base = settings.name if saved is None else str(saved.base_model_name_or_path)
    based = replace(settings, name=base)
    check_code(based)
    unread = _unread(based) if on_host else None
    if unread is None:
        model, tokenizer = _load_model(based, torch.device("cpu") if on_host else device, seed)
    else:
        model, tokenizer = _convert_parameters(unread.model, settings), _padding(load_tokenizer(based))
    set_template_defaults(tokenizer, settings.chat_template_kwargs, base)
    bare = _choose_layers(model, tokenizer, settings, device)
    bare = detect_capabilities(bare) if unread is None else bare
    with _recomputing(model, settings):
        wrapped: nn.Module = model
        with nullcontext() if unread is None else unread.on_host():
            if saved is not None:
                wrapped = load_adapters(model, settings, saved)
            elif settings.lora_rank > 0 and trainable:
                wrapped = add_adapters(model, settings, seed)
    if not trainable:
        wrapped.requires_grad_(False)
    if unread is not None:
        return replace(bare, model=wrapped, complete=partial(_complete, unread, settings, device, trainable))
    return _finish(bare, wrapped, settings, device, trainable)


def computable(settings: ModelConfig, device: torch.device) -> ModelConfig:
    """Replace float16 on a CPU, seven times slower there than bfloat16."""
    if settings.precision != "float16" or device.type != "cpu":
        return settings
    has_half = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    precision = "bfloat16" if has_half else "float32"
    tell(f"model.precision=float16 is computed in {precision}: this device is a CPU, which is slow in float16")
    return replace(settings, precision=precision)


def _unread(settings: ModelConfig) -> MetaModel | None:
    """Return the saved model without weights, None if it must load whole."""
    if settings.name in NANO_TOKENIZERS or quantized_bits(settings) or settings.code is not None:
        return None
    how = {"attn_implementation": ATTENTION, "dtype": _storage_type(settings), **NO_CODE}
    found = find_unread(settings.kind, settings.name, settings.revision, how)
    if found is not None:
        refuse_encoder(settings, found.model.config)
    return found


def _complete(
    unread: MetaModel, settings: ModelConfig, device: torch.device, trainable: bool, policy: Policy
) -> Policy:
    """Read the weights of a sharded policy and detect its capabilities. Collective."""
    unread.read()
    without = policy.model.disable_adapter() if is_adapted(policy.model) else nullcontext()  # type: ignore[operator]
    trained = [weight for weight in policy.model.parameters() if weight.requires_grad]
    with MAKING, without:
        for weight in trained:  # what is gathered first asks whether gradients will come, and in which type
            weight.requires_grad_()
        bare = detect_capabilities(policy)
    return _finish(bare, policy.model, settings, device, trainable)


def policy_in_memory(
    given: nn.Module, tokenizer: PreTrainedTokenizerBase, settings: ModelConfig, *, seed: int
) -> Policy:
    """Make a policy of a model, or peft's wrapper, in memory, in place.

    `model.lora_rank` adds adapters. Weights move to `model.device` and become float32, or float64 with that precision,
    unless new adapters are trained. Dropout is removed, and attention is replaced by covey's.
    """
    with MAKING:
        register()
        device = choose_device(settings.device)
        settings = computable(settings, device)
        _refuse_split(given)
        set_template_defaults(tokenizer, settings.chat_template_kwargs, settings.name)
        _padding(hear_text(tokenizer))
        model: PreTrainedModel = given if isinstance(given, PreTrainedModel) else model_inside(given, settings)
        check_form(model, quantized_bits(settings), "the model in memory")
        refuse_encoder(settings, model.config)
        model.set_attn_implementation(ATTENTION)
        _move(model, device, settings)
        with given.disable_adapter() if given is not model else nullcontext():  # type: ignore[operator]
            bare = detect_capabilities(_choose_layers(model, tokenizer, settings, device))
        with _recomputing(model, settings):
            wrapped = add_adapters(model, settings, seed) if settings.lora_rank > 0 else given
        return _finish(bare, wrapped, settings, device, trainable=True)


@contextmanager
def _recomputing(model: PreTrainedModel, settings: ModelConfig) -> Iterator[None]:
    """Recompute layers if asked, and add adapters inside."""
    with warnings.catch_warnings():  # peft and older transformers know checkpointing by this name only
        warnings.filterwarnings("ignore", ".*gradient_checkpointing", FutureWarning)
        if settings.gradient_checkpointing:
            if not model.supports_gradient_checkpointing:
                kind = type(model).__name__
                raise ValueError(f"model.gradient_checkpointing=true needs a class that can, {kind} has no code for it")
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        yield


def _refuse_split(given: nn.Module) -> None:
    places = {str(place) for place in (getattr(given, "hf_device_map", None) or {}).values()}
    if len(places) > 1:
        raise ValueError(f"the model in memory is split over {', '.join(sorted(places))} (device_map): {ONE_DEVICE}")


def _choose_layers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: ModelConfig, device: torch.device
) -> Policy:
    refuse_rowless(model, tokenizer, settings.name)
    remove_dropout(model)
    frozen = beside_text(model)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    if frozen:
        tell(f"{type(model).__name__}: text is trained; what else it reads stays as it is")
    if device.type == "cpu":
        linear.choose_library(model, settings.kernels, DTYPES[settings.precision])
    precision = DTYPES[settings.precision]
    if precision == torch.float64 and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the grouped product of experts has no float64
    if liger.is_wanted(settings.kernels, precision, device):
        liger.use_liger(model, device, _compiles(settings, device))
    choose_kernels(model, settings.kernels, precision, device)
    if settings.kind == "causal" and mixers.route(model, _operations(settings.kernels, precision, device)):
        # covey computes these layers: no lines on kernels that transformers lacks
        logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)
    path: Literal["fast", "general"] = "fast" if model.config._attn_implementation == ATTENTION else "general"
    return Policy(
        model,
        tokenizer,
        precision,
        False,
        path=path,
        mask_id=_mask_id(settings, tokenizer),
        processor=read_processor(model.name_or_path or settings.name, settings.revision) if is_composite(model) else {},
    )


def _operations(kernels: str, precision: torch.dtype, device: torch.device) -> Operations:
    """Choose how layers with a state compute."""
    in_c = kernels == "auto" and not unsupported_reason("recurrence", [(precision, device.type)])
    return compiled if in_c else plain


def _finish(bare: Policy, wrapped: nn.Module, settings: ModelConfig, device: torch.device, trainable: bool) -> Policy:
    """Put the adapted model into the policy, and choose its packed attention."""
    attention = bare.attention
    if not bare.computes_whole:
        for module in wrapped.modules():  # adapters would keep a copy in float32, which autocast casts back at once
            if hasattr(module, "cast_input_dtype_enabled"):
                module.cast_input_dtype_enabled = False  # type: ignore[assignment] # no tensor: a flag of peft's
    adapted.fuse_adapters(wrapped)
    if bare.path == "general":
        if settings.attention not in ("auto", "sdpa"):
            kind = type(bare.causal_lm).__name__
            raise ValueError(f"model.attention={settings.attention} needs covey's attention, {kind} has its own")
        attention = "rows" if attention == "forked" and settings.gradient_checkpointing else attention
    elif bare.mask_id is None:
        heads = [replace(each, device_type=device.type) for each in bare.heads]
        attention = choose_attention(settings.attention, settings.kernels, heads)
    return replace(
        bare,
        model=wrapped,
        offload=settings.activation_offload and trainable,
        attention=attention,
        compiles=_compiles(settings, device),
        deterministic=settings.deterministic,
    )


def _compiles(settings: ModelConfig, device: torch.device) -> bool:
    return inductor.is_wanted(settings.kernels, device) and not settings.deterministic


def load_tokenizer(settings: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer, saved or embedded. ValueError without one.

    For some architectures AutoTokenizer ignores the saved class: Qwen2's own would give a nano policy a token
    without an embedding, and normalise text. Without files it makes some out of special tokens alone.
    """
    if settings.name in NANO_TOKENIZERS:
        return NANO_TOKENIZERS[settings.name]()
    try:
        saved = get_tokenizer_config(settings.name, revision=settings.revision).get("tokenizer_class")
        loader = PreTrainedTokenizerFast if saved == PreTrainedTokenizerFast.__name__ else AutoTokenizer
        revision = settings.revision or "main"
        found = loader.from_pretrained(settings.name, revision=revision, **trusted_code(settings))
    except UNREADABLE as error:
        raise ValueError(explain_unreadable(settings, error, "has no tokenizer that can be read")) from error
    special = {number for number, token in found.added_tokens_decoder.items() if token.special}
    if special >= set(found.get_vocab().values()):
        raise ValueError(f"model.name={settings.name} has no tokenizer: {SAVE_TOKENIZER}")
    return hear_text(found, settings.name, settings.revision)


def _mask_id(settings: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> int | None:
    if settings.kind == "causal":
        return None
    if tokenizer.mask_token_id is None:
        raise ValueError(f"model.kind=masked needs a tokenizer with a mask token, {settings.name} has none")
    return int(tokenizer.mask_token_id)


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_device(name)
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"model.device={name} needs a CUDA device and there is none; use model.device=cpu")
    return device


def _load_model(
    settings: ModelConfig, device: torch.device, seed: int
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if settings.name in NANO_TOKENIZERS:
        if bits := quantized_bits(settings):
            raise ValueError(f"model.load_in_{bits}bit=true needs saved weights, got model.name={settings.name}")
        shape = NanoShape(
            settings.nano_architecture, settings.nano_hidden_size, settings.nano_num_layers, settings.nano_num_heads
        )
        tokenizer = NANO_TOKENIZERS[settings.name]()
        model = (nano_model if settings.name == NANO else nano_masked_model)(shape, tokenizer, seed)
        return _move(model, device, settings), tokenizer
    if settings.code not in (None, FOLDER):
        made, its_tokenizer = make_model(settings)
        made.set_attn_implementation(ATTENTION)
        return _move(made, device, settings), _padding(hear_text(its_tokenizer))
    return _load_pretrained(settings, device)


def _load_pretrained(settings: ModelConfig, device: torch.device) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    how = {"attn_implementation": ATTENTION, "dtype": _storage_type(settings)}
    keywords: dict[str, Any] = how | trusted_code(settings)
    if settings.revision is not None:
        keywords["revision"] = settings.revision
    if bits := quantized_bits(settings):
        keywords["quantization_config"] = quantization_config(settings, bits)
        keywords["device_map"] = {"": device}
    if not Path(settings.name).exists():
        silence()
    refuse_encoder(settings)
    try:
        try:
            model, lacking = read_weights(settings.kind, settings.name, **keywords)
        except KeyError as error:
            if error.args != (ATTENTION,):
                raise
            del keywords["attn_implementation"]  # this architecture has attention of its own alone
            model, lacking = read_weights(settings.kind, settings.name, **keywords)
    except UNREADABLE as error:
        raise ValueError(explain_unreadable(settings, error)) from error
    tokenizer = _padding(load_tokenizer(settings))
    check_form(model, bits, f"model.name={settings.name}")
    if lacking:
        raise ValueError(f"model.name={settings.name} {lacking}")
    if settings.code == FOLDER:
        restore_buffers(model)
    elif "config.json" in code_beside(settings.name):
        own = f"{settings.name} has code of its own, which does not run: transformers knows {type(model).__name__}"
        tell(f"{own}; model.code=folder runs it")
    # Quantised weights are on their device already
    if bits:
        keep_promises(model, bits)
        return model, tokenizer
    return _move(model, device, settings), tokenizer


def _padding(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _move(model: PreTrainedModel, device: torch.device, settings: ModelConfig) -> PreTrainedModel:
    nn.Module.to(model, device=device)
    return _convert_parameters(model, settings)


def _convert_parameters(model: PreTrainedModel, settings: ModelConfig) -> PreTrainedModel:
    """Convert parameters to the type that they are stored in, alone.

    Buffers keep their type: rotary frequencies in half precision would be off by a radian after 500 tokens.
    """
    dtype = _storage_type(settings)
    if isinstance(model, OwnModel):  # which may mix types in ways that half precision breaks
        dtype = torch.promote_types(dtype, torch.float32)
        model.convert_constants(dtype)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _storage_type(settings: ModelConfig) -> torch.dtype:
    """Return base weights' type: float32 or float64 if trained, else the precision."""
    precision = DTYPES[settings.precision]
    return precision if settings.lora_rank > 0 or precision == torch.float64 else torch.float32


NANO_TOKENIZERS = {NANO: nano_tokenizer, NANO_MASKED: nano_masked_tokenizer}
"""The embedded policies, which are built from nothing."""
