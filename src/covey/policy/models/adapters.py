"""LoRA adapters (arXiv 2106.09685) through peft, new or saved."""

import inspect
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from covey.policy.models.text_part import beside_text
from covey.policy.settings import ModelConfig

if TYPE_CHECKING:
    from peft import LoraConfig

ALL_LINEAR = ["all-linear"]
PLAIN_LORA = frozenset(
    (
        *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
        *("inference_mode", "r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out"),
        *("init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config"),
        "target_parameters",
    )
)
"""peft's settings of plain LoRA: where, rank, scale and initialisation. Any other setting makes another method."""
READ_PAST = re.compile(r"self\.(\w+)\.weight\b(?!\[|\.(?:dtype|device|shape|data)\b)")
"""A layer's weight in the code of the module around it. Slices are Bloom's, of a way that it takes if asked to."""
BASE = "base"
"""The folder of a run that holds the model under its adapters, where no name leads to it (`save_base_model`)."""


def add_adapters(model: PreTrainedModel, settings: ModelConfig, seed: int) -> nn.Module:
    """Add new adapters, in float32 at least; nothing else trains."""
    from peft import LoraConfig, get_peft_model

    everywhere, beside = settings.lora_targets == ALL_LINEAR, beside_text(model)
    linear = [name for name, _ in linear_layers(model) if f"{name}.weight" not in beside]
    unfit = [] if everywhere else [name for name in settings.lora_targets if not _names_linear_layers(model, name)]
    if unfit or not settings.lora_targets:
        known = ", ".join(dict.fromkeys(map(_last, linear))) or "none"
        others = "; experts get adapters by all-linear alone" if _experts(model) else ""
        raise ValueError(
            f"model.lora_targets must name linear layers of the model ({known}{others}), got [{','.join(unfit)}]"
        )
    targets = linear if everywhere else settings.lora_targets
    named = linear if everywhere else [name for name in linear if any(_is_called(name, each) for each in targets)]
    swallowed = _taken_for_experts(model, named)
    experts = _experts(model) if everywhere else []
    parameters = [*experts, *(f"{name}.weight" for name in named if _last(name) in swallowed)]
    if everywhere and not linear and not parameters:
        raise ValueError(f"model.lora_rank={settings.lora_rank} needs linear layers, {type(model).__name__} has none")
    lora = LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,  # type: ignore[arg-type]
        lora_dropout=settings.lora_dropout,
        target_modules=[name for name in targets if _last(name) not in swallowed],
        exclude_modules=None if everywhere else [name.removesuffix(".weight") for name in sorted(beside)] or None,
        target_parameters=parameters or None,
        task_type="CAUSAL_LM" if settings.kind == "causal" else None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return get_peft_model(model, lora)


