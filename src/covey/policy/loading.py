"""Settings in, a policy out: weights, precision, quantisation, adapters."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from covey.config import ModelConfig
from covey.policy.attention import ATTENTION, DENSE, register
from covey.policy.nano import NANO, nano_model, nano_tokenizer
from covey.policy.policy import DTYPES, Policy, inference


def load_policy(settings: ModelConfig, *, seed: int, trainable: bool = True) -> Policy:
    """Build the policy that `settings` describe; `seed` decides random weights (nano, adapters).

    Raises ValueError where a setting cannot be met: no such model, no bitsandbytes, unsupported attention.
    """
    register()
    device = choose_device(settings.device)
    model, tokenizer = _load_model(settings, device, seed)
    _remove_dropout(model)
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    precision = DTYPES[settings.precision]
    wrapped: nn.Module = model
    if settings.lora_rank > 0 and trainable:
        wrapped = add_adapters(model, settings, seed)
    policy = Policy(model=wrapped, tokenizer=tokenizer, precision=precision, plain_head=_has_plain_head(model))
    if not trainable:
        wrapped.requires_grad_(False)
    return policy


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"model.device={name} needs a CUDA device and there is none; use model.device=cpu")
    return device


def _load_model(
    settings: ModelConfig, device: torch.device, seed: int
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if settings.name == NANO:
        tokenizer = nano_tokenizer()
        shape = (settings.nano_architecture, settings.nano_hidden_size, settings.nano_num_layers)
        model = nano_model(*shape, settings.nano_num_heads, tokenizer, seed)
        return _move(model, device, _storage_type(settings)), tokenizer
    return _load_pretrained(settings, device)


def _load_pretrained(settings: ModelConfig, device: torch.device) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    keywords: dict[str, Any] = {"attn_implementation": ATTENTION, "dtype": _storage_type(settings)}
    if settings.revision is not None:
        keywords["revision"] = settings.revision
    if settings.load_in_4bit:
        keywords["quantization_config"] = _four_bit(settings)
        keywords["device_map"] = {"": device}
    try:
        model = AutoModelForCausalLM.from_pretrained(settings.name, **keywords)
        tokenizer = AutoTokenizer.from_pretrained(settings.name, revision=settings.revision)
    except OSError as error:
        what = "directory" if Path(settings.name).exists() else "directory or reachable hub model"
        raise ValueError(
            f"model.name={settings.name} is no {what} of a causal language model ({_line(error)})"
        ) from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return (model if settings.load_in_4bit else _move(model, device, _storage_type(settings))), tokenizer


def _move(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    nn.Module.to(model, device=device, dtype=dtype)
    return model


def _storage_type(settings: ModelConfig) -> torch.dtype:
    """Trained weights are float32 (or float64); frozen weights under adapters take the type they compute in."""
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


def add_adapters(model: PreTrainedModel, settings: ModelConfig, seed: int) -> nn.Module:
    """LoRA (arXiv 2106.09685) through peft; only the adapters train, in float32."""
    from peft import LoraConfig, get_peft_model

    targets: str | list[str] = list(settings.lora_targets)
    if targets == ["all-linear"]:
        targets = "all-linear"
    lora = LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,  # type: ignore[arg-type]
        lora_dropout=settings.lora_dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return get_peft_model(model, lora)


def _remove_dropout(model: nn.Module) -> None:
    """A policy that is sampled without dropout must be trained without it, or the ratio is noise."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def _has_plain_head(model: PreTrainedModel) -> bool:
    """Whether logits are just the output embedding of the last hidden state (no scaling, no soft cap)."""
    probe = torch.arange(min(8, model.config.vocab_size), device=model.device)[None]
    keywords = {"input_ids": probe, "layout": DENSE, "use_cache": False}
    with inference(model):
        logits = model(**keywords).logits
        hidden = model.base_model(**keywords).last_hidden_state
        return bool(torch.equal(model.get_output_embeddings()(hidden), logits))


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:160]
