"""Write a folder's model as one GGUF file, which llama.cpp reads.

Shapes: H heads, D dimensions of a head, rows and columns of a weight.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from numpy import dtype, ndarray
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from covey.policy.models.loading import load_tokenizer
from covey.policy.settings import ModelConfig
from covey_report.export.card import model_type


class Source(NamedTuple):
    """A weight in a file of the folder."""

    file: Path
    key: str
    shape: tuple[int, ...]
    kind: str
    """Name of its type in a GGUF file."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture as a GGUF file has it."""

    name: str
    is_interleaved: bool = False
    """Whether the two parts of a rotated pair are neighbours."""
    norm_offset: float = 0.0
    """Added to the weights of norms, which a model adds while it computes."""
    tensors: frozenset[str] = frozenset()
    """Settings that show in the weights alone."""


def write_gguf(folder: Path, kind: str) -> Path:
    """Write the folder's model into it as a GGUF file.

    ValueError for what a GGUF file of the architecture has no place for.
    """
    from gguf import GGUFWriter, LlamaFileType

    if (found := model_type(folder)) not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"--gguf writes models of type {known}, got {found}; llama.cpp converts more")
    config = AutoConfig.from_pretrained(folder)
    own = _architecture(config)
    fields = _shape_fields(config, own) | _token_fields(load_tokenizer(ModelConfig(name=str(folder))), folder, config)
    sources = dict(_sources(folder, config, own, kind.upper()))
    extra = rope_factors(config)
    file = folder / f"model-{kind}.gguf"
    writer = GGUFWriter(file, own.name)
    writer.add_file_type(LlamaFileType["ALL_F32" if kind == "f32" else f"MOSTLY_{kind.upper()}"])
    writer.add_quantization_version(2)
    for name, value in fields.items():
        _add(writer, name, value)
    _write_tensors(writer, sources, extra, config, own)
    return file


def _architecture(config: PreTrainedConfig) -> Architecture:
    """Return an architecture's record. ValueError for settings that a file cannot hold."""
    own = ARCHITECTURES[config.model_type]
    said = config.to_dict()
    shape = {name: said[name] for name in (*SHAPE.values(), *IN_PLACE) if name in said}
    usual = type(config)(**shape).to_dict()
    other = {n: v for n, v in said.items() if v != usual.get(n) and n not in MEANINGLESS and n not in own.tensors}
    if own.name == "gemma3":
        other |= {} if config.query_pre_attn_scalar == config.head_dim else {"head_dim": config.head_dim}
        other.pop("query_pre_attn_scalar", None)
    elif (window := said.get("sliding_window")) and window < config.max_position_embeddings:
        other["sliding_window"] = window
    if rope := {each.get("rope_type", "default") for each in _ropes(config)} - {"default", "linear", "llama3"}:
        other["rope_type"] = rope.pop()
    if other:
        name, value = next(iter(other.items()))
        raise ValueError(f"--gguf cannot write {name}={value!r:.60}, which a file of {own.name} has no place for")
    return own


def _ropes(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """List the rotary settings: one, or one for each kind of layer."""
    found: dict[str, Any] = config.rope_parameters
    return [found] if "rope_theta" in found else [found["full_attention"], found["sliding_attention"]]


def _shape_fields(config: PreTrainedConfig, own: Architecture) -> dict[str, Any]:
    said, ropes = config.to_dict(), _ropes(config)
    width = said.get("head_dim") or config.hidden_size // config.num_attention_heads
    fields = {name: said[setting] for name, setting in SHAPE.items()}
    fields |= dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), width)
    fields["rope.freq_base"] = float(ropes[0]["rope_theta"])
    if own.name == "gemma3":
        fields |= {"attention.sliding_window": config.sliding_window}
        fields |= {"rope.freq_base_swa": float(ropes[1]["rope_theta"])}
    if ropes[0].get("rope_type") == "linear":
        fields |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(ropes[0]["factor"])}
    return {f"{own.name}.{name}": value for name, value in fields.items()}


