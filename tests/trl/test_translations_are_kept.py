"""What settings of other systems are here is what is written down: a change of any is meant, and shown in the commit.

To renew it: python -m tests.trl.test_translations_are_kept
"""

import random
from collections.abc import Iterator
from pathlib import Path

from covey_trl import translation as foreign
from covey_trl.translation.counterparts import Decision, Row, System, Translation, system

KEPT = Path(__file__).parents[1] / "data" / "translations.txt"
USUAL = ("true", "false", "null", "0", "0.5", "1", "2", "16", "-1", "a/b")
DRAWS = 8
"""Of values for each decision."""


def values_of(one: System, row: Row) -> list[str]:
    """All values that a row knows, or a few usual ones."""
    of_maps = [value for name, known in one.maps.items() if f"|{name}>" in row.words for value in known]
    return [*(row.values or {}), *of_maps] or (list(USUAL) if row.by else ["2"])


def wanted_by(decision: Decision) -> dict[str, list[str]]:
    """Values that decide, by short name."""
    found: dict[str, list[str]] = {short: [] for short in {**decision.reads, **decision.uses}}
    for case in decision.cases:
        for short, wanted in case.get("when", {}).items():
            found[short] += [str(one).lower() for one in (wanted if isinstance(wanted, list) else [wanted])]
    return {
        short: [value for value in dict.fromkeys(values) if value[0] not in ">~"] for short, values in found.items()
    }


def drawn(one: System, decision: Decision, chance: random.Random) -> dict[str, str]:
    """Some of what a decision reads, with values that matter and others."""
    wanted, typed = wanted_by(decision), {}
    every = [value for known in one.maps.values() for value in known]
    for short, names in {**decision.reads, **decision.uses}.items():
        if chance.random() < 0.75:
            choices = [*wanted[short], *(value for value in every if value in wanted[short]), *USUAL[:8]]
            typed[chance.choice(names)] = chance.choice(choices)
    return typed


def line(one: System, typed: dict[str, str], answer: Translation) -> str:
    said = " ".join(f"{name}={value}" for name, value in typed.items())
    return f"{one.name}: {said} -> {' '.join(answer.words) or ('(a note)' if answer.note else '(nothing)')}"


def lines() -> Iterator[str]:
    for one in map(system, (*foreign.SYSTEMS, "trl")):
        for name, row in one.settings.items():
            for value in values_of(one, row):
                yield line(one, {name: value}, row.answer(value, one.maps))
        for place, decision in enumerate(one.decisions):
            chance = random.Random(f"{one.name}/{place}")
            for typed in [{}, *(drawn(one, decision, chance) for _ in range(DRAWS))]:
                yield line(one, typed, decision.answer(typed, one.defaults, one.maps))
        yield from (f"{one.name} does {name}={value}" for name, value in one.defaults.items())
        for name, known in one.maps.items():
            yield f"{one.name} calls {name}: " + " ".join(f"{a}={b}" for a, b in known.items())


def test_every_answer_is_the_one_that_is_written_down() -> None:
    found, kept = list(lines()), KEPT.read_text(encoding="utf-8").splitlines()
    assert [one for one in found if one not in set(kept)] == []
    assert [one for one in kept if one not in set(found)] == []
    assert len(found) > 500


if __name__ == "__main__":
    KEPT.write_text("\n".join(lines()) + "\n", encoding="utf-8")
