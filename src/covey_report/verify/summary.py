"""Write a verification as a sealed file with hashes.

The seal finds a changed file; it is no signature, as anybody can write another summary. To check it, compute the
same steps again: `covey verify RUN --again FILE`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from covey.run.checkpoints.checkpoint import complete_checkpoints
from covey.run.checkpoints.manifest import MANIFEST, MAX_BYTES, SEAL, digest_of_file, seal_text
from covey.run.folder import CHANGES, CONFIG, ROWS, VERSIONS
from covey.run.folder import SUMMARY as CLAIMS
from covey.system.disk import atomic_file, read_regular
from covey.system.text.format import timestamp

FORMAT = 1


def hashes_of(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of what a run claims: settings, logs, results, checkpoints.

    A checkpoint's is that of its manifest, which has those of its files.
    """
    names = [CONFIG, CHANGES, CLAIMS, VERSIONS, *ROWS]
    names += [f"checkpoints/{path.name}/{MANIFEST}" for path in complete_checkpoints(folder / "checkpoints")]
    return {name: digest_of_file(folder / name) for name in names if (folder / name).is_file()}


def write_summary(path: Path, folder: Path, content: Mapping[str, Any]) -> str:
    """Write a sealed summary; return its seal."""
    text = seal_text(
        {"format": FORMAT, "run": folder.resolve().name, "time": timestamp(), **content, "files": hashes_of(folder)}
    )
    with atomic_file(path) as file:
        file.write(text)
    return str(json.loads(text)[SEAL])


def read_summary(path: Path) -> dict[str, Any]:
    """Read a summary. ValueError where it is not what was written."""
    try:
        text = read_regular(path, MAX_BYTES).decode()
        content = json.loads(text)
        if (
            not isinstance(content, dict)
            or content.get("format") != FORMAT
            or not isinstance(content.get("files"), dict)
        ):
            raise ValueError("it is no summary of covey verify")
        if seal_text({name: value for name, value in content.items() if name != SEAL}) != text:
            raise ValueError("its seal is of another content")
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {str(error)[:200]}") from error
    return content


def files_changed(folder: Path, content: Mapping[str, Any]) -> Sequence[str]:
    """List files that are not those a summary speaks of."""
    now, then = hashes_of(folder), content["files"]
    return [name for name in dict.fromkeys((*then, *now)) if then.get(name) != now.get(name)]
