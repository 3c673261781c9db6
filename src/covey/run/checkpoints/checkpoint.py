"""Checkpoints: complete state, written aside, synced, sealed, renamed, verified.

    checkpoints/step-000100/
      policy/          the weights (or the adapter) and the tokenizer; `from_pretrained` loads it
      state.pt         optimiser, loss scale, generators, positions, counters (loaded with weights_only)
      manifest.json    step, facts, size and SHA-256 of every file, and a hash of itself; written last

There is no pointer to the newest checkpoint: it is the newest one that verifies.
"""

import logging
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from covey.policy import sharding
from covey.policy.models.adapters import BASE
from covey.policy.models.naming import COLD_START_REPORT
from covey.policy.policy import Policy, is_adapted
from covey.run.checkpoints.manifest import (
    MANIFEST,
    difference,
    file_digests,
    folder_name,
    read_manifest,
    render,
    step_of,
)
from covey.system.disk import atomic_folder, catch_write_errors, sync

LOGGER = logging.getLogger(__name__)

POLICY, STATE, SETTINGS, CARD = "policy", "state.pt", "settings.yaml", "README.md"


def save_policy(policy: Policy, folder: Path, weights: Mapping[str, torch.Tensor] | None = None) -> None:
    """Save weights (or adapter) and tokenizer in transformers' format.

    A sharded policy needs its whole `weights` (`sharding.full_state_dict`), gathered by all ranks. ValueError where
    the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{folder}: the folder cannot be made ({error.strerror}); name another") from error
    keywords: dict[str, Any] = {} if weights is None else {"state_dict": dict(weights)}
    if is_adapted(policy.model):  # a reference adapter is no part of the policy
        keywords["selected_adapters"] = ["default"]
        # Nor are frozen layers that adapters stand beside, which peft would add where one is the head
        keywords["save_embedding_layers"] = False
    policy.model.save_pretrained(folder, **keywords)  # type: ignore[operator]
    (folder / CARD).unlink(missing_ok=True)  # peft's is an empty form; `covey export` writes one
    policy.save_tokenizer(folder)


def save_checkpoint(
    checkpoints: Path,
    step: int,
    policy: Policy,
    state: Mapping[str, Any],
    facts: Mapping[str, Any],
    weights: Mapping[str, torch.Tensor] | None = None,
    settings: str | None = None,
) -> Path:
    """Write checkpoints/step-NNNNNN with its manifest, or nothing; return its path.

    `weights` are the whole ones of a sharded policy, `settings` every setting of the run as YAML. A killed process
    leaves the old checkpoints as they were, and at most a folder *.tmp-*. ValueError where the state holds more than
    tensors and plain containers.
    """
    final = checkpoints / folder_name(step)
    with catch_write_errors(final):
        checkpoints.mkdir(exist_ok=True)  # never its parents: a run folder that is gone must not come back as a stump
        sync(checkpoints.parent)
    # Leftovers of any step go, as their room may be needed: no other process writes here (`resume.run_lock`). Only an
    # earlier attempt at this step is replaced, which did not verify or lacks its evaluation.
    with atomic_folder(final, family="step-*", replaces=True) as aside:
        if is_adapted(policy.model):
            save_base_model(policy, checkpoints.parent / BASE, weights)
        save_policy(policy, aside / POLICY, weights)
        with (aside / STATE).open("wb") as file:  # given a path, torch would not say why a write failed
            torch.save(dict(state), file)
        load_state(aside, mapped=True)
        if settings is not None:
            (aside / SETTINGS).write_text(settings, encoding="utf-8")
        (aside / MANIFEST).write_text(render(step, facts, file_digests(aside)), encoding="utf-8")
    return final


def prune_checkpoints(checkpoints: Path, *, keep_last: int, keep_best: bool) -> None:
    """Keep the last checkpoints, and the best; the newest must verify."""
    complete = complete_checkpoints(checkpoints)
    if not complete or problem(complete[-1]) is not None:
        return
    keep = set(complete[-keep_last:])
    if keep_best:
        keep.add(max(complete, key=lambda path: (_score(path), path.name)))
    for path in complete:
        if path not in keep:
            shutil.rmtree(path, ignore_errors=True)


def _score(checkpoint: Path) -> float:
    try:
        return float(read_manifest(checkpoint).get("score", "-inf"))
    except ValueError:
        return float("-inf")


def complete_checkpoints(checkpoints: Path) -> list[Path]:
    """Return the checkpoints with a manifest, oldest first, unverified."""
    found = {path.parent: step_of(path.parent) for path in checkpoints.glob(f"step-*/{MANIFEST}")}
    return sorted((path for path, step in found.items() if step is not None), key=lambda path: found[path] or 0)


def newest_valid(checkpoints: Path) -> Path | None:
    """Return the newest checkpoint that verifies, warning of damaged ones."""
    for path in reversed(complete_checkpoints(checkpoints)):
        fault = problem(path)
        if fault is None:
            return path
        LOGGER.warning("checkpoint %s is damaged (%s); falling back to the one before", path, fault)
    return None


def problem(checkpoint: Path) -> str | None:
    """Return a checkpoint's defect, None where it verifies."""
    try:
        return difference(checkpoint, read_manifest(checkpoint)["files"])
    except (OSError, ValueError, RecursionError) as error:
        return str(error)


