"""Tiny random policies and the plain transformers forward they are checked against."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from benchmarks.checks.architecture_configs import tiny_config
from covey.policy.attention.base import register
from covey.policy.models.nano import nano_tokenizer
from covey.policy.policy import Policy
from covey.policy.recurrence import plain
from covey.policy.recurrence.mixers import route
from covey.policy.sampling import filtered_logprobs
from covey.types import Completion, Sampling

WINDOW = 5
TOKENIZER = nano_tokenizer()
MAX_LENGTH = 128


def _rotary(**more: Any) -> dict[str, Any]:
    common = {
        "vocab_size": len(TOKENIZER),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_LENGTH,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return common | more


def config_of(architecture: str) -> Any:
    """A config with 2 layers and 4 heads; "-window" variants see only the last 5 tokens in some or all layers.

    Heads are 16 wide, as compiled attention needs them, for some and 8 wide for others.
    """
    gpt2 = {"n_positions": MAX_LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}
    configs = {
        "llama": lambda: LlamaConfig(**_rotary(head_dim=16)),
        "qwen2": lambda: Qwen2Config(**_rotary()),
        "qwen2-window": lambda: Qwen2Config(
            **_rotary(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)
        ),
        "qwen3": lambda: Qwen3Config(**_rotary(head_dim=16)),
        "mistral": lambda: MistralConfig(**_rotary(sliding_window=None)),
        "mistral-window": lambda: MistralConfig(**_rotary(sliding_window=WINDOW, head_dim=16)),
        "gpt2": lambda: GPT2Config(vocab_size=len(TOKENIZER), bos_token_id=None, eos_token_id=None, **gpt2),
    }
    return configs[architecture]() if architecture in configs else tiny_config(architecture)


def tiny_model(architecture: str, dtype: torch.dtype = torch.float32, attention: str = "covey") -> PreTrainedModel:
    """Random weights, the same for the same arguments whatever the attention."""
    register()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config_of(architecture), attn_implementation=attention)
        if attention == "covey" and route(model, plain):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_(0, 0.1) if parameter.dim() > 1 else None
    return model.to(dtype)


def tiny_policy(architecture: str, dtype: torch.dtype = torch.float32, stop_ids: Sequence[int] = ()) -> Policy:
    model = tiny_model(architecture, dtype)
    model.generation_config.eos_token_id = list(stop_ids)
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.eos_token = None
    return Policy(model=model, tokenizer=tokenizer, precision=dtype, head_is_linear=True)


@torch.no_grad()
def plain_logprobs(
    model: PreTrainedModel, prompt_ids: Sequence[int], completion: Completion, sampling: Sampling
) -> Tensor:
    """What a plain forward over prompt and completion gives the sampled tokens."""
    token_ids = torch.tensor([[*prompt_ids, *completion.token_ids]])
    logits_TV = model(input_ids=token_ids).logits[0, len(prompt_ids) - 1 : -1]
    logprobs_TV = filtered_logprobs(logits_TV, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    return logprobs_TV.gather(-1, token_ids[0, len(prompt_ids) :, None])[:, 0]
