"""docs/use/metrics.md explains every number that a run can log, and no number that there is not."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir

import covey
from covey.algorithm.loss_inputs import loss_inputs
from covey.algorithm.losses import LOSSES, clip_events
from covey.algorithm.metrics import LOSS_TERMS, MAXIMA, MEASURED, PER_UPDATE
from covey.algorithm.settings import AlgorithmConfig
from covey.config import compose as settings
from covey.config.schema import Config
from covey.environments.settings import ArithmeticConfig, MixtureConfig
from covey.loop import train
from covey.rollouts.settings import GroupSizeStep
from covey.run.records.step_metrics import DOCUMENT_NAMES
from covey_tasks.code import environment as code
from covey_tasks.machines.design.types import Invalid
from covey_tasks.machines.environment import StepStats
from covey_tasks.math import verifier
from covey_tasks.math.settings import CountdownConfig

from ..support.small import POLICIES, rows, scripted_for, small_config, use

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "use" / "metrics.md").read_text(encoding="utf-8")
PLACE = re.compile(r"(?<=[/_])(?:NAME|PART|K|N)(?=/|$)")
TRAIN, EVALUATE = "train", "evaluate"


def documented(kind: str) -> list[str]:
    """The names in the first column of the tables about rows of one kind."""
    training, _, evaluations = PAGE.partition("\n## Evaluations\n")
    text = evaluations if kind == EVALUATE else training
    return [
        name for cell in re.findall(r"^\| (`[^|]+`) \|", text, re.MULTILINE) for name in re.findall("`(.+?)`", cell)
    ]


def unexplained(names: set[str], kind: str) -> list[str]:
    """The names that no row of the page is about."""
    known = documented(kind)
    if kind == EVALUATE:  # an environment logs the same of both
        known += [name for name in documented(TRAIN) if name.startswith("environment/")]
    patterns = [PLACE.sub("[^/]+", re.escape(name)) for name in known]
    # Parts of a mixture have their own numbers below their name.
    of_parts = ("environment/", "curriculum/", "reward/", "reward_std/")
    patterns += [pattern.replace("/", "/[^/]+/", 1) for pattern in patterns if pattern.startswith(of_parts)]
    return sorted(name for name in names if not any(re.fullmatch(pattern, name) for pattern in patterns))


# ------------------------------------------------------------------------------------------------ rows of real runs


def everything() -> Config:
    """One run in which most of what an algorithm can log is there."""
    config = small_config(updates_per_batch=2, curriculum__name="success", preflight__enabled=False)
    config.algorithm = AlgorithmConfig(
        kl_coef=0.1,
        sampler_kl_coef=0.1,
        target_entropy=1.0,
        correction="truncate",
        group_filter="zero_std",
        loss_options={"eps_low": 0.2, "eps_high": 0.28, "dual_clip": 3.0},
    )
    config.group_size_schedule = [GroupSizeStep(step=1, group_size=3)]
    return config


def mixed() -> Config:
    """Two environments in turn, from easy to hard."""
    config = small_config(num_steps=1, curriculum__name="difficulty", preflight__enabled=False)
    sums = ArithmeticConfig(levels=[1, 2], num_train=8, num_test=4)
    config.environment = MixtureConfig(parts={"sums": sums, "targets": CountdownConfig(num_train=8, num_test=4)})
    return config


def masked() -> Config:
    config = small_config(num_steps=1, preflight__enabled=False, **POLICIES["masked"])
    config.algorithm = replace(config.algorithm, kl_coef=0.1)
    return config


def recipe(name: str) -> Config:
    """A step of a recipe, on a policy of a few thousand weights."""
    small = {"num_steps": 1, "groups_per_step": 2, "group_size": 4, "evaluation.num_prompts": 2, "evaluation.k": "[1]"}
    small |= {"cold_start.enabled": "false", "preflight.enabled": "false", "model.nano_hidden_size": 32}
    small |= {"model.nano_num_layers": 1, "model.nano_num_heads": 2}
    settings.register()
    with initialize_config_dir(str(settings.CONF), version_base="1.3"):
        words = [f"{key}={value}" for key, value in small.items()]
        return settings.to_config(compose("config", overrides=[f"recipe={name}", *words]))


RUNS: dict[str, Callable[[], Config]] = {"everything": everything, "mixed": mixed, "masked": masked}
RECIPES = ("guess_nano", "arithmetic_curriculum", "math_nano", "machines_nano", "ifeval_nano")


@pytest.mark.parametrize("name", [*RUNS, *RECIPES])
def test_every_number_of_a_run_is_explained(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in ("everything", "masked"):
        use(monkeypatch, scripted_for("masked" if name == "masked" else "causal"))
    train(RUNS[name]() if name in RUNS else recipe(name), tmp_path)
    for kind in (TRAIN, EVALUATE):
        found = {name for row in rows(tmp_path / "metrics.jsonl", kind) for name in row} - {"step", "kind", "time"}
        assert len(found) >= 5
        assert unexplained(found, kind) == []


# ------------------------------------------------------------------------------------------------ tables in the code


def events() -> Iterator[str]:
    log_probs = torch.zeros(1, 2)
    mask = torch.ones(1, 2, dtype=torch.bool)
    inputs = loss_inputs(log_probs, log_probs, torch.ones(1), mask, mask)
    for loss in LOSSES.values():
        yield from () if loss.events is None else loss.events(inputs)
    yield from clip_events(inputs, dual_clip=3.0)


def of_machines() -> Iterator[str]:
    tally = StepStats()
    tally.add([Invalid("overlap", "")] * 4, [0.0] * 4, ["complete"])
    yield from (f"environment/{name}" for name in tally.take())


TABLES: dict[str, set[str]] = {
    "objective": {*LOSS_TERMS, *MEASURED, *MAXIMA},
    "events": set(events()),
    "updates": {f"{place}/{name}" for place in ("first_update", "last_update") for name in PER_UPDATE},
    "infill document": set(DOCUMENT_NAMES),
    "code": {f"environment/{name}" for name in (*code.COUNTS, code.UNSAFE)},
    "machines": set(of_machines()),
    "math": {f"environment/{name}" for name in verifier.COUNTS},
    "functions of one's own": {"advantage/spread", "loss/margin"},
    "dropped": {f"dropped/{name}" for name in ("unscored_groups", "filtered_mixed", "filtered_all_wrong")},
}


@pytest.mark.parametrize("table", TABLES)
def test_every_number_that_a_table_of_the_code_names_is_explained(table: str) -> None:
    assert TABLES[table]
    assert unexplained(TABLES[table], TRAIN) == []


def test_the_page_says_which_numbers_are_logged_of_each_update() -> None:
    (line,) = [line for line in PAGE.splitlines() if line.startswith("| `first_update/NAME`")]
    assert all(name in line for name in PER_UPDATE)


def test_nothing_is_explained_that_there_is_not() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in Path(covey.__file__).parents[1].rglob("*.py"))
    names = {part for kind in (TRAIN, EVALUATE) for name in documented(kind) for part in PLACE.sub("", name).split("/")}
    words = {name.strip("_") for name in names} - {""}
    assert len(words) > 80
    made_of = {word: word.removeprefix("sampler_").removeprefix("filtered_") for word in words}
    assert {word for word, own in made_of.items() if own not in source} == set()


def test_a_number_is_explained_once_and_each_row_has_four_cells() -> None:
    for kind in (TRAIN, EVALUATE):
        assert len(documented(kind)) == len(set(documented(kind)))
    for line in PAGE.splitlines():
        if line.startswith("| `") and "what you see" not in line:
            assert line.count(" | ") in (2, 3), line


def test_an_unexplained_metric_name_is_found() -> None:
    names: Any = {"reward/mine", "reward_mean", "environment/part/timeouts", "made_up", "environment/made_up"}
    assert unexplained(names, TRAIN) == ["environment/made_up", "made_up"]
