"""The largest model that trains 8 answers of 1,024 tokens on cards of 8 to 40 GB, found by capping one.

A cell is a model's size, what is trained of it (all weights, adapters, adapters on 4 bits) and a cap. Sizes and caps
are walked as a stair: what fits is tried larger, what does not fit on more memory. Every cell is kept as it ends, in
gpu_fits.jsonl, and not tried again where an earlier call left it (GPU_CHECK_DONE: a folder). Beside each stands what
`covey plan` tells. TRL walks the same stair in processes of its own, at its defaults in bfloat16.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.checks.gpu_models import (
    batch_of,
    config_of,
    device_here,
    given_completions,
    make_shaped,
    make_trainer,
    second_step,
)
from benchmarks.speed.models import saved_model, word_tokenizer
from benchmarks.speed.workloads import Job, Workload
from covey.policy.models.loading import load_policy
from covey.policy.policy import Policy
from covey.policy.settings import ModelConfig, chooses_liger
from covey.run.memory.memory_model import Workload as Load
from covey.run.memory.memory_model import memory_of
from covey.run.memory.model_shapes import Shape, count_shape

NAME = "gpu_fits"
CAPS = (8, 10, 16, 24, 40)
"""GiB of the card."""
CONTEXT = 0.5
"""GiB of it that the driver takes."""
SIZES = {name: f"Qwen2.5-{name}" for name in ("0.5B", "1.5B", "3B", "7B", "14B")}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "LoRA": {"lora_rank": 16},
    "all weights": {},
    "4-bit": {"lora_rank": 16, "load_in_4bit": True},
}
MICRO_BATCH = 4096
TRL_SIZES = ("0.5B", "1.5B")
"""Those whose files are written quickly."""
REST = {"num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 64}
TINY: Mapping[str, Mapping[str, Any]] = {
    "small": {
        "kind": "qwen2",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        **REST,
    },
    "larger": {
        "kind": "qwen2",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        **REST,
    },
}
TINY_CAPS = (0.005, 0.01, 0.05)
Row = dict[str, Any]


def fits(tiny: bool) -> Row:
    """Walk the stair of every kind; the largest size by kind and cap."""
    caps, sizes = (TINY_CAPS, tuple(TINY)) if tiny else (CAPS, tuple(SIZES))
    kinds = [kind for kind in KINDS if not tiny or kind != "4-bit"]
    return stairs("covey", caps, sizes, kinds, cell)


def fits_trl(tiny: bool) -> Row:
    """Walk TRL's stair."""
    if tiny and not os.environ.get("GPU_CHECK_TRL"):
        return {"skipped": "takes TRL in processes of its own"}
    caps, sizes = (TINY_CAPS, ("tiny",)) if tiny else (CAPS, TRL_SIZES)
    kinds = [kind for kind in KINDS if kind != "4-bit"]
    with tempfile.TemporaryDirectory() as folder:
        return stairs("TRL", caps, sizes, kinds, partial(trl_cell, folder=Path(folder)))


def stairs(
    who: str, caps: Sequence[float], sizes: Sequence[str], kinds: Sequence[str], cell: Callable[..., Row]
) -> Row:
    """Walk the stair of each kind, and say what was found."""
    cells = Cells()
    for kind in kinds:
        walk(
            caps, sizes, lambda cap, size, kind=kind: cells.look((who, kind, size, cap), partial(cell, kind, size, cap))
        )
    return table(cells.rows, caps, sizes, kinds, who)


class Cells:
    """Cells of this call and of earlier ones, each written as it ends."""

    def __init__(self) -> None:
        self._file = Path(os.environ.get("GPU_CHECK_OUT", ".")) / f"{NAME}.jsonl"
        before = Path(os.environ.get("GPU_CHECK_DONE", ".")) / f"{NAME}.jsonl"
        files = {file.resolve(): file for file in (before, self._file) if file.is_file()}
        self.rows: list[Row] = [json.loads(line) for file in files.values() for line in file.read_text().splitlines()]

    def look(self, place: tuple[str, str, str, float], make: Callable[[], Row]) -> Row:
        names = dict(zip(("who", "kind", "size", "cap"), place, strict=True))
        known = [row for row in self.rows if names.items() <= row.items()]
        if known:
            return known[-1]
        started = time.perf_counter()
        row = {**names, **make(), "took": round(time.perf_counter() - started, 1)}
        self.rows.append(row)
        with self._file.open("a") as out:
            print(json.dumps(row), file=out, flush=True)
        return row


def walk(caps: Sequence[float], sizes: Sequence[str], look: Callable[[float, str], Row]) -> list[Row]:
    """What fits is tried larger, what does not fit on more memory: no cell's answer follows from another's."""
    rows, cap, size = [], 0, 0
    while cap < len(caps) and size < len(sizes):
        rows.append(look(caps[cap], sizes[size]))
        if rows[-1]["fits"]:
            size += 1
        else:
            cap += 1
    return rows


