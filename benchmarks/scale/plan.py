"""What `covey plan` predicts of memory and time on this machine, against what twelve runs take.

    python -m benchmarks.scale.plan   # trains them, a few minutes on one core, and writes benchmarks/scale/plan.md

Each run has ten steps in this process, timed in seconds of the processor, which others on the machine hardly lengthen:
the first is left out, three are the probe, the last six are what is to be predicted. Memory is what the preflight
measures by a pass over the largest micro-batch, training beside sampling.
"""

import json
import math
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from covey.config.schema import Config, DoctorConfig, EvaluationConfig, OutputConfig
from covey.environments.arithmetic import Arithmetic
from covey.loop import train
from covey.run.given import RunObjects
from covey.run.memory.estimate import with_fused_layers, workload
from covey.run.memory.memory_model import memory_of
from covey.types import Failure, Prompt, Reward
from covey_preflight import passes
from covey_report.plan.hardware import Hardware, here
from covey_report.plan.plan import work_of
from covey_report.plan.probe import Watch, compared
from covey_report.plan.seconds import step_seconds
from covey_report.plan.settings import shape_for

HERE = Path(__file__).resolve().parent
RESULTS, PAGE = HERE.parent / "results" / "plan.json", HERE / "plan.md"
EDGES = HERE.parent / "results" / "plan_edge.json"
STEPS, PROBE = 10, 4
GIB, MIB = 1 << 30, 1 << 20


def config_of(**changes: Any) -> Config:
    """A run of ten steps on sums; `model__lora_rank=8` is model.lora_rank=8."""
    config = Config(num_steps=STEPS, groups_per_step=16, group_size=8)
    config.sampling.max_tokens = 16
    config.evaluation = EvaluationConfig(num_prompts=1, num_samples=1, k=[1])
    config.output = OutputConfig(save_every=0, traces=False, report=False, progress=False)
    config.doctor = DoctorConfig(enabled=False)
    config.model.gradient_checkpointing = False
    for name, value in changes.items():
        *sections, leaf = name.split("__")
        node: Any = config
        for section in sections:
            node = getattr(node, section)
        setattr(node, leaf, value)
    return config


class Varied(Arithmetic):
    """Sums whose rewards differ for random answers too, so that every step has something to train on."""

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        return [Reward(sum(text.encode()) % 5 / 4) for text in completions]

    def gold(self, prompt: Prompt) -> str:
        """Return an answer of full reward."""
        return "\x04"


WIDE = {"model__nano_hidden_size": 256, "model__nano_num_layers": 8}
WIDER = {"model__nano_hidden_size": 512, "model__nano_num_layers": 8, "model__nano_num_heads": 8}
LORA = {"model__lora_rank": 8, "algorithm__kl_coef": 0.01}
CASES: dict[str, dict[str, Any]] = {
    "0.8 M": {},
    "0.8 M, 64 × 8 answers": {"groups_per_step": 64},
    "0.8 M, 64 tokens": {"sampling__max_tokens": 64},
    "0.8 M, 4 updates a batch": {"updates_per_batch": 4},
    "0.8 M, 256 tokens, checkpointing": {"sampling__max_tokens": 256, "model__gradient_checkpointing": True},
    "0.8 M, micro-batches of 512": {"micro_batch_tokens": 512, "groups_per_step": 32},
    "7 M": WIDE,
    "7 M, 64 tokens": {**WIDE, "sampling__max_tokens": 64},
    "7 M, checkpointing": {**WIDE, "model__gradient_checkpointing": True},
    "26 M": {**WIDER, "groups_per_step": 8},
    "26 M, 64 tokens": {**WIDER, "sampling__max_tokens": 64, "groups_per_step": 8},
    "26 M, KL to a reference": {**WIDER, "algorithm__kl_coef": 0.01, "groups_per_step": 8},
}


def measure(config: Config) -> dict[str, Any]:
    """Train, and return seconds of the processor a step, as predicted with the probe and taken, and bytes."""
    passes.MAX_SECONDS = math.inf  # the largest micro-batch is measured, however long that takes
    shape, on = shape_for(config.model), here()
    watch = Watch(time.process_time)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "run"
        train(config, folder, RunObjects(environment=lambda config: Varied(), callbacks=[watch], built=watch.built))
        checks = json.loads((folder / "preflight.json").read_text())
    # Split the steps: three for the probe, the rest to be predicted
    end = STEPS - PROBE
    measured = (watch.times[-1] - watch.times[PROBE - 1]) / end
    length = sum(watch.lengths[PROBE:]) / end
    first = Watch(time.process_time)
    first.phases, first.times = watch.phases[:PROBE], watch.times[:PROBE]
    first.lengths, first.prompt_tokens = watch.lengths[:PROBE], watch.prompt_tokens
    probe = compared(config, shape, on, first)
    # The probe says how long answers are, too
    work = work_of(config, 1, probe.prompt_tokens, probe.completion_tokens or 1)
    probed = sum(step_seconds(shape, workload(config, 1), work, on, probe.factors).values())
    return {
        "measured": measured,
        "probed": probed,
        **_memory(checks),
        "phases": _phases(watch),
        "length": length,
        "prompt_tokens": watch.prompt_tokens,
    }


