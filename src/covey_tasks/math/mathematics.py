"""Competition mathematics with answers of any kind (MATH, arXiv 2103.03874).

Schemes:

| scheme      | asks for              | rewards                                                                   |
|-------------|-----------------------|---------------------------------------------------------------------------|
| covey       | a box                 | 1 for the right answer, computed (modules `answers` and `computed`), else |
|             |                       | `format_reward` where there is one box, closed and not empty              |
| values      | a box                 | the same, computed or not                                                 |
| math_verify | a box                 | 1 where math-verify's own settings find the gold anywhere                 |
| trl         | a box                 | 1 where math-verify finds the gold in LaTeX, a box first                  |
| torchrl     | think and answer tags | 1 for the right first answer tag, 0.1 for a wrong one                     |

The last two reproduce TRL's accuracy_reward and TorchRL (pytorch/rl ae9719f1), so that curves can be compared with
theirs; as judges of mathematics they are worse than the first two.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from numbers import Number
from typing import Any

from covey.environments.base import Split, conversation
from covey.environments.data.columns import from_text, value_in
from covey.environments.data.rows import load_rows, make_prompts, row_settings
from covey.environments.settings import BuildSettings
from covey.system.section import check_bounds
from covey.types import CutText, Failure, Prompt, Reward
from covey_graders.math.answers import find_answer
from covey_graders.math.judge import compare, is_no_answer
from covey_graders.math.layout import boxed_answer, has_one_box
from covey_graders.tags import first_block, visible
from covey_tasks.columns import as_question, nothing_in, text_in
from covey_tasks.math.schemes import graded, torchrl_reward
from covey_tasks.math.settings import MathConfig
from covey_tasks.math.verified import VerifiedAnswers
from covey_tasks.math.verifier import MathVerifier, check_installed

Row = Mapping[str, Any]

_SENTENCE = re.compile(
    r"(?=(?:\S+\s+){3})[A-Z][a-z]*\b.*\b(?:is|are|was|were|has|have|equals|will|can|must|gets?|costs?|needs?)\b"
)
_LEVEL = re.compile(r"(?:level\s*)?(\d+)", re.IGNORECASE)
_DOLLARS = re.compile(r"\$([^$]*)\$")
_TORCHRL_READS = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
"""Golds that TorchRL's comparison is sure to find equal to themselves: it cannot read LaTeX without dollar signs."""


class Mathematics(VerifiedAnswers):
    """Environment of mathematical problems.

    >>> Mathematics({"train": [{"problem": "What is $6 \\\\cdot 7$?", "answer": "42"}], "test": [...]})
    """

    def __init__(self, rows: Mapping[Split, Sequence[Row | Prompt]], settings: MathConfig | None = None) -> None:
        self._settings = settings or MathConfig()
        check_bounds(self._settings)
        if self._settings.scheme in ASK_MATH_VERIFY:
            check_installed(self._settings.scheme)
        verifier = MathVerifier(self._settings.timeout, self._settings.num_workers)
        super().__init__(make_prompts(rows, partial(prompt_of, settings=self._settings)), verifier)

    def gold(self, prompt: Prompt) -> str | None:
        """Return the worked solution, None if TorchRL's scheme rewards none fully."""
        hopeless = self._settings.scheme == "torchrl" and not _TORCHRL_READS.fullmatch(prompt.columns["gold"])
        return None if hopeless else self.write_solution(prompt)

    def write_solution(self, prompt: Prompt) -> str:
        solution = prompt.columns.get(self._settings.solution_column)
        form = FORMS[self._settings.scheme]
        return form(solution if isinstance(solution, str) else "", prompt.columns["gold"])

    async def judged(self, prompt: Prompt, completion: str) -> Reward | Failure:
        golds = [prompt.columns["gold"], *prompt.columns.get("other_golds", ())]
        verdicts = [await self._judged_by(gold, prompt, completion) for gold in golds]
        rewards = [verdict for verdict in verdicts if isinstance(verdict, Reward)]
        return max(rewards, key=lambda reward: reward.value) if rewards else verdicts[0]

    async def _judged_by(self, gold: str, prompt: Prompt, completion: str) -> Reward | Failure:
        scheme = self._settings.scheme
        if scheme == "trl":
            return await self._verifier.trl(completion, gold)
        if scheme == "math_verify":
            return await self._verifier.math_verify(completion, gold)
        if scheme == "torchrl":
            answer = first_block(completion, "answer")
            equal = await self._verifier.torchrl_equal(answer, gold) if answer else False
            return equal if isinstance(equal, Failure) else torchrl_reward(completion, equal)
        question = str(prompt.columns.get(self._settings.problem_column, ""))
        is_right = compare(completion, gold, question, scheme == "covey", isinstance(completion, CutText))
        return covey_reward(completion, is_right, self._settings.format_reward)