def table(rows: Sequence[Row], caps: Sequence[float], sizes: Sequence[str], kinds: Sequence[str], who: str) -> Row:
    """Say the largest size that fits by kind and cap, with its seconds, and how far the plan was off."""
    found: Row = {}
    mine = [row for row in rows if row["who"] == who]
    for kind in kinds:
        for cap in caps:
            fit = [row for row in mine if row["kind"] == kind and row["fits"] and row["cap"] <= cap]
            best = max(fit, key=lambda row: sizes.index(row["size"]), default=None)
            found[f"{kind}, {cap:g} GB"] = f"{best['size']}, {best['seconds']} s" if best else "none"
    ratios = [row["peak"] / row["told"] for row in mine if row["fits"] and row.get("told")]
    if ratios and device_here() == "cuda":
        found |= {"peak against plan": [round(min(ratios), 3), round(max(ratios), 3)]}
        found["good"] = min(ratios) >= 0.9 and max(ratios) <= 1.1
    return found


def cell(kind: str, size: str, cap: float) -> Row:
    """Two steps of a model of this size under a cap; seconds of the second, and the peak in GiB."""
    shape, settings = _shape(size), dict(KINDS[kind])
    plan = memory_of(shape, load_of(settings))
    told = (plan["in_all"] - plan.get("decode_copy", 0)) / 2**30  # of training alone
    row: Row = {"told": round(told, 4), "plan": round(plan["in_all"] / 2**30, 4), "weights": shape.weights}
    try:
        with capped(cap, told):
            policy = _policy(size, settings)
            return {**row, "fits": True, **_two_steps(policy)}
    except RuntimeError as error:  # of torch, and of libraries that name it otherwise
        if "out of memory" not in str(error):
            raise
        return {**row, "fits": False}
    finally:
        gc.collect()
        torch.cuda.empty_cache() if device_here() == "cuda" else None


@contextmanager
def capped(cap: float, told: float = 0.0) -> Iterator[None]:
    """Let this process take so many GiB; on a CPU, refuse what the plan says is more."""
    if device_here() == "cpu":
        if told > cap:
            raise RuntimeError("out of memory, says the plan")
        yield
        return
    whole = torch.cuda.get_device_properties(0).total_memory / 2**30
    torch.cuda.set_per_process_memory_fraction(min(1.0, (cap - CONTEXT) / whole))
    torch.cuda.reset_peak_memory_stats()
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def load_of(settings: Mapping[str, Any]) -> Load:
    """What `covey plan` is told of a cell."""
    return Load(
        "bfloat16",
        gradient_checkpointing=True,
        micro_batch_tokens=MICRO_BATCH,
        fuses_layers=chooses_liger("auto", is_half=True) and not settings.get("load_in_4bit"),
        **settings,
    )


def _two_steps(policy: Policy) -> Row:
    lengths, prompt = ((12, 12), 8) if device_here() == "cpu" else ((1024, 1024), 256)
    batch = batch_of(policy, *given_completions(policy, 1, 8, lengths, prompt), micro_batch_tokens=MICRO_BATCH)
    seconds = second_step(make_trainer(policy), batch)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device_here() == "cuda" else 0.0
    return {"seconds": round(seconds, 2), "peak": round(peak, 3)}


def _policy(size: str, settings: Mapping[str, Any]) -> Policy:
    how = {"gradient_checkpointing": True, "precision": "bfloat16", **settings}
    if not settings.get("load_in_4bit"):
        return make_shaped(shaped_config(size), **how)
    # 4-bit weights come from files alone
    folder = Path(tempfile.gettempdir()) / f"covey-fits-{size}"
    if not (folder / "tokenizer.json").exists():
        with torch.device(device_here()):
            model = AutoModelForCausalLM.from_config(shaped_config(size), dtype=torch.bfloat16)
        model.save_pretrained(folder)
        word_tokenizer(model.config.vocab_size).save_pretrained(folder)
        del model
        torch.cuda.empty_cache()
    return load_policy(ModelConfig(name=str(folder), device=device_here(), **how), seed=0)


def shaped_config(size: str) -> Any:
    return config_of(TINY.get(size, SIZES.get(size, size)))


def _shape(size: str) -> Shape:
    with torch.device("meta"):
        return count_shape(AutoModelForCausalLM.from_config(shaped_config(size)))


def trl_cell(kind: str, size: str, cap: float, folder: Path) -> Row:
    """Two steps of TRL's trainer on completions that are given, in a process with a cap."""
    lengths = (8, 12) if size == "tiny" else (256, 1024)
    work = Workload(size, (lengths[0],), lengths[1], 8)
    job = Job("trl", work, "training", "bfloat16", KINDS[kind].get("lora_rank", 0), micro_batch_rollouts=1)
    job = replace(job, device=device_here(), model_dir=saved_model(work, folder))
    command = [sys.executable, "-m", "benchmarks.checks.gpu_fits", str(cap), job.to_json()]
    ran = subprocess.run(command, input="step\nstep\n", capture_output=True, text=True, timeout=300)
    answers = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    if len(answers) < 3:
        if "out of memory" not in ran.stderr:
            raise RuntimeError(f"TRL ended: {ran.stderr.strip().splitlines()[-1:]}")
        return {"fits": False}
    return {"fits": True, "seconds": round(answers[2]["seconds"]["total"], 2), "peak": answers[1]["peak_bytes"] / 2**30}


def main(cap: str, job: str) -> None:
    """One of TRL's cells: its worker under a cap, with the activations recomputed as it does by default."""
    from benchmarks.speed.workers import trl_worker

    config = trl_worker.GRPOConfig
    trl_worker.GRPOConfig = lambda **given: config(**{**given, "gradient_checkpointing": True})  # type: ignore[misc,assignment]
    with capped(float(cap)):
        trl_worker.main(Job.from_json(job))


if __name__ == "__main__":
    main(*sys.argv[1:])
