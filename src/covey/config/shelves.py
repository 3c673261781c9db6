"""Find the files of presets under conf/, without heavy imports."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from covey.system.lookup import read_table

CONF = Path(__file__).resolve().parent / "conf"
"""The folder of YAML that only chooses among values that the dataclasses allow."""
SHELVES: Mapping[str, tuple[str, ...]] = {
    "algorithm": ("papers", "writeups"),
    "model": ("qwen2.5",),
    "recipe": ("offline", "laptop", "writeups"),
}
"""Group -> its shelves: algorithm=opo means algorithm/papers/opo.yaml. Other folders are a part of the name."""


@cache
def former(group: str) -> Mapping[str, str]:
    """Return a group's former preset names, with those of today."""
    return dict(read_table(CONF.with_name("former.yaml")).get(group, {}))


@cache
def presets(group: str, conf: Path = CONF) -> Mapping[str, Path]:
    """Return a group's preset names in order, with their files. ValueError where two have one name."""
    folder = conf / group
    found: dict[str, Path] = {}
    for file in sorted(folder.rglob("*.yaml")):
        path = file.relative_to(folder).with_suffix("")
        is_shelved = path.parts[0] in SHELVES.get(group, ()) and len(path.parts) > 1
        name = Path(*path.parts[is_shelved:]).as_posix()
        if name in found:
            raise ValueError(f"{group}={name} would mean {found[name]} and {file}; rename one of them")
        found[name] = file
    return dict(sorted(found.items()))


def preset_file(group: str, name: str) -> Path | None:
    """Return the file of a preset, None if unknown."""
    known, name = presets(group), former(group).get(name, name)
    file = CONF / group / f"{name}.yaml"
    return known.get(name) or (file if file in known.values() else None)


@cache
def preset_fields(group: str, name: str) -> Mapping[str, Any] | None:
    """Read a preset's fields, None if unknown. Options stay nested."""
    file = preset_file(group, name)
    content = {} if file is None else yaml.safe_load(file.read_text(encoding="utf-8"))
    return None if file is None else {field: value for field, value in content.items() if field != "defaults"}
