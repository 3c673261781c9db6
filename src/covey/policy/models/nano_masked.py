"""The embedded masked policy: a small bidirectional encoder and a byte tokenizer.

The same encoder with a score on top is the embedded judge. Both are transformers' own classes, which `from_pretrained`
loads anywhere.
"""

from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from covey.policy.attention.base import ATTENTION
from covey.policy.models.nano import END, PAD, NanoShape, byte_tokenizer
from covey.system.lookup import one_of

NANO_MASKED = "nano-masked"
MASK = "<mask>"
ARCHITECTURES = ("modernbert", "bert", "roberta")
MAX_LENGTH = 512
FIRST_TOKEN = 2
"""RoBERTa counts positions from its padding token on."""


def nano_masked_tokenizer() -> PreTrainedTokenizerFast:
    """Return one token per byte, with nothing put around a text."""
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer([PAD, END, MASK]),
        pad_token=PAD,
        eos_token=END,
        mask_token=MASK,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def nano_masked_model(shape: NanoShape, tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    """Make random weights from the seed, leaving the global random state alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForMaskedLM.from_config(_config(shape, tokenizer), attn_implementation=ATTENTION)


def nano_judge_model(shape: NanoShape, tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    """Return the encoder with one score per text, and transformers' own attention."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForSequenceClassification.from_config(_config(shape, tokenizer, num_labels=1))


def _config(shape: NanoShape, tokenizer: PreTrainedTokenizerFast, **more: Any) -> Any:
    one_of("model.nano_architecture", shape.architecture, ARCHITECTURES)
    if shape.architecture == "modernbert":
        more |= {"global_attn_every_n_layers": 1, "classifier_pooling": "mean", "norm_bias": True}
    return AutoConfig.for_model(
        shape.architecture,
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=4 * shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        max_position_embeddings=MAX_LENGTH + FIRST_TOKEN,
        tie_word_embeddings=True,
        initializer_range=shape.initializer_range,
        bos_token_id=None,
        cls_token_id=None,
        sep_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **more,
    )
