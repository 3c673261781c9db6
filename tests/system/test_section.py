"""From Python too, no setting is misspelt or of another type without a word."""

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

from covey.config.schema import Config
from covey.config.validate import validate
from covey.environments.data.settings import DataConfig
from covey.environments.registry import environment_classes
from covey.environments.reward_functions.settings import RewardFunctionsConfig
from covey.environments.settings import ArithmeticConfig, EnvironmentConfig, MixtureConfig, part_configs
from covey.loop import train
from covey.rollouts.settings import GroupSizeStep
from covey.system.section import Section
from covey.trainer.settings import OptimizerConfig
from covey_tasks.math.settings import Gsm8kConfig

KINDS = get_type_hints(Config).values()
SECTIONS: list[Any] = [
    *(Config, EnvironmentConfig, GroupSizeStep, *environment_classes().values()),
    *(kind for kind in KINDS if isinstance(kind, type) and is_dataclass(kind)),
]


def a_value(field: "Field[Any]") -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def made(section: Any) -> Any:
    return GroupSizeStep(step=1, group_size=2) if section is GroupSizeStep else section()


def typed_fields() -> Iterator[tuple[Any, str]]:
    for section in SECTIONS:
        hints = get_type_hints(section)
        yield from ((section, field.name) for field in fields(section) if hints[field.name] is not Any)


def test_no_two_sections_share_a_default_that_can_change() -> None:
    kept = [(vars(made(one)), vars(made(one))) for one in SECTIONS]
    lists = [(own, other[name]) for mine, other in kept for name, own in mine.items() if isinstance(own, list | dict)]
    assert len(lists) > 10
    assert [own for own, other in lists if own is other] == []


def test_every_dataclass_of_settings_is_a_section() -> None:
    assert len(SECTIONS) > 25
    assert [section for section in SECTIONS if not issubclass(section, Section)] == []


@pytest.mark.long
@pytest.mark.parametrize("section", SECTIONS)
def test_no_class_of_settings_takes_a_name_it_does_not_have(section: Any) -> None:
    with pytest.raises(ValueError, match=r"^unknown setting .*nmae|^the chosen environment has no setting"):
        section(nmae=3)
    found = made(section)
    for field in fields(section):
        with pytest.raises(ValueError, match="unknown setting"):
            setattr(found, f"{field.name}_x", 1)
    assert vars(found).keys() == {field.name for field in fields(section)}


@pytest.mark.parametrize(("section", "name"), typed_fields(), ids=lambda found: str(found).rpartition(".")[2])
def test_no_setting_takes_an_object_of_another_type(section: Any, name: str) -> None:
    found = made(section)
    with pytest.raises(ValueError, match=rf"{name} must be .*, got <object"):
        setattr(found, name, object())
    with pytest.raises(ValueError, match=rf"{name} must be .*, got <object"):
        replace(found, **{name: object()})