def _is_called(layer: str, name: str) -> bool:
    """Return True if a layer's full name ends with a target's."""
    return f".{layer}".endswith(f".{name}")


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def linear_layers(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Yield the linear layers but the head.

    Llama 4's routers are linear by class alone.
    """
    head = model.get_output_embeddings()
    for name, layer in model.named_modules():
        is_linear = isinstance(layer, Conv1D) or (isinstance(layer, nn.Linear) and _computes_linearly(layer))
        if is_linear and layer is not head and not _is_read_past(model, name):
            yield name, layer


def _is_read_past(model: nn.Module, name: str) -> bool:
    """Return True if code around a layer reads its weight.

    An adapter would train nothing there, on some devices or in training alone (state-space layers, Gemma 3n).
    """
    around, _, last = name.rpartition(".")
    kind: Any = type(model.get_submodule(around))  # hashable, which mypy denies
    return last in _weights_read(kind)


@cache
def _weights_read(kind: type) -> frozenset[str]:
    found: set[str] = set()
    for each in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        with suppress(OSError, TypeError):  # no file has it
            found.update(READ_PAST.findall(inspect.getsource(each)))
    return frozenset(found)


def _experts(model: PreTrainedModel) -> list[str]:
    """Name the parameters that hold the weights of all experts."""
    holders = [(name, part) for name, part in model.named_modules() if "Experts" in type(part).__name__]
    named = [(name, key) for name, part in holders for key, weight in part._parameters.items() if _is_stack(weight)]
    return sorted({f"{_last(name)}.{key}" for name, key in named})


def _is_stack(weight: torch.Tensor | None) -> bool:
    return weight is not None and weight.dim() == 3


def _taken_for_experts(model: PreTrainedModel, linear: Sequence[str]) -> set[str]:
    """Return last names that peft takes for old files' experts.

    It goes by them alone. Dense layers and shared experts would get no adapter; as parameters they are found.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    def is_kept(last: str) -> bool:
        config = LoraConfig(target_modules=[last])
        with suppress(ValueError):  # one of two that old files held together
            convert_peft_config_for_transformers(config, model, None)
            return last in (config.target_modules or ())
        return False

    return {last for last in {*map(_last, linear)} if not is_kept(last)}


def _computes_linearly(layer: nn.Linear) -> bool:
    """Return True unless a model's own subclass computes something else."""
    if not type(layer).__module__.startswith("transformers.models."):
        return True
    with torch.no_grad():
        try:
            found = layer(layer.weight.new_ones(1, layer.in_features))
        except (RuntimeError, ValueError, IndexError):
            return False
    return isinstance(found, torch.Tensor) and found.shape == (1, layer.out_features)


def _names_linear_layers(model: nn.Module, name: str) -> bool:
    """Return True if peft resolves a name to linear layers alone."""
    found = [(full, layer) for full, layer in model.named_modules() if _is_called(full, name)]
    return bool(found) and all(
        isinstance(layer, nn.Linear | Conv1D) and not _is_read_past(model, full) for full, layer in found
    )


def other_than_plain_lora(config: object) -> str:
    """Return the first setting that plain LoRA lacks, "" for none.

    Engine, reference, checkpoints and vLLM support plain LoRA alone, and would drop the rest silently.
    """
    from peft import LoraConfig

    if not isinstance(config, LoraConfig):
        return type(config).__name__
    default = LoraConfig()
    for name, value in vars(config).items():
        if value and name not in PLAIN_LORA and value != getattr(default, name, None):
            return f"{name}={value}"
    return ""


def check_layers(model: nn.Module) -> None:
    """Refuse adapters of embeddings, which have other parameter names. ValueError."""
    found = [name for name, _ in model.named_parameters() if ".lora_embedding_" in name]
    if found:
        layer = found[0].partition(".lora_embedding_")[0].removeprefix("base_model.model.")
        raise ValueError(f"LoRA adapters must be those of linear layers, got one of {layer}")


def saved_adapters(settings: ModelConfig) -> "LoraConfig | None":
    """Return the saved adapters' settings, None where model.name is a whole model.

    ValueError where they contradict `settings`, or their base model is unknown.
    """
    saved = _config_in(settings.name)
    if saved is None:
        return None
    asked: dict[str, object] = {"lora_rank": settings.lora_rank, "lora_alpha": settings.lora_alpha}
    if settings.lora_targets != ALL_LINEAR:
        asked["lora_targets"] = sorted(settings.lora_targets)
    whole = [name.removesuffix(".weight") for name in saved.target_parameters or ()]  # of layers taken for experts
    targets = {next((each for each in settings.lora_targets if _is_called(name, each)), name) for name in whole}
    targets |= {saved.target_modules} if isinstance(saved.target_modules, str) else {*(saved.target_modules or ())}
    found: dict[str, object] = {"lora_rank": saved.r, "lora_alpha": saved.lora_alpha, "lora_targets": sorted(targets)}
    base = saved.base_model_name_or_path = base_of(Path(settings.name), saved.base_model_name_or_path)
    if not base:
        raise ValueError(f"model.name={settings.name} holds adapters that do not name their base model")
    held = f"model.name={settings.name} holds adapters of {base}"
    if base.startswith(("/", "~", ".")) and not Path(base).is_dir():
        raise ValueError(
            f"{held}, and there is no such folder: base_model_name_or_path of adapter_config.json names it"
        )
    if other := [name for name, value in asked.items() if value != found[name]]:
        needed, got = (" ".join(f"model.{name}={of[name]}" for name in other) for of in (found, asked))
        raise ValueError(f"{held} and needs {needed}, got {got}")
    saved.lora_dropout = settings.lora_dropout
    return saved


def saved_rank(name: str) -> tuple[int, float] | None:
    """Return rank and alpha of saved adapters, None for a whole model."""
    try:
        saved = _config_in(name)
    except ValueError:
        return 1, 1.0  # loading says what is wrong with them
    return None if saved is None else (saved.r, saved.lora_alpha)


def _config_in(name: str) -> "LoraConfig | None":
    """Return the saved adapters' settings. ValueError where covey does not support them."""
    if not (Path(name) / "adapter_config.json").is_file():
        return None
    from peft import LoraConfig

    try:
        saved = LoraConfig.from_pretrained(name)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{name}/adapter_config.json cannot be read ({error!r:.120})") from error
    if other := other_than_plain_lora(saved):  # of Megatron's, peft would import what the config names
        raise ValueError(f"model.name={name} must hold plain LoRA adapters, got {other}")
    assert isinstance(saved, LoraConfig), "plain LoRA"
    return saved


def base_of(policy: Path, recorded: str | None) -> str | None:
    """Return the adapters' base model: in their run folder, or as recorded."""
    above = policy.resolve().parents
    if len(above) < 3 or above[1].name != "checkpoints" or not (above[2] / BASE).is_dir():
        return recorded
    return str(above[2] / BASE)


def load_adapters(model: PreTrainedModel, settings: ModelConfig, saved: "LoraConfig") -> nn.Module:
    """Return the saved adapters on their base model. ValueError for missing files."""
    from peft import PeftModel

    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():  # they are made at random first
        warnings.filterwarnings("error", "Found missing adapter keys")
        try:
            adapted = PeftModel.from_pretrained(model, settings.name, config=saved, is_trainable=True)
        except UserWarning as error:
            what = f"model.name={settings.name} must hold all adapters that adapter_config.json names"
            raise ValueError(f"{what} ({str(error)[:160]}): save them again") from error
    check_layers(adapted)
    return adapted


def model_inside(given: nn.Module, settings: ModelConfig) -> PreTrainedModel:
    """Return the model inside peft's wrapper. ValueError where covey cannot train it."""
    from peft import PeftModel

    if not isinstance(given, PeftModel):
        raise ValueError(
            f"model must be a PreTrainedModel, a PeftModel, a name or a folder, got {type(given).__name__}"
        )
    if settings.lora_rank > 0:
        raise ValueError(
            f"model.lora_rank={settings.lora_rank} adds adapters, and the model in memory has some already"
        )
    if list(given.peft_config) != ["default"]:
        raise ValueError(f'a PeftModel needs one adapter, "default", got {", ".join(given.peft_config)}')
    if other := other_than_plain_lora(given.peft_config["default"]):
        raise ValueError(f"a PeftModel needs plain LoRA adapters, got {other}")
    check_layers(given)
    model = given.get_base_model()
    assert isinstance(model, PreTrainedModel), "peft wraps models of transformers here"
    return model
