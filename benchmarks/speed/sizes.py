"""Models of real sizes: sampling beside vLLM, llama.cpp and transformers, a training step beside TRL.

    python -m benchmarks real [--only "sampling 135M float32 16"] [--again]

Weights are random, in the shapes of SmolLM2-135M, Qwen2.5-0.5B and Qwen3-0.6B (with a GPU Qwen2.5-0.5B, -1.5B and
Qwen3-4B), so that every answer has its 64 tokens. A cell is one line of the table: its contestants take turns, a
process each. Each cell is written when it is done, and those that are there are not measured again.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.speed import floor
from benchmarks.speed.contest import VLLM_PYTHON, WorkerFailed, contest
from benchmarks.speed.models import saved_model
from benchmarks.speed.ratios import Spread, contestant_figures, split_clean
from benchmarks.speed.report import RESULTS, circumstances, load
from benchmarks.speed.workers.llama_types import TYPES
from benchmarks.speed.workloads import Job, Phase, Workload

NAME = "real_sizes"
CPU_SIZES, GPU_SIZES = ("135M", "0.5B", "0.6B"), ("0.5B", "1.5B", "4B")
ROWS = (1, 4, 16, 64, 256)
PRECISIONS = ("float32", "bfloat16")
PROMPT_LENGTH, COMPLETION_LENGTH = 128, 64
GROUP = 8
LORA_RANK = 16
STEP_ROWS = 64
TOKENIZERS = {"135M": "smollm2-135m", "0.5B": "qwen2.5-coder-0.5b", "0.6B": "qwen2.5-coder-0.5b"}
"""Folders below COVEY_REAL_MODELS whose tokenizers a GGUF file of a size is given: it cannot be without one."""
MODELS = Path(__file__).resolve().parents[2] / ".cache" / "real_sizes"


@dataclass(frozen=True)
class Cell:
    """A line of the table."""

    phase: Phase
    size: str
    precision: str
    rows: int
    lora_rank: int = 0

    @property
    def name(self) -> str:
        weights = f", LoRA {self.lora_rank}" if self.lora_rank else ""
        return f"{self.phase} {self.size} {self.precision} {self.rows} rows{weights}"

    @property
    def workload(self) -> Workload:
        group = min(GROUP, self.rows)
        return Workload(self.size, (PROMPT_LENGTH,) * (self.rows // group), COMPLETION_LENGTH, group)

    def job(self, contestant: str, device: str) -> Job:
        lora = {"lora_rank": self.lora_rank, "device": device}
        return Job(contestant, self.workload, self.phase, self.precision, **lora)  # type: ignore[arg-type]


def cells(device: str) -> Iterator[Cell]:
    """Yield every line: sampling, also through adapters, and steps."""
    for size in CPU_SIZES if device == "cpu" else GPU_SIZES:
        for precision in PRECISIONS:
            yield from (Cell("sampling", size, precision, rows) for rows in ROWS)
            yield Cell("sampling", size, precision, 16, LORA_RANK)
            yield from (Cell("step", size, precision, STEP_ROWS, rank) for rank in (0, LORA_RANK))


def rivals(cell: Cell, device: str) -> dict[str, str]:
    """Return contestants beside covey, and the reason against each that cannot be had here."""
    if cell.phase == "step":
        return {"trl": ""}
    if cell.lora_rank:
        return {}
    llama = "pip install xllamacpp" if find_spec("xllamacpp") is None else ""
    llama = llama or ("" if tokenizer_of(cell.size) else "COVEY_REAL_MODELS names no folder with a tokenizer for it")
    vllm = "" if VLLM_PYTHON.exists() else "make bench-vllm-setup"
    return {"vllm": vllm, "llama": llama if device == "cpu" else "measured on CPUs alone", "transformers": ""}


def tokenizer_of(size: str) -> Path | None:
    folder = Path(os.environ.get("COVEY_REAL_MODELS", "nowhere")) / TOKENIZERS.get(size, "none")
    return folder if (folder / "tokenizer.json").is_file() else None


def gguf_file(workload: Workload, folder: Path, precision: str) -> Path:
    """Return the model of a folder as a GGUF file in it, made if it is not there."""
    from covey_report.export.to_gguf import write_gguf

    kind = TYPES[precision]
    file, lent = folder / f"model-{kind}.gguf", tokenizer_of(workload.size)
    if not file.is_file() and lent is not None:
        beside = folder / "gguf"
        beside.mkdir(exist_ok=True)
        for source in (
            *folder.glob("*.safetensors"),
            folder / "config.json",
            *lent.glob("*token*"),
            *lent.glob("*.txt"),
        ):
            (beside / source.name).unlink(missing_ok=True)
            (beside / source.name).symlink_to(source.resolve())
        write_gguf(beside, kind).rename(file)
    return file


def measure(cell: Cell, device: str, num_repetitions: int) -> dict[str, Any]:
    """Let the contestants of a cell take turns, between two looks at what the machine allows at that hour."""
    against = rivals(cell, device)
    names = ["covey", *(name for name, reason in against.items() if not reason)]
    folder = Path(saved_model(cell.workload, MODELS))
    if "llama" in names:
        gguf_file(cell.workload, folder, cell.precision)
    jobs = {name: cell.job(name, device) for name in names}
    before = rates_now(cell, device)
    repetitions = contest(jobs, num_repetitions, MODELS, MODELS / "logs")
    rates = {name: max(before[name], value) for name, value in rates_now(cell, device).items()}
    clean, num_dropped = split_clean(repetitions)
    used = clean or repetitions
    found = {name: contestant_figures([each[name] for each in used]) for name in names}
    known = floor.Rates(**rates)
    for name, figures in found.items():
        figures["shares"] = floor.shares(jobs[name], figures["seconds"], known)
        figures["times"] = times(used, name)
    return {
        "contestants": found,
        "absent": {name: reason for name, reason in against.items() if reason},
        "rates": rates,
        "num_clean": len(clean),
        "num_dropped": num_dropped,
        "raw": repetitions,
    }


def rates_now(cell: Cell, device: str) -> dict[str, float]:
    return vars(floor.measured(device, (cell.size,))[f"{cell.size}/{cell.precision}"])


def times(repetitions: Sequence[Mapping[str, Any]], name: str) -> dict[str, float]:
    """Return how often covey's seconds go into a contestant's, turn by turn."""
    seconds = [[each[one]["seconds"]["total"] for one in (name, "covey")] for each in repetitions]
    return Spread.of([theirs / ours for theirs, ours in seconds]).to_dict()


def run(device: str, only: Sequence[str], num_repetitions: int, say: Callable[[str], None], *, again: bool) -> None:
    """Measure the cells that are missing, each with its floor, and write each."""
    for cell in cells(device):
        name = cell.name if device == "cpu" else f"{cell.name}, {device}"
        done = load(NAME).get("cells", {})
        if not all(word in name for word in only) or (name in done and not again):
            continue
        try:
            row = measure(cell, device, num_repetitions)
        except WorkerFailed as error:
            row = {"error": str(error)}
        done[name] = {**row, "circumstances": circumstances()}
        (RESULTS / f"{NAME}.json").write_text(json.dumps({"cells": done}, indent=1, sort_keys=True) + "\n")
        say(f"{name}: {in_short(row)}")


def in_short(row: Mapping[str, Any]) -> str:
    """Return tokens a second of each contestant, with the share of its floor."""
    if "error" in row:
        return str(row["error"])
    parts = []
    for name, found in row["contestants"].items():
        speed, shares = found["tokens_per_second"], "/".join(f"{share:.0%}" for share in found["shares"].values())
        spread = f"{speed['median']:.0f} ({speed['low']:.0f} to {speed['high']:.0f}) tokens/s"
        parts.append(f"{name} {spread}, {shares} of the floor")
    return "; ".join([*parts, f"{row['num_clean']} clean, {row['num_dropped']} not"])


# ---------------------------------------------------------------------------------------------- the page's tables

NAMES = {"135M": "SmolLM2-135M", "0.5B": "Qwen2.5-0.5B", "0.6B": "Qwen3-0.6B"}
SAMPLERS = ("vllm", "llama", "transformers")


def tables(cells: Mapping[str, Any]) -> list[str]:
    """Return the lines of both tables in docs/use/real_models.md, of cells measured on CPUs."""
    rows: dict[str, list[str]] = {"sampling": [], "step": []}
    for cell in (cell for cell in cells_of_page() if "contestants" in cells.get(cell.name, {})):
        row = cells[cell.name]
        weights = f"adapters of rank {cell.lora_rank}" if cell.lora_rank else "all weights"
        line = _sampling(cell, row, weights) if cell.phase == "sampling" else _step(cell, row, weights)
        rows[cell.phase].append(f"| {NAMES[cell.size]} | {cell.precision} | " + " | ".join(line) + " |")
    return [
        "| model | precision | rows | covey | of its floor | vLLM | llama.cpp | transformers |",
        "|---" * 8 + "|",
        *rows["sampling"],
        "",
        "| model | precision | trained | TRL, s | covey, s | times | of its floor | memory, TRL | covey |",
        "|---" * 9 + "|",
        *rows["step"],
    ]


def cells_of_page() -> list[Cell]:
    return sorted(cells("cpu"), key=lambda cell: (cell.phase, CPU_SIZES.index(cell.size)))


def _sampling(cell: Cell, row: Mapping[str, Any], weights: str) -> list[str]:
    found = row["contestants"]
    rows = str(cell.rows) if not cell.lora_rank else f"{cell.rows}, {weights}"
    speeds = {name: _spread(figures["tokens_per_second"], ".0f") for name, figures in found.items()}
    share = f"{found['covey']['shares']['sampling']:.0%}"
    return [rows, speeds["covey"], share, *(speeds.get(name, "") for name in SAMPLERS)]


def _step(cell: Cell, row: Mapping[str, Any], weights: str) -> list[str]:
    covey, trl = (row["contestants"][name] for name in ("covey", "trl"))
    shares = ", ".join(f"{name} {share:.0%}" for name, share in covey["shares"].items())
    memory = [f"{each['process_bytes'] / 1e9:.1f} GB" for each in (trl, covey)]
    seconds = [_spread(each["seconds"]["total"], ".1f") for each in (trl, covey)]
    return [weights, *seconds, _spread(trl["times"], ".1f"), shares, *memory]


def _spread(found: Mapping[str, float], form: str) -> str:
    return f"{found['median']:{form}} ({found['low']:{form}} to {found['high']:{form}})"


if __name__ == "__main__":
    print("\n".join(tables(load(NAME)["cells"])))