def rope_factors(config: PreTrainedConfig) -> dict[str, ndarray]:
    """Return by what Llama 3 divides each rotary frequency."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = _ropes(config)[0]
    if rope.get("rope_type") != "llama3":
        return {}
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = rope["rope_theta"] ** -(torch.arange(len(scaled), dtype=torch.float64) / len(scaled))
    return {ROPE_FACTORS: (plain / scaled).float().numpy()}


# ------------------------------------------------------------------------------------------------ the tokenizer


def _token_fields(tokenizer: PreTrainedTokenizerBase, folder: Path, config: PreTrainedConfig) -> dict[str, Any]:
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    model, added = spec["model"], {token["id"]: token for token in spec["added_tokens"]}
    if model["type"] != "BPE":
        raise ValueError(f"--gguf writes tokenizers of byte pairs (BPE), got {model['type']}")
    texts = {number: text for text, number in model["vocab"].items()} | {n: t["content"] for n, t in added.items()}
    if max(texts) >= config.vocab_size:
        raise ValueError(f"--gguf needs a row for each token, got {config.vocab_size} for {max(texts) + 1}")
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    numbers = range(config.vocab_size)
    fields: dict[str, Any] = {"tokens": [texts.get(number, f"[PAD{number}]") for number in numbers]}
    unknown = tokenizer.unk_token_id if model["byte_fallback"] else None
    fields["token_type"] = [_token_type(texts.get(number), added.get(number), number == unknown) for number in numbers]
    if model["byte_fallback"]:
        ranks: dict[str, int] = {}
        for rank, merge in enumerate(merges):
            ranks.setdefault(merge.replace(" ", ""), rank)
        fields |= {"model": "llama", "pre": "default"}
        fields["scores"] = [-float(ranks.get(text, UNMERGED)) for text in fields["tokens"]]
        first = tokenizer.convert_ids_to_tokens(tokenizer("a", add_special_tokens=False)["input_ids"])[0]
        fields["add_space_prefix"] = first.startswith("▁")
    else:
        fields |= {"model": "gpt2", "pre": _pre_tokenizer(spec["pre_tokenizer"]), "merges": merges}
    return {f"tokenizer.ggml.{name}": value for name, value in (fields | _ends(tokenizer, folder)).items()} | (
        {"tokenizer.chat_template": template} if (template := _template(tokenizer)) else {}
    )


def _token_type(text: str | None, added: Mapping[str, Any] | None, is_unknown: bool) -> int:
    """Return 1 for ordinary tokens, and the number of any other kind."""
    if text is None:
        return 5
    if added is not None:
        return 2 if is_unknown else 3 if added["special"] else 4
    return 6 if len(text) == 6 and text.startswith("<0x") and text.endswith(">") else 1


def _pre_tokenizer(spec: Mapping[str, Any] | None) -> str:
    """Return llama.cpp's name for the way that texts are split."""
    found = splits_of(spec)
    name = next((name for name, splits in PRE_TOKENIZERS.items() if splits == found), None)
    if name is None:
        raise ValueError(f"--gguf knows no name for the tokenizer's way to split texts ({' then '.join(found):.100})")
    return name


def splits_of(spec: Mapping[str, Any] | None) -> tuple[str, ...]:
    """List what a pre-tokenizer splits by: patterns, DIGITS, WORDS."""
    parts = [] if spec is None else spec.get("pretokenizers", [spec])
    names = {"ByteLevel": WORDS, "Digits": DIGITS}
    kept = [part for part in parts if part["type"] != "ByteLevel" or part["use_regex"]]
    return tuple(
        part["pattern"]["Regex"] if part["type"] == "Split" else names.get(part["type"], part["type"]) for part in kept
    )


def _ends(tokenizer: PreTrainedTokenizerBase, folder: Path) -> dict[str, Any]:
    """Return the numbers of special tokens, and which stand around each text."""
    named = {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}
    ids = {
        word: tokenizer.convert_tokens_to_ids(text)
        for word, short in named.items()
        if (text := tokenizer.special_tokens_map.get(f"{short}_token"))
    }
    fields: dict[str, Any] = {f"{word}_token_id": number for word, number in ids.items()}
    if (folder / "generation_config.json").is_file():
        stops = GenerationConfig.from_pretrained(folder).eos_token_id
        stops = stops if isinstance(stops, list) else [stops]
        others = [stop for stop in stops if stop not in (None, ids.get("eos"))]
        fields |= {"eot_token_id": others[0]} if others else {}
    around = list(tokenizer("a")["input_ids"])
    fields["add_bos_token"], fields["add_eos_token"] = around[0] == ids.get("bos"), around[-1] == ids.get("eos")
    return fields


