"""Saving a policy so that `from_pretrained` loads it: written aside and renamed, so no half checkpoint is ever seen."""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from covey.policy.policy import Policy, is_adapted

MANIFEST = "manifest.json"
POLICY = "policy"


def save_policy(policy: Policy, folder: Path) -> None:
    """The weights (or the adapter) and the tokenizer, in the format of transformers and peft."""
    # A reference adapter is no part of the policy.
    keywords = {"selected_adapters": ["default"]} if is_adapted(policy.model) else {}
    policy.model.save_pretrained(folder, **keywords)  # type: ignore[operator]
    policy.tokenizer.save_pretrained(folder)


def save_checkpoint(checkpoints: Path, step: int, policy: Policy, facts: dict[str, Any], *, keep_last: int) -> Path:
    """Write checkpoints/step-NNNNNN: complete with its manifest, or not there at all. Returns its path.

    Older checkpoints beyond `keep_last`, and what a killed run had half written, go only after the new one is in place.
    """
    final = checkpoints / f"step-{step:06d}"
    checkpoints.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f"{final.name}.tmp-", dir=checkpoints))
    save_policy(policy, aside / POLICY)
    manifest = {"step": step, **facts, "files": _inventory(aside)}
    (aside / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for path in (*aside.rglob("*"), aside):
        _sync(path)
    if final.exists():
        shutil.rmtree(final)
    os.rename(aside, final)
    _sync(checkpoints)
    half_written = checkpoints.glob("step-*.tmp-*")
    for old in (*complete_checkpoints(checkpoints)[: -max(keep_last, 1)], *half_written):
        shutil.rmtree(old)
    return final


def complete_checkpoints(checkpoints: Path) -> list[Path]:
    """Checkpoints that have their manifest, oldest first."""
    return sorted(path.parent for path in checkpoints.glob(f"step-??????/{MANIFEST}"))


def _inventory(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file."""
    return {
        str(file.relative_to(folder)): {
            "bytes": file.stat().st_size,
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        }
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def _sync(path: Path) -> None:
    """Onto the disk: a file's bytes, or a directory's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
