"""Settings in, a policy out: weights, precision, quantisation, adapters."""

import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from jinja2 import Environment, meta
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from covey.policy.attention.base import ATTENTION, register
from covey.policy.attention.choice import choose_attention
from covey.policy.kernels import linear
from covey.policy.kernels.layers import choose_kernels
from covey.policy.kernels.liger import use_liger
from covey.policy.models.adapters import add_adapters, load_adapters, saved_adapters
from covey.policy.models.naming import check_device, check_name
from covey.policy.models.nano import NANO, NanoShape, nano_model, nano_tokenizer
from covey.policy.models.nano_masked import NANO_MASKED, nano_masked_model, nano_masked_tokenizer
from covey.policy.models.probe import LISTED, detect_capabilities, remove_dropout
from covey.policy.plain import MAKING
from covey.policy.policy import DTYPES, Policy
from covey.policy.settings import ModelConfig
from covey.system.hub import silence
from covey.system.lookup import near


def load_policy(settings: ModelConfig, *, seed: int, trainable: bool = True, on_host: bool = False) -> Policy:
    """Build the policy that `settings` describe. `seed` decides random weights (nano, adapters).

    With `on_host` it lies in the host's memory, ready to be shared out over devices (`sharding.shard`), of which none
    need then hold it whole.

    Raises ValueError where a setting cannot be met: no such model, no bitsandbytes, unsupported attention.
    """
    with MAKING:
        return _load_policy(settings, seed, trainable, on_host)


def _load_policy(settings: ModelConfig, seed: int, trainable: bool, on_host: bool) -> Policy:
    register()
    # Warns on some CPUs that a kernel nobody asked for is missing, as soon as peft imports it.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    device = choose_device(settings.device)
    if settings.activation_offload and device.type == "cpu":
        raise ValueError("model.activation_offload=true needs a GPU, got model.device=cpu")
    if settings.deterministic:
        if device.type == "cpu":
            raise ValueError("model.deterministic=true is for GPUs, a CPU repeats bit for bit without it")
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else its products would not repeat
    check_name(settings.name)
    saved = saved_adapters(settings)
    base = settings.name if saved is None else str(saved.base_model_name_or_path)
    place = torch.device("cpu") if on_host else device
    model, tokenizer = _load_model(replace(settings, name=base), place, seed)
    set_template_defaults(tokenizer, settings.chat_template_kwargs, base)
    bare = _prepared(model, tokenizer, settings, device)
    with warnings.catch_warnings():  # peft and older transformers know checkpointing by this name only
        warnings.filterwarnings("ignore", ".*gradient_checkpointing", FutureWarning)
        if settings.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        wrapped: nn.Module = model
        if saved is not None:
            wrapped = load_adapters(model, settings, saved)
        elif settings.lora_rank > 0 and trainable:
            wrapped = add_adapters(model, settings, seed)
    if not trainable:
        wrapped.requires_grad_(False)
    return _finished(bare, wrapped, settings, device, trainable)


def policy_in_memory(
    given: nn.Module, tokenizer: PreTrainedTokenizerBase, settings: ModelConfig, *, seed: int
) -> Policy:
    """Make a policy of a model in memory, peft's wrapper around one included. It is trained in place.

    `model.lora_rank` adds adapters. Weights move to `model.device` and become float32, or float64 with that precision,
    unless new adapters are trained. Dropout is removed, and attention is covey's from now on.
    """
    with MAKING:
        register()
        device = choose_device(settings.device)
        set_template_defaults(tokenizer, settings.chat_template_kwargs, settings.name)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        model: PreTrainedModel = given if isinstance(given, PreTrainedModel) else _adapted_model(given, settings)
        model.set_attn_implementation(ATTENTION)
        _move(model, device, _storage_type(settings))
        with given.disable_adapter() if given is not model else nullcontext():  # type: ignore[operator]
            bare = _prepared(model, tokenizer, settings, device)
        if settings.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        wrapped = add_adapters(model, settings, seed) if settings.lora_rank > 0 else given
        return _finished(bare, wrapped, settings, device, trainable=True)


