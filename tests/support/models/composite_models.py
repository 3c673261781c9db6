"""The smallest models of text and pictures, of the classes that people have in folders."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, PreTrainedModel

from benchmarks.checks.architecture_configs import tiny_config
from covey.policy.models.nano import nano_tokenizer

TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
DEEP = {"depth": 2, "hidden_size": 32, "num_heads": 4, "out_hidden_size": 32, "intermediate_size": 64}
PICTURE = {"image_size": 28, "patch_size": 14}
GEMMA4 = {"model_type": "gemma4_vision", **TOWER, "num_key_value_heads": 2, "head_dim": 16}
LLAMA4 = {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32, **TOWER}
LLAMA4 |= {**PICTURE, "intermediate_size": 128}
TOWERS: Mapping[str, Mapping[str, Any]] = {
    "qwen3_5": DEEP,
    "qwen3_5_moe": DEEP,
    "qwen3_vl": {**DEEP, "deepstack_visual_indexes": [0]},
    "qwen3_vl_moe": {**DEEP, "deepstack_visual_indexes": [0]},
    "gemma3": {"image_size": 56, "patch_size": 14},
    "gemma4": GEMMA4,
    "smolvlm": PICTURE,
    "llama4": LLAMA4,
    "mistral3": PICTURE,
    "internvl": {},
    "lfm2_vl": {},
}
"""Sizes of the part that looks at pictures, by architecture."""
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
PROCESSOR = '{"image_processor_type": "SiglipImageProcessor", "size": {"height": 28, "width": 28}}'


def composite_model(
    name: str, text: Mapping[str, Any] | None = None, tower: Mapping[str, Any] | None = None
) -> PreTrainedModel:
    """A random model, with weights large enough to say something."""
    more: dict[str, Any] = {"vision_config": {**TOWERS[name], **(tower or {})}}
    if text or name.startswith("qwen3_5"):
        more["text_config"] = text or HYBRID
    if name == "gemma3":
        more["mm_tokens_per_image"] = 4
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForImageTextToText.from_config(tiny_config(name, more))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4.0) if weight.dim() > 1 else None
    return model


def composite_folder(
    name: str, folder: Path, text: Mapping[str, Any] | None = None, tower: Mapping[str, Any] | None = None
) -> Path:
    """A folder as a hub has it, with a tokenizer and the file of a processor."""
    composite_model(name, text, tower).save_pretrained(folder)
    nano_tokenizer().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(PROCESSOR, encoding="utf-8")
    return folder
