"""The doctor's findings, and the evidence behind them."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any

from covey_doctor.log import RunLog


class Level(IntEnum):
    """The severity of a finding."""

    NOTE = 1
    WATCH = 2
    SICK = 3

    @property
    def word(self) -> str:
        return self.name.lower()

    def milder(self) -> "Level":
        return Level(max(Level.NOTE, self - 1))


@dataclass(frozen=True, slots=True)
class Evidence:
    """Evidence of a rule in a run."""

    level: Level
    seen: str
    """The numbers, in a sentence."""
    since: int | None
    """First step of it, None where it is about the run as a whole."""
    until: int | None = None
    """Last step of it where it is over, else None."""
    values: Mapping[str, float] = field(default_factory=dict)
    prompts: tuple[str, ...] = ()
    """Prompts of the groups that show it best."""


@dataclass(frozen=True, slots=True)
class FindingRule:
    """One kind of finding: test, meaning and remedy."""

    id: str
    name: str
    why: str
    source: str
    advice: tuple[str, ...]
    """Settings by name and their changes, most likely first."""
    refuted: str
    """Observation that would prove it wrong."""
    look: Callable[[RunLog], Evidence | None]
    brings: tuple[str, ...] = ()
    """Ids of rules whose findings follow from this one."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule that holds."""

    rule: FindingRule
    evidence: Evidence
    cause: str | None = None
    """The id of the finding that it follows from, whose advice comes first."""
    first_step: int = 1
    """First step of the log."""
    advice: tuple[str, ...] = ()
    """Advice of the rule, without the settings that the run has already."""

    @property
    def level(self) -> Level:
        return self.evidence.level

    @property
    def title(self) -> str:
        """Return one line: step, finding, numbers."""
        evidence = self.evidence
        after = "" if self.cause is None else f" (follows from {self.cause})"
        return f"{self.rule.id} {self.rule.name}{self._when}: {evidence.seen}{after}"

    @property
    def _when(self) -> str:
        """Return the steps in which it holds, "" for the whole run."""
        since, until = self.evidence.since, self.evidence.until
        if since is None:
            return ""
        is_first = since <= self.first_step
        if until is not None:
            return f" from {'the first step' if is_first else f'step {since}'} to {until}, over now"
        return " from the first step on" if is_first else f" since step {since}"

    def as_row(self) -> dict[str, Any]:
        rule, evidence = self.rule, self.evidence
        return {
            **{"id": rule.id, "name": rule.name, "level": self.level.word, "title": self.title, "why": rule.why},
            "cause": self.cause,
            **{"source": rule.source, "advice": list(self.advice), "refuted": rule.refuted},
            **{name: value for name, value in asdict(evidence).items() if name != "level"},
            "prompts": list(evidence.prompts),
        }
