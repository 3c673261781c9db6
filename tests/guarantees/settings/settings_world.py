"""What the observations of settings read by relative paths: rows, rewards, saved policies, a stopped run, a hub."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest

from benchmarks.checks.architectures import save
from covey.config.schema import Config
from covey.config.validate import validate
from covey.environments.registry import environment_classes
from covey.loop import train
from covey.policy.models.nano import NanoShape, nano_judge_model, nano_masked_tokenizer
from covey.policy.settings import ModelConfig

from ...support.builders import nano
from ...support.small import small_config
from .settings_doors import make_doors

REWARDS = """
import os, time

CALLS = []

def varied(completions, **columns):
    return [sum(text.encode()) % 5 / 4 for text in completions]

def length(completions, **columns):
    return [len(text) for text in completions]

def half(completions, **columns):
    return [float("nan") if index % 2 else 1.0 for index, _ in enumerate(completions)]

def process(completions, **columns):
    return [os.getpid()] * len(completions)

def slow(completions, **columns):
    time.sleep(1.0)
    return [1.0] * len(completions)

def fading(completions, **columns):
    CALLS.append(1)
    return [float(len(CALLS) <= 11)] * len(completions)

def bigrams(weights):
    from torch import nn
    return nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 256)), (lambda text: list(text.encode()), bytes)

def hearing(config, say):
    from covey import Callback
    return Callback()
"""
ENVIRONMENTS = """
from covey.types import Prompt, Reward

class Numbers:
    power = 1

    def __init__(self, count=4):
        self.count = count

    def prompts(self, split):
        return [Prompt(f"{split}-{i}", "numbers", str(i ** self.power), {}) for i in range(self.count)]

    async def score(self, prompt, completions):
        return [Reward(float(len(text)), {}) for text in completions]

class Squares(Numbers):
    power = 2
"""
HUB, FILLS_HUB = "hub/models--some--one", "hub/models--some--filler"
MASKED = {"name": "nano-masked", "kind": "masked", "nano_architecture": "modernbert"}


def make_world(folder: Path) -> None:
    """Fill the folder, which is the current one."""
    (folder / "observed_rewards.py").write_text(REWARDS)
    (folder / "observed_environments.py").write_text(ENVIRONMENTS)
    make_doors(folder)
    _write_rows(folder)
    for name, hub, made in (("policy", HUB, {"nano_hidden_size": 192}), ("filler", FILLS_HUB, MASKED)):
        for place, seed in ((name, 0), (f"{hub}/snapshots/0", 0), (f"{hub}/snapshots/1", 1)):
            policy = nano(seed=seed, **made)
            policy.model.save_pretrained(folder / place)  # type: ignore[operator]
            policy.tokenizer.save_pretrained(folder / place)
        (folder / hub / "refs").mkdir()
        (folder / hub / "refs" / "main").write_text("0")
        (folder / hub / "refs" / "other").write_text("1")
    save("qwen3_moe", str(folder / "mixture"))
    tokenizer = nano_masked_tokenizer()
    nano_judge_model(NanoShape("modernbert", 16, 1, 2), tokenizer, seed=5).save_pretrained(folder / "judge")
    tokenizer.save_pretrained(folder / "judge")
    stopped = configured({"num_steps": 2})
    train(stopped, folder / "stopped")


def _write_rows(folder: Path) -> None:
    texts = [{"prompt": f"row {n}: ", "other": f"the other {n}: "} for n in range(12)]
    words = [{"question": f"What is {n}+1?", "answer": f"{n}+1={n + 1}\n#### {n + 1}"} for n in range(8)]
    problems = [{"problem": f"{n}+1?", "other": f"\\boxed{{{n}}}", "answer": f"{n + 1}"} for n in range(8)]
    problems = [row | {"solution": f"So \\boxed{{{row['answer']}}}."} for row in problems]
    gaps = [{"prompt": f"<mask>ow {n}<mask><mask>" if n % 2 else f"row {n}"} for n in range(12)]
    begun = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}] for n in range(12)]
    files = {"begun": [{"prompt": messages} for messages in begun]}
    imports = ("", "import numpy\n")
    files["programs"] = [{"prompt": f"f adds {n}", "test": f"{imports[n % 2]}assert f(1) == {n + 1}"} for n in range(8)]
    files |= {"rows": texts, "gaps": gaps, "more": texts[:5], "words": words, "mathematics": problems}
    asked = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    files |= {"instructions": [{"prompt": f"Row {n}, without commas.", **asked} for n in range(8)]}
    files |= {"designs": [{"completion": "Ba0Wb1Wb4"}]}
    files |= {"targets": [{"nums": [n, 2], "target": n + 2} for n in range(8)]}
    files |= {"splits/train": texts[:6], "splits/test": texts[6:8], "splits/extra": texts[8:]}
    (folder / "splits").mkdir()
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "broken.jsonl").write_text((folder / "rows.jsonl").read_text() + "no JSON\n")


def connect(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Hubs of models and data that are here and hold what `make_world` put there."""
    patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder / "hub"))
    patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    patch.setattr(datasets, "load_dataset", _hub_rows)


def _hub_rows(name: str, subset: str | None) -> dict[str, list[dict[str, str]]]:
    return {split: [{"prompt": f"{subset} {split} {n}: "} for n in range(4)] for split in ("train", "test")}


def configured(settings: Mapping[str, Any]) -> Config:
    """A valid config of a run of a fraction of a second, unchecked unless said. ValueError where a rule refuses it."""
    schema = environment_classes()[settings.get("environment.name", "arithmetic")]
    small: dict[str, Any] = {"environment": schema(), "preflight.enabled": False}
    if schema().name == "arithmetic":
        small |= {"environment.num_train": 16, "environment.num_test": 8}
    if settings.get("model.name", "nano") not in ("nano", "nano-masked"):
        usual = ModelConfig()
        small |= {f"model.{key}": value for key, value in vars(usual).items() if key.startswith("nano_")}
    config = small_config(**{key.replace(".", "__"): value for key, value in (small | dict(settings)).items()})
    validate(config)
    return config
