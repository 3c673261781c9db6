"""Tiny models with tokenizers made in the manner of known families, saved in a folder as a hub would have them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

CORPUS = [f"{a} + {b} = {a + b}, {word}." for a in range(30) for b in range(7) for word in ("see", "so", "yes", "no")]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""As Qwen3 writes it."""
HEADERS = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
"""As Llama 3 writes it."""
INSTRUCTIONS = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}[INST] {{ message['content'] }} "
    "[/INST]{% elif message['role'] == 'assistant' %}{{ message['content'] }}{{ eos_token }}{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
"""As Llama 2 and Mistral write it."""


def byte_level(special: list[str]) -> Tokenizer:
    """Byte-level BPE: every token that GPT-2, Llama 3 and Qwen have starts from bytes. The special tokens come last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def qwen() -> PreTrainedTokenizerFast:
    """All special tokens are named, and tokens of thought are plain ones."""
    tokenizer = byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    named = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "extra_special_tokens": ["<|im_start|>"]}
    return fast(tokenizer, CHATML, **named)


def qwen_unnamed() -> PreTrainedTokenizerFast:
    """<|im_start|> is marked as special, and no more."""
    tokenizer = byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return fast(tokenizer, CHATML, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def llama3() -> PreTrainedTokenizerFast:
    """256 special tokens, of which two are named; the beginning of a text is put before every one."""
    named = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"]
    tokenizer = byte_level([*named, "<|eot_id|>", *(f"<|reserved_special_token_{n}|>" for n in range(250))])
    bos = ("<|begin_of_text|>", tokenizer.token_to_id("<|begin_of_text|>"))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    return fast(tokenizer, HEADERS, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>")


def gpt2() -> PreTrainedTokenizerFast:
    """One special token, no padding, no chat template."""
    end = "<|endoftext|>"
    return fast(byte_level([end]), None, bos_token=end, eos_token=end, unk_token=end)


def llama2() -> PreTrainedTokenizerFast:
    """Pieces with a mark for the blank before them, bytes for what is no piece, and no mark for roles."""
    letters = sorted({*"".join(CORPUS), *"abcdefghijklmnopqrstuvwxyz[]/INST?Be", "▁"} - {" "})
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, "▁▁"]
    vocabulary = {token: index for index, token in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "▁")], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return fast(tokenizer, INSTRUCTIONS, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def wordpiece() -> PreTrainedTokenizerFast:
    """In the manner of BERT: lower case, pieces of words, one blank between any two words, unknown letters."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[UNK]", "[SEP]", "[PAD]"]
    tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=special))
    return fast(tokenizer, None, eos_token="[SEP]", unk_token="[UNK]", pad_token="[PAD]")


def without_pad() -> PreTrainedTokenizerFast:
    return fast(byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]), CHATML, eos_token="<|im_end|>")


def without_eos() -> PreTrainedTokenizerFast:
    return fast(byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]), CHATML, pad_token="<|endoftext|>")


def fast(tokenizer: Tokenizer, template: str | None, **named: Any) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
    made.chat_template = template
    return made


SOUND: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    **{"qwen": qwen, "qwen_unnamed": qwen_unnamed, "llama3": llama3, "gpt2": gpt2, "llama2": llama2},
    **{"without_pad": without_pad, "wordpiece": wordpiece},
}
"""Tokenizers that a model can be trained with."""
STOPS = {"llama3": ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"], "without_eos": []}
"""The stop tokens of the generation config, where they are not the one of the tokenizer."""


def save_model(folder: Path, tokenizer: PreTrainedTokenizerFast, stops: list[str] | None = None) -> str:
    """Save a model of a few thousand random weights with this tokenizer; return the folder as model.name has it."""
    eos = None if tokenizer.eos_token_id is None else int(tokenizer.eos_token_id)
    ids = [int(tokenizer.convert_tokens_to_ids(token)) for token in stops or []]
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=ids or eos,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
