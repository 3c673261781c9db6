"""A whole run of a tiny Qwen3.5, which takes the general path, with all checks before it."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import covey
from benchmarks.checks.architectures import save
from covey.cli.main import main

from ...support.byte_rewards import vowels
from ...support.processes import as_job_steps
from ...support.small import equal


@pytest.mark.long
def test_a_hybrid_passes_every_check_and_trains(tmp_path: Path) -> None:
    save("qwen3_5_text", str(tmp_path / "model"))
    small: dict[str, Any] = {"num_steps": 2, "groups_per_step": 2, "group_size": 4, "max_tokens": 6, "lr": 1e-2}
    small |= {"evaluation": {"num_prompts": 2}, "num_samples": 2, "k": [1, 2], "progress": False}
    rows = [{"prompt": f"say {index}:"} for index in range(12)]
    result = covey.train(str(tmp_path / "model"), vowels, rows, folder=tmp_path / "run", **small)
    assert result.status == "completed"
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(step["mismatch"] for step in metrics if "mismatch" in step) < 1e-5
    policy = next((tmp_path / "run").glob("checkpoints/*/policy"))
    trained, start = map(AutoModelForCausalLM.from_pretrained, (policy, tmp_path / "model"))
    assert type(trained).__name__ == "Qwen3_5ForCausalLM"
    assert not equal(trained.state_dict(), start.state_dict())


SHARDED = [
    ("qwen3_5_text", []),
    ("lfm2_moe", []),
    ("llama4_text", []),
    ("nemotron_h", []),
    ("llama4_text", ["model.lora_rank=2", "model.precision=bfloat16"]),
    ("llama", ["model.lora_rank=2", "model.precision=bfloat16"]),
]


@pytest.mark.long
@pytest.mark.parametrize(("architecture", "changes"), SHARDED)
def test_a_model_trains_in_shards_on_two_ranks(architecture: str, changes: list[str], tmp_path: Path) -> None:
    save(architecture, str(tmp_path / "model"))
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "say {index}:"}}\n' for index in range(12)))
    small = {"num_steps": 2, "groups_per_step": 4, "group_size": 4, "sampling.max_tokens": 6, "optimizer.lr": 1e-2}
    small |= {"evaluation.num_prompts": 2, "evaluation.num_samples": 2, "evaluation.k": "[1,2]"}
    words = [f"{name}={value}" for name, value in small.items()]
    words += [
        f"model.name={tmp_path / 'model'}",
        "environment=reward_functions",
        f"data.path={tmp_path / 'rows.jsonl'}",
    ]
    words += ["rewards=[tests.support.byte_rewards:vowels]", "parallel.strategy=fsdp", *changes]
    words += [f"hydra.run.dir={tmp_path / 'run'}", "output.progress=false"]
    assert as_job_steps(lambda: main(["train", *words]), seconds=240.0) == [0, 0]
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in metrics if step.get("mismatch") is not None]
    assert max(step["mismatch"] for step in steps) < (0.02 if changes else 1e-5)
    assert max(step["grad_norm"] for step in steps) > 0.0, "some step had a signal"
