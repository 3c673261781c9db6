"""The model under adapters, kept in the run folder where no name leads to it: nano, or a cold start in a cache."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from covey.policy.policy import Policy
from covey.system.disk import atomic_folder

COLD_START_REPORT = "cold_start.json"
"""Marks a warmed policy, which lies in a cache that may be emptied."""
WRAPPED = "base_model.model."
"""What peft puts before the names of the model that it wraps."""


def save_base_model(policy: Policy, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Save a base model that the adapters of `policy` can name, once, where they have none.

    `weights` are the whole ones of a sharded policy. The name is absolute, for peft and transformers; covey looks in
    the run folder first, which may have been moved (`adapters.base_of`).
    """
    name = policy.causal_lm.name_or_path or ""
    is_cold_start = bool(name) and (Path(name) / COLD_START_REPORT).is_file()
    if (is_cold_start or not name) and not folder.is_dir():
        with atomic_folder(folder) as aside:
            if is_cold_start:
                _copy(Path(name), aside)
            else:
                _save(policy, policy.model.state_dict() if weights is None else weights, aside)
    base = folder if is_cold_start or not name else Path(name)
    policy.model.peft_config["default"].base_model_name_or_path = (  # type: ignore[index,union-attr]
        str(base.resolve()) if base.is_dir() else name
    )


def _copy(found: Path, aside: Path) -> None:
    for path in found.iterdir():
        if path.is_file() and path.name != COLD_START_REPORT:
            shutil.copyfile(path, aside / path.name)


def _save(policy: Policy, weights: Mapping[str, Tensor], aside: Path) -> None:
    """Save the model's own weights under its own names, taken from the model that has adapters."""
    own = {name: weight for name, weight in weights.items() if ".lora_" not in name}
    plain = {name.removeprefix(WRAPPED).replace(".base_layer.", "."): weight for name, weight in own.items()}
    policy.causal_lm.save_pretrained(aside, state_dict=plain)
    policy.tokenizer.save_pretrained(aside)
