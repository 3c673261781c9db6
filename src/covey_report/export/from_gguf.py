"""Make a folder for model.name of a GGUF file."""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from numpy import allclose, ndarray
from tokenizers import Regex, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from covey.policy.models.text import TEXT
from covey.system.text.format import one_line
from covey_report.export.to_gguf import DIGITS, PRE_TOKENIZERS, ROPE_FACTORS, WORDS, rope_factors, splits_of

Fields = Mapping[str, Any]
"""A GGUF file's content besides its weights."""


def read_gguf(file: Path, folder: Path, dtype: str) -> str:
    """Write a GGUF file's model and tokenizer as plain numbers; describe them.

    ValueError for files that transformers does not read, and for weights that make no language model.
    """
    if not file.is_file():
        raise ValueError(f"--from-gguf must name a file, got {file}")
    try:
        reader = _open(file)
        fields = {name: field.contents() for name, field in reader.fields.items() if name not in LONG}
        if fields.get("split.count", 1) > 1:
            raise ValueError("it is one of several parts: llama-gguf-split --merge joins them")
        with TemporaryDirectory() as alone:  # transformers would take what lies beside the file for its own
            (Path(alone) / GGUF).symlink_to(file.resolve())
            tokenizer = AutoTokenizer.from_pretrained(alone, gguf_file=GGUF)
            model = _plain_model(alone, dtype, fields, {tensor.name: tensor.data for tensor in reader.tensors})
    except Exception as error:  # foreign files, and foreign code with errors of its own making
        said = one_line(str(error)) or type(error).__name__
        raise ValueError(f"{file} cannot be converted ({said[:200]})") from error
    remark = _name_tokens(model, tokenizer, fields)
    said = _look(model, tokenizer, file)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return said + remark


def _open(file: Path) -> Any:
    """Return a reader of the file. ValueError where it ends early."""
    from gguf import GGUFReader

    try:
        return GGUFReader(file)
    except (ValueError, IndexError) as error:
        with file.open("rb") as held:
            is_cut = MAGIC.startswith(held.read(len(MAGIC)))
        size = file.stat().st_size
        raise ValueError(f"it ends early, after {size:,} bytes: fetch it again" if is_cut else str(error)) from error


def _plain_model(folder: str, dtype: str, fields: Fields, tensors: Mapping[str, ndarray]) -> PreTrainedModel:
    """Return the causal model of a GGUF file in plain numbers.

    A model read from such a file calls itself quantised and cannot be saved, so its weights are moved into another. A
    file may hold the matrix of tied embeddings a second time, in more bits: it is then taken for both.
    """
    kind = getattr(torch, dtype)
    read: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=kind)
    config = type(read.config).from_dict({**read.config.to_dict(), "quantization_config": None})
    del config.quantization_config
    vars(config).pop("_model_name_or_path", None)  # the file's title
    found = read.state_dict()
    _complete(config, fields, tensors, found)
    inner, outer = (found[f"{name}.weight"].flatten().float() for name in ("model.embed_tokens", "lm_head"))
    if not config.tie_word_embeddings and torch.cosine_similarity(inner, outer, dim=0) > ALIKE:
        found["model.embed_tokens.weight"] = found["lm_head.weight"]
        config.tie_word_embeddings = True
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=kind)
    model.load_state_dict(found)
    return model


