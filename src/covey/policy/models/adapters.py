"""LoRA adapters (arXiv 2106.09685) through peft: new ones, and saved ones that training continues."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from covey.policy.settings import ModelConfig

if TYPE_CHECKING:
    from peft import LoraConfig

ALL_LINEAR = ["all-linear"]
BASE = "base"
"""The folder of a run that holds the model under its adapters, where no name leads to it (`save_base_model`)."""


def add_adapters(model: PreTrainedModel, settings: ModelConfig, seed: int) -> nn.Module:
    """Add new adapters, in float32 at least, and let nothing else train."""
    from peft import LoraConfig, get_peft_model

    everywhere = settings.lora_targets == ALL_LINEAR
    unfit = [] if everywhere else [name for name in settings.lora_targets if not _names_linear_layers(model, name)]
    if unfit or not settings.lora_targets:
        raise ValueError(f"model.lora_targets must name linear layers of the model, got [{','.join(unfit)}]")
    lora = LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,  # type: ignore[arg-type]
        lora_dropout=settings.lora_dropout,
        target_modules="all-linear" if everywhere else list(settings.lora_targets),
        task_type="CAUSAL_LM" if settings.kind == "causal" else None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return get_peft_model(model, lora)


def _names_linear_layers(model: nn.Module, name: str) -> bool:
    """Tell whether a name leads to modules, as peft looks them up, and all of them are linear layers."""
    found = [module for full, module in model.named_modules() if full == name or full.endswith(f".{name}")]
    return bool(found) and all(isinstance(module, nn.Linear | Conv1D) for module in found)


def saved_adapters(settings: ModelConfig) -> "LoraConfig | None":
    """Return the settings of the adapters in the directory model.name, None where it holds a whole model.

    ValueError where they are not what `settings` ask for, or their base model is not known.
    """
    if not (Path(settings.name) / "adapter_config.json").is_file():
        return None
    from peft import LoraConfig

    try:
        saved = LoraConfig.from_pretrained(settings.name)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{settings.name}/adapter_config.json cannot be read ({error!r:.120})") from error
    if not isinstance(saved, LoraConfig) or saved.megatron_config:  # peft would import what the latter names
        raise ValueError(f"model.name={settings.name} must hold plain LoRA adapters, got {type(saved).__name__}")
    # Check that the settings are those of the adapters
    asked: dict[str, object] = {"lora_rank": settings.lora_rank, "lora_alpha": settings.lora_alpha}
    if settings.lora_targets != ALL_LINEAR:
        asked["lora_targets"] = sorted(settings.lora_targets)
    targets = saved.target_modules or []
    found: dict[str, object] = {"lora_rank": saved.r, "lora_alpha": saved.lora_alpha, "lora_targets": sorted(targets)}
    for name, value in asked.items():
        if value != found[name]:
            raise ValueError(
                f"model.name={settings.name} holds adapters and needs model.{name}={found[name]}, "
                f"got model.{name}={value}"
            )
    # Find the base model
    saved.base_model_name_or_path = base_of(Path(settings.name), saved.base_model_name_or_path)
    if not saved.base_model_name_or_path:
        raise ValueError(f"model.name={settings.name} holds adapters that do not name their base model")
    saved.lora_dropout = settings.lora_dropout
    return saved


def saved_rank(name: str) -> tuple[int, float] | None:
    """Return rank and alpha of the adapters in a directory, None where it holds a whole model."""
    if not (Path(name) / "adapter_config.json").is_file():
        return None
    from peft import LoraConfig

    try:
        saved = LoraConfig.from_pretrained(name)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return 1, 1.0  # loading says what is wrong with them
    return (saved.r, saved.lora_alpha) if isinstance(saved, LoraConfig) else (1, 1.0)


def base_of(policy: Path, recorded: str | None) -> str | None:
    """Return the base model of saved adapters: the one in their run folder, else `recorded`.

    The run folder may have been moved.
    """
    above = policy.resolve().parents
    if len(above) < 3 or above[1].name != "checkpoints" or not (above[2] / BASE).is_dir():
        return recorded
    return str(above[2] / BASE)


def load_adapters(model: PreTrainedModel, settings: ModelConfig, saved: "LoraConfig") -> nn.Module:
    """Return the adapters in the directory model.name, on their base model, ready to be trained further."""
    from peft import PeftModel

    with torch.random.fork_rng(devices=[]):  # they are made at random first
        return PeftModel.from_pretrained(model, settings.name, config=saved, is_trainable=True)
