"""The embedded policy: a model of about a million parameters and a byte tokenizer, built from nothing.

It makes every recipe run offline on a laptop; a cold start teaches it enough to earn rewards.
"""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from covey.policy.attention import ATTENTION

NANO = "nano"
# AutoTokenizer takes Qwen2's own class for this architecture, which would add this end token if it were missing.
PAD, END, START_TURN, END_TURN = "<pad>", "<|endoftext|>", "<turn>", "</turn>"
ARCHITECTURES = ("qwen2", "qwen3", "llama", "mistral")
MAX_LENGTH = 4096

CHAT_TEMPLATE = (
    "{% for message in messages %}<turn>{{ message['role'] }}\n{{ message['content'] }}</turn>{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)


def nano_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, so that any text goes in and comes out unchanged; four special tokens besides."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([PAD, END, START_TURN, END_TURN, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        extra_special_tokens=[START_TURN, END_TURN],
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def nano_model(
    architecture: str, hidden_size: int, num_layers: int, num_heads: int, tokenizer: PreTrainedTokenizerFast, seed: int
) -> PreTrainedModel:
    """Random weights, a pure function of the arguments; the global random state is left as it was."""
    if architecture not in ARCHITECTURES:
        raise ValueError(f"model.nano_architecture must be one of {', '.join(ARCHITECTURES)}, got {architecture}")
    if hidden_size % (2 * num_heads) != 0:
        raise ValueError(f"model.nano_hidden_size must be a multiple of 2 x nano_num_heads, got {hidden_size}")
    config = AutoConfig.for_model(
        architecture,
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=8 * (hidden_size // 3),
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        head_dim=hidden_size // num_heads,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        # The usual 0.02 suits wide models; a narrow one learns several times faster from a start of unit scale.
        initializer_range=0.7 * hidden_size**-0.5,
        sliding_window=None,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
