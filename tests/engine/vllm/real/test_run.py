"""Real vLLM: the command trains on what it samples, and what the run learns can be measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ....support.small import rows

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

SETTINGS = (
    *("recipe=arithmetic", "engine=vllm", "num_steps=60", "seed=0", "evaluation.every=0"),
    *("engine.cache_bytes=100000000", "engine.max_rows=256", "model.device=cpu"),
)


def test_a_run_that_samples_with_vllm_learns_to_add(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "covey", "train", *SETTINGS, f"hydra.run.dir={tmp_path}"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert finished.returncode == 0, finished.stderr[-2000:]
    said = "algorithm.correction=truncate in place of none: engine=vllm is another program than the trainer"
    assert said in finished.stdout + finished.stderr
    # Before the first step, the engine was measured against the trainer.
    checks = {check["name"]: check for check in json.loads((tmp_path / "preflight.json").read_text())}
    assert checks["log-probs"]["passed"]
    assert 0 < checks["log-probs"]["values"]["max"] < 1e-4
    # Every step trained on completions of the weights before it, as the trainer understands them.
    steps = rows(tmp_path / "metrics.jsonl", "train")
    assert len(steps) == 60
    assert max(step["staleness_max"] for step in steps) == 0
    assert max(step["mismatch_max"] for step in steps) < 1e-4
    before, after = [row["accuracy"] for row in rows(tmp_path / "metrics.jsonl", "evaluate")]
    assert after - before > 0.08  # 27 % before and 44 % after, of 512 held-out sums
