"""Prompts for a teacher, with more than the policy saw."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, chain
from typing import Any

from transformers import PreTrainedTokenizerBase

from covey.algorithm.teacher.terms import choose_lessons
from covey.environments.base import Environment, naming, text_of
from covey.rollouts.encoding import encode_prompt
from covey.types import Group, Prompt, Rollout

WHAT = {
    "gold": "A right answer to what follows",
    "solution": "Another answer to what follows, which was right",
    "feedback": "What was said of an answer to what follows",
}
MAX_FEEDBACK = 2000


@dataclass(frozen=True)
class GoldAnswers:
    """Right answers to prompts, from a column or from the environment."""

    environment: Environment
    column: str | None = None

    def of(self, prompt: Prompt) -> str | None:
        """Return a right answer, None if unknown. ValueError without the column."""
        if self.column is None:
            with naming(self.environment, "gold"):
                return self.environment.gold(prompt)
        if self.column not in prompt.columns:
            known = ", ".join(prompt.columns) or "none"
            raise ValueError(f"algorithm.gold_column must be a column of the rows ({known}), got {self.column}")
        value = prompt.columns[self.column]
        return None if value is None else str(value)


@dataclass(frozen=True)
class Lessons:
    """Writes prompts with texts that the policy did not see."""

    tokenizer: PreTrainedTokenizerBase
    environment: Environment
    gold: GoldAnswers
    shows: Sequence[str]
    template: str
    max_length: int
    """Most tokens that the teacher reads."""
    selection: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, group: Group) -> list[Rollout | None]:
        """Return each rollout as the teacher reads it. None where there is nothing to show it, or too much to read."""
        if not self.shows:
            return [one if len(one.input_ids) < self.max_length else None for one in group.rollouts]
        encode = partial(encode_prompt, self.tokenizer, tools=self.environment.tool_schemas(group.prompt))
        prompt_ids = encode(group.prompt)
        written: dict[str, list[int]] = {}
        found: list[Rollout | None] = []
        for rollout, shown in zip(group.rollouts, self.texts(group), strict=True):
            text = "".join(self.template.format(what=WHAT[kind], text=said) for kind, said in shown.items())
            if not text:
                found.append(None)
                continue
            if text not in written:
                written[text] = encode(with_lesson(group.prompt, text))
            found.append(self._after(rollout, prompt_ids, written[text], group.prompt.id))
        return found

    def texts(self, group: Group) -> list[dict[str, str]]:
        """Return the texts that each rollout's teacher is shown, by kind."""
        gold = self.gold.of(group.prompt) if "gold" in self.shows else None
        words = [feedback_of(one) if "feedback" in self.shows else "" for one in group.rollouts]
        lessons = choose_lessons(group.rewards, list(map(bool, words)), **self.selection)
        found = []
        for said, sibling, used in zip(words, lessons.demonstrations, lessons.feedback_used, strict=True):
            is_solved = "solution" in self.shows and sibling is not None
            texts = {
                "gold": gold,
                "solution": group.rollouts[sibling].text if is_solved and sibling is not None else None,
                "feedback": said if used else None,
            }
            found.append({kind: text for kind in self.shows if (text := texts[kind])})
        return found

    def _after(self, rollout: Rollout, old: Sequence[int], new: Sequence[int], name: str) -> Rollout | None:
        pieces = [_with_prompt(rollout, start, end, old, new) for start, end in rollout.sequences]
        if any(piece is None for piece in pieces):
            raise ValueError(
                f"algorithm.teacher_shows needs rollouts that begin with their prompt, got an episode of {name}"
            )
        whole = [piece for piece in pieces if piece is not None]
        if max(len(piece[0]) for piece in whole) >= self.max_length:
            return None
        starts = accumulate((len(piece[0]) for piece in whole[:-1]), initial=0)
        ids, targets, mask, logprobs = (chain.from_iterable(lists) for lists in zip(*whole, strict=True))
        return replace(
            rollout,
            input_ids=tuple(ids),
            target_ids=tuple(targets),
            loss_mask=tuple(mask),
            sampler_logprobs=tuple(logprobs),
            branches=tuple(starts) if rollout.branches else (),
        )


def _with_prompt(
    rollout: Rollout, start: int, end: int, old: Sequence[int], new: Sequence[int]
) -> tuple[list[int], list[int], list[bool], list[float]] | None:
    """Return a sequence's four lists with another prompt. None where it does not begin with the old one."""
    length, tokens = len(old), [*rollout.input_ids[start:end], rollout.target_ids[end - 1]]
    if tokens[:length] != list(old) or any(rollout.loss_mask[start : start + length - 1]):
        return None
    tokens, before = [*new, *tokens[length:]], len(new) - 1
    mask = [False] * before + list(rollout.loss_mask[start + length - 1 : end])
    logprobs = [0.0] * before + list(rollout.sampler_logprobs[start + length - 1 : end])
    return tokens[:-1], tokens[1:], mask, logprobs


def with_lesson(prompt: Prompt, lesson: str) -> Prompt:
    """Put a text before a prompt, or before its last user message.

    >>> with_lesson(Prompt("p", "arithmetic", "41+7=", {}), "48. ").text
    '48. 41+7='
    """
    if isinstance(prompt.text, str):
        return replace(prompt, text=lesson + prompt.text)
    places = [place for place, message in enumerate(prompt.text) if message["role"] == "user"]
    if not places:
        raise ValueError(f"algorithm.teacher_shows needs a message of the user, prompt {prompt.id} has none")
    changed = {**prompt.text[places[-1]], "content": lesson + text_of(prompt.text[places[-1]])}
    return replace(prompt, text=(*prompt.text[: places[-1]], changed, *prompt.text[places[-1] + 1 :]))


def feedback_of(rollout: Rollout) -> str:
    """Return the judge's note `feedback`, or the environment's last words, cut."""
    note = rollout.reward.extra.get("feedback")
    said = [text_of(message) for message in rollout.messages if message["role"] != "assistant"]
    text = str(note) if note is not None else said[-1] if said else ""
    return text.strip()[:MAX_FEEDBACK]