def load_state(checkpoint: Path, *, mapped: bool = False) -> dict[str, Any]:
    """Load the state: tensors and plain containers alone. ValueError. `mapped` leaves tensors in the file."""
    try:
        return torch.load(checkpoint / STATE, map_location="cpu", weights_only=True, mmap=mapped)
    except UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        kind = found[1] if found else "other values"
        raise ValueError(
            f"{STATE} of a checkpoint in {checkpoint.parent} holds {kind}: only plain values and tensors are read, so "
            "a custom state_dict(), such as a curriculum's, keeps numbers, strings, lists, dicts and tensors"
        ) from error


def load_weights(policy: Policy, checkpoint: Path) -> None:
    """Load the saved weights (or adapter) in place. ValueError for a mismatch."""
    saved: dict[str, torch.Tensor] = {}
    for file in sorted((checkpoint / POLICY).glob("*.safetensors")):
        saved.update(load_file(file))
    is_model = (checkpoint / POLICY / "config.json").is_file() and not is_adapted(policy.model)
    if is_model and not saved.keys() <= policy.model.state_dict().keys():  # named as the hub does, not as the class
        saved = _read_renamed(policy, checkpoint / POLICY)
    if policy.sharded:
        sharding.reshard(policy)  # a pass before may have left whole weights in place of the shards
    # Refuse those of another size, then lay each out like the parameter it is for; adapters are saved without "default"
    names = {name.replace(".default.", "."): name for name, _ in policy.model.named_parameters(remove_duplicate=False)}
    examples = {short: policy.model.get_parameter(name) for short, name in names.items()}
    resized = [name for name, weight in saved.items() if name in examples and weight.shape != examples[name].shape]
    if resized:
        raise ValueError(f"{checkpoint} does not fit the policy: {sorted(resized)[:3]} are of another size")
    if policy.sharded:
        saved = {n: sharding.placed_like(w, examples[n]) if n in examples else w for n, w in saved.items()}
    # Under the policy's own names: peft's loading renames some a second time (Laguna's)
    found = {names.get(short, short): weight for short, weight in saved.items()}
    unknown = policy.model.load_state_dict(found, strict=False).unexpected_keys
    given = {id(examples[short]) for short in saved.keys() & names.keys()}
    missing = {
        name
        for name, p in policy.model.named_parameters()
        if id(p) not in given and (p.requires_grad or not is_adapted(policy.model))
    }
    # Refuse weights of another policy
    if unknown or missing:
        raise ValueError(f"{checkpoint} does not fit the policy: {sorted([*unknown, *missing])[:3]}")


def _read_renamed(policy: Policy, folder: Path) -> dict[str, Tensor]:
    """Read the saved weights under the names of the policy's class."""
    read: Any = type(policy.causal_lm).from_pretrained
    model, told = read(folder, dtype="auto", trust_remote_code=False, output_loading_info=True)
    foreign = {name: torch.empty(0) for name in told["unexpected_keys"]}
    return foreign | {name: weight for name, weight in model.state_dict().items() if name not in told["missing_keys"]}


WRAPPED = "base_model.model."
"""Prefix that peft puts before the names of the model that it wraps."""


def save_base_model(policy: Policy, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Save the adapters' base model once, where it has no name.

    `weights` are the whole ones of a sharded policy. The name is absolute, for peft and transformers; covey looks in
    the run folder first, which may have been moved (`adapters.base_of`).
    """
    # A hub model is found by its name again; a cold start's cache may be emptied, and a random start has no name
    name = policy.causal_lm.name_or_path or ""
    is_cold_start = bool(name) and (Path(name) / COLD_START_REPORT).is_file()
    if (is_cold_start or not name) and not folder.is_dir():
        with atomic_folder(folder) as aside:
            if is_cold_start:
                _copy(Path(name), aside)
            else:
                _save(policy, policy.model.state_dict() if weights is None else weights, aside)
    name_base(policy, str(folder) if is_cold_start or not name else name)


def name_base(policy: Policy, name: str) -> None:
    """Set the base model's name in the adapters, for from_pretrained."""
    found = str(Path(name).resolve()) if name and Path(name).is_dir() else name
    policy.model.peft_config["default"].base_model_name_or_path = found  # type: ignore[index,union-attr]


def _copy(found: Path, aside: Path) -> None:
    for path in found.iterdir():
        if path.is_file() and path.name != COLD_START_REPORT:
            shutil.copyfile(path, aside / path.name)


def _save(policy: Policy, weights: Mapping[str, Tensor], aside: Path) -> None:
    """Save the model's own weights from below its adapters."""
    own = {name: weight for name, weight in weights.items() if ".lora_" not in name}
    plain = {name.removeprefix(WRAPPED).replace(".base_layer", ""): weight for name, weight in own.items()}
    policy.causal_lm.save_pretrained(aside, state_dict=plain)
    policy.save_tokenizer(aside)