def build_math(settings: MathConfig, config: BuildSettings) -> VerifiedAnswers:
    make = partial(prompt_of, settings=settings)
    how = row_settings(config.data, (settings.problem_column,), "environment.problem_column", make=make)
    names = settings.problem_column, settings.answer_column
    how = replace(how, known=lambda row: as_question(row, *names))
    return Mathematics(load_rows(config.data.path, how).splits, settings)


def covey_reward(completion: str, is_right: bool, format_reward: float) -> Reward:
    """Return 1 for the right answer, `format_reward` for one box outside thoughts."""
    return graded(is_right, has_one_box(visible(completion)), format_reward)


def gold_answers(row: Row, settings: MathConfig) -> list[str]:
    """Collect the gold answers of a row. ValueError where there is none."""
    answer = value_in(row, settings.answer_column)
    if answer is None or (isinstance(answer, str) and not answer.strip()):
        if value_in(row, settings.solution_column) is None:
            raise ValueError(nothing_in(row, settings.answer_column, settings.solution_column))
        answer = boxed_answer(text_in(row, settings.solution_column))
        if answer is None:
            raise ValueError(f"has no \\boxed{{}} in column {settings.solution_column!r}")
    listed = _list(answer)
    found = [gold for one in listed if (gold := _gold_of(one, settings.answer_column)) is not None]
    if not found:
        raise ValueError(f"has no answer in column {settings.answer_column!r}, got {answer!r:.80}")
    return found


def _list(answer: object) -> list[object]:
    """Return the answers in a text's list, or in a mapping."""
    found = from_text(answer)
    if isinstance(found, Mapping):
        held = (from_text(found.get(name)) for name in ("value", "aliases", "text", "spans"))
        return [one for value in held for one in (value if isinstance(value, list) else [value])]
    is_list = isinstance(found, list | tuple) and (found is answer or all(isinstance(one, str) for one in found))
    return list(found) if is_list else [answer]


def _gold_of(answer: object, column: str) -> str | None:
    """Return an answer, or a sentence's, as it is compared; None without."""
    if answer is None:
        return None
    if not isinstance(answer, str | Number):
        raise ValueError(f"column {column!r} must be text, a number or a list of these, got {answer!r:.80}")
    text = str(answer).strip()
    if "####" in text:
        raise ValueError(f"has a '####' in column {column!r}, which environment=gsm8k reads")
    dollars = _DOLLARS.fullmatch(text)
    text = dollars[1].strip() if dollars is not None else text
    if _SENTENCE.match(text):
        said = find_answer(text, numeric=False)
        if said is None or said.form == "none":
            raise ValueError(f"column {column!r} must be an answer, got the sentence {text!r:.80}")
        text = said.text.strip()
    return None if is_no_answer(text) else text


def prompt_of(row: Row, settings: MathConfig) -> Prompt:
    """Make a prompt of a row. ValueError without problem or answer."""
    problem = text_in(row, settings.problem_column)
    gold, *others = gold_answers(row, settings)
    columns = {**row, settings.problem_column: problem, "gold": gold} | ({"other_golds": others} if others else {})
    level = _LEVEL.fullmatch(str(row.get("level", "")).strip())
    if level is not None:
        columns["level"] = int(level[1])
    instruction = INSTRUCTIONS[settings.scheme] if settings.instruction is None else settings.instruction
    return Prompt("", "math", conversation(problem, instruction), columns)


def _box_form(solution: str, gold: str) -> str:
    if boxed_answer(solution) == gold:
        return solution
    return f"{solution}\n\\boxed{{{gold}}}".lstrip()


_SHORT_FRACTION = re.compile(r"\\[dt]?frac\s*(\{[^{}]*\}|\w)\s*(\{[^{}]*\}|\w)")
_SHORT_ROOT = re.compile(r"\\sqrt\s*(\w)")


def _full_box_form(solution: str, gold: str) -> str:
    """Write `\\frac12` as `\\frac{1}{2}`, which TRL's reward needs."""
    full = _SHORT_FRACTION.sub(lambda m: f"\\frac{{{m[1].strip('{}')}}}{{{m[2].strip('{}')}}}", gold)
    full = _SHORT_ROOT.sub(r"\\sqrt{\1}", full)
    return _box_form(solution, gold) if full == gold else f"\\boxed{{{full}}}"


def _tag_form(solution: str, gold: str) -> str:
    return f"<think>{solution}</think>\n<answer>{gold}</answer>" if solution else f"<answer>{gold}</answer>"


_ASK_BOX = "Reason step by step, then write the final answer as \\boxed{answer}."
_ASK_TAGS = "Reason inside <think></think> tags, then write the final answer alone inside <answer></answer> tags."

_BOXED = ("covey", "values", "math_verify", "trl")
INSTRUCTIONS = {**dict.fromkeys(_BOXED, _ASK_BOX), "torchrl": _ASK_TAGS}
FORMS: dict[str, Callable[[str, str], str]] = {
    **dict.fromkeys(_BOXED, _box_form),
    "trl": _full_box_form,
    "torchrl": _tag_form,
}
ASK_MATH_VERIFY = frozenset({"trl", "math_verify", "torchrl"})
