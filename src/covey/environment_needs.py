"""Settings of one environment that only mean something beside another of them."""

from typing import TYPE_CHECKING

from covey.environment_config import (
    CodeConfig,
    CountdownConfig,
    CustomConfig,
    IfevalConfig,
    InfillConfig,
    RewardFunctionsConfig,
)
from covey.need import Needs, is_set, names_of
from covey.tables import names_function

if TYPE_CHECKING:
    from covey.config import Config

JUDGE_TRAINING = names_of(
    InfillConfig, "environment", "judge_num", "judge_pairs", "judge_lr", "judge_hidden", "judge_cache"
)
"""Of a judge that covey trains itself."""
WITHOUT_MATH_VERIFY = ("verl", "verl_dapo")
"""Schemes of environment=math that compare texts."""

ENVIRONMENT_NEEDS: dict[str, tuple[Needs, ...]] = {
    "gsm8k": (
        Needs(
            ("environment.format_reward",),
            "environment.scheme = covey or values",
            ("environment.scheme",),
            lambda scheme: scheme in ("covey", "values"),
        ),
    ),
    "math": (
        Needs(
            ("environment.format_reward",),
            "environment.scheme = covey or values",
            ("environment.scheme",),
            lambda scheme: scheme in ("covey", "values"),
        ),
        Needs(
            ("environment.timeout", "environment.num_workers"),
            "a scheme that asks math-verify",
            ("environment.scheme",),
            lambda scheme: scheme not in WITHOUT_MATH_VERIFY,
        ),
    ),
    "countdown": (
        Needs(
            names_of(CountdownConfig, "environment", "num_", "max_", "operators", "problem_seed"),
            "data.path = null",
            ("data.path",),
            lambda path: path is None,
        ),
    ),
    "code": (
        Needs(
            names_of(CodeConfig, "environment", "problem", "difficulty", "num_train", "num_test"),
            "problems made up, data.path = null",
            ("data.path",),
            lambda path: path is None,
        ),
        Needs(("environment.tier",), "environment.remote_url = null", ("environment.remote_url",), lambda url: not url),
        Needs(("environment.remote_margin",), "environment.remote_url set", ("environment.remote_url",), is_set),
    ),
    "ifeval": (
        Needs(
            ("environment.measure_weights", "environment.answer_bonus", "environment.think_bonus"),
            "environment.scheme = torchrl",
            ("environment.scheme",),
            lambda scheme: scheme == "torchrl",
        ),
        Needs(
            ("environment.min_words",),
            "a scheme other than torchrl",
            ("environment.scheme",),
            lambda scheme: scheme != "torchrl",
        ),
        Needs(
            names_of(IfevalConfig, "environment", "style", "kinds", "max_instructions", "num_", "problem_seed"),
            "data.path = null, so that prompts are generated",
            ("data.path",),
            lambda path: path is None,
        ),
        Needs(
            ("environment.num_test",), "environment.benchmark = null", ("environment.benchmark",), lambda path: not path
        ),
    ),
    "infill": (
        Needs(
            ("environment.text_column",),
            "data.path = rows, not a text file",
            ("data.path",),
            lambda path: path is not None and not path.endswith(".txt"),
        ),
        Needs(
            ("environment.span_length",),
            "environment.masking = spans",
            ("environment.masking",),
            lambda how: how == "spans",
        ),
        Needs(
            JUDGE_TRAINING,
            "a judge that covey trains (nano-judge, or second_judge among the watches)",
            ("environment.judge", "environment.watch"),
            lambda judge, watch: judge == "nano-judge" or "second_judge" in watch,
        ),
    ),
    "reward_functions": (
        Needs(
            names_of(RewardFunctionsConfig, "environment", "num_workers", "start_timeout", "worker_"),
            "environment.in_process = false",
            ("environment.in_process",),
            lambda in_process: not in_process,
        ),
    ),
}
"""The same for the settings of one environment, by its name."""


def check_custom(config: "Config") -> None:
    """An environment of one's own has a name of its own."""
    assert isinstance(config.environment, CustomConfig)
    factory = config.environment.factory
    if not names_function(factory):
        raise ValueError(f"environment=custom needs environment.factory=module:function, got {factory or 'none'}")
