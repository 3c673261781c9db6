"""Build environment=gsm8k, math and countdown."""

from dataclasses import replace
from functools import partial

from covey.environments.base import Environment
from covey.environments.data.columns import of_verl
from covey.environments.data.rows import load_rows, row_settings
from covey.environments.settings import BuildSettings
from covey_tasks.math import gsm8k, mathematics
from covey_tasks.math.countdown.environment import Countdown, generate, problem_of
from covey_tasks.math.gsm8k import GSM8K
from covey_tasks.math.mathematics import Mathematics
from covey_tasks.math.settings import CountdownConfig, Gsm8kConfig, MathConfig


def build_gsm8k(settings: Gsm8kConfig, config: BuildSettings) -> Environment:
    make = partial(gsm8k.prompt_of, scheme=settings.scheme, instruction=settings.instruction)
    how = row_settings(config.data, ("question", "answer"), prompt=("question",), make=make)
    known = partial(of_verl, problem="question", answer="answer", form="#### {}")
    rows = load_rows(config.data.path, replace(how, known=known))
    return GSM8K(rows.splits, settings.scheme, settings.format_reward, settings.instruction)


def build_math(settings: MathConfig, config: BuildSettings) -> Environment:
    make = partial(mathematics.prompt_of, settings=settings)
    how = row_settings(config.data, (settings.problem_column,), "environment.problem_column", make=make)
    known = partial(of_verl, problem=settings.problem_column, answer=settings.answer_column)
    return Mathematics(load_rows(config.data.path, replace(how, known=known)).splits, settings)


def build_countdown(settings: CountdownConfig, config: BuildSettings) -> Environment:
    if config.data.path is None:
        return Countdown(generate(settings), settings)
    rows = load_rows(config.data.path, row_settings(config.data, ("nums", "target"), make=problem_of))
    return Countdown(rows.splits, settings)