MISTAKES: dict[str, tuple[Callable[[Config], Any], str]] = {
    "a name of elsewhere": (
        lambda c: setattr(c.optimizer, "learning_rate", 0.5),
        "unknown setting optimizer.learning_rate; did you mean optimizer.lr?",
    ),
    "a name at the top": (
        lambda c: setattr(c, "groupsize", 99),
        "unknown setting groupsize; did you mean group_size?",
    ),
    "a name of TRL": (lambda c: Config(beta=0.1), "unknown setting beta; did you mean algorithm.kl_coef?"),  # type: ignore[call-arg]
    "a name of another environment": (
        lambda c: setattr(c.environment, "timeout", 3),
        "the chosen environment has no setting environment.timeout; these have: agent, code, machines, math, "
        "reward_functions, tools",
    ),
    "text for a number": (lambda c: setattr(c, "num_steps", "10"), "num_steps must be an integer, got '10'"),
    "a fraction": (lambda c: setattr(c, "num_steps", 1.5), "num_steps must be an integer, got 1.5"),
    "a truth": (lambda c: setattr(c, "seed", True), "seed must be an integer, got True"),
    "not a number": (lambda c: setattr(c, "seed", float("nan")), "seed must be an integer, got nan"),
    "nothing": (lambda c: setattr(c.optimizer, "lr", None), "optimizer.lr must be a number, got None"),
    "a number for a truth": (lambda c: setattr(c, "shuffle", 1), "shuffle must be true or false, got 1"),
    "text for a list": (
        lambda c: setattr(c.model, "lora_targets", "q_proj"),
        "model.lora_targets must be a list, got 'q_proj'",
    ),
    "text in a list": (lambda c: setattr(c.evaluation, "k", [1, "4"]), "evaluation.k[1] must be an integer, got '4'"),
    "a list for a mapping": (
        lambda c: setattr(c.algorithm, "shaping", {"repetition": 3}),
        "algorithm.shaping.repetition must be a mapping, got 3",
    ),
    "a mapping for settings": (
        lambda c: Config(optimizer={"lr": 1e-4}),  # type: ignore[arg-type]
        "optimizer must be settings, such as OptimizerConfig(lr=0.0001), got {'lr': 0.0001}",
    ),
    "a misspelt mapping": (
        lambda c: Config(optimizer={"learning_rate": 1e-4}),  # type: ignore[arg-type]
        "unknown setting optimizer.learning_rate; did you mean optimizer.lr?",
    ),
    "settings of another section": (
        lambda c: setattr(c, "model", OptimizerConfig()),
        "model must be settings, such as ModelConfig(), got OptimizerConfig(...)",
    ),
    "a mapping in a list": (
        lambda c: setattr(c, "group_size_schedule", [{"step": 1, "group_size": 4}]),
        "group_size_schedule[0] must be settings, such as GroupSizeStep(step=1, group_size=4), "
        "got {'step': 1, 'group_size': 4}",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused_where_it_is_made(mistake: str) -> None:
    make, line = MISTAKES[mistake]
    with pytest.raises(ValueError) as refusal:
        make(Config())
    assert str(refusal.value) == line


def test_what_serves_as_a_value_becomes_one() -> None:
    found = Config(seed=np.int64(3), num_steps=1e3)  # type: ignore[arg-type]
    found.optimizer.lr, found.optimizer.betas = 1, (0.9, np.float32(0.5))  # type: ignore[assignment]
    found.data.path = Path("rows") / "x.jsonl"  # type: ignore[assignment]
    found.optimizer.eps = Fraction(1, 4)  # type: ignore[assignment]
    assert (found.seed, found.num_steps, found.optimizer.lr, found.data.path) == (3, 1000, 1.0, "rows/x.jsonl")
    assert [type(value) for value in (found.seed, found.num_steps, found.optimizer.lr)] == [int, int, float]
    assert (found.optimizer.betas, found.optimizer.eps) == ([0.9, 0.5], 0.25)


def test_what_was_changed_behind_the_back_of_a_section_is_found_before_the_run() -> None:
    for spoil, line in (
        (lambda c: c.sampling.stop.append(3), "sampling.stop[0] must be text, got 3"),
        (lambda c: vars(c).update(num_steps="10"), "num_steps must be an integer, got '10'"),
        (lambda c: vars(c.model).update(nmae="x"), "unknown setting model.nmae; did you mean model.name?"),
        (lambda c: vars(c.environment).update(levels=3), "environment.levels must be a list, got 3"),
        (
            lambda c: setattr(c, "environment", "gsm8k"),
            "environment must be settings, such as ArithmeticConfig(), got 'gsm8k'",
        ),
        (
            lambda c: setattr(c, "environment", MixtureConfig(parts={"sums": {"levels": [1]}})),
            "environment.parts.sums must be settings, such as ArithmeticConfig(), got {'levels': [1]}",
        ),
        (lambda c: setattr(c, "environment", EnvironmentConfig()), "environment must be one of agent, arithmetic"),
    ):
        found = Config()
        spoil(found)
        with pytest.raises(ValueError) as refusal:
            validate(found)
        assert str(refusal.value).startswith(line)


def test_train_validates_by_itself_and_makes_no_folder_for_what_it_refuses(tmp_path: Path) -> None:
    found = Config()
    found.group_size = 1
    with pytest.raises(ValueError, match=r"^group_size must be >= 2, got 1$"):
        train(found, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", environment_classes())
def test_settings_are_copied_pickled_and_replaced_as_ever(name: str) -> None:
    found = Config(environment=environment_classes()[name](), seed=5)
    for again in (copy.deepcopy(found), pickle.loads(pickle.dumps(found)), replace(found), copy.copy(found)):
        assert again == found
        assert again.environment == found.environment
        again.seed = 6
    assert found.seed == 5


def test_parts_of_a_mixture_are_settings_too() -> None:
    parts = {"words": Gsm8kConfig(), "mine": RewardFunctionsConfig()}
    found = Config(environment=MixtureConfig(parts=parts, data={"mine": DataConfig(path="x.jsonl")}))
    parts["words"] = ArithmeticConfig()
    assert isinstance(part_configs(found)["words"].environment, Gsm8kConfig)
