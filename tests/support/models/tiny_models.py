"""The smallest models that transformers makes, for comparisons with other trainers."""

import torch
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel

from ..small import TOKENIZER


def tiny_model(dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A GPT-2 of a few thousand weights, which computes in `dtype` throughout, without dropout."""
    config = GPT2Config(
        vocab_size=len(TOKENIZER),
        n_positions=64,
        n_embd=16,
        n_layer=1,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=TOKENIZER.eos_token_id,
        pad_token_id=TOKENIZER.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model.to(dtype)
