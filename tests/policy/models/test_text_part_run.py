"""Whole runs on tiny folders of text and pictures: trained, killed, resumed, adapted, exported, in shards."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

import covey
from covey.cli.main import main
from covey.policy.models.text_part import beside_text
from covey_report.export.command import run_export

from ...support.byte_rewards import by_bytes
from ...support.models.composite_models import PROCESSOR, composite_folder
from ...support.processes import as_job_steps
from ...support.small import equal

ROWS = [{"prompt": f"say {index}:"} for index in range(12)]
SMALL: dict[str, Any] = {"groups_per_step": 2, "group_size": 4, "max_tokens": 6, "lr": 1e-2, "save_every": 2}
SMALL |= {"evaluation": {"num_prompts": 2}, "num_samples": 2, "k": [1, 2], "progress": False}


def assert_text_alone_moved(given: Path, saved: Path) -> None:
    """What was saved is the class that came, whole, and equal beside the text."""
    before = AutoModelForImageTextToText.from_pretrained(given)
    after, told = AutoModelForImageTextToText.from_pretrained(saved, output_loading_info=True)
    assert type(after) is type(before)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    beside = beside_text(before)
    moved = {name for name, weight in after.named_parameters() if not torch.equal(weight, before.get_parameter(name))}
    assert moved
    assert not moved & beside
    assert (saved / "preprocessor_config.json").read_text(encoding="utf-8") == PROCESSOR


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3_5_moe", "smolvlm"])
def test_a_folder_of_text_and_pictures_passes_every_check_trains_and_resumes(name: str, tmp_path: Path) -> None:
    given = composite_folder(name, tmp_path / "model")

    def half(step: int, metrics: dict[str, float | None]) -> None:
        if step == 2:
            raise covey.StopTraining("half is done")

    covey.train(str(given), by_bytes, ROWS, folder=tmp_path / "whole", num_steps=4, **SMALL)
    begun = covey.train(str(given), by_bytes, ROWS, folder=tmp_path / "begun", num_steps=4, callbacks=[half], **SMALL)
    assert len(begun.rows) == 2
    covey.train(rewards=by_bytes, data=ROWS, resume=tmp_path / "begun")
    metrics = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert max(step["mismatch"] for step in metrics if "mismatch" in step) < 1e-5
    policies = [tmp_path / run / "checkpoints" / "step-000004" / "policy" for run in ("whole", "begun")]
    first, second = (AutoModelForImageTextToText.from_pretrained(policy) for policy in policies)
    assert equal(first.state_dict(), second.state_dict())
    assert_text_alone_moved(given, policies[0])


@pytest.mark.long
@pytest.mark.parametrize("name", ["gemma3", "llama4"])
def test_adapters_of_the_text_are_exported_into_the_class_that_came(name: str, tmp_path: Path) -> None:
    given = composite_folder(name, tmp_path / "model")
    covey.train(str(given), by_bytes, ROWS, folder=tmp_path / "run", num_steps=2, lora_rank=2, **SMALL)
    run_export([str(tmp_path / "run"), "--to", str(tmp_path / "out"), "--merge"])
    assert_text_alone_moved(given, tmp_path / "out")


@pytest.mark.long
def test_a_folder_of_text_and_pictures_trains_in_shards_on_two_ranks(tmp_path: Path) -> None:
    given = composite_folder("qwen3_5_moe", tmp_path / "model")
    small = {"num_steps": 2, "groups_per_step": 4, "group_size": 4, "sampling.max_tokens": 6, "optimizer.lr": 1e-2}
    small |= {"evaluation.num_prompts": 2, "evaluation.num_samples": 2, "evaluation.k": "[1,2]", "output.save_every": 2}
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    words = [f"{name}={value}" for name, value in small.items()]
    words += [
        f"model.name={given}",
        "environment=reward_functions",
        "rewards=[tests.support.byte_rewards:by_bytes]",
        f"data.path={data}",
    ]
    words += ["parallel.strategy=fsdp", f"hydra.run.dir={tmp_path / 'run'}", "output.progress=false"]
    assert as_job_steps(lambda: main(["train", *words]), seconds=240.0) == [0, 0]
    assert_text_alone_moved(given, tmp_path / "run" / "checkpoints" / "step-000002" / "policy")
