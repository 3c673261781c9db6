"""What the preflight finds of the user's own reward functions before the first step."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from covey.environments.base import Environment, adapt
from covey.environments.mixture import Mixture
from covey.environments.reward_functions.environment import RewardFunctions, RewardSettings, reward_functions
from covey.environments.settings import ArithmeticConfig, CustomConfig, MixtureConfig
from covey.types import Prompt
from covey_preflight.preflight import raise_on_failure, run_checks, table, write
from covey_preflight.subject import Check, PreflightContext

from ..support.small import scripted
from .looked_at import Build, Golden, refusal, subjects

REFUSED = "preflight: reward functions: none of 2 completions could be scored: reward function "


@pytest.fixture(name="build")
def _build() -> Iterator[Build]:
    with subjects() as build:
        yield build


def judged_by(*functions: Callable[..., Any]) -> RewardFunctions:
    rows = [{"prompt": f"{i}:", "answer": i} for i in range(8)]
    return RewardFunctions(
        {"train": rows, "test": rows[:1]}, reward_functions(functions), RewardSettings(in_process=True)
    )


def raises(completions: list[str], **columns: Any) -> list[float]:
    raise RuntimeError("always")


def returning(value: Any) -> Callable[..., Any]:
    def fixed(**columns: Any) -> Any:
        return value

    return fixed


@pytest.mark.long
@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (raises, '"raises" raised RuntimeError: always ('),
        (returning([1.0]), '"fixed" returned 1 values for 2 completions'),
        (returning(None), '"fixed" returned NoneType None, not a list of numbers'),
        (returning([float("nan")] * 2), '"fixed" returned nan for completion 0'),
    ],
    ids=["raises", "wrong length", "None", "NaN"],
)
def test_a_function_that_never_gives_a_reward_is_refused_in_its_own_words(
    build: Build, function: Callable[..., Any], reason: str
) -> None:
    for environment in (judged_by(function), Mixture({"own": judged_by(function), "other": scripted()}, {})):
        line = refusal(build(environment, preflight__num_prompts=6))
        assert line.startswith(REFUSED + reason)
        assert line.endswith("; fix the function or the rows (preflight.enabled=false trains unchecked)")
        assert "allowed" not in line.removeprefix(REFUSED + reason)
        assert "\n" not in line


@pytest.mark.long
def test_before_training_a_failure_ends_the_checks_before_the_long_ones(build: Build) -> None:
    subject = build(judged_by(returning([0.0, 0.0, 0.0])))
    names = [check.name for check in run_checks(subject, after_failure=False)]
    assert names[-2:] == ["completions", "reward functions"]
    assert [check.name for check in run_checks(subject)][: len(names) + 1] == [*names, "log-probs"]


def found(checks: list[Check]) -> Mapping[str, Check]:
    return {check.name: check for check in checks}


@pytest.mark.long
def test_functions_are_called_with_what_was_sampled_and_nothing_of_it_is_counted(build: Build) -> None:
    asked: list[tuple[list[str], list[int]]] = []

    def long(completions: list[str], answer: list[int], log_metric: Callable[..., None], **columns: Any) -> list[float]:
        log_metric("seen", 1.0)
        asked.append((completions, answer))
        return [float(len(text)) for text in completions]

    environment = judged_by(long, returning([None, None]))
    subject = build(environment)
    checks = run_checks(subject)
    raise_on_failure(checks)
    group = subject.groups[0]
    assert asked[-1:] == [([rollout.text for rollout in group.rollouts], [group.prompt.columns["answer"]] * 2)]
    assert found(checks)["reward functions"].figure == "2 of 2 completions get a reward"
    assert environment.metrics() == {}
    assert not environment._recent


@pytest.mark.long
def test_a_function_may_say_that_it_does_not_apply(build: Build) -> None:
    raise_on_failure(run_checks(build(judged_by(returning([None, None])))))


@pytest.mark.long
@pytest.mark.parametrize(
    "environment", [scripted(), Mixture({"a": scripted(), "b": scripted()}, {})], ids=["one", "mix"]
)
def test_a_check_with_nothing_to_measure_reads_not_applicable(
    build: Build, environment: Environment, tmp_path: Path
) -> None:
    checks = run_checks(build(environment))
    idle = {name for name, check in found(checks).items() if not check.applies}
    assert idle <= {"gold answers", "wrong answers", "reward functions"}
    console = Console(width=200)
    with console.capture() as shown:
        console.print(table(checks))
    assert shown.get().count("not applicable") == len(idle) > 0
    raise_on_failure(checks)
    write(checks, tmp_path)


# ------------------------------------------------------------------------------------------------ an environment


def own(subject: PreflightContext, *, in_mixture: bool = False) -> PreflightContext:
    """The same run with the settings of an environment of the user's own, alone or as a part of a mixture."""
    settings: Any = CustomConfig(factory="tests:anything")
    if in_mixture:
        settings = MixtureConfig(parts={"own": settings, "other": ArithmeticConfig()})
    return replace(subject, config=replace(subject.config, environment=settings))


def broken(prompt: Prompt, text: str) -> float:
    raise KeyError("target")


@pytest.mark.long
def test_an_environment_of_ones_own_is_tried_and_its_mistake_refused_in_one_line(build: Build) -> None:
    reason = "none of 2 completions could be scored: scripted.score raised KeyError: 'target'"
    line = refusal(own(build(scripted(broken))))
    assert line.startswith(f"preflight: reward functions: {reason}")
    assert line.endswith("; fix the environment (preflight.enabled=false trains unchecked)")
    mixture = Mixture({"own": scripted(broken), "other": scripted()}, {})
    assert "KeyError: 'target'" in refusal(own(build(mixture, preflight__num_prompts=6), in_mixture=True))


@pytest.mark.long
def test_an_environment_of_ones_own_that_scores_passes_and_leaves_nothing_to_log(build: Build) -> None:
    environment = Golden(lambda prompt, text: float(len(text)), lambda prompt: None)
    checks = run_checks(own(build(adapt(environment))))
    raise_on_failure(checks)
    assert found(checks)["reward functions"].figure == "2 of 2 completions get a reward"
    assert environment.num_scored == 2
    assert environment.metrics() == {"num": 0.0}


@pytest.mark.long
def test_other_environments_are_not_tried(build: Build) -> None:
    assert "reward functions" not in found(run_checks(build(scripted(broken))))
