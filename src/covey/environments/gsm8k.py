"""Grade-school word problems with a number as the answer (GSM8K, arXiv 2110.14168, and data in its form).

Schemes, all on the scale 0 to 1:

| scheme        | asks for              | rewards                                                            |
|---------------|-----------------------|--------------------------------------------------------------------|
| covey         | a last line `#### N`  | 1 for the right answer in any form (module `answers`), else        |
|               |                       | `format_reward` where the last line has the form                   |
| verl_strict   | a last line `#### N`  | 1 where the last `#### N` in the last 300 characters is the gold   |
| verl_flexible | a last line `#### N`  | 1 where the last number in the last 300 characters is the gold     |
| torchrl       | think and answer tags | 1 for the right first answer tag, 0.1 for a wrong one              |
| trl           | a box                 | 1 where math-verify finds the gold in LaTeX                        |

The last four reproduce verl (volcengine/verl b178a3cd), TorchRL (pytorch/rl ae9719f1) and TRL's accuracy_reward to the
letter, so that curves can be compared with theirs; as judges of mathematics they are worse than the first.
"""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from covey.environments.answers import Answer, compare
from covey.environments.base import Split
from covey.environments.symbolic import symbolic_equal, trl_accuracy
from covey.environments.workers import NO_WORKER, WorkerPool, WorkerSettings
from covey.types import Failure, Message, Prompt, Reward

Row = Mapping[str, Any]

FORMAT_REWARD_TORCHRL = 0.1
VERL_CHARACTERS = 300
MATH_TIMEOUT = 10.0
"""Seconds math-verify may take for one completion; an answer it cannot judge by then is wrong, not a failure."""

_CALCULATOR_NOTE = re.compile(r"<<[^<>\n]*>>")
_GOLD = re.compile(r"^(.*)#### *([^\s#][^\n#]*?)\s*$", re.DOTALL)
_REQUESTED_FORM = re.compile(r"(?:^|\n)#### ?\$?-?[\d,]*\.?\d+\s*$")
_VERL_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_VERL_FLEXIBLE = re.compile(r"-?[0-9.,]+")
_THINK = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def split_answer(answer: str) -> tuple[str, str]:
    """(worked solution without calculator notes, gold number without commas) of a row's answer.

    Raises ValueError where the answer does not end in `#### N`.
    """
    match = _GOLD.match(answer)
    if match is None or "####" in match[1]:
        raise ValueError(f"answer must end in one '#### N', got ...{answer[-40:]!r}")
    return _CALCULATOR_NOTE.sub("", match[1]).strip(), match[2].replace(",", "")


class GSM8K:
    """Environment of word problems.

    >>> GSM8K({"train": [{"question": "What is 6 * 7?", "answer": "6 * 7 = 42\\n#### 42"}], "test": [...]})
    """

    def __init__(self, rows: Mapping[Split, Sequence[Row]], scheme: str = "covey", format_reward: float = 0.1) -> None:
        """Raises ValueError for an unknown scheme and for rows whose answer does not end in `#### N`."""
        if scheme not in INSTRUCTIONS:
            raise ValueError(f"scheme must be one of {', '.join(INSTRUCTIONS)}, got {scheme!r}")
        if not 0 <= format_reward < 1:
            raise ValueError(f"format_reward must be in [0, 1), got {format_reward}")
        self.scheme = scheme
        self.format_reward = format_reward
        self._prompts = {split: [_prompt(split, i, row, scheme) for i, row in enumerate(rows[split])] for split in rows}
        self._pool: WorkerPool | None = None

    def prompts(self, split: Split) -> list[Prompt]:
        return list(self._prompts[split])

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        gold = prompt.columns["gold"]
        return await asyncio.gather(*(self._score(completion, gold) for completion in completions))

    def demonstrations(self, split: Split) -> list[tuple[Prompt, str]]:
        """The worked solutions, ending in the form the scheme asks for."""
        return [(prompt, self.gold(prompt)) for prompt in self._prompts[split]]

    def gold(self, prompt: Prompt) -> str:
        """The row's worked solution, ending in the form the scheme asks for."""
        return DEMONSTRATIONS[self.scheme](prompt.columns["solution"], prompt.columns["gold"])

    async def validate(self) -> None:
        """Score every worked solution. Raises ValueError that names the first one without full marks."""
        for split in self._prompts:
            for prompt, demonstration in self.demonstrations(split):
                (reward,) = await self.score(prompt, [demonstration])
                if isinstance(reward, Failure) or reward.value != 1.0:
                    raise ValueError(f"{prompt.id}: the gold answer {prompt.columns['gold']!r} scores {reward}")

    def close(self) -> None:
        """End the worker processes that ran math-verify, if any. Also done when the environment is collected."""
        if self._pool is not None:
            self._pool.close()

    async def _score(self, completion: str, gold: str) -> Reward | Failure:
        if self.scheme in TEXT_SCHEMES:
            return TEXT_SCHEMES[self.scheme](completion, gold)
        if self.scheme == "trl":
            value = await self._math(trl_accuracy, {"completion": completion, "gold": gold})
            if value is None:
                return Failure(f"math-verify cannot read the gold answer {gold!r}")
            return value if isinstance(value, Failure) else Reward(value, {"correct": value})
        verdict: Any = compare(completion, gold)
        if isinstance(verdict, Answer):
            verdict = await self._math(symbolic_equal, {"answer": verdict.text, "gold": gold})
        return verdict if isinstance(verdict, Failure) else covey_reward(completion, bool(verdict), self.format_reward)

    async def _math(self, function: Callable[..., Any], keywords: Mapping[str, str]) -> Any:
        """Call math-verify where it can be killed. An answer it does not survive is wrong (0.0), not a failure."""
        if self._pool is None:
            self._pool = WorkerPool(
                MATH_FUNCTIONS, WorkerSettings(num_workers=2, timeout=MATH_TIMEOUT, preload=MATH_MODULES)
            )
        result = await self._pool.call(MATH_FUNCTIONS.index(function), keywords)
        return 0.0 if isinstance(result, Failure) and not result.reason.startswith(NO_WORKER) else result


