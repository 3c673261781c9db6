"""Promise 3, in the run in which all state matters: dropout, steered coefficients, a moving reference, a loss scale.

A run of eight steps is cut back to its checkpoint of step four and resumed with other random generators, as a new
process would have them. Every part of the last checkpoint must be that of the run that was never stopped.
"""

import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from covey.config.schema import Config
from covey.loop import train
from covey.run.checkpoints.checkpoint import STATE
from covey.run.state import generators, restore_generators

from ..support.builders import keep_float16
from ..support.small import equal, rows, saved_policy, scripted, small_config, timeless, use

SETTINGS: dict[str, Any] = {
    "num_steps": 8,
    "output__save_every": 4,
    "evaluation__num_prompts": 1,
    "evaluation__correct_above": 0.5,
    "preflight__enabled": False,
    "model__precision": "float16",  # its first loss scale overflows here
    "model__lora_rank": 2,
    "model__lora_dropout": 0.3,
    "curriculum__name": "success",
    "algorithm__advantage": "role_ema",
    "algorithm__kl_coef": 0.05,
    "algorithm__target_kl": 0.02,
    "algorithm__kl_horizon": 100,
    "algorithm__reference_refresh_every": 3,
    "algorithm__target_entropy": 5.4,
}


@dataclass(frozen=True)
class Runs:
    """Folders of the run that was never stopped and of the one that was resumed."""

    whole: Path
    resumed: Path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    made = Runs(tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("resumed") / "run")
    before = generators()
    with pytest.MonkeyPatch.context() as patch:
        use(patch, scripted())
        keep_float16(patch)
        run_with_seed(1, small_config(**SETTINGS), made.whole)
        shutil.copytree(made.whole, made.resumed)
        shutil.rmtree(made.resumed / "checkpoints" / "step-000008")
        run_with_seed(2, small_config(**SETTINGS, resume=str(made.resumed)), made.resumed)
    yield made
    restore_generators(before)


def run_with_seed(seed: int, config: Config, folder: Path) -> None:
    """Train in a process whose global generators somebody has seeded so."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    train(config, folder)


def state_of(run: Path, step: int) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(run / "checkpoints" / f"step-{step:06d}" / STATE, weights_only=True)
    return state | {f"trainer/{name}": value for name, value in state["trainer"].items()}


def plain(value: Any) -> Any:
    """With lists for tensors, so that states can be compared with ==."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


PARTS = [
    "generators",
    "source",
    "credit",
    *(
        f"trainer/{name}"
        for name in ("optimizer", "scaler", "kl_coef", "entropy", "reference", "teacher", "nonfinite_in_a_row")
    ),
]


@pytest.mark.parametrize("part", PARTS)
def test_each_part_of_the_state_ends_as_in_the_run_that_was_never_stopped(part: str, runs: Runs) -> None:
    whole, resumed = (plain(state_of(run, 8)[part]) for run in (runs.whole, runs.resumed))
    assert resumed == whole


def test_there_is_no_other_part(runs: Runs) -> None:
    named = {"trainer", "step", "record", "trainer/optimizer_name"}
    assert state_of(runs.whole, 8).keys() - named == set(PARTS)


def test_the_resumed_run_logs_and_learns_the_same(runs: Runs) -> None:
    whole, resumed = (timeless(rows(run / "metrics.jsonl")) for run in (runs.whole, runs.resumed))
    assert resumed == whole
    assert equal(saved_policy(runs.resumed), saved_policy(runs.whole))


def test_the_summary_of_the_resumed_run_is_about_all_of_it(runs: Runs) -> None:
    whole, resumed = (json.loads((run / "summary.json").read_text()) for run in (runs.whole, runs.resumed))
    assert whole["steps"] == 8
    for name in ("steps", "tokens", "skipped_steps", "before", "after"):
        assert resumed[name] == whole[name], name


def test_at_the_checkpoint_all_of_it_had_left_where_it_began(runs: Runs) -> None:
    """Else what is not restored would not show."""
    state = state_of(runs.whole, 4)
    assert state["trainer/scaler"]["scale"] < 65536.0
    assert state["trainer/kl_coef"] != 0.05
    assert state["trainer/entropy"][0] > 0
    assert state["credit"]["baselines"]
    assert state["source"]["lanes"]
    assert any(bool(adapter.any()) for name, adapter in state["trainer/reference"].items() if "lora_B" in name)
    later = state_of(runs.whole, 8)
    for part in ("trainer/kl_coef", "trainer/entropy", "trainer/reference"):
        assert plain(later[part]) != plain(state[part]), part
