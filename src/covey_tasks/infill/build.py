"""Build the environment of masked texts, its judge and monitors."""

import logging
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from covey.environments.data.rows import row_settings
from covey.environments.settings import BuildSettings
from covey.policy.models.loading import load_tokenizer
from covey.system import collectives
from covey_tasks.columns import text_in
from covey_tasks.infill.environment import GRAMMAR, Infill, Monitor, Rule, gap_reference, make_prompts, written
from covey_tasks.infill.judge import Judge
from covey_tasks.infill.judge_training import NANO_JUDGE, Pair, accuracy, ensure_judge
from covey_tasks.infill.settings import InfillConfig
from covey_tasks.infill.texts import MASKINGS, Masker, Texts, load_texts

LOGGER = logging.getLogger(__name__)
NUM_CHECKED = 256
"""Held-out texts on which a judge's accuracy is measured."""


@dataclass(frozen=True)
class Judged:
    """A judge with its accuracy on held-out pairs of texts."""

    judge: Judge
    accuracy: float

    @property
    def facts(self) -> dict[str, Any]:
        return {"name": self.judge.name, "accuracy": self.accuracy}


@dataclass(frozen=True)
class Material:
    """Texts to train and measure judges on, as policies write them."""

    texts: Texts
    masker: Masker
    tokenizer: PreTrainedTokenizerBase
    settings: InfillConfig
    say: Callable[[str], None]
    """Called with a line before long work."""

    def pairs(self, split: str, seed: int) -> "PairSource":
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


Places = Callable[[int, int, random.Random], Sequence[int]]
"""(length, how many, chance) -> positions."""
SINGLE = 0.4
"""Share of texts in which one token is replaced."""
PLAUSIBLE = 0.7
"""Share of insertions that have the same neighbours elsewhere: wrong only by text further off."""
ANY_TOKEN = 0.05
"""Share of the other tokens that may be any of the vocabulary."""