def _adapted_model(given: nn.Module, settings: ModelConfig) -> PreTrainedModel:
    """Return the model inside peft's wrapper. ValueError where it is another than covey can train."""
    from peft import PeftModel

    if not isinstance(given, PeftModel):
        raise ValueError(
            f"model must be a PreTrainedModel, a PeftModel, a name or a folder, got {type(given).__name__}"
        )
    if settings.lora_rank > 0:
        raise ValueError(
            f"model.lora_rank={settings.lora_rank} adds adapters, and the model in memory has some already"
        )
    if list(given.peft_config) != ["default"]:
        raise ValueError(f'a PeftModel needs one adapter, "default", got {", ".join(given.peft_config)}')
    model = given.get_base_model()
    assert isinstance(model, PreTrainedModel), "peft wraps models of transformers here"
    return model


def _prepared(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: ModelConfig, device: torch.device
) -> Policy:
    """Choose what computes the layers of a model, and detect what it can."""
    remove_dropout(model)
    if device.type == "cpu":
        linear.choose_library(model, settings.kernels)
    precision = DTYPES[settings.precision]
    if precision == torch.float64 and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the grouped product of experts has no float64
    if settings.kernels == "liger":
        use_liger(model, device)
    choose_kernels(model, settings.kernels, precision, device)
    return detect_capabilities(
        Policy(model, tokenizer, precision, head_is_linear=False, mask_id=_mask_id(settings, tokenizer))
    )


def _finished(bare: Policy, wrapped: nn.Module, settings: ModelConfig, device: torch.device, trainable: bool) -> Policy:
    """Put the model with its adapters into the policy, and choose how packed streams attend."""
    attention = bare.attention
    if not bare.computes_whole:
        for module in wrapped.modules():  # adapters would keep a copy in float32, which autocast casts back at once
            if hasattr(module, "cast_input_dtype_enabled"):
                module.cast_input_dtype_enabled = False  # type: ignore[assignment] # no tensor: a flag of peft's
    if bare.mask_id is None:
        heads = [replace(each, device_type=device.type) for each in bare.heads]
        attention = choose_attention(settings.attention, settings.kernels, heads)
    return replace(
        bare,
        model=wrapped,
        offload=settings.activation_offload and trainable,
        attention=attention,
        deterministic=settings.deterministic,
    )


def load_tokenizer(settings: ModelConfig) -> PreTrainedTokenizerBase:
    """Return the policy's tokenizer alone, without its weights."""
    if settings.name in NANO_TOKENIZERS:
        return NANO_TOKENIZERS[settings.name]()
    try:
        return _load_tokenizer(settings)
    except UNREADABLE as error:
        raise ValueError(f"model.name={settings.name} has no tokenizer ({_line(error)})") from error


