"""Texts to mask: generated sentences, a text file, or rows.

Tokens of the policy's own tokenizer are masked, found by their places in the text, so an input stays a text.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from covey.environments.base import SPLITS, Split
from covey.environments.data.files import is_row_file
from covey.environments.data.rows import RowSettings, load_rows
from covey.system.lookup import is_function_path
from covey_tasks.infill.grammar import sentences

CHARACTERS_PER_TOKEN = 8
"""More than tokens of running text have on average."""
NUM_SENTENCES: Mapping[Split, int] = {"train": 4096, "test": 1024}


class Texts(Protocol):
    """A source of text pieces; the two splits share none."""

    @property
    def num_pool(self) -> int:
        """Return pieces that judges learn from. Each is seen with many corruptions."""

    def draw(self, split: Split, count: int, seed: str) -> list[str]:
        """Draw pieces by the arguments alone; they may repeat."""


@dataclass(frozen=True)
class Pieces:
    """Texts one by one: generated sentences, or rows."""

    splits: Mapping[Split, Sequence[str]]
    num_pool: int = 2048

    def draw(self, split: Split, count: int, seed: str) -> list[str]:
        pieces, chance = self.splits[split], random.Random(f"{seed}/{split}")
        return [text for start in range(0, count, len(pieces)) for text in chance.sample(pieces, len(pieces))][:count]


@dataclass(frozen=True)
class Running:
    """One long text, its end held out; pieces begin anywhere."""

    splits: Mapping[Split, str]
    piece_length: int
    """Length of a piece in characters."""
    num_pool: int = 16384
    """More than of texts one by one: a long text has more to tell."""

    def draw(self, split: Split, count: int, seed: str) -> list[str]:
        text, chance = self.splits[split], random.Random(f"{seed}/{split}")
        starts = [chance.randint(0, max(0, len(text) - self.piece_length)) for _ in range(count)]
        return [text[start : start + self.piece_length] for start in starts]


def load_texts(path: str | None, window: int, rows: RowSettings) -> Texts:
    """Load texts from a file or rows; without `path`, generate sentences.

    ValueError for a file that is no text, or too short for a piece in each split.
    """
    if path is None:
        return Pieces({split: sentences(NUM_SENTENCES[split], "infill", held_out=split == "test") for split in SPLITS})
    file = Path(path).expanduser()
    if is_function_path(path) or not file.is_file() or is_row_file(file):
        return Pieces(load_rows(path, rows).splits)
    if rows.max_rows is not None:
        raise ValueError(f"data.max_rows={rows.max_rows} needs data.path with rows, got {path}")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 (byte {error.start})") from error
    cut = round(len(text) * (1 - rows.test_fraction))
    parts: dict[Split, str] = {"train": text[:cut], "test": text[cut:]}
    if min(map(len, parts.values())) < window:
        raise ValueError(f"{path} has {len(text)} characters, too few for environment.window={window} in each split")
    return Running(parts, CHARACTERS_PER_TOKEN * window)


@dataclass(frozen=True, slots=True)
class Masked:
    """A piece of text some of whose tokens are masked."""

    text: str
    """Text with the tokenizer's mask token in the place of each."""
    hidden: tuple[int, ...]
    """The tokens that stood there."""


class Masker:
    """Cuts text into inputs of a policy and masks them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, window: int, masking: str, span_length: int) -> None:
        self._tokenizer = tokenizer
        self._window = window
        self._choose = MASKINGS[masking]
        self._span_length = span_length

    def cut(self, text: str) -> str:
        units = self._units(text)
        return text[: units[-1].stop] if units else ""

    def mask(self, text: str, ratio: float, seed: str) -> Masked | None:
        """Return the text with a share of tokens masked, None if impossible.

        It is where tokens are too few, gaps come out fewer than masked tokens, or the text has gaps of its own.
        """
        made: list[Masked] = []
        if self._tokenizer.mask_token in text:
            return None
        for units in self._ways(text):
            if len(units) < 2:
                break
            num_chosen = num_masked(len(units), ratio)
            chosen = self._choose(len(units), num_chosen, self._span_length, random.Random(seed))
            made.append(self._without(text, units, chosen))
            if self._ids(made[-1].text) == self._with_gaps(units, chosen):
                return made[-1]
        mask_id = self._tokenizer.mask_token_id
        return next((masked for masked in made if self._ids(masked.text).count(mask_id) == len(masked.hidden)), None)

    def _ways(self, text: str) -> Iterator[list["_Unit"]]:
        """Yield choices of units to mask, finest first, until other tokens stay.

        Tokens, or whole words where a gap inside one makes other tokens of the rest of it (WordPiece); without the
        blank before them, or with it where it belongs to the token and the mask token does not take it (BPE).
        """
        for whole_words in (False, True):
            units = self._units(text, whole_words)
            yield units
            yield [
                replace(unit, start=before.stop) if text[before.stop : unit.start].isspace() else unit
                for before, unit in zip([_Unit(0, 0, ()), *units], units, strict=False)
            ]

    def _without(self, text: str, units: Sequence["_Unit"], chosen: Sequence[int]) -> Masked:
        pieces: list[str] = []
        hidden: list[int] = []
        end = 0
        for unit in (units[index] for index in chosen):
            pieces += [text[end : unit.start], self._tokenizer.mask_token * len(unit.token_ids)]
            hidden += unit.token_ids
            end = unit.stop
        return Masked("".join([*pieces, text[end : units[-1].stop]]), tuple(hidden))

    def _with_gaps(self, units: Sequence["_Unit"], chosen: Sequence[int]) -> list[int]:
        mask_id, gaps = self._tokenizer.mask_token_id, set(chosen)
        return [mask_id if i in gaps else token_id for i, unit in enumerate(units) for token_id in unit.token_ids]

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _units(self, text: str, whole_words: bool = False) -> list["_Unit"]:
        """Group tokens that share a character, or a word."""
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        units: list[_Unit] = []
        words: list[int | None] = [None, *encoded.word_ids()]
        tokens = zip(encoded["input_ids"], encoded["offset_mapping"], words[:-1], words[1:], strict=True)
        for token_id, (start, stop), word_before, word in tokens:
            if units and (start < units[-1].stop or (whole_words and word == word_before)):
                last = units.pop()
                units.append(_Unit(last.start, max(stop, last.stop), (*last.token_ids, token_id)))
            else:
                units.append(_Unit(start, stop, (token_id,)))
        num_tokens = 0
        for index, unit in enumerate(units):
            num_tokens += len(unit.token_ids)
            if num_tokens > self._window:
                return units[:index]
        return units


@dataclass(frozen=True, slots=True)
class _Unit:
    start: int
    stop: int
    token_ids: tuple[int, ...]


def random_tokens(length: int, count: int, span_length: int, chance: random.Random) -> list[int]:
    return sorted(chance.sample(range(length), count))


def spans(length: int, count: int, span_length: int, chance: random.Random) -> list[int]:
    """Mask stretches of `span_length` tokens, `count` tokens exactly."""
    chosen: set[int] = set()
    while len(chosen) < count:
        size = min(span_length, count - len(chosen))
        start = chance.randint(0, length - size)
        chosen.update(range(start, start + size))
    return sorted(chosen)


def num_masked(length: int, ratio: float) -> int:
    """Count masked tokens: at least one is masked, and one is seen."""
    return max(1, min(length - 1, round(ratio * length)))


MASKINGS: Mapping[str, Callable[[int, int, int, random.Random], list[int]]] = {"random": random_tokens, "spans": spans}
"""Name of a strategy -> (length, how many, span_length, chance) -> positions in rising order."""