def _complete(config: PreTrainedConfig, fields: Fields, tensors: Mapping[str, ndarray], names: Collection[str]) -> None:
    """Set a file's rotary scaling. ValueError for parts transformers drops."""
    biases = [[name for name in of if name.endswith(".bias")] for of in (tensors, names)]
    if len(biases[0]) > len(biases[1]):
        raise ValueError(f"transformers does not read its biases, such as {biases[0][0]}")
    rope, scaling = config.rope_parameters, fields.get(f"{fields['general.architecture']}.rope.scaling.type")
    if scaling not in (None, "none", rope.get("rope_type")):
        raise ValueError(f"transformers does not read its rotary scaling, {scaling}")
    if (factors := tensors.get(ROPE_FACTORS)) is not None:
        config.rope_parameters = rope | LLAMA3 | {"factor": round(float(factors.max()), 3)}
        if not allclose(rope_factors(config)[ROPE_FACTORS], factors, rtol=1e-3):
            raise ValueError("its rotary factors are not those of a Llama 3")
    if config.model_type == "gemma3_text":  # as llama.cpp has it: the largest of them divides otherwise
        width = config.hidden_size // config.num_attention_heads
        config.query_pre_attn_scalar = width if config.num_hidden_layers == 62 else config.head_dim


def _name_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, fields: Fields) -> str:
    """Set the file's special tokens, splits and template; return remarks."""
    names = {word: f"tokenizer.ggml.{long}_token_id" for word, long in TOKENS.items()}
    ids = {word: int(fields[name]) for word, name in names.items() if name in fields}
    for word, number in ids.items():
        setattr(tokenizer, f"{word}_token", tokenizer.convert_ids_to_tokens(number))
        setattr(model.config, f"{word}_token_id", number)
    model.generation_config = GenerationConfig(
        **{f"{word}_token_id": number for word, number in ids.items() if word != "unk"}
    )
    if (turn := fields.get("tokenizer.ggml.eot_token_id")) is not None and turn != ids.get("eos"):
        model.generation_config.eos_token_id = [ids["eos"], int(turn)] if "eos" in ids else int(turn)
    tokenizer.chat_template = fields.get("tokenizer.chat_template")
    tokenizer.model_max_length = model.config.max_position_embeddings
    remark = "" if tokenizer.chat_template else "; it has no chat template"
    if fields.get("tokenizer.ggml.model") != "gpt2":
        return remark
    pre, backend = str(fields.get("tokenizer.ggml.pre")), tokenizer.backend_tokenizer
    if (splits := PRE_TOKENIZERS.get(ALIASES.get(pre, pre))) is not None:
        backend.pre_tokenizer = _splitter(splits)
    elif splits_of(json.loads(backend.to_str())["pre_tokenizer"]) == (WORDS,):
        remark += f"; texts are split as GPT-2 does, the file says {pre}: compare its tokens with the published ones"
    return remark


def _splitter(splits: Sequence[str]) -> pre_tokenizers.PreTokenizer:
    """Build what `splits_of` describes."""
    parts = [
        pre_tokenizers.Digits(individual_digits=True) if one == DIGITS else pre_tokenizers.Split(Regex(one), "isolated")
        for one in splits
        if one != WORDS
    ]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=WORDS in splits)
    return pre_tokenizers.Sequence([*parts, level])


def _look(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, file: Path) -> str:
    """Measure the log-prob of a plain text. ValueError if only chance."""
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
    with torch.no_grad():
        found = -float(model.eval()(input_ids=ids, labels=ids).loss)
    chance = -math.log(model.config.vocab_size)
    if not found > chance:
        raise ValueError(f"{file} cannot be converted: its model reads plain text no better than chance ({found:.1f})")
    return f"log-prob {found:.2f} for each token of a plain text (by chance {chance:.1f})"


GGUF, MAGIC = "model.gguf", b"GGUF"
LONG = ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges", "tokenizer.ggml.scores")
"""Fields that are read by transformers alone."""
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Rotary scaling of Llama 3.1 and later, whose factors a file holds instead."""
TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
"""Special tokens as transformers and as GGUF files call them."""
ALIASES = {
    **dict.fromkeys(("default", "gpt2"), "gpt-2"),
    **dict.fromkeys(("refact", "starcoder", "command-r"), "smollm"),
    **dict.fromkeys(("llama3", "llama-v3"), "llama-bpe"),
}
"""Other names that files have for the same ways to split."""
ALIKE = 0.9
"""Cosine between two matrices of embeddings above which one is the other, with fewer bits."""
