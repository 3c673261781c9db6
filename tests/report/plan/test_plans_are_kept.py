"""Numbers of plans are those that are written down: a change of any is meant, and shown in the commit.

To renew them: python -m tests.report.plan.test_plans_are_kept
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from covey.policy.settings import ModelConfig
from covey.rollouts.settings import GroupSizeStep
from covey.run.memory.model_shapes import PUBLIC
from covey_report.plan.hardware import GPUS, Hardware
from covey_report.plan.plan import Measured, plan_of
from covey_report.plan.settings import shape_for

from ...support.small import changed
from .test_planner import config_of

KEPT = Path(__file__).parents[2] / "data" / "plans.json"
CPU = Hardware("a CPU", 24e9, 1e11, 2e10, is_gpu=False)
LARGE = "Qwen/Qwen2.5-7B"
STEP: dict[str, Any] = {"group_size": 8, "sampling.max_tokens": 1024, "engine.max_rows": 512}
ON_H100 = Measured(300.0, 1024.0)
CASES: dict[str, tuple[Hardware, int, Measured, dict[str, Any]]] = {
    "as it is": (GPUS["h100"], 1, Measured(), {}),
    # As benchmarks/checks/gpu_parts.py measures it; docs/use/plan.md says both
    "0.5B on an H100": (GPUS["h100"], 1, ON_H100, STEP),
    "1.5B on an H100": (GPUS["h100"], 1, ON_H100, STEP | {"model.name": "Qwen/Qwen2.5-1.5B"}),
    "1.5B on an H100, checkpointing": (
        GPUS["h100"],
        1,
        ON_H100,
        STEP | {"model.name": "Qwen/Qwen2.5-1.5B", "model.gradient_checkpointing": True},
    ),
    "long answers": (GPUS["h100"], 1, Measured(100.0, 480.0), {}),
    "on a CPU": (CPU, 1, Measured(), {"model.precision": "float32", "engine.max_rows": 64}),
    "on a CPU, adapters": (CPU, 1, Measured(), {"model.lora_rank": 16, "micro_batch_tokens": 4096}),
    "measured": (GPUS["a100"], 1, Measured(300.0, 150.0, {"sampling": 2.0, "backward": 0.5}, "a probe"), {}),
    "short answers": (GPUS["h100"], 2, Measured(64.0, 20.0), {"engine.max_rows": 100}),
    "a price": (GPUS["h100"].with_price(2.0), 4, Measured(completion_tokens=100.0), {"num_steps": 1000}),
    "checkpointing": (GPUS["a100"], 1, Measured(), {"model.gradient_checkpointing": True}),
    "several updates": (GPUS["h100"], 1, Measured(), {"updates_per_batch": 3, "mini_batch_groups": 16}),
    "a reference": (GPUS["h100"], 1, Measured(), {"algorithm.kl_coef": 0.1, "algorithm.reference_model": LARGE}),
    "its own reference": (GPUS["h100"], 1, Measured(), {"algorithm.kl_coef": 0.1, "packing": "packed"}),
    "does not fit": (GPUS["a100"], 1, Measured(), {"model.name": LARGE}),
    "fits with adapters": (GPUS["a100"], 1, Measured(), {"model.name": LARGE, "model.lora_rank": 32}),
    "sharded": (GPUS["h100"], 8, Measured(), {"model.name": LARGE, "parallel.strategy": "fsdp"}),
    "in 4 bits": (GPUS["a100"], 1, Measured(), {"model.name": LARGE, "model.lora_rank": 8, "model.load_in_4bit": True}),
    "fits nowhere": (GPUS["h100"], 8, Measured(), {"model.name": "Qwen/Qwen2.5-72B"}),
    "samplers": (GPUS["h100"], 2, Measured(), {"source": "ray", "devices.sampler": 3, "max_staleness": 1}),
    "samplers that are waited for": (GPUS["h100"], 2, Measured(), {"source": "ray", "devices.sampler": 1}),
    "few groups, many ranks": (GPUS["h100"], 8, Measured(), {"groups_per_step": 3, "group_size": 16}),
    "sizes that rise": (GPUS["h100"], 1, Measured(), {"group_size_schedule": [GroupSizeStep(50, 24)]}),
    "a warm-up": (GPUS["h100"], 1, Measured(), {"cold_start.enabled": True, "cold_start.num_steps": 70}),
    "evaluations": (GPUS["h100"], 1, Measured(), {"evaluation.every": 10, "evaluation.num_samples": 4}),
    "streaming": (GPUS["h100"], 1, Measured(), {"streaming": True, "micro_batch_tokens": 200_000}),
    "small micro-batches": (GPUS["h100"], 1, Measured(), {"micro_batch_tokens": 2048, "logprob_chunk": 0}),
}


def rounded(value: Any) -> Any:
    """Numbers to six digits, far more than a plan is worth and less than the order of sums changes."""
    if isinstance(value, Mapping):
        return {name: rounded(part) for name, part in value.items() if name not in ("on", "source")}
    if isinstance(value, list | tuple):
        return [rounded(part) for part in value]
    return float(f"{value:.6g}") if isinstance(value, int | float) else value


def plan(name: str) -> Any:
    on, num_gpus, known, changes = CASES[name]
    config = changed(config_of(), changes)
    found = plan_of(config, shape_for(config.model), on, num_gpus, known)
    return rounded({**asdict(found), "bottleneck": found.bottleneck.partition(":")[0]})


def shape(name: str) -> Any:
    found = shape_for(ModelConfig(name=name))
    return [sum(layer.inputs * layer.outputs for layer in found.body), found.vocabulary, found.key_value_width]


PARTS = {
    "plans": lambda: {name: plan(name) for name in CASES},
    "shapes": lambda: {name: shape(f"own/{name}") for name in PUBLIC},
}


@pytest.mark.parametrize("part", PARTS)
def test_the_numbers_are_those_that_are_written_down(part: str) -> None:
    found, kept = PARTS[part](), json.loads(KEPT.read_text(encoding="utf-8"))[part]
    apart = {name: (kept.get(name), value) for name, value in found.items() if kept.get(name) != value}
    assert apart == {}
    assert found.keys() == kept.keys()


if __name__ == "__main__":
    KEPT.write_text(json.dumps({part: found() for part, found in PARTS.items()}, indent=1) + "\n", encoding="utf-8")
