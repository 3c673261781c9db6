"""What the arguments of covey.train may be, and what is said of others."""

import re
from pathlib import Path
from typing import Any

import pytest
from pandas import DataFrame

import covey
from covey.algorithm.settings import AlgorithmConfig
from covey.api.request import Arguments, make_request
from covey.api.settings import make_config
from covey.config.schema import Config
from covey.engine.settings import SamplingConfig
from covey.environments.reward_functions.settings import RewardFunctionsConfig

from ..support.byte_rewards import by_bytes

SMALL: dict[str, Any] = {
    "groups_per_step": 1,
    "group_size": 2,
    "max_tokens": 2,
    "evaluation": {"num_prompts": 1, "num_samples": 1, "k": [1]},
    "preflight": {"enabled": False},
}
ROWS = [{"prompt": f"say {index}:"} for index in range(30)]


def without_arguments() -> None:
    """Be no callback: a callback hears of a step and its metrics."""


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"config": {"num_steps": 1}}, "config must be a Config, got a dict; settings come by keyword"),
        ({"lr": 1e-3, "optimizer__lr": 1e-4}, "optimizer.lr is given twice: write it once"),
        ({"data__path": "rows.jsonl"}, "data.path is given twice: write it once"),
        ({"algorithm": AlgorithmConfig(kl_estimator="k1")}, "algorithm.kl_estimator=k1 needs algorithm.kl_coef > 0"),
        ({"reward": by_bytes}, "unknown setting reward; did you mean rewards?"),
        ({"reward_fn": by_bytes}, "unknown setting reward_fn; did you mean rewards?"),
        (
            {"beta": 0.05, "mini_batch_size": 4, "learning_rate": 5e-6},
            "unknown setting beta, did you mean algorithm.kl_coef?; mini_batch_size=4 is mini_batch_rollouts=4 here; "
            "unknown setting learning_rate, did you mean optimizer.lr?",
        ),
        (
            {"train.sync_iter": False, "train__kl_to_ref_coeff": 0.1, "env.dataset": "ifeval"},
            "train.sync_iter=False is source=ray max_staleness=1 here; train.kl_to_ref_coeff=0.1 is "
            "algorithm.kl_coef=0.1 here; env.dataset=ifeval is recipe=torchrl_ifeval here",
        ),
        ({"dataset": ROWS}, "unknown setting dataset; did you mean data?"),
        ({"recipe": 3}, "recipe must be a name, got 3"),
        ({"resume": True}, "resume must be a path, got True"),
        ({"reference": 3}, "reference must be a name, a folder or a model in memory, got 3"),
        ({"callbacks": [covey.Callback]}, "callbacks must be objects of Callback classes, or functions, got <class"),
        ({"callbacks": ["x"]}, "callbacks must be objects of Callback classes, or functions, got 'x'"),
        (
            {"callbacks": without_arguments},
            "callbacks: without_arguments must take a step and its metrics: (step, metrics)",
        ),
        ({"optimizer": {1: 2}}, "optimizer has settings by name, got 1"),
    ],
)
def test_what_would_be_ignored_or_cannot_be_used_is_refused_in_one_line(
    keywords: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        covey.train("nano", by_bytes, ROWS, folder=tmp_path / "run", num_steps=1, **SMALL, **keywords)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        (
            {"lora_rank": 8},
            ROWS,
            "model must be a name, a folder or a model in memory, got {'lora_rank': 8}; its settings come by keyword, "
            "such as model__lora_rank=...",
        ),
        (
            "nano",
            {"prompt": ["a", "b"]},
            "data must have a split 'train', got prompt; of a table of columns give a list of rows, "
            "[{'prompt': ...}, ...]",
        ),
        ("nano", DataFrame(ROWS), "data must be rows, got a DataFrame: give a list of dicts, as to_dict"),
        ("nano", {"train": DataFrame(ROWS)}, "data must be rows, got a DataFrame: give a list of dicts, as to_dict"),
    ],
    ids=["model", "columns", "data", "split"],
)
def test_arguments_of_another_type_are_refused_with_what_they_may_be(model: Any, data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        covey.train(model, by_bytes, data, progress=False)


class Mine:
    def prompts(self, split: str) -> list[covey.Prompt]:
        return [covey.Prompt("a", "mine", "a?", {})]

    def score(self, prompt: covey.Prompt, completion: str) -> covey.Reward:
        return covey.Reward(0.0)


def misspelt(completions: list[str], promt_id: list[int], **columns: object) -> list[float]:
    return [0.0 for _ in completions]


ORDER = "; the order is covey.train(model, rewards, data)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nothing says what to train: covey.train(model, rewards, data), or recipe='arithmetic' for a first run"),
        (
            ("nano",),
            "nothing says what to train: covey.train(model, rewards, data), or recipe='arithmetic' for a first run",
        ),
        (("nano", by_bytes, by_bytes), "data must be rows, a path, splits of rows or an environment, got a function"),
        (("nano", ROWS, by_bytes), f"rewards must be functions or their names, got rows{ORDER}"),
        (("nano", ROWS, "rows.jsonl"), f"rewards must be functions or their names, got rows{ORDER}"),
        (("nano", Mine()), f"an environment is given as data, which needs no rewards{ORDER}"),
        (("nano", None, Mine), "data must be an environment, got the class Mine: give Mine()"),
        (
            ("nano", misspelt, [row | {"prompt_id": 3} for row in ROWS]),
            "reward function \"misspelt\" cannot be called: rows have no column 'promt_id' (besides the prompt they "
            "have: prompt_id); did you mean prompt_id?",
        ),
    ],
)
def test_arguments_in_another_order_or_misspelt_are_refused_before_anything_is_said_or_loaded(
    arguments: tuple[Any, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        covey.train(*arguments, num_steps=1)
    assert capsys.readouterr().out == ""


def test_a_folder_is_called_so_in_python_too_and_has_a_name() -> None:
    with pytest.raises(ValueError, match=r"^folder must be a path, got ''$"):
        covey.train("nano", by_bytes, ROWS, folder="")
    with pytest.raises(ValueError, match=r"^unknown setting output_dir; did you mean folder\?$"):
        covey.train("nano", by_bytes, ROWS, output_dir="mine")


def test_a_file_in_the_place_of_the_run_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(ValueError, match=r"run: the run folder cannot be made \(File exists\); name another"):
        covey.train("nano", by_bytes, ROWS, folder=tmp_path / "run", num_steps=2, **SMALL)


def test_a_section_may_be_given_as_an_object_and_is_not_changed() -> None:
    given = SamplingConfig(temperature=0.5)
    config = make_config(None, {"max_tokens": 4, "sampling": given}).config
    assert (config.sampling.temperature, config.sampling.max_tokens) == (0.5, 4)
    assert given == SamplingConfig(temperature=0.5)
    base = Config()
    assert make_config(base, {"max_tokens": 4}).config.sampling.max_tokens == 4
    assert base == Config()


@pytest.mark.parametrize("given", [{"timeout": 7.0}, RewardFunctionsConfig(timeout=7.0)], ids=["mapping", "section"])
@pytest.mark.parametrize("base", [None, Config()], ids=["no config", "config"])
def test_settings_of_the_environment_go_with_rewards_and_rows(given: Any, base: Config | None) -> None:
    asked = Arguments("nano", by_bytes, ROWS, settings={"environment": given})
    config = make_request(asked, base).config
    assert isinstance(config.environment, RewardFunctionsConfig)
    assert config.environment.timeout == 7.0


@pytest.mark.long
def test_changes_of_a_resumed_run_are_names_of_settings() -> None:
    with pytest.raises(ValueError, match=r"^resume_changes must be names of settings, got 5$"):
        covey.train("nano", by_bytes, ROWS, resume="anywhere", resume_changes=5)


def test_one_callback_needs_no_list(tmp_path: Path) -> None:
    steps: list[int] = []
    covey.train(
        "nano",
        by_bytes,
        ROWS,
        folder=tmp_path / "run",
        callbacks=lambda step, _: steps.append(step),
        num_steps=2,
        **SMALL,
    )
    assert steps == [1, 2]
