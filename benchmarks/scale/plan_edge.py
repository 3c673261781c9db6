"""Where training runs out of memory: the edge that the one model of memory predicts, and the one found by trying.

    python -m benchmarks.scale.plan_edge       # three minutes on one core; writes benchmarks/results/plan_edge.json

Each try is a process of its own: it builds the policy, allows itself so many bytes of data more (RLIMIT_DATA), and
takes two micro-batches through the trainer. The largest size that passes is found by bisection.
"""

import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.scale.plan import CASES, config_of
from covey.config.schema import Config
from covey.run.memory.estimate import with_fused_layers, workload
from covey.run.memory.memory_model import kept_bytes, training_bytes
from covey_report.plan.hardware import here
from covey_report.plan.settings import shape_for

RESULTS = Path(__file__).resolve().parents[1] / "results" / "plan_edge.json"
EDGES = {"0.8 M": 6000, "7 M": 2400, "7 M, checkpointing": 6000, "26 M": 1200}
"""Tokens of the micro-batch for which memory is just enough, as predicted."""
LOW, HIGH, PRECISION = 0.6, 1.6, 0.02
"""Where the edge is looked for, as shares of the predicted one."""
ANSWER = 59
PROMPT = (3, 4, 5, 6, 7)
FRESH = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
"""glibc gives blocks back to the system once they are freed, as a GPU's allocator reuses them."""


def training_needs(config: Config, num_tokens: int) -> int:
    """Return the bytes that gradients and one micro-batch of so many tokens take, by the model of memory."""
    shape, load = shape_for(config.model), replace(workload(config, 1), micro_batch_tokens=num_tokens)
    load = with_fused_layers(load, config.model, shape, is_gpu=here().is_gpu)
    return kept_bytes(shape, load)["gradients"] + training_bytes(shape, load)


def try_size(name: str, num_tokens: int, budget: int) -> None:
    """Take two micro-batches of so many tokens through the trainer, within `budget` bytes."""
    import torch

    from covey.policy.models.loading import load_policy
    from covey.run.build import trainer_settings
    from covey.trainer.trainer import Trainer
    from covey_preflight.passes import BatchShape, synthetic
    from covey_preflight.policy import compute_gradient_only

    config = config_of(**CASES[name])
    torch.set_num_threads(1)
    policy = load_policy(config.model, seed=0)
    trainer = Trainer(policy, trainer_settings(config), None)
    shape = BatchShape(PROMPT, ANSWER, 8, config.packing, policy.attention, num_tokens, several=True)
    # What is made once, such as buffers of kernels, is no matter of the size
    compute_gradient_only(trainer, synthetic(shape, 128, policy.device))
    trainer.drop_gradients()
    batch = synthetic(shape, num_tokens, policy.device)
    limit = data_bytes() + budget
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    compute_gradient_only(trainer, batch)


def data_bytes() -> int:
    """Return the bytes of this process that RLIMIT_DATA counts."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))


def fits(name: str, num_tokens: int, budget: int) -> bool:
    words = [sys.executable, "-m", "benchmarks.scale.plan_edge", "--try", name, str(num_tokens), str(budget)]
    ended = subprocess.run(words, env={**os.environ, **FRESH}, capture_output=True, text=True, check=False)
    if ended.returncode and "alloc" not in ended.stderr and "MemoryError" not in ended.stderr:
        raise RuntimeError(f"{name} with {num_tokens} tokens ended by something else: {ended.stderr[-500:]}")
    return ended.returncode == 0


def edge_of(name: str) -> dict[str, Any]:
    """Return the predicted and the found edge in tokens, and the bytes that were allowed."""
    predicted = EDGES[name]
    budget = training_needs(config_of(**CASES[name]), predicted)
    low, high = int(LOW * predicted), int(HIGH * predicted)
    if not fits(name, low, budget) or fits(name, high, budget):
        raise RuntimeError(f"the edge of {name} is not between {low} and {high} tokens")
    while high - low > PRECISION * predicted:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(name, middle, budget) else (low, middle)
    return {"predicted": predicted, "fits": low, "fails": high, "bytes": budget}


def main() -> int:
    if "--try" in sys.argv:
        name, num_tokens, budget = sys.argv[-3:]
        try_size(name, int(num_tokens), int(budget))
        return 0
    found = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    for name in EDGES:
        if name not in found:
            found[name] = edge_of(name)
            print(name, found[name], flush=True)
            RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
