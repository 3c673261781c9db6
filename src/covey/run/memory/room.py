"""The free memory of a GPU, or of the machine within limits."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import torch

from covey.engine.native.cache import free_bytes

PAGE = os.sysconf("SC_PAGE_SIZE")


def available_bytes(device: torch.device) -> int:
    """Return the bytes this process can still take on the device. Processes of one machine share its memory evenly."""
    if device.type == "cuda":
        return free_bytes(device)
    return host_bytes(Path("/")) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def host_bytes(root: Path) -> int:
    """Return the least free memory of machine, process and groups."""
    return min(_machine(root), _address_space(root), *_control_groups(root))


def _machine(root: Path) -> int:
    meminfo = root / "proc" / "meminfo"
    if not meminfo.is_file():
        return os.sysconf("SC_PHYS_PAGES") * PAGE
    rows = dict(line.split(":") for line in meminfo.read_text().splitlines())
    return int(rows["MemAvailable"].split()[0]) * 1024


def _address_space(root: Path) -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    statm = root / "proc" / "self" / "statm"
    if limit == resource.RLIM_INFINITY or not statm.is_file():
        return 1 << 62
    return limit - int(statm.read_text().split()[0]) * PAGE


def _control_groups(root: Path) -> Iterator[int]:
    """Yield the free bytes of each group from the process' own upwards.

    File cache that can be dropped counts as free.
    """
    file = root / "proc" / "self" / "cgroup"
    for line in file.read_text().splitlines() if file.is_file() else []:
        _, kinds, path = line.split(":", 2)
        if kinds not in FILES:
            continue
        folder, limit_name, usage_name, cache_name = FILES[kinds]
        top = root / "sys" / "fs" / "cgroup" / folder
        # Limits of the groups above bind as well
        for place in (PurePosixPath(path), *PurePosixPath(path).parents):
            group = top / str(place).lstrip("/")
            if not (group / limit_name).is_file():
                continue
            limit = (group / limit_name).read_text().strip()
            if limit != "max":
                used = int((group / usage_name).read_text())
                yield int(limit) - used + _cached_bytes(group / "memory.stat", cache_name)


def _cached_bytes(stat: Path, name: str) -> int:
    if not stat.is_file():
        return 0
    return int(dict(line.split() for line in stat.read_text().splitlines()).get(name, 0))


FILES = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Controllers of a line of /proc/self/cgroup (none in version 2) -> folder, limit, use and droppable cache."""
