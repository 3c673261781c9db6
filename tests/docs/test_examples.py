"""The examples run: covey's rewards in TRL's real trainer, and in a file that verl would load."""

import importlib.util
import math
import runpy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from datasets import Dataset

from covey.rewards import Pairwise, RewardModel, SentenceEnd, think_format

from ..support.builders import saved_classifier, saved_model

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(name: str) -> ModuleType:
    """Loaded as verl loads a file with a reward."""
    spec = importlib.util.spec_from_file_location("custom_module", EXAMPLES / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def policy(tmp_path: Path) -> str:
    pytest.importorskip("trl", reason="runs TRL's trainer: pip install trl")
    return saved_model(tmp_path / "policy", "llama")


def metrics(trainer: Any) -> list[dict[str, float]]:
    trainer.train()
    return [row for row in trainer.state.log_history if "reward" in row]


def test_coveys_environment_and_rewards_train_in_trls_trainer(policy: str, tmp_path: Path) -> None:
    trainer = example("trl_covey_rewards.py").make_trainer(policy, num_steps=2, folder=str(tmp_path / "run"))
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    seen = watched(trainer)
    first, second = metrics(trainer)
    assert any(not torch.equal(tensor, before[name]) for name, tensor in trainer.model.state_dict().items())
    for row in (first, second):
        parts = [row[f"rewards/{name}/mean"] for name in ("arithmetic", "soft_overlong", "repetition")]
        assert row["reward"] == pytest.approx(parts[0] + 0.2 * parts[1] + 0.1 * parts[2], abs=1e-5)
        assert row["arithmetic/unscored"] == 0.0
    assert seen
    assert all(math.isfinite(value) for value in seen)


def watched(trainer: Any) -> list[float]:
    """All values the three rewards return from now on."""
    seen: list[float] = []
    for index, reward in enumerate(trainer.reward_funcs):

        def called(reward: Any = reward, **keywords: Any) -> list[float]:
            values: list[float] = reward(**keywords)
            assert len(values) == len(keywords["prompts"])
            seen.extend(values)
            return values

        trainer.reward_funcs[index] = called
    return seen


def longer(prompt: Any, first: str, second: str, **columns: Any) -> float:
    return 0.5 + 0.5 * ((len(first) > len(second)) - (len(first) < len(second)))


@pytest.mark.parametrize("conversational", [False, True])
def test_trl_gives_our_reward_model_the_score_of_its_own(policy: str, tmp_path: Path, conversational: bool) -> None:
    """One step with the same judge twice: by name, as TRL loads it, and as covey's reward."""
    trl = pytest.importorskip("trl")
    judge = saved_classifier(tmp_path / "judge", num_labels=1)
    prompt: Any = [{"role": "user", "content": "why?"}] if conversational else "why? "
    settings = trl.GRPOConfig(
        output_dir=str(tmp_path / "run"),
        max_steps=1,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        bf16=False,
        logging_steps=1,
        report_to="none",
    )
    trainer = trl.GRPOTrainer(
        model=policy,
        reward_funcs=[judge, RewardModel(judge, device="cpu"), Pairwise(longer), think_format, SentenceEnd()],
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": prompt}] * 4),
    )
    (row,) = metrics(trainer)
    theirs, ours = (f"rewards/{name}" for name in ("judge", "reward_model"))
    assert row[f"{ours}/mean"] == pytest.approx(row[f"{theirs}/mean"], abs=1e-5)
    assert row[f"{ours}/std"] == pytest.approx(row[f"{theirs}/std"], abs=1e-5)
    assert row[f"{theirs}/std"] > 1e-3
    assert row["rewards/pairwise/mean"] == pytest.approx(0.5)


def test_verl_finds_a_function_that_takes_its_keywords(capsys: pytest.CaptureFixture[str]) -> None:
    compute_score = example("verl_compute_score.py").compute_score
    row = {"data_source": "openai/gsm8k", "solution_str": "#### 7", "ground_truth": "7"}
    assert compute_score(**row, extra_info={"split": "train", "index": 0}) == 1.0
    assert compute_score(**row, extra_info=None, **{"scheme": "torchrl"}) == 0.0
    runpy.run_path(str(EXAMPLES / "verl_compute_score.py"), run_name="__main__")
    assert [line[0:3].strip() for line in capsys.readouterr().out.splitlines()] == ["1", "1", "0.1", "1"]