def covey_reward(completion: str, is_right: bool, format_reward: float) -> Reward:
    """1 for the right answer; for a wrong one `format_reward` where the last line, and no other, is `#### N`."""
    has_form = completion.count("####") == 1 and _REQUESTED_FORM.search(completion) is not None
    value = 1.0 if is_right else format_reward * has_form
    return Reward(value, {"correct": float(is_right), "format": float(has_form)})


def verl_strict_reward(completion: str, gold: str) -> Reward:
    found = _VERL_STRICT.findall(completion[-VERL_CHARACTERS:])
    correct = float(bool(found) and found[-1].replace(",", "") == gold)
    return Reward(correct, {"correct": correct})


def verl_flexible_reward(completion: str, gold: str) -> Reward:
    found = [number for number in _VERL_FLEXIBLE.findall(completion[-VERL_CHARACTERS:]) if number != "."]
    correct = float(bool(found) and found[-1] == gold)
    return Reward(correct, {"correct": correct})


def torchrl_reward(completion: str, gold: str) -> Reward:
    answer, thought = _ANSWER.search(completion), _THINK.search(completion)
    text = answer[1].strip() if answer is not None else ""
    right = text != "" and _torchrl_normalised(text) == _torchrl_normalised(gold)
    value = 1.0 if right else FORMAT_REWARD_TORCHRL if text else 0.0
    has_thought = thought is not None and thought[1].strip() != ""
    return Reward(value, {"correct": float(right), "answer": float(text != ""), "think": float(has_thought)})


def _torchrl_normalised(text: str) -> str:
    text = re.sub("[,$%]", "", text.strip()).rstrip(".")
    return text.rstrip("0").rstrip(".") if "." in text else text


def _prompt(split: Split, index: int, row: Row, scheme: str) -> Prompt:
    try:
        question, (solution, gold) = row["question"], split_answer(row["answer"])
    except KeyError as error:
        raise ValueError(f"{split} row {index} has no column {error} (has: {', '.join(row)})") from error
    except ValueError as error:
        raise ValueError(f"{split} row {index}: {error}") from error
    columns = {"question": question, "solution": solution, "gold": gold}
    return Prompt(f"{split}-{index}", "gsm8k", _messages(question, scheme), columns)


def _messages(question: str, scheme: str) -> tuple[Message, ...]:
    return ({"role": "system", "content": INSTRUCTIONS[scheme]}, {"role": "user", "content": question})


def _hash_form(solution: str, gold: str) -> str:
    return f"{solution}\n#### {gold}"


def _tag_form(solution: str, gold: str) -> str:
    return f"<think>{solution}</think>\n<answer>{gold}</answer>"


def _box_form(solution: str, gold: str) -> str:
    return f"{solution}\n\\boxed{{{gold}}}"


_ASK_HASH = "Reason step by step. End with a last line that is four hashes, a blank and the answer as a plain number."
_ASK_TAGS = "Reason inside <think></think> tags, then write the answer, only a number, inside <answer></answer> tags."
_ASK_BOX = "Reason step by step, then write the answer, only a number, as \\boxed{answer}."

INSTRUCTIONS = {
    "covey": _ASK_HASH,
    "verl_strict": _ASK_HASH,
    "verl_flexible": _ASK_HASH,
    "torchrl": _ASK_TAGS,
    "trl": _ASK_BOX,
}
DEMONSTRATIONS: dict[str, Callable[[str, str], str]] = {
    "covey": _hash_form,
    "verl_strict": _hash_form,
    "verl_flexible": _hash_form,
    "torchrl": _tag_form,
    "trl": _box_form,
}
TEXT_SCHEMES: dict[str, Callable[[str, str], Reward]] = {
    "verl_strict": verl_strict_reward,
    "verl_flexible": verl_flexible_reward,
    "torchrl": torchrl_reward,
}
MATH_MODULES = ("math_verify", "sympy")
MATH_FUNCTIONS: list[Callable[..., Any]] = [symbolic_equal, trl_accuracy]