@dataclass(frozen=True)
class Corruption:
    """Replaces tokens by tokens of other real texts."""

    pool: Sequence[Sequence[int]]
    """Real texts as tokens; insertions come from them, with their frequencies."""
    places: Places
    ratios: Sequence[float]
    """Largest shares of tokens that are replaced."""
    num_tokens: int
    """Size of the vocabulary: now and then any token is put in, so that a judge knows those that no text has."""
    _between: dict[tuple[int, int], list[int]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        for ids in self.pool:
            for position, token_id in enumerate(ids):
                self._between[_neighbours(ids, position)].append(token_id)

    def __call__(self, ids: Sequence[int], chance: random.Random) -> list[int]:
        """Replace at least one token by another."""
        most = max(1, round(chance.choice(self.ratios) * len(ids)))
        count = 1 if chance.random() < SINGLE else chance.randint(1, most)
        places = self.places(len(ids), min(count, len(ids)), chance)
        plausible = chance.random() < PLAUSIBLE
        found = list(ids)
        for position in chance.sample(places, len(places)):
            known = self._between[_neighbours(found, position)] if plausible else ()
            found[position] = chance.choice(known) if known else self._token(chance)
        while found == list(ids):
            found[chance.choice(places)] = self._token(chance)
        return found

    def _token(self, chance: random.Random) -> int:
        if chance.random() < ANY_TOKEN:
            return chance.randrange(self.num_tokens)
        return chance.choice(chance.choice(self.pool))


def _neighbours(ids: Sequence[int], position: int) -> tuple[int, int]:
    return (ids[position - 1] if position > 0 else -1, ids[position + 1] if position + 1 < len(ids) else -1)


@dataclass(frozen=True)
class PairSource:
    """Draws pairs of a real text and its corrupted version."""

    tokenizer: PreTrainedTokenizerBase
    pool: Sequence[Sequence[int]]
    corrupt: Corruption

    def __call__(self, count: int, chance: random.Random) -> list[Pair]:
        chosen = [chance.choice(self.pool) for _ in range(count)]
        return [(written(self.tokenizer, ids), written(self.tokenizer, self.corrupt(ids, chance))) for ids in chosen]


def build_infill(settings: InfillConfig, config: BuildSettings, say: Callable[[str], None] = LOGGER.info) -> Infill:
    """Build the environment.

    A judge that is not there yet is trained first, and `say` hears of it.
    ValueError where the texts cannot be masked, or a judge is below its floor.
    """
    model, path, seed = config.model, config.data.path, config.seed
    make = partial(text_in, column=settings.text_column)
    rows = row_settings(config.data, (settings.text_column,), "environment.text_column", make=make)
    tokenizer = load_tokenizer(model)
    if tokenizer.mask_token_id is None:
        raise ValueError(f"environment=infill needs a policy with a mask token, model.name={model.name} has none")
    texts = load_texts(path, settings.window, rows)
    if path is None:
        say("texts: generated sentences of a small grammar, as data.path names none")
    masker = Masker(tokenizer, settings.window, settings.masking, settings.span_length)
    material = Material(texts, masker, tokenizer, settings, say)
    first = judged(material, settings.judge, 2 * seed)
    monitors, others = _monitors(material, 2 * seed + 1)
    facts = {
        "monitors": list(settings.monitors),
        "gap_reference": gap_reference(monitors),
        "judge": first.facts,
        **others,
    }
    return Infill(make_prompts(texts, masker, tokenizer, settings), tokenizer, first.judge, monitors, facts)


def judged(material: Material, name: str, seed: int) -> Judged:
    """Load a judge, trained if need be. ValueError below its floor."""
    settings = material.settings
    if name == NANO_JUDGE:
        name = str(collectives.run_on_rank0(lambda: _ensure(material, seed)))
    judge = Judge(name, settings)
    pairs = material.pairs("test", seed)(NUM_CHECKED, random.Random(f"judge/{seed}/check"))
    judge.check_lengths([real for real, _ in pairs])
    found = accuracy(judge, pairs)
    if found < settings.judge_floor:
        raise ValueError(
            f"environment.judge_floor={settings.judge_floor:g} needs a judge that ranks so many held-out texts above "
            f"their corrupted versions, {name} ranks {found:.1%}; environment.judge_num_steps trains nano-judge longer"
        )
    return Judged(judge, found)


def _ensure(material: Material, seed: int) -> str:
    pairs = material.pairs("train", seed)
    settings = material.settings
    content = [
        *(written(material.tokenizer, ids) for ids in pairs.pool),
        f"{settings.masking} {settings.span_length} {list(settings.mask_ratios)} {len(material.tokenizer)}",
    ]
    return str(ensure_judge(settings, seed, pairs, content, material.say))


def _monitors(material: Material, seed: int) -> tuple[Mapping[str, Monitor], Mapping[str, Any]]:
    monitors: dict[str, Monitor] = {}
    facts: dict[str, Any] = {}
    for name in material.settings.monitors:
        if name == "grammar":
            monitors[name] = GRAMMAR
        elif name == "ngram":
            drawn = material.texts.draw("train", material.texts.num_pool, "ngram")
            texts = [material.masker.cut(text) for text in drawn]
            monitors[name] = Rule(NgramModel(texts).log_prob)
        else:
            second = judged(material, NANO_JUDGE, seed)
            monitors[name], facts[name] = second.judge, second.facts
    return monitors, facts


NUM_VALUES = 256


class NgramModel:
    """Log-probability of texts by the characters before each."""

    def __init__(self, texts: Iterable[str], order: int = 5) -> None:
        self._order = order
        self._counts: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()
        self._kinds: Counter[str] = Counter()
        for text in texts:
            for end in range(1, len(text) + 1):
                self._count(text[max(0, end - order) : end])

    def log_prob(self, text: str) -> float:
        """Return nats per character. 0 for an empty text."""
        found = [self._log_prob(text[max(0, end - self._order) : end]) for end in range(1, len(text) + 1)]
        return sum(found) / len(found) if found else 0.0

    def _count(self, stretch: str) -> None:
        for start in range(len(stretch)):
            gram = stretch[start:]
            self._kinds[gram[:-1]] += gram not in self._counts
            self._counts[gram] += 1
            self._totals[gram[:-1]] += 1

    def _log_prob(self, stretch: str) -> float:
        probability = 1 / NUM_VALUES
        for start in range(len(stretch) - 1, -1, -1):
            gram = stretch[start:]
            kinds, total = self._kinds[gram[:-1]], self._totals[gram[:-1]]
            if total == 0:
                break
            probability = (self._counts[gram] + kinds * probability) / (total + kinds)
        return math.log(probability)
