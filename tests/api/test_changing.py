"""What is typed in Python is taken, answered or refused: functions, words of others, hooks, modules written anew."""

import importlib
import json
import pydoc
import sys
from pathlib import Path
from typing import Any

import pytest

import covey
from covey.algorithm.credit.scores import Scores
from covey.algorithm.loss_inputs import LossInputs
from covey.api.settings import make_config

from ..support.byte_rewards import by_bytes

ROWS = [{"prompt": f"say {number}"} for number in range(12)]
SMALL: dict[str, Any] = {
    "num_steps": 1,
    "groups_per_step": 4,
    "group_size": 2,
    "max_tokens": 4,
    "evaluation": {"num_prompts": 1, "num_samples": 1},
    "output": {"progress": False, "report": False},
    "preflight": {"enabled": False},
}


def length(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def step_of(result: covey.Result) -> dict[str, Any]:
    rows = map(json.loads, (result.folder / "metrics.jsonl").read_text().splitlines())
    return next(row for row in rows if "advantage_mean" in row)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"batch_size": 128}, "batch_size=128 is groups_per_step=128 here"),
        ({"cold_start": {"lr": 1e-3}}, "cold_start.lr=0.001 needs cold_start.enabled=true"),
        ({"cold_start.num_steps": 7}, "cold_start.num_steps=7 needs cold_start.enabled=true"),
        ({"timeouts__cold_start": 9.0}, "timeouts.cold_start=9.0 needs cold_start.enabled=true"),
        ({"cold_start": covey.ColdStartConfig(batch_size=9)}, "cold_start.batch_size=9 needs cold_start.enabled=true"),
        ({"mini_batch_size": 8}, "mini_batch_size=8 is mini_batch_rollouts=8 here"),
        ({"ref_model": "m", "clip_range": 0.3}, "ref_model=m is algorithm.reference_model=m here"),
        ({"clip_range": 0.3, "device_map": "auto"}, "device_map=auto is model.device=auto here"),
        ({"use_kl_loss": False, "kl_loss_coef": 0.1}, "use_kl_loss=False kl_loss_coef=0.1 is algorithm.kl_coef=0 here"),
        ({"output_dir": "mine"}, "unknown setting output_dir; did you mean folder?"),
    ],
)
def test_what_is_no_setting_or_would_do_nothing_is_answered_in_one_line(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        make_config(None, settings)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_cold_start_settings_count_where_it_is_on() -> None:
    on = make_config(None, {"cold_start": {"lr": 1e-3, "enabled": True}, "environment": "arithmetic"}).config
    assert (on.cold_start.lr, on.cold_start.enabled) == (1e-3, True)


def test_functions_of_a_program_stand_wherever_names_of_functions_do() -> None:
    def own(scores: Scores) -> Any:
        return scores.rewards_N * 0 + 3

    def loss(inputs: LossInputs) -> Any:
        return -inputs.advantages_NT * inputs.log_probs_NT

    config = make_config(
        None,
        {
            "advantage": own,
            "algorithm": {"loss": loss, "selection": lambda scores, estimator: scores},
            "group_filter": lambda rewards_M: True,
            "shaping": [lambda rewards_N, info: rewards_N, length],
            "curriculum": lambda prompts, seed, shuffle: prompts,
        },
    ).config
    assert config.algorithm.advantage == "covey.api.of_this_program:own"
    assert config.algorithm.loss == "covey.api.of_this_program:loss"
    names = [config.algorithm.selection, config.algorithm.group_filter, config.curriculum.name]
    assert len({*names, *config.algorithm.shaping}) == 5
    assert f"{__name__}:length" in config.algorithm.shaping


def test_a_run_trains_on_functions_of_its_program(tmp_path: Path) -> None:
    def constant(scores: Scores) -> Any:
        return scores.rewards_N * 0 + 3

    result = covey.train("nano", by_bytes, ROWS, advantage=constant, folder=tmp_path / "run", **SMALL)
    row = step_of(result)
    assert row["advantage_mean"] == 3
    with pytest.raises(ValueError, match="other processes, which cannot have constant in memory"):
        covey.train("nano", "accuracy", "rows.jsonl", advantage=constant, source="ray")


class Kept(covey.Callback):
    def __init__(self) -> None:
        self.saved: list[tuple[int, bool]] = []

    def on_save(self, step: int, policy: Path) -> None:
        self.saved.append((step, (policy / "config.json").is_file()))


def test_a_callback_hears_where_a_policy_was_saved(tmp_path: Path) -> None:
    kept = Kept()
    covey.train("nano", length, ROWS, callbacks=[kept], folder=tmp_path / "run", **SMALL)
    assert kept.saved == [(SMALL["num_steps"], True)]


class Saves(covey.Callback):
    def on_saving(self, step: int) -> None: ...


class Steps(covey.Callback):
    def on_steps(self, step: int, metrics: Any) -> None: ...


class Logs(covey.Callback):
    def on_log(self, args: Any, state: Any) -> None: ...


class Short(covey.Callback):
    def on_step(self, step: int) -> None: ...  # type: ignore[override] # the slip


@pytest.mark.parametrize(
    ("callback", "line"),
    [
        (Saves(), "Saves.on_saving is never called: hooks are on_evaluation, on_save, on_start, on_step"),
        (
            Steps(),
            "Steps.on_steps is never called: hooks are on_evaluation, on_save, on_start, on_step; "
            "did you mean on_step?",
        ),
        (
            Logs(),
            "Logs.on_log is never called: hooks are on_evaluation, on_save, on_start, on_step; did you mean on_step?",
        ),
        (Short(), "Short.on_step must take (step, metrics)"),
    ],
)
def test_an_unknown_callback_hook_is_refused(callback: covey.Callback, line: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        covey.train("nano", length, ROWS, callbacks=[callback], folder=tmp_path / "run", **SMALL)
    assert str(caught.value).startswith(line)


def test_a_rewritten_module_is_imported_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(value: int) -> None:
        text = f"def adv(scores):\n    return scores.rewards_N * 0 + {value}\n"
        (tmp_path / "own_of_test.py").write_text(
            f"{text}def f(completions, **columns):\n    return [{value}.0] * len(completions)\n"
        )

    write(5)
    own = importlib.import_module("own_of_test")
    function = own.f
    for value in (5, 7):
        write(value)
        result = covey.train(
            "nano", function, ROWS, advantage="own_of_test:adv", folder=tmp_path / f"run-{value}",
            **{**SMALL, "environment.in_process": True},
        )  # fmt: skip
        row = step_of(result)
        assert (row["advantage_mean"], row["reward_mean"]) == (value, value)
    (tmp_path / "own_of_test.py").write_text("def adv(\n")
    with pytest.raises(ValueError, match="own_of_test has changed since it was imported, and its import raised Syntax"):
        covey.train("nano", function, ROWS, advantage="own_of_test:adv", folder=tmp_path / "run", **SMALL)


def test_help_explains_the_call_and_dir_lists_what_is_public() -> None:
    page = pydoc.render_doc(covey.train, renderer=pydoc.plaintext)
    assert "Train a model by GRPO on rewards" in page
    assert "train(model: " in page
    assert all(f"`{name}`" in page for name in ("model", "rewards", "data", "tools", "reference", "folder", "resume"))
    assert "drop_stale" not in page
    assert "train_step" not in page
    public = {name for name in dir(covey) if not name.startswith("_")}
    assert public == {*covey.__all__} - {"__version__"}
    assert len(dir(covey)) == len(set(dir(covey)))
