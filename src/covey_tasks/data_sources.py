"""Judges by the names of data sources, each with its environment.

A source is `source(settings) -> judge`, a judge `judge(ground_truth) -> (environment, prompt)`: the prompt holds what
the environment compares with, and no question.
"""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

from covey.environments.arithmetic import Arithmetic
from covey.environments.base import Environment
from covey.environments.data.columns import from_text
from covey.system.lookup import check_options, near
from covey.types import Prompt
from covey_sandbox import Sandbox
from covey_tasks.code.environment import Code
from covey_tasks.code.formats import problem_of as code_problem
from covey_tasks.code.settings import CodeConfig
from covey_tasks.ifeval.environment import IFEval
from covey_tasks.ifeval.prompts import prompt_of as ifeval_prompt
from covey_tasks.ifeval.settings import IfevalConfig
from covey_tasks.math.countdown.environment import Countdown, problem_of, with_columns
from covey_tasks.math.gsm8k import GSM8K, prompt_of
from covey_tasks.math.mathematics import Mathematics, gold_answers
from covey_tasks.math.settings import CountdownConfig, Gsm8kConfig, MathConfig

Judge = Callable[[Any], tuple[Environment, Prompt]]


def judge_of(name: str, settings: Mapping[str, Any]) -> Judge:
    """Return a data source's judge, or the one that `judge` names.

    ValueError for an unknown name or setting.
    """
    settings = dict(settings)
    name = settings.pop("judge", "math" if name not in DATA_SOURCES and MATHEMATICS.match(name) else name)
    if name not in DATA_SOURCES:
        there = f"there is {', '.join(DATA_SOURCES)}, and judge=NAME has one of them judge another source"
        raise ValueError(f"no data source {name!r}{near(name, DATA_SOURCES)}; {there}")
    source = DATA_SOURCES[name]
    check_options(source, settings, setting="settings")
    return _made(name, tuple(sorted(settings.items())))


@functools.cache
def _made(name: str, settings: tuple[tuple[str, Any], ...]) -> Judge:
    """Make one environment per settings, as it may hold worker processes."""
    judge = DATA_SOURCES[name](**dict(settings))

    def judge_with_truth(truth: Any) -> tuple[Environment, Prompt]:
        if truth is None:
            raise ValueError(f"{name} cannot judge without a right answer: the ground truth is None")
        return judge(truth)

    return judge_with_truth


def arithmetic() -> Judge:
    """Judge sums. The ground truth is the integer."""
    environment = Arithmetic((1,), num_train=1, num_test=1)
    return lambda truth: (environment, Prompt("arithmetic", "arithmetic", "", {"answer": int(truth)}))


def gsm8k(*, scheme: str = "covey", format_reward: float = 0.1) -> Judge:
    """Judge word problems by a number, or solution ending in `#### N`."""
    settings = Gsm8kConfig(scheme=scheme, format_reward=format_reward, instruction="")
    environment = GSM8K({}, settings)

    def judge(truth: Any) -> tuple[Environment, Prompt]:
        answer = str(truth) if "####" in str(truth) else f"#### {truth}"
        return environment, prompt_of({"question": "", "answer": answer}, settings)

    return judge


def mathematics(*, scheme: str = "covey", format_reward: float = 0.1, timeout: float = 10.0) -> Judge:
    """Judge answers in LaTeX by the right one, or any of several."""
    environment = Mathematics({}, MathConfig(scheme=scheme, format_reward=format_reward, timeout=timeout))

    def judge(truth: Any) -> tuple[Environment, Prompt]:
        gold, *others = gold_answers({"answer": truth}, MathConfig())
        return environment, Prompt("math", "math", "", {"gold": gold, "other_golds": others})

    return judge


def countdown(*, uses: str = "exactly", answer_form: str = "tags", format_reward: float = 0.1) -> Judge:
    """Judge Countdown by a mapping of `nums` (or `numbers`) and `target`."""
    settings = CountdownConfig(uses=uses, answer_form=answer_form, format_reward=format_reward)
    environment = Countdown({}, settings)

    def judge(truth: Any) -> tuple[Environment, Prompt]:
        problem = problem_of({"nums": None, **with_columns(_mapping(truth, "target"))})
        return environment, Countdown({"train": [problem]}, settings).prompts("train")[0]

    return judge


def code(
    *,
    partial_weight: float = 0.5,
    timeout: float = 5.0,
    total_seconds: float = 20.0,
    cpu_seconds: int = 20,
    memory_bytes: int = 512 << 20,
) -> Judge:
    """Judge programs by a row with tests, as environment=code reads them."""
    settings = CodeConfig(
        partial_weight=partial_weight,
        timeout=timeout,
        total_seconds=total_seconds,
        cpu_seconds=cpu_seconds,
        memory_bytes=memory_bytes,
    )
    sandbox = Sandbox()
    environment = Code({}, sandbox, settings)

    def judge(truth: Any) -> tuple[Environment, Prompt]:
        row = {"prompt": "?", **_mapping(truth)}
        return environment, Code({"train": [code_problem(row)]}, sandbox, settings).prompts("train")[0]

    return judge


def ifeval(*, scheme: str = "strict_share") -> Judge:
    """Judge instructions by a mapping of `instruction_id_list` and `kwargs`."""
    environment = IFEval({}, IfevalConfig(scheme=scheme))
    names = "instruction_id_list", "kwargs"
    return lambda truth: (environment, ifeval_prompt({"prompt": "", **_mapping(truth, *names)}))


def _mapping(truth: Any, *names: str) -> Mapping[str, Any]:
    """Return a mapping, also one as text or alone in a list."""
    found = from_text(truth)
    found = found[0] if isinstance(found, list) and len(found) == 1 else found
    if not isinstance(found, Mapping):
        raise ValueError(f"the ground truth must be a mapping, or one as text, got {truth!r:.80}")
    for name in names:
        if name not in found:
            raise ValueError(f"the ground truth has no {name!r} (has: {', '.join(map(str, found))})")
    return found


MATHEMATICS = re.compile(r"(?i)(?:.*/)?(?:math_dapo|aime|amc|numina|olympiad|minerva|hmmt|dapo|deepscaler|math-?500)")
"""Names of other sources of mathematics: there are many, by years and mixtures."""
DATA_SOURCES: dict[str, Callable[..., Judge]] = {
    "arithmetic": arithmetic,
    "gsm8k": gsm8k,
    "openai/gsm8k": gsm8k,
    "math": mathematics,
    "lighteval/MATH": mathematics,
    "DigitalLearningGmbH/MATH-lighteval": mathematics,
    "HuggingFaceH4/MATH-500": mathematics,
    "countdown": countdown,
    "code": code,
    "openai/openai_humaneval": code,
    "google-research-datasets/mbpp": code,
    **dict.fromkeys(("apps", "taco", "codecontests", "codeforces", "livecodebench", "kodcode", "leetcode"), code),
    "ifeval": ifeval,
    "google/IFEval": ifeval,
}
