"""The manifest of a checkpoint: step, facts, file hashes, its own hash."""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from covey.system.disk import read_regular

MANIFEST = "manifest.json"
FORMAT = 2
"""Version of the folder's format; a checkpoint of another is refused."""
MAX_BYTES = 64 << 20
"""A longer manifest is refused unread."""
SEAL = "sha256"
"""The last field: the hash of the text that the other fields make."""
STEP = re.compile(r"step-(\d{6,})")

Digests = dict[str, dict[str, Any]]


def folder_name(step: int) -> str:
    """Return the checkpoint name of a step.

    >>> folder_name(30), folder_name(1234567)
    ('step-000030', 'step-1234567')
    """
    return f"step-{step:06d}"


def step_of(folder: Path) -> int | None:
    """Return the step of a checkpoint's folder name, else None.

    >>> step_of(Path("run/checkpoints/step-000030")), step_of(Path("step-000030.tmp-x"))
    (30, None)
    """
    found = STEP.fullmatch(folder.name)
    return int(found[1]) if found and folder.name == folder_name(int(found[1])) else None


def render(step: int, facts: Mapping[str, Any], files: Digests) -> str:
    """Return the text of a manifest, the only form that is read."""
    return seal_text({"format": FORMAT, "step": step, **facts, "files": files})


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Read a checkpoint's manifest. ValueError for any changed text."""
    try:
        text = read_regular(checkpoint / MANIFEST, MAX_BYTES).decode()
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError(f"it holds {type(content).__name__}, not fields")
        if content.get("format") != FORMAT:
            raise ValueError(f"format {str(content.get('format'))[:20]}, this covey reads {FORMAT}")
        if seal_text({name: value for name, value in content.items() if name != SEAL}) != text:
            raise ValueError("it is not what was written")
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{MANIFEST}: {str(error)[:200]}") from error
    _check_types(content, checkpoint)
    return content


def file_digests(folder: Path) -> Digests:
    """Return size and SHA-256 of every other file, by relative path."""
    return {name: {"bytes": size, SEAL: digest_of_file(folder / name)} for name, size in file_sizes(folder).items()}


def file_sizes(folder: Path) -> dict[str, int]:
    """Return every file's size, without the manifest. ValueError for links and devices."""
    sizes = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ValueError(f"{name} is not a regular file")
        if path.is_file() and name != MANIFEST:
            sizes[name] = path.stat().st_size
    return sizes


def difference(folder: Path, written: Digests) -> str | None:
    """Describe how files differ from those `written`, None if not.

    Sizes come first, so that a grown file is not read.
    """
    sizes = file_sizes(folder)
    if sizes.keys() != written.keys():
        return f"files {sorted(sizes.keys() ^ written.keys())} are missing or too many"
    for name, facts in written.items():
        if sizes[name] != facts["bytes"] or digest_of_file(folder / name) != facts[SEAL]:
            return f"{name} is not what was written"
    return None


def seal_text(fields: Mapping[str, Any]) -> str:
    """Return fields as JSON that ends with its own hash."""
    seal = hashlib.sha256(json.dumps(fields, indent=1).encode()).hexdigest()
    return json.dumps({**fields, SEAL: seal}, indent=1) + "\n"


def _check_types(content: Mapping[str, Any], checkpoint: Path) -> None:
    """Refuse a manifest of another folder or with wrong types."""
    if content.get("step") != step_of(checkpoint):
        raise ValueError(f"{MANIFEST}: step {str(content.get('step'))[:20]} in a folder named {checkpoint.name}")
    kinds: dict[str, Any] = {"score": int | float, "num_ranks": int, "num_threads": int}
    kinds |= {"prompts": str, "reference": str, "versions": dict, "files": dict}
    wrong = [name for name, kind in kinds.items() if name in content and not isinstance(content[name], kind)]
    if wrong or "files" not in content:
        raise ValueError(f"{MANIFEST}: {', '.join(wrong) or 'files'} must be of another type")
    entries = content["files"].values()
    if not all(isinstance(entry, dict) and entry.keys() == {"bytes", SEAL} for entry in entries):
        raise ValueError(f"{MANIFEST}: files must have bytes and {SEAL} each")


def digest_of_file(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
