"""The embedded policies: about a million parameters and a byte tokenizer.

They make every recipe run offline on a laptop; a cold start teaches the causal one enough to earn rewards. The masked
one is a small bidirectional encoder, which with a score on top is the embedded judge. Their classes are transformers'.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from covey.policy.attention.base import ATTENTION
from covey.policy.settings import NANO as SPECIAL
from covey.system.lookup import one_of

NANO = "nano"
# AutoTokenizer takes Qwen2's own class for this architecture, which would add this end token if it were missing.
PAD, END, START_TURN, END_TURN = SPECIAL[NANO]
ARCHITECTURES = ("qwen2", "qwen3", "llama", "mistral")
MAX_LENGTH = 4096

CHAT_TEMPLATE = (
    "{% if tools %}<turn>system\n{{ tools | tojson }}</turn>{% endif %}"
    "{% for message in messages %}<turn>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}"
    "</turn>{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class NanoShape:
    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int

    def __post_init__(self) -> None:
        if self.hidden_size % (2 * self.num_heads) != 0:
            raise ValueError(f"model.nano_hidden_size must be a multiple of 2 x nano_num_heads, got {self.hidden_size}")

    @property
    def initializer_range(self) -> float:
        """Return the weights' initial scale: the usual 0.02 suits wide models."""
        return float(0.7 * self.hidden_size**-0.5)


def byte_tokenizer(special: Sequence[str]) -> Tokenizer:
    """Build a tokenizer of one token per byte; special tokens come first."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def nano_tokenizer() -> PreTrainedTokenizerFast:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(SPECIAL[NANO]),
        pad_token=PAD,
        eos_token=END,
        extra_special_tokens=[START_TURN, END_TURN],
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def nano_model(shape: NanoShape, tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    """Make random weights from the seed, leaving the global random state alone."""
    one_of("model.nano_architecture", shape.architecture, ARCHITECTURES)
    config = AutoConfig.for_model(
        shape.architecture,
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=8 * (shape.hidden_size // 3),
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_heads,
        head_dim=shape.hidden_size // shape.num_heads,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        initializer_range=shape.initializer_range,
        sliding_window=None,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return _make(AutoModelForCausalLM, config, seed, attn_implementation=ATTENTION)


NANO_MASKED = "nano-masked"
MASK = "<mask>"
MASKED_ARCHITECTURES = ("modernbert", "bert", "roberta")
MASKED_LENGTH = 512
FIRST_TOKEN = 2
"""RoBERTa counts positions from its padding token on."""


def nano_masked_tokenizer() -> PreTrainedTokenizerFast:
    """Return one token per byte, with nothing put around a text."""
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(SPECIAL[NANO_MASKED]),
        pad_token=PAD,
        eos_token=END,
        mask_token=MASK,
        model_max_length=MASKED_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def nano_masked_model(shape: NanoShape, tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    """Make random weights from the seed, leaving the global random state alone."""
    return _make(AutoModelForMaskedLM, _masked_config(shape, tokenizer), seed, attn_implementation=ATTENTION)


def nano_judge_model(shape: NanoShape, tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    """Return the encoder with one score per text, and transformers' own attention."""
    return _make(AutoModelForSequenceClassification, _masked_config(shape, tokenizer, num_labels=1), seed)


def _make(kind: Any, config: Any, seed: int, **how: str) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind.from_config(config, **how)


def _masked_config(shape: NanoShape, tokenizer: PreTrainedTokenizerFast, **more: Any) -> Any:
    one_of("model.nano_architecture", shape.architecture, MASKED_ARCHITECTURES)
    if shape.architecture == "modernbert":
        more |= {"global_attn_every_n_layers": 1, "classifier_pooling": "mean", "norm_bias": True}
    return AutoConfig.for_model(
        shape.architecture,
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=4 * shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        max_position_embeddings=MASKED_LENGTH + FIRST_TOKEN,
        tie_word_embeddings=True,
        initializer_range=shape.initializer_range,
        bos_token_id=None,
        cls_token_id=None,
        sep_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **more,
    )
