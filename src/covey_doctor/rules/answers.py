"""Detect a text that wins for any question, unlike a frequent answer."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from covey_doctor.finding import Evidence, Level
from covey_doctor.log import Row, RunLog
from covey_doctor.rules.common import percent

MIN_PROMPTS = 20
"""Fewest prompts for a finding: as many are won late in the run, and as many were answered with the text."""
ONE_ANSWER, MOST = 0.3, 0.5
"""Share of won prompts won by one text: to look further, and more than an open question's commonest answer has."""
ALWAYS = 0.95
"""Share of its prompts that a text must win: the answer of a class fails on those of another."""
GROWN = 1.5
"""Times the share of its first half: how often an answer is right is a matter of the prompts, and stays."""


@dataclass(frozen=True, slots=True)
class TextVerdicts:
    """The questions that each text won, and those that it lost."""

    won: dict[str, set[str]] = field(default_factory=dict)
    lost: dict[str, set[str]] = field(default_factory=dict)

    @property
    def prompts(self) -> set[str]:
        return set().union(*self.won.values())

    def share(self, text: str) -> float:
        return len(self.won.get(text, ())) / max(1, len(self.prompts))


def wins_everywhere(log: RunLog) -> Evidence | None:
    """Find one text that is right for prompts whose right answers differ."""
    rows = [*log.answers, *log.rollouts]
    middle = log.steps[-1] // 2 if log.steps else 0
    bound = log.setting("evaluation.correct_above", 1.0)
    late = verdicts_of((row for row in rows if row["step"] > middle), bound)
    if len(late.prompts) < MIN_PROMPTS:
        return None
    text = max(late.won, key=lambda one: len(late.won[one]))
    share = late.share(text)
    early = verdicts_of((row for row in rows if row["step"] <= middle), bound)
    if share < ONE_ANSWER or fails_somewhere(text, late) or is_class(text, early, late):
        return None
    its_own = [row for row in rows if row["step"] > middle and said(row) == text]
    names = sorted({str(row.get("prompt_id")) for row in its_own})
    seen = f"one answer ({text[:40]!r}) is right for {percent(share)} of {len(late.prompts)} prompts, and seldom wrong"
    # It may have begun before the half that it is judged by
    first = 0 if early.share(text) >= ONE_ANSWER else middle + 1
    began = [step for kept in (log.answers, log.rollouts) for step in _said_since(kept, text) if step >= first]
    return Evidence(Level.WATCH, seen, min(began, default=first), values={"share": share}, prompts=tuple(names[:4]))


def _said_since(rows: Iterable[Row], text: str) -> list[int]:
    """Return each row's first step since the rows before."""
    rows = list(rows)
    steps = sorted({0, *(row["step"] for row in rows)})
    before = dict(zip(steps[1:], steps, strict=False))
    return [before.get(row["step"], 0) + 1 for row in rows if said(row) == text]


def fails_somewhere(text: str, seen: TextVerdicts) -> bool:
    """Return True if a text loses more than chance, or was rare.

    An answer that is right as often as its class is loses wherever the policy takes one class for another.
    """
    won, lost = seen.won[text], seen.lost.get(text, set())
    return len(won | lost) < MIN_PROMPTS or len(won - lost) < ALWAYS * len(won | lost)


def is_class(text: str, early: TextVerdicts, late: TextVerdicts) -> bool:
    """Return True if a text is one of several right answers."""
    if wins_against_others(text, late) or wins_against_others(text, joined(early, late)):
        return False
    others = {one: names - late.won[text] for one, names in late.won.items() if one != text}
    others = {one: names for one, names in others.items() if names}
    prompts = set().union(*others.values())
    # A few answers that share the other prompts out are the classes of the task
    if prompts and len(others) < 0.5 * len(prompts):
        return True
    # Among open answers, one is as often right as its prompts are asked: in the first half as now
    share = late.share(text)
    if len(early.prompts) >= MIN_PROMPTS:
        return share < min(ALWAYS, GROWN * early.share(text))
    return share < MOST


def wins_against_others(text: str, seen: TextVerdicts) -> bool:
    """Return True if a text wins where another is right, and where it is wrong.

    A class has several spellings, but what is right for some of its prompts is right for all.
    """
    won = seen.won.get(text, set())
    enough = max(2.0, 0.1 * len(won))
    pairs = ((seen.won[one] & won, seen.lost.get(one, set()) & won) for one in seen.won if one != text)
    return any(min(len(right), len(wrong - right)) >= enough for right, wrong in pairs)


def verdicts_of(rows: Iterable[Row], bound: float) -> TextVerdicts:
    """Return the prompts that each text won and lost; answers without a number are left out."""
    found = TextVerdicts()
    for row in rows:
        reward = row.get("reward")
        if isinstance(reward, int | float):
            kept = found.won if reward >= bound and reward > 0 else found.lost
            kept.setdefault(said(row), set()).add(asked(row))
    return found


def joined(one: TextVerdicts, other: TextVerdicts) -> TextVerdicts:
    return TextVerdicts(_joined(one.won, other.won), _joined(one.lost, other.lost))


def _joined(one: Mapping[str, set[str]], other: Mapping[str, set[str]]) -> dict[str, set[str]]:
    return {text: one.get(text, set()) | other.get(text, set()) for text in {*one, *other}}


def asked(row: Row) -> str:
    """Return a prompt's identity: text and columns, else its name.

    Prompts that ask for the same are one, such as the best machine of a stage: a text that wins one wins all.
    """
    if row.get("prompt") is None:
        return str(row.get("prompt_id"))
    return json.dumps([row["prompt"], row.get("columns")], sort_keys=True, default=str)


def said(row: Row) -> str:
    return re.sub(r"\s+", " ", str(row.get("completion"))).strip()
