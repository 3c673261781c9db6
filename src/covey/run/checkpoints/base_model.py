"""The model under adapters, kept in the run folder where no name leads to it: nano, or a cold start in a cache."""

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from torch import Tensor

from covey.policy.policy import Policy
from covey.system.disk import catch_write_errors, sync

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
    if is_cold_start:
        _once(folder, partial(_copy, Path(name)))
    elif not name:
        _once(folder, partial(_save, policy, policy.model.state_dict() if weights is None else weights))
    base = folder if is_cold_start or not name else Path(name)
    policy.model.peft_config["default"].base_model_name_or_path = (  # type: ignore[index,union-attr]
        str(base.resolve()) if base.is_dir() else name
    )


def _once(folder: Path, write: Callable[[Path], None]) -> None:
    """Write aside, sync and rename, so that the folder is whole or not there."""
    if folder.is_dir():
        return
    with catch_write_errors(folder):
        for left in folder.parent.glob(f"{folder.name}.tmp-*"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        aside = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent))
        try:
            write(aside)
            for path in (*aside.iterdir(), aside):
                sync(path)
            os.rename(aside, folder)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        sync(folder.parent)


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
