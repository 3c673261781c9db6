"""Environment of masked texts: a policy fills them, a judge scores.

The reward is the judge's score of the completed text. A learned judge can be flattered, so others look at the same
texts and are logged, never trained on: an exact grammar check, a second judge trained independently, an n-gram model.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from covey.environments.base import Environment, JudgeSummary, Split
from covey.types import Failure, Prompt, Reward
from covey_tasks.infill.grammar import is_sentence
from covey_tasks.infill.judge import Judge
from covey_tasks.infill.settings import InfillConfig
from covey_tasks.infill.texts import Masker, Texts

NOT_TEXT = "\N{REPLACEMENT CHARACTER}"
"""Stands for a token that is no text, such as padding: it cannot be used to leave something out."""


class Monitor(Protocol):
    """Measures completed texts; its numbers are logged, never trained on."""

    async def scores(self, texts: Sequence[str]) -> list[float]: ...


@dataclass(frozen=True)
class Rule:
    """A monitor that is a function of one text."""

    of: Callable[[str], float]

    async def scores(self, texts: Sequence[str]) -> list[float]:
        return [float(self.of(text)) for text in texts]


GRAMMAR = Rule(is_sentence)
"""1 for a sentence of the embedded language, exactly."""


def make_prompts(
    texts: Texts, masker: Masker, tokenizer: PreTrainedTokenizerBase, settings: InfillConfig
) -> dict[Split, list[Prompt]]:
    """Mask both splits' texts, by the arguments alone. ValueError without any."""
    counts: dict[Split, int] = {"train": settings.num_train, "test": settings.num_test}
    ratios, seed = settings.mask_ratios, settings.problem_seed
    made: dict[Split, list[Prompt]] = {}
    for split, count in counts.items():
        made[split] = []
        for index, text in enumerate(texts.draw(split, count, f"infill/{seed}")):
            ratio = ratios[index % len(ratios)]
            masked = masker.mask(text, ratio, f"infill/{seed}/{split}/{index}")
            if masked is not None:
                columns = {
                    "input_ids": tuple(tokenizer(masked.text)["input_ids"]),
                    "hidden": masked.hidden,
                    "ratio": ratio,
                }
                made[split].append(Prompt(f"{split}-{index}", "infill", masked.text, columns))
        if not made[split]:
            raise ValueError(f"no text of split {split} has two tokens or more to mask")
    return made


class Infill(Environment):
    """Environment of masked texts, rewarded by the judge's score when completed."""

    def __init__(
        self,
        prompts: Mapping[Split, list[Prompt]],
        tokenizer: PreTrainedTokenizerBase,
        judge: Judge,
        monitors: Mapping[str, Monitor],
        facts: Mapping[str, Any],
    ) -> None:
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._judge = judge
        self._monitors = monitors
        self._facts = facts

    def prompts(self, split: Split) -> list[Prompt]:
        return list(self._prompts[split])

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        """Score fills given as text; one that fits no gaps is empty."""
        ids = [self._tokenizer(text, add_special_tokens=False)["input_ids"] for text in completions]
        return await self.score_tokens(prompt, completions, ids)

    async def score_tokens(
        self, prompt: Prompt, completions: Sequence[str], completion_ids: Sequence[Sequence[int]]
    ) -> list[Reward | Failure]:
        texts = [self.completed(prompt, ids) for ids in completion_ids]
        judged = await self._judge.scores(texts)
        monitored = [await monitor.scores(texts) for monitor in self._monitors.values()]
        parts = [dict(zip(self._monitors, found, strict=True)) for found in zip(*monitored, strict=True)]
        parts = parts or [{} for _ in texts]
        name = gap_reference(self._monitors)
        return [
            Reward(score, {"judge": score, **part, **({} if name is None else {"gap": score - part[name]})})
            for score, part in zip(judged, parts, strict=True)
        ]

    def completed(self, prompt: Prompt, fill_ids: Sequence[int]) -> str:
        """Fill tokens into the gaps, "" where they are not as many."""
        mask_id, fills = self._tokenizer.mask_token_id, iter(fill_ids)
        given = prompt.columns["input_ids"]
        if given.count(mask_id) != len(fill_ids):
            return ""
        # Text unknown to the tokenizer was there: it is written as a sign.
        special = set(self._tokenizer.all_special_ids) - {self._tokenizer.unk_token_id}
        own = [token_id for token_id in given if token_id == mask_id or token_id not in special]
        return written(self._tokenizer, [next(fills) if token_id == mask_id else token_id for token_id in own])

    def judge_summary(self) -> JudgeSummary:
        judges = {name: self._facts[name] for name in ("judge", "second_judge") if name in self._facts}
        found = [
            f"{name.replace('_', ' ')} ranks {fact['accuracy']:.1%} of held-out texts above their corrupted versions: "
            f"{fact['name']}"
            for name, fact in judges.items()
        ]
        return JudgeSummary(self._judge.is_frozen, "; ".join(found))

    def difficulty(self, prompt: Prompt) -> float:
        return float(prompt.columns["ratio"])

    def demonstrations(self, split: Split) -> list[tuple[Prompt, tuple[int, ...]]]:
        return [(prompt, prompt.columns["hidden"]) for prompt in self._prompts[split]]

    def facts(self) -> Mapping[str, Any]:
        return self._facts


def written(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """Decode tokens to the text that is judged."""
    special = set(tokenizer.all_special_ids)
    pieces: list[str] = []
    run: list[int] = []
    for token_id in token_ids:
        if token_id in special or token_id >= len(tokenizer):
            pieces += [str(tokenizer.decode(run)), NOT_TEXT]
            run = []
        else:
            run.append(token_id)
    return "".join([*pieces, str(tokenizer.decode(run))])


def gap_reference(monitors: Collection[str]) -> str | None:
    """Choose the monitor that a judge is compared with, if any: a gap that rises is reward hacking."""
    return next((name for name in SAME_SCALE if name in monitors), None)


SAME_SCALE = ("grammar", "second_judge")
"""Watches that speak of the same as a judge's probability."""
