"""Grade-school word problems with numbers as answers (GSM8K, arXiv 2110.14168).

Schemes, all on the scale 0 to 1:

| scheme        | asks for              | rewards                                                            |
|---------------|-----------------------|--------------------------------------------------------------------|
| covey         | a last line `#### N`  | 1 for the right answer, computed (modules `answers`, `computed`),  |
|               |                       | else `format_reward` where the last line, or the only box, holds N |
| values        | a last line `#### N`  | the same, computed or not                                          |
| verl_strict   | a last line `#### N`  | 1 where the last `#### N` in the last 300 characters is the gold   |
| verl_flexible | a last line `#### N`  | 1 where the last number in the last 300 characters is the gold     |
| torchrl       | think and answer tags | 1 for the right first answer tag, 0.1 for a wrong one              |
| trl           | a box                 | 1 where math-verify finds the gold in LaTeX                        |

The last four reproduce verl (volcengine/verl b178a3cd), TorchRL (pytorch/rl ae9719f1) and TRL's accuracy_reward to the
letter, so that curves can be compared with theirs; as judges of mathematics they are worse than the first.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from covey.environments.base import Split, conversation
from covey.environments.data.rows import load_rows, make_prompts, row_settings
from covey.environments.settings import BuildSettings
from covey.system.section import check_bounds
from covey.types import CutText, Failure, Prompt, Reward
from covey_graders.math.judge import compare
from covey_graders.math.layout import states_number
from covey_graders.tags import first_block, visible
from covey_tasks.columns import of_verl, text_in
from covey_tasks.math.schemes import graded
from covey_tasks.math.schemes import torchrl_reward as torchrl_scale
from covey_tasks.math.settings import Gsm8kConfig
from covey_tasks.math.verified import VerifiedAnswers
from covey_tasks.math.verifier import MathVerifier, check_installed

Row = Mapping[str, Any]

VERL_CHARACTERS = 300
_CALCULATOR_NOTE = re.compile(r"<<[^<>\n]*>>")
_GOLD = re.compile(r"^(.*)#### *([^\s#][^\n#]*?)\s*$", re.DOTALL)
_VERL_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_VERL_FLEXIBLE = re.compile(r"-?[0-9.,]+")


def split_answer(answer: str) -> tuple[str, str]:
    """Split a row's answer into worked solution and gold number, both cleaned.

    Raises ValueError where the answer does not end in `#### N`.
    """
    match = _GOLD.match(answer)
    if match is None or "####" in match[1]:
        raise ValueError(f"answer must end in one '#### N', got ...{answer[-40:]!r}")
    return _CALCULATOR_NOTE.sub("", match[1]).strip(), match[2].replace(",", "")


class GSM8K(VerifiedAnswers):
    """Environment of word problems.

    >>> GSM8K({"train": [{"question": "What is 6 * 7?", "answer": "6 * 7 = 42\\n#### 42"}], "test": [...]})
    """

    def __init__(self, rows: Mapping[Split, Sequence[Row | Prompt]], settings: Gsm8kConfig | None = None) -> None:
        """Take rows. ValueError unless each answer ends in `#### N`."""
        self._settings = settings or Gsm8kConfig()
        check_bounds(self._settings)
        if self._settings.scheme == "trl":
            check_installed("trl")
        super().__init__(make_prompts(rows, partial(prompt_of, settings=self._settings)), MathVerifier())

    def write_solution(self, prompt: Prompt) -> str:
        return DEMONSTRATIONS[self._settings.scheme].format(**prompt.columns)

    async def judged(self, prompt: Prompt, completion: str) -> Reward | Failure:
        gold, scheme = prompt.columns["gold"], self._settings.scheme
        if scheme in TEXT_SCHEMES:
            return TEXT_SCHEMES[scheme](completion, gold)
        if scheme == "trl":
            return await self._verifier.trl(completion, gold)
        is_right = compare(completion, gold, computed=scheme == "covey", is_cut=isinstance(completion, CutText))
        return covey_reward(completion, is_right, self._settings.format_reward)


def build_gsm8k(settings: Gsm8kConfig, config: BuildSettings) -> VerifiedAnswers:
    make = partial(prompt_of, settings=settings)
    how = row_settings(config.data, ("question", "answer"), prompt=("question",), make=make)
    known = partial(of_verl, problem="question", answer="answer", form="#### {}")
    rows = load_rows(config.data.path, replace(how, known=known))
    return GSM8K(rows.splits, settings)


def covey_reward(completion: str, is_right: bool, format_reward: float) -> Reward:
    """Return 1 for the right answer, `format_reward` for the form."""
    return graded(is_right, states_number(visible(completion)), format_reward)


def verl_strict_reward(completion: str, gold: str) -> Reward:
    found = _VERL_STRICT.findall(completion[-VERL_CHARACTERS:])
    correct = float(bool(found) and found[-1].replace(",", "") == gold)
    return Reward(correct, {"correct": correct})


def verl_flexible_reward(completion: str, gold: str) -> Reward:
    found = [number for number in _VERL_FLEXIBLE.findall(completion[-VERL_CHARACTERS:]) if number != "."]
    correct = float(bool(found) and found[-1] == gold)
    return Reward(correct, {"correct": correct})


def torchrl_reward(completion: str, gold: str) -> Reward:
    is_right = _torchrl_normalised(first_block(completion, "answer")) == _torchrl_normalised(gold)
    return torchrl_scale(completion, is_right)


def _torchrl_normalised(text: str) -> str:
    text = re.sub("[,$%]", "", text.strip()).rstrip(".")
    return text.rstrip("0").rstrip(".") if "." in text else text


def prompt_of(row: Row, settings: Gsm8kConfig) -> Prompt:
    """Make a prompt of a row. ValueError without question and answer."""
    question, (solution, gold) = text_in(row, "question"), split_answer(text_in(row, "answer"))
    columns = {"question": question, "solution": solution, "gold": gold, "level": row.get("level")}
    said = INSTRUCTIONS[settings.scheme] if settings.instruction is None else settings.instruction
    return Prompt("", "gsm8k", conversation(question, said), columns)


# No example: of 40 answers of SmolLM2-135M-Instruct 12 to 14 ended in the 42 of "such as: #### 42".
_ASK_HASH = "Reason step by step. End with a last line that is #### and the answer as a plain number."
_ASK_TAGS = "Reason inside <think></think> tags, then write the answer, only a number, inside <answer></answer> tags."
_ASK_BOX = "Reason step by step, then write the answer, only a number, as \\boxed{answer}."

_HASHED = ("covey", "values", "verl_strict", "verl_flexible")
INSTRUCTIONS = {**dict.fromkeys(_HASHED, _ASK_HASH), "torchrl": _ASK_TAGS, "trl": _ASK_BOX}
DEMONSTRATIONS = {
    **dict.fromkeys(_HASHED, "{solution}\n#### {gold}"),
    "torchrl": "<think>{solution}</think>\n<answer>{gold}</answer>",
    "trl": "{solution}\n\\boxed{{{gold}}}",
}
TEXT_SCHEMES: dict[str, Callable[[str, str], Reward]] = {
    "verl_strict": verl_strict_reward,
    "verl_flexible": verl_flexible_reward,
    "torchrl": torchrl_reward,
}