def _phases(watch: Watch) -> Any:
    last, first = watch.phases[-1], watch.phases[PROBE - 1]
    return {name: (last[name] - first.get(name, 0.0)) / (STEPS - PROBE) for name in last}


def _memory(checks: Any) -> dict[str, float]:
    """Return bytes on top of weights, and tokens of the largest micro-batch, as the preflight measured them."""
    rows = checks["checks"] if isinstance(checks, dict) else checks
    (found,) = (row["values"] for row in rows if row["name"] == "memory")
    return {"needed": found["needed"], "num_tokens": found["num_tokens"]}


def planned_bytes(config: Config, on: Hardware, num_tokens: float, prompt_tokens: float) -> float:
    """Return the bytes on top of weights of the one model of memory."""
    shape, load = shape_for(config.model), replace(workload(config, 1), micro_batch_tokens=int(num_tokens))
    load = with_fused_layers(load, config.model, shape, is_gpu=on.is_gpu)
    num_cached = load.num_cached + int(config.groups_per_step * prompt_tokens)
    load = replace(load, num_cached=num_cached, single_pass=num_tokens < config.micro_batch_tokens)
    parts = memory_of(shape, load)
    return float(parts["optimizer"] + max(parts["gradients"] + parts["training"], parts["sampling"]))


def off(predicted: float, measured: float) -> float:
    return predicted / measured - 1


def table(results: dict[str, Any]) -> str:
    lines = [
        "| run | s measured | plan | off | with probe | off | MiB measured | plan | off |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, one in results["cases"].items():
        cells = [f"{one['measured']:.3f}"]
        for kind in ("plain", "probed"):
            cells += [f"{one[kind]:.3f}", f"{100 * off(one[kind], one['measured']):+.0f} %"]
        cells += [
            f"{one['needed'] / MIB:.0f}",
            f"{one['planned'] / MIB:.0f}",
            f"{100 * off(one['planned'], one['needed']):+.0f} %",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def within(results: dict[str, Any], kind: str, of: str, bound: float) -> str:
    errors = [abs(off(one[kind], one[of])) for one in results["cases"].values()]
    good = sum(error <= bound for error in errors)
    worst = f"median {100 * median(errors):.0f} %, largest {100 * max(errors):.0f} %"
    return f"{good} of {len(errors)} within {100 * bound:.0f} %, {worst}"


def with_plain(results: dict[str, Any]) -> dict[str, Any]:
    """Add what the plan alone predicts, by the constants of now."""
    on = Hardware(**results["hardware"])
    for name, one in results["cases"].items():
        config = config_of(**CASES[name])
        work = work_of(config, 1, one["prompt_tokens"], one["length"])
        predicted = step_seconds(shape_for(config.model), workload(config, 1), work, on)
        planned = planned_bytes(config, on, one["num_tokens"], one["prompt_tokens"])
        one |= {"plain": sum(predicted.values()), "predicted": predicted, "planned": planned}
    return results


def page(results: dict[str, Any]) -> str:
    return f"""# What `covey plan` predicts, and what runs take

`python -m benchmarks.scale.plan`: {len(results["cases"])} runs of ten steps on sums, randomly initialised, in float32.
Seconds of the processor a step, prompts and lengths known. The plan alone takes constants that were fitted to this
table and to an earlier round of it, so it says little of other machines; the probe takes three steps of the run, which
are not among the six that are predicted. Memory is what comes on top of the weights, as the preflight measures it with
the largest micro-batch.

- Time, the plan alone: {within(results, "plain", "measured", 0.30)}.
- Time, with the probe: {within(results, "probed", "measured", 0.10)}.
- Memory: {within(results, "planned", "needed", 0.10)}.

Measured on {results["machine"]}, one thread.

{table(results)}
{edges()}"""


def edges() -> str:
    """Return the table of benchmarks.scale.plan_edge, nothing where it has not run."""
    if not EDGES.is_file():
        return ""
    rows = [
        f"| {name} | {one['bytes'] / MIB:.0f} | {one['predicted']} | {one['fits']} | {one['fails']} "
        f"| {100 * off(one['predicted'], one['fits']):+.0f} % |"
        for name, one in json.loads(EDGES.read_text()).items()
    ]
    return f"""
## The edge of memory

`python -m benchmarks.scale.plan_edge`: a process may have so many MiB more (RLIMIT_DATA) than it holds with the
policy, and takes two micro-batches through the trainer; the largest that passes is found by bisection, each try in a
process of its own. Freed blocks go back to the system, as a GPU's allocator reuses them.

| policy | MiB | tokens that fit, predicted | passed | ran out | off |
|---|---|---|---|---|---|
{chr(10).join(rows)}
"""


def main() -> int:
    if "--table" in sys.argv:
        PAGE.write_text(page(with_plain(json.loads(RESULTS.read_text()))))
        return 0
    results: dict[str, Any] = {
        "machine": f"{platform.machine()}, Linux, no GPU, 2 cores shared with others",
        "cases": {},
    }
    results["hardware"] = asdict(here())
    if RESULTS.is_file():  # of runs that were measured before; delete the file to measure them again
        results = json.loads(RESULTS.read_text())
    for name, changes in CASES.items():
        if name in results["cases"]:
            continue
        results["cases"][name] = measure(config_of(**changes))
        print(name, {k: v for k, v in results["cases"][name].items() if k != "phases"}, flush=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(page(with_plain(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
