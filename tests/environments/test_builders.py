"""From settings to an environment."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from covey.config import Config, DataConfig
from covey.environment_config import ArithmeticConfig, Gsm8kConfig, RewardFunctionsConfig
from covey.environments import ENVIRONMENTS

QUESTION = {"question": "6 * 7?", "answer": "#### 42", "prompt": "6*7="}


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(QUESTION))
    return DataConfig(path=str(tmp_path))


def test_arithmetic_is_built_from_its_settings() -> None:
    settings = ArithmeticConfig(levels=[1], num_train=20, num_test=5, problem_seed=1)
    environment = ENVIRONMENTS["arithmetic"](settings, Config())
    assert (len(environment.prompts("train")), len(environment.prompts("test"))) == (20, 5)


def test_gsm8k_reads_its_rows_from_data(data: DataConfig) -> None:
    environment = ENVIRONMENTS["gsm8k"](Gsm8kConfig(scheme="torchrl"), Config(data=data))
    assert environment.prompts("train")[0].columns["gold"] == "42"


def test_reward_functions_take_their_rows_and_functions_from_the_top(data: DataConfig) -> None:
    config = Config(data=data, rewards=["builtins:len", "builtins:len"], reward_weights=[1.0, 0.5])
    environment = ENVIRONMENTS["reward_functions"](RewardFunctionsConfig(in_process=True), config)
    assert environment.prompts("test")[0].text == "6*7="
    with pytest.raises(ValueError, match="needs rewards="):
        ENVIRONMENTS["reward_functions"](RewardFunctionsConfig(), Config(data=data))


def test_rows_that_lack_the_prompt_column_are_named(data: DataConfig) -> None:
    data.prompt_column = "text"
    config = Config(data=data, rewards=["builtins:len"])
    with pytest.raises(ValueError, match=r"train\.jsonl line 1 has no column 'text'"):
        ENVIRONMENTS["reward_functions"](RewardFunctionsConfig(), config)


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, covey.environments; print({'torch', 'numpy', 'datasets'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
