"""The smallest runs that go through everything: a policy of a few thousand weights, prompts of a few bytes."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from covey.config.schema import Config
from covey.environments.base import Environment
from covey.environments.settings import ArithmeticConfig, CustomConfig
from covey.policy.models.loading import load_policy
from covey.policy.models.nano import nano_tokenizer
from covey.run.checkpoints.manifest import render
from covey.types import Failure, Group, Prompt, Reward, Rollout
from tests.support.scripted import Scripted

TOKENIZER = nano_tokenizer()

SETTINGS: dict[str, Any] = {
    "num_steps": 2,
    "groups_per_step": 2,
    "group_size": 4,
    "sampling.max_tokens": 4,
    "model.nano_hidden_size": 16,
    "model.nano_num_layers": 1,
    "model.nano_num_heads": 2,
    "optimizer.lr": 1e-2,
    "evaluation.num_prompts": 2,
    "evaluation.num_samples": 2,
    "evaluation.k": [1, 2],
    "evaluation.correct_above": 0.999,  # a bound of the user's own says what is right
    "output.progress": False,
    "doctor.enabled": False,
}


def small_config(**changes: Any) -> Config:
    """A config of a run of a fraction of a second; `sampling__max_tokens=8` is sampling.max_tokens=8."""
    return changed(Config(), SETTINGS | {key.replace("__", "."): value for key, value in changes.items()})


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """The same config with other values, by dotted name."""
    for name, value in changes.items():
        *sections, leaf = name.split(".")
        node: Any = config
        for section in sections:
            node = vars(node)[section]
        assert leaf in vars(node), f"no setting {name}"
        vars(node)[leaf] = value
    return config


def words(**changes: Any) -> list[str]:
    """The same settings as words of the command line."""
    settings = SETTINGS | {key.replace("__", "."): value for key, value in changes.items()}
    return [f"{name}={json.dumps(value)}" for name, value in settings.items() if name != "output.progress"]


def varied(prompt: Prompt, text: str) -> float:
    """A reward that random completions differ in: 0, 0.25, 0.5, 0.75 or 1."""
    return sum(text.encode()) % 5 / 4


def scripted(verdict: Any = varied, num_prompts: int = 6) -> Scripted:
    texts = [f"prompt {index}:" for index in range(num_prompts)]
    return Scripted({"train": texts, "test": ["test a:", "test b:", "test c:"]}, verdict)


POLICIES: dict[str, dict[str, Any]] = {
    "causal": {},
    "masked": {
        "model__name": "nano-masked",
        "model__kind": "masked",
        "model__nano_architecture": "bert",
        "engine__name": "fill",
        "environment": CustomConfig(factory="tests:anything"),
    },
}
"""Changes of `small_config` for each kind of policy."""


def scripted_for(kind: str, verdict: Any = varied) -> Scripted:
    """Prompts that are continued, or that have gaps: as many, with the same names."""
    if kind == "causal":
        return scripted(verdict)
    texts = [f"<mask>ompt {index}<mask><mask>" for index in range(6)]
    return Scripted({"train": texts, "test": ["te<mask>t a:", "t<mask>st b:", "t<mask>"]}, verdict)


def use(monkeypatch: pytest.MonkeyPatch, environment: Environment) -> None:
    """Let runs of `small_config` take this environment."""
    for kind in (ArithmeticConfig, CustomConfig):
        monkeypatch.setattr(kind, "build", lambda settings, run, say: environment)


def rollout(reward: float, num_tokens: int = 2, finish_reason: Any = "stop", **parts: float) -> Rollout:
    """A rollout of the prompt (5, 6) that wrote `num_tokens` tokens 8."""
    ids = (5, 6, *(8,) * num_tokens)
    return Rollout(
        input_ids=ids[:-1],
        target_ids=ids[1:],
        loss_mask=(False,) + (True,) * num_tokens,
        sampler_logprobs=(0.0,) + (-0.5,) * num_tokens,
        reward=Reward(reward, parts or {"value": reward}),
        text="8" * num_tokens,
        finish_reason=finish_reason,
        policy_version=0,
    )


def group(*rewards: float, num_failures: int = 0, prompt_id: str = "p", environment: str = "test") -> Group:
    failures = (Failure("judge timed out"),) * num_failures
    return Group(Prompt(prompt_id, environment, "?", {}), tuple(rollout(r) for r in rewards), failures)


def rows(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The lines of a .jsonl file; of metrics.jsonl those of one kind."""
    with path.open(encoding="utf-8", newline="\n") as lines:
        found = [json.loads(line) for line in lines]
    return [row for row in found if kind is None or row["kind"] == kind]


def timeless(metrics: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows without what a clock decides."""
    return [{k: v for k, v in row.items() if k not in ("time", "seconds", "tokens_per_second")} for row in metrics]


def rewrite(manifest: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Write a manifest anew with other facts, as an honest writer would; None takes a fact out."""
    old = json.loads(manifest.read_text())
    facts = {name: value for name, value in {**old, **change(old)}.items() if value is not None}
    step, files = facts.pop("step"), facts.pop("files")
    manifest.write_text(render(step, {k: v for k, v in facts.items() if k not in ("format", "sha256")}, files))


def start_weights(config: Config) -> dict[str, Tensor]:
    return dict(load_policy(config.model, seed=config.seed).model.state_dict())


def saved_weights(folder: Path) -> dict[str, Tensor]:
    """Of the last checkpoint, as anybody would load it."""
    last = max((folder / "checkpoints").iterdir())
    return dict(AutoModelForCausalLM.from_pretrained(last / "policy").state_dict())


def saved_policy(folder: Path) -> dict[str, Tensor]:
    """The tensors of the last checkpoint: all weights, or those of the adapters."""
    last = max((folder / "checkpoints").iterdir())
    return {
        name: tensor for file in (last / "policy").glob("*.safetensors") for name, tensor in load_file(file).items()
    }


def equal(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """Bit for bit."""
    assert first.keys() == second.keys()
    return all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@contextmanager
def logging_as_it_was() -> Iterator[None]:
    """Runs of the command take the root logger; give it back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in set(root.handlers) - set(handlers):
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