def _mask_id(settings: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the token a masked policy replaces, None for a causal one."""
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
        if settings.load_in_4bit:
            raise ValueError(f"model.load_in_4bit=true needs saved weights, got model.name={settings.name}")
        shape = NanoShape(
            settings.nano_architecture, settings.nano_hidden_size, settings.nano_num_layers, settings.nano_num_heads
        )
        tokenizer = NANO_TOKENIZERS[settings.name]()
        model = (nano_model if settings.name == NANO else nano_masked_model)(shape, tokenizer, seed)
        return _move(model, device, _storage_type(settings)), tokenizer
    return _load_pretrained(settings, device)


def _load_pretrained(settings: ModelConfig, device: torch.device) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    keywords: dict[str, Any] = {"attn_implementation": ATTENTION, "dtype": _storage_type(settings), **NO_CODE}
    # Say what is loaded, and in which type
    if settings.revision is not None:
        keywords["revision"] = settings.revision
    if settings.load_in_4bit:
        keywords["quantization_config"] = _four_bit(settings)
        keywords["device_map"] = {"": device}
    if not Path(settings.name).exists():
        silence()
    try:
        model = KINDS[settings.kind].from_pretrained(settings.name, **keywords)
        tokenizer = _load_tokenizer(settings)
    except UNREADABLE as error:
        if error.args == (ATTENTION,):
            raise ValueError(
                f"model.name={settings.name} needs attention that transformers lets others compute, this architecture "
                f"has its own{LISTED}"
            ) from error
        what = "directory" if Path(settings.name).exists() else "directory or reachable hub model"
        reason = _line(error)
        if "trust_remote_code" in str(error):
            reason = "it needs code of its own, which is never run"
        raise ValueError(
            f"model.name={settings.name} is no {what} of a {settings.kind} language model ({reason})"
        ) from error
    # Make it ready to train
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if settings.load_in_4bit:
        _keep_differentiable(model)
        return model, tokenizer
    return _move(model, device, _storage_type(settings)), tokenizer


def _load_tokenizer(settings: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer that was saved.

    For some architectures AutoTokenizer takes their own class whatever was saved: Qwen2's would give a nano policy a
    token it has no embedding for, and normalise text.
    """
    saved = get_tokenizer_config(settings.name, revision=settings.revision).get("tokenizer_class")
    loader = PreTrainedTokenizerFast if saved == PreTrainedTokenizerFast.__name__ else AutoTokenizer
    revision = settings.revision or "main"
    tokenizer: PreTrainedTokenizerBase = loader.from_pretrained(settings.name, revision=revision, **NO_CODE)
    return tokenizer


def _move(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Move all to the device and weights to the type.

    Other tensors keep theirs, as transformers keep them: frequencies of rotary positions in half precision would turn a
    token by another angle, a whole radian after 500 tokens.
    """
    nn.Module.to(model, device=device)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _storage_type(settings: ModelConfig) -> torch.dtype:
    """Trained weights are float32 (or float64). Frozen weights under adapters take the type they compute in."""
    precision = DTYPES[settings.precision]
    return precision if settings.lora_rank > 0 or precision == torch.float64 else torch.float32


def _four_bit(settings: ModelConfig) -> Any:
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise ValueError("model.load_in_4bit=true needs bitsandbytes: pip install 'covey[quantization]'") from error
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=DTYPES[settings.precision],
    )


def _keep_differentiable(model: nn.Module) -> None:
    """Keep 4-bit layers on kernels that have a backward.

    On CPUs with AVX512-BF16, bitsandbytes packs a weight at its first use without gradient, and packed weights are
    multiplied without a backward from then on, in training too.
    """
    from bitsandbytes.nn import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]


UNREADABLE = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError),
    StrictDataclassError,
)
"""What transformers raises of files that hold something else than it writes."""
NO_CODE: dict[str, Any] = {"trust_remote_code": False}
"""Code beside weights is never run. Left out, transformers would ask at the terminal."""
KINDS = {"causal": AutoModelForCausalLM, "masked": AutoModelForMaskedLM}
NANO_TOKENIZERS = {NANO: nano_tokenizer, NANO_MASKED: nano_masked_tokenizer}
"""The embedded policies, which are built from nothing."""


GIVEN = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now", "tojson"}
    | {"range", "dict", "lipsum", "cycler", "joiner", "namespace"}
)
"""What transformers and Jinja give to every template."""
GENERATION_TAG = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""A tag of transformers' own, which marks the assistant's words."""


def set_template_defaults(tokenizer: PreTrainedTokenizerBase, values: Mapping[str, Any], model_name: str) -> None:
    """Make `values` the defaults of the tokenizer's chat template.

    ValueError for one that the template never reads.
    """
    if not values:
        return
    if tokenizer.chat_template is None:
        raise ValueError(
            f"model.chat_template_kwargs={dict(values)} needs a chat template, the tokenizer of {model_name} has none"
        )
    # Refuse values that no template reads
    named = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {"": tokenizer.chat_template}
    readable = sorted({name for template in named.values() for name in _read_by(template)})
    for name in values:
        if name not in readable:
            what = f"it reads {', '.join(readable)}" if readable else "it reads none"
            raise ValueError(
                f"model.chat_template_kwargs.{name} is set, but the chat template of {model_name} never reads it"
                f"{near(name, readable)}; {what}"
            )
    # Set the defaults inside the template, where every renderer finds them
    changed = {key: _with_defaults(template, values) for key, template in named.items()}
    tokenizer.chat_template = changed if isinstance(tokenizer.chat_template, dict) else changed[""]


def _read_by(template: str) -> Iterator[str]:
    """Yield the variables that a template reads and that its caller may set."""
    parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(GENERATION_TAG.sub("", template))
    for name in meta.find_undeclared_variables(parsed):
        if name not in GIVEN and not name.endswith("_token"):
            yield name


def _with_defaults(template: str, values: Mapping[str, Any]) -> str:
    """Return the template with values for what its caller does not set. A template that has them stays as it is."""
    read = set(_read_by(template))
    defaults = "".join(
        f"{{%- if {name} is not defined %}}{{%- set {name} = {value!r} %}}{{%- endif +%}}"
        for name, value in values.items()
        if name in read
    )
    return template if template.startswith(defaults) else defaults + template