def _template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    found = tokenizer.chat_template
    return found.get("default") if isinstance(found, dict) else found


# ------------------------------------------------------------------------------------------------ the weights


def _sources(folder: Path, config: PreTrainedConfig, own: Architecture, kind: str) -> Iterator[tuple[str, Source]]:
    """Yield each weight's name and source. ValueError for unknown ones."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    (number,) = [number for number, name in MODEL_ARCH_NAMES.items() if name == own.name]
    names = get_tensor_name_map(number, config.num_hidden_layers)
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as held:
            for key in held.keys():  # noqa: SIM118
                name = names.get_name(key, try_suffixes=(".weight", ".bias"))
                if name == "output.weight" and config.tie_word_embeddings:
                    continue
                if name is None:
                    raise ValueError(f"--gguf knows no name for the weight {key} in a file of {own.name}")
                shape = tuple(held.get_slice(key).get_shape())
                yield name, Source(file, key, shape, _type_of(shape, kind))


def _type_of(shape: Sequence[int], kind: str) -> str:
    """Return a weight's type: vectors stay whole, odd rows become F16."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if len(shape) < 2:
        return "F32"
    return kind if shape[-1] % GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0] == 0 else "F16"


def _write_tensors(
    writer: Any, sources: Mapping[str, Source], more: Mapping[str, ndarray], config: PreTrainedConfig, own: Architecture
) -> None:
    """Write names and shapes, then one weight at a time."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

    for name, source in sources.items():
        kind = GGMLQuantizationType[source.kind]
        block, size = GGML_QUANT_SIZES[kind]
        num_bytes = torch.Size(source.shape).numel() // block * size
        writer.add_tensor_info(name, source.shape, dtype("float32"), num_bytes, kind)
    for name, values in more.items():
        writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, source in sources.items():
        with safe_open(source.file, framework="pt") as held:
            weight = _convert(held.get_tensor(source.key).float(), name, config, own)
        writer.write_tensor_data(quants.quantize(weight.numpy(), GGMLQuantizationType[source.kind]))
    for values in more.values():
        writer.write_tensor_data(values)
    writer.close()


def _convert(weight: Tensor, name: str, config: PreTrainedConfig, own: Architecture) -> Tensor:
    if name.endswith("norm.weight"):
        return weight + own.norm_offset
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-2])
    if not own.is_interleaved or heads is None:
        return weight
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


def _add(writer: Any, name: str, value: Any) -> None:
    """Add a field, typed by its value."""
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds.get(type(value), writer.add_array)(name, value)


# ------------------------------------------------------------------------------------------------ the tables

ARCHITECTURES = {
    "llama": Architecture("llama", is_interleaved=True, tensors=frozenset(("attention_bias", "mlp_bias"))),
    "mistral": Architecture("llama", is_interleaved=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "gemma3_text": Architecture("gemma3", norm_offset=1.0),
}
"""Architectures that are written, by transformers' type: each is compared with llama.cpp."""
SHAPE = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
"""Fields of a file, and the settings they are."""
IN_PLACE = ("head_dim", "rope_parameters", "tie_word_embeddings", "sliding_window")
"""Further settings that a file has a place for."""
MEANINGLESS = frozenset(
    (
        *("architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "_model_name_or_path"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "initializer_range", "attention_dropout"),
        *("use_cache", "pretraining_tp", "max_window_layers", "sliding_window"),
    )
)
"""Settings without influence on what a whole model computes, or looked at elsewhere."""
ROPE_FACTORS = "rope_freqs.weight"
UNMERGED = 10**6
"""Rank of a token that no merge makes."""
WORDS, DIGITS = "words as GPT-2", "single digits"
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = {
    "gpt-2": (WORDS,),
    "smollm": (DIGITS, WORDS),
    "qwen2": (QWEN2,),
    "llama-bpe": (QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|"),),
}
"""Ways to split a text before bytes are joined, by llama.cpp's names."""
