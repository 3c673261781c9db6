"""Build environment=code: its problems and what runs programs."""

from dataclasses import replace
from functools import partial
from typing import cast

from covey.environments.base import Environment, Split
from covey.environments.data.columns import of_verl
from covey.environments.data.rows import load_rows, row_settings
from covey.environments.settings import BuildSettings
from covey_sandbox import Runner, Sandbox, SandboxFailed, Tier
from covey_tasks.code.environment import Code
from covey_tasks.code.formats import PROMPTS, problem_of
from covey_tasks.code.problems import NUM_TESTS, generate_problems, with_tests
from covey_tasks.code.settings import CodeConfig


def build_code(settings: CodeConfig, config: BuildSettings) -> Environment:
    if config.data.path is not None:
        make = partial(problem_of, packages=settings.test_packages)
        how = row_settings(config.data, (), prompt=PROMPTS, make=make)
        rows = load_rows(config.data.path, replace(how, known=partial(of_verl, problem="prompt", answer="tests")))
        problems = with_tests(rows.splits, settings.tests_per_problem, settings.problem_seed)
    else:
        counts: dict[Split, int] = {"train": settings.num_train, "test": settings.num_test}
        num_tests = settings.tests_per_problem or NUM_TESTS
        which = settings.problem, settings.difficulty, counts, settings.problem_seed
        problems = generate_problems(*which, num_tests, settings.style)
    return Code(problems, code_runner(settings), settings)


def code_runner(settings: CodeConfig) -> Runner:
    """Build what runs programs. Raises ValueError where this machine cannot isolate them."""
    try:
        return Sandbox(settings.num_slots, cast("Tier", settings.isolation))
    except SandboxFailed as error:
        raise ValueError(f"environment.isolation={settings.isolation}: {error}") from error
