"""The 25 kinds of instruction, with checked arguments.

The rules are those of the IFEval paper's checkers (arXiv 2311.07911, google-research/instruction_following_eval).
Departures, which no prompt of the benchmark can tell: keywords and postscript markers are taken literally, not as
patterns, and an argument that is missing or out of range is refused, where the official code draws one at random.
"""

import difflib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from covey_graders.ifeval.checks import languages, text_checks

Check = Callable[..., bool]


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a prompt, made and checked by `instruction`.

    >>> Instruction("keywords:existence", {"keywords": ["lantern", "harbor"]}).holds("Lanterns in the harbor.")
    True
    """

    id: str
    arguments: Mapping[str, Any]

    def holds(self, text: str) -> bool:
        """Return True if the text follows it. A blank text follows nothing."""
        return bool(text.strip()) and CHECKS[self.id](text, **self.arguments)


def instruction(instruction_id: str, arguments: Mapping[str, Any] | None) -> Instruction:
    """Return the instruction of an IFEval row; null arguments are absent.

    ValueError for an unknown kind, and for arguments it does not take, lacks or cannot mean.
    """
    if instruction_id not in CHECKS:
        raise ValueError(f"instruction must be one of {', '.join(CHECKS)}, got {instruction_id!r}")
    # Arguments without a value are absent, as in the benchmark's files
    given = {name: value for name, value in (arguments or {}).items() if value is not None}
    _check_names(instruction_id, given)
    checked = {name: _checked(instruction_id, name, value) for name, value in given.items()}
    if checked.get("nth_paragraph", 1) > checked.get("num_paragraphs", 1):
        raise ValueError(
            f"nth_paragraph of {instruction_id} must be <= num_paragraphs={checked['num_paragraphs']}, "
            f"got {checked['nth_paragraph']}"
        )
    if instruction_id in NEED_LANGDETECT:
        languages.check_installed()
    if "language" in checked:
        _check_language(f"language of {instruction_id}", checked["language"])
    return Instruction(instruction_id, checked)


def _check_names(instruction_id: str, given: Collection[str]) -> None:
    """Refuse unknown and missing arguments of a check. ValueError."""
    where, check = f"kwargs of {instruction_id}", CHECKS[instruction_id]
    needed = list(inspect.signature(check).parameters)[1:]
    unknown, missing = sorted(set(given) - set(needed)), [name for name in needed if name not in given]
    if unknown:
        allowed = f"be among {', '.join(needed)}" if needed else "be empty"
        raise ValueError(f"{where} must {allowed} for {check.__name__}, got {', '.join(unknown)}")
    if missing:
        raise ValueError(f"{where} must set {', '.join(missing)} for {check.__name__}, got {sorted(given)}")


def _check_language(where: str, code: str) -> None:
    known = languages.codes()
    if code not in known:
        close = difflib.get_close_matches(code, known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(f"{where} must be one of {', '.join(known)}, got {code}{hint}")


def _checked(instruction_id: str, name: str, value: Any) -> Any:
    """Convert an argument to its check's type. Raises ValueError."""
    where = f"{name} of {instruction_id}"
    if name in COUNTS:
        return _count(where, value, at_least=name == "nth_paragraph")
    if name in WORD_LISTS:
        if not isinstance(value, list | tuple) or not value or not all(isinstance(v, str) and v for v in value):
            raise ValueError(f"{where} must be a list of words, got {value!r}")
        return list(value)
    if name.endswith("relation") and value not in text_checks.COMPARED:
        raise ValueError(f"{where} must be one of {', '.join(text_checks.COMPARED)}, got {value!r}")
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where} must be a text that is not blank, got {value!r}")
    if name == "letter" and len(value.strip()) != 1:
        raise ValueError(f"{where} must be one character, got {value!r}")
    return value


def _count(where: str, value: Any, at_least: int) -> int:
    """Return a whole number, which Parquet may hold as a fraction."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value % 1 != 0 or value < at_least:
        raise ValueError(f"{where} must be a whole number >= {int(at_least)}, got {value!r}")
    return int(value)


COUNTS = frozenset({
    "frequency", "let_frequency", "num_sentences", "num_words", "num_paragraphs", "nth_paragraph",
    "num_placeholders", "num_bullets", "num_highlights", "num_sections", "capital_frequency",
})  # fmt: skip
"""Arguments that are whole numbers."""
WORD_LISTS = frozenset({"keywords", "forbidden_words"})
NEED_LANGDETECT = frozenset(
    {"language:response_language", "change_case:english_capital", "change_case:english_lowercase"}
)

GROUPS = {
    "keywords": "existence frequency forbidden_words letter_frequency",
    "language": "response_language",
    "length_constraints": "number_sentences number_paragraphs number_words nth_paragraph_first_word",
    "detectable_content": "number_placeholders postscript",
    "detectable_format": "number_bullet_lists constrained_response number_highlighted_sections multiple_sections"
    " json_format title",
    "combination": "two_responses repeat_prompt",
    "startend": "end_checker quotation",
    "change_case": "capital_word_frequency english_capital english_lowercase",
    "punctuation": "no_comma",
}
CHECKS: dict[str, Check] = {
    f"{group}:{name}": getattr(text_checks, name) for group, names in GROUPS.items() for name in names.split()
}
"""Kind to its check: (text, *, arguments) -> whether the text follows it."""


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Verdict on each instruction of a response, in their order.

    >>> judge("Sure, here:\\nYes.", [Instruction("punctuation:no_comma", {})])
    Verdicts(strict=(False,), loose=(True,))
    """

    strict: tuple[bool, ...]
    """Verdicts on the response as it is."""
    loose: tuple[bool, ...]
    """Verdicts on any of eight texts: the response, less its first or last line or both, each with and without `*`."""

    @property
    def all_strict(self) -> float:
        return float(all(self.strict))

    @property
    def share_strict(self) -> float:
        return fmean(self.strict)

    @property
    def all_loose(self) -> float:
        return float(all(self.loose))

    @property
    def share_loose(self) -> float:
        return fmean(self.loose)


def judge(response: str, instructions: Sequence[Instruction]) -> Verdicts:
    """Give both verdicts on each instruction. A blank response follows none."""
    texts = list(dict.fromkeys(_loose_texts(response)))
    strict = tuple(wanted.holds(response) for wanted in instructions)
    loose = tuple(
        held or any(wanted.holds(text) for text in texts) for held, wanted in zip(strict, instructions, strict=True)
    )
    return Verdicts(strict, loose)


def verdicts(response: str, instruction_id_list: Sequence[str], kwargs: Sequence[Mapping[str, Any] | None]) -> Verdicts:
    """Judge the instructions of an IFEval row. Raises ValueError."""
    return judge(response, instructions_of(instruction_id_list, kwargs))


def instructions_of(
    instruction_id_list: Sequence[str], kwargs: Sequence[Mapping[str, Any] | None]
) -> tuple[Instruction, ...]:
    """Return the instructions of a row of IFEval's form."""
    if not instruction_id_list or len(instruction_id_list) != len(kwargs):
        raise ValueError(
            f"a prompt needs at least one instruction, and kwargs for each, "
            f"got {len(instruction_id_list)} instructions and {len(kwargs)} kwargs"
        )
    return tuple(instruction(name, given) for name, given in zip(instruction_id_list, kwargs, strict=True))


def _loose_texts(response: str) -> Iterator[str]:
    """Yield the further texts of the loose verdict."""
    lines = response.split("\n")
    shortened = ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
    yield from shortened
    for text in (response, *shortened):
        yield text.replace("*", "")
