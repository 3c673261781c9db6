"""Strict and loose verdicts on a response, for each instruction and for all of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from covey.environments.ifeval.instructions import Instruction, instruction


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Which instructions a response follows, in their order.

    >>> judge("Sure, here:\\nYes.", [Instruction("punctuation:no_comma", {})])
    Verdicts(strict=(False,), loose=(True,))
    """

    strict: tuple[bool, ...]
    """On the response as it is."""
    loose: tuple[bool, ...]
    """On at least one of eight texts: the response, less its first or last line or both, each with and without `*`."""

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
    texts = list(dict.fromkeys(_loosened(response)))
    strict = tuple(wanted.holds(response) for wanted in instructions)
    loose = tuple(
        held or any(wanted.holds(text) for text in texts) for held, wanted in zip(strict, instructions, strict=True)
    )
    return Verdicts(strict, loose)


def verdicts(response: str, instruction_id_list: Sequence[str], kwargs: Sequence[Mapping[str, Any] | None]) -> Verdicts:
    """Give verdicts on the instructions of a row of IFEval's form. Raises ValueError for instructions that make no
    sense."""
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


def _loosened(response: str) -> Iterator[str]:
    """Yield the texts of the loose verdict that the strict one has not looked at."""
    lines = response.split("\n")
    shortened = ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
    yield from shortened
    for text in (response, *shortened):
        yield text.replace("*", "")
