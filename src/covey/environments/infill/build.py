"""From settings to the environment of masked texts, its judge and what watches it."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from covey.environments.data.rows import RowSettings
from covey.environments.infill.corruption import Corruption
from covey.environments.infill.environment import (
    GRAMMAR,
    Draw,
    Infill,
    Rule,
    Watch,
    gap_reference,
    make_prompts,
    written,
)
from covey.environments.infill.judge import Judge, JudgeSettings
from covey.environments.infill.judge_training import NANO_JUDGE, JudgeTraining, Pair, accuracy, ensure_judge
from covey.environments.infill.masking import MASKINGS
from covey.environments.infill.ngram import NgramModel
from covey.environments.infill.settings import InfillConfig
from covey.environments.infill.texts import Masker, Texts, load_texts
from covey.policy.models.loading import load_tokenizer
from covey.policy.settings import ModelConfig
from covey.system import collectives

NUM_CHECKED = 256
"""Held-out texts on which a judge's accuracy is measured."""


@dataclass(frozen=True)
class Judged:
    """A judge and how often it ranks a held-out text above its corrupted version."""

    judge: Judge
    accuracy: float

    @property
    def facts(self) -> dict[str, Any]:
        return {"name": self.judge.name, "accuracy": self.accuracy}


@dataclass(frozen=True)
class Material:
    """What judges are trained and measured on: texts as the policy would write them."""

    texts: Texts
    masker: Masker
    tokenizer: PreTrainedTokenizerBase
    settings: InfillConfig
    say: Callable[[str], None]
    """Hears of what takes a while."""

    def pairs(self, split: str, seed: int) -> "PairSource":
        """Return real texts of a split with their corrupted versions."""
        count = self.texts.num_pool if split == "train" else NUM_CHECKED
        drawn = self.texts.draw("train" if split == "train" else "test", count, f"judge/{seed}")
        cut = [self.masker.cut(text) for text in drawn]
        pool = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in cut if text]
        choose, span = MASKINGS[self.settings.masking], self.settings.span_length
        corrupt = Corruption(
            pool=pool,
            places=lambda length, many, chance: choose(length, many, span, chance),
            ratios=self.settings.mask_ratios,
            num_tokens=len(self.tokenizer),
        )
        return PairSource(self.tokenizer, pool, corrupt)


@dataclass(frozen=True)
class PairSource:
    """Draws pairs of a real text and its corrupted version."""

    tokenizer: PreTrainedTokenizerBase
    pool: Sequence[Sequence[int]]
    corrupt: Corruption

    def __call__(self, count: int, chance: random.Random) -> list[Pair]:
        chosen = [chance.choice(self.pool) for _ in range(count)]
        return [(written(self.tokenizer, ids), written(self.tokenizer, self.corrupt(ids, chance))) for ids in chosen]


def build(
    settings: InfillConfig,
    model: ModelConfig,
    path: str | None,
    rows: RowSettings,
    seed: int,
    say: Callable[[str], None],
) -> Infill:
    """Build the environment. A judge that is not there yet is trained first, from this seed, and `say` hears of it.

    ValueError where the texts cannot be masked, or a judge is below its floor.
    """
    tokenizer = load_tokenizer(model)
    if tokenizer.mask_token_id is None:
        raise ValueError(f"environment=infill needs a policy with a mask token, model.name={model.name} has none")
    texts = load_texts(path, settings.text_column, settings.window, rows)
    masker = Masker(tokenizer, settings.window, settings.masking, settings.span_length)
    counts = Draw(settings.mask_ratios, {"train": settings.num_train, "test": settings.num_test}, settings.problem_seed)
    material = Material(texts, masker, tokenizer, settings, say)
    first = judged(material, settings.judge, 2 * seed)
    watches, others = _watches(material, 2 * seed + 1)
    facts = {"watch": list(settings.watch), "gap_to": gap_reference(watches), "judge": first.facts, **others}
    return Infill(make_prompts(texts, masker, tokenizer, counts), tokenizer, first.judge, watches, facts)


def judged(material: Material, name: str, seed: int) -> Judged:
    """Return the judge of that name, trained if need be. Raises ValueError where it ranks too few held-out texts
    right."""
    settings = material.settings
    # Train the embedded judge, once for all ranks.
    if name == NANO_JUDGE:
        training = JudgeTraining(
            hidden_size=settings.judge_hidden_size,
            num_layers=settings.judge_num_layers,
            num_steps=settings.judge_num_steps,
            batch_size=settings.judge_pairs,
            lr=settings.judge_lr,
            seed=seed,
        )
        name = str(collectives.run_on_rank0(lambda: _ensure(material, training)))
    # Load it, and refuse one that is hardly better than chance.
    how = JudgeSettings(settings.judge_device, settings.judge_batch_size, settings.judge_output, settings.judge_label)
    judge = Judge(name, how)
    found = accuracy(judge, material.pairs("test", seed)(NUM_CHECKED, random.Random(f"judge/{seed}/check")))
    if found < settings.judge_floor:
        raise ValueError(
            f"environment.judge_floor={settings.judge_floor:g} needs a judge that ranks so many held-out texts above "
            f"their corrupted versions, {name} ranks {found:.1%}; environment.judge_num_steps trains nano-judge longer"
        )
    return Judged(judge, found)


def _ensure(material: Material, training: JudgeTraining) -> str:
    pairs = material.pairs("train", training.seed)
    settings = material.settings
    content = [
        *(written(material.tokenizer, ids) for ids in pairs.pool),
        f"{settings.masking} {settings.span_length} {list(settings.mask_ratios)} {len(material.tokenizer)}",
    ]
    return str(ensure_judge(training, pairs, content, Path(settings.judge_cache_dir), material.say))


def _watches(material: Material, seed: int) -> tuple[Mapping[str, Watch], Mapping[str, Any]]:
    """Return what looks at the same texts, and what there is to record of it."""
    watches: dict[str, Watch] = {}
    facts: dict[str, Any] = {}
    for name in material.settings.watch:
        if name == "grammar":
            watches[name] = GRAMMAR
        elif name == "ngram":
            drawn = material.texts.draw("train", material.texts.num_pool, "ngram")
            texts = [material.masker.cut(text) for text in drawn]
            watches[name] = Rule(NgramModel(texts).log_prob)
        else:
            second = judged(material, NANO_JUDGE, seed)
            watches[name], facts[name] = second.judge, second.facts
    return watches, facts
