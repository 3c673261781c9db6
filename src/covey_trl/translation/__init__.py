"""Translate settings of verl, TorchRL, OpenRLHF, prime-rl and the documents.

Their names are data, in the files of this folder. Those of TRL are in `covey_trl.fields`. The core asks for lines here
(`covey.config.names.explain_foreign`) where it does not know a name.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain

from covey.config.names import RUN_FOLDER, other_names
from covey.config.schema import setting_names
from covey_trl.fields import MAPPED, REFUSED
from covey_trl.translation.counterparts import Decision, System, Translation, system

SYSTEMS = ("words", "torchrl", "verl", "openrlhf", "prime_rl")
"""A file each. The first that has a name counts."""
AMBIGUOUS = {
    *("num_devices", "enabled", "r", "n", "name", "path", "model_path", "type", "mode", "rank", "alpha", "interval"),
    "enable",
}
"""Last parts of names that are ambiguous without the parts before them."""
FLAT = 3
"""Names without a section that tell a program."""


@dataclass(frozen=True, slots=True)
class Answered:
    """Answer to settings that were given."""

    typed: Mapping[str, str]
    """Settings that were given; none where defaults alone are answered."""
    answer: Translation
    is_decision: bool = False
    """Whether settings together were answered."""


@cache
def last_parts(*systems: str) -> Mapping[str, str]:
    """Map last parts and aliases to full names, for all systems or some."""
    names = [name for one in map(system, systems or SYSTEMS) for name in one.settings]
    found = {name.rpartition(".")[2]: name for name in reversed(names) if name.rpartition(".")[2] not in AMBIGUOUS}
    return found | {name: other for one in map(system, systems or SYSTEMS) for name, other in one.aliases.items()}


def answer(name: str, value: str, given: Mapping[str, str]) -> Answered | None:
    """Translate a foreign setting, None for unknown names.

    Settings that were typed together and decide one thing have one answer.

    >>> answer("train.sync_iter", "False", {}).answer
    Translation(words=('source=ray', 'max_staleness=1'), note='')
    """
    own = {*setting_names()} - {name}
    full = {typed: typed if typed in own else full_name(typed) for typed in (name, *given)}
    for one in map(system, SYSTEMS):
        known = one.row(full[name], value)
        if known is None or full[name] not in one.settings:
            continue
        for decision in one.decisions:
            relevant = {full[typed]: given[typed] for typed in given if full[typed] in decision.looked_at}
            if full[name] in decision.names and len(relevant) > 1:
                together = {typed: given[typed] for typed in given if full[typed] in decision.names}
                return Answered(together, decision.answer(relevant, one.defaults, one.maps))
        return Answered({name: value}, known)
    notes = (one.row(name, value) for one in map(system, SYSTEMS))
    return next((Answered({name: value}, note) for note in notes if note is not None), None)


def full_name(typed: str) -> str:
    """Return the full name of a last part, in any section."""
    section, _, leaf = typed.rpartition(".")
    is_known = any(system(one).has(typed) for one in SYSTEMS) or leaf in AMBIGUOUS
    is_own = any(name.startswith(f"{section}.") for name in setting_names())
    return last_parts().get(typed if is_known or is_own else leaf, typed)


def in_a_line(found: Answered) -> str:
    """Describe a translation in a line.

    >>> in_a_line(Answered({"train.sync_iter": "False"}, Translation(("source=ray", "max_staleness=1"))))
    'train.sync_iter=False is source=ray max_staleness=1 here'
    """
    typed = " ".join(f"{name}={value}" for name, value in found.typed.items())
    note = f" ({found.answer.note})" if found.answer.note else ""
    if found.answer.words:
        return f"{typed} is {' '.join(found.answer.words)} here{note}"
    return f"{typed} is no setting here{note or ' and need not be said'}"


def explain(name: str, value: str, given: Mapping[str, str]) -> str:
    """Describe a foreign setting in covey's words, "" for unknown names and slips of covey's own."""
    found = answer(name, value, given)
    if found is not None:
        return in_a_line(found)
    is_own = any(f".{name}." in f".{own}." for own in setting_names())
    if "." in name or is_own or name in {*other_names(), *RUN_FOLDER}:
        return ""
    if name in MAPPED:
        return f"{name} of TRL is here: {MAPPED[name]}"
    return f"{name} of TRL is no setting here: {REFUSED[name]}" if name in REFUSED else ""


def system_of(tokens: Sequence[str], given: Mapping[str, str]) -> System | None:
    """Identify the system of a command by its program or its settings.

    ValueError for a program that trains by something else.
    """
    programs = [token for token in tokens if "=" not in token]
    for one, token in ((system(name), token) for name in SYSTEMS for token in programs):
        if one.others.fullmatch(token):
            raise ValueError(f"{token} does not train by GRPO, which is all that covey does")
    for one in map(system, SYSTEMS):
        if any(one.programs.fullmatch(token) for token in programs):
            return one
    shares = sorted(((_share(system(name), given), name) for name in SYSTEMS), reverse=True)
    (most, name), (next_most, _) = shares[:2]
    return system(name) if most > next_most else None


def _share(one: System, given: Mapping[str, str]) -> int:
    """Count the settings that identify a system."""
    dotted = [name for name in given if "." in name]
    named = sum(2 * (name in {*one.settings, *one.aliases}) for name in dotted)
    shared = {*system("words").settings, *system("trl").settings, *MAPPED, *REFUSED}
    flat = sum(name in one.settings and name not in shared for name in given) if one.name == "openrlhf" else 0
    return named + sum(name.partition(".")[0] in one.sections for name in dotted) + (flat if flat >= FLAT else 0)


def is_program(token: str) -> bool:
    """Check that a word of a command starts one of the systems."""
    return "=" not in token and any(system(name).programs.fullmatch(token) for name in SYSTEMS)


def answers(one: System, given: Mapping[str, str]) -> Iterator[Answered]:
    """Translate settings by full names, then the defaults of the system.

    In the order of the table: of two names for one thing the later counts, however they were typed.
    """
    defaults = {**one.defaults, **one.variants.get(given.get("config_name", ""), {})}
    order = {name: place for place, name in enumerate(one.settings)}
    given = dict(sorted(given.items(), key=lambda item: (order.get(item[0], len(order)), item[0])))
    done: set[int] = set()
    for name in chain(given, (name for name in defaults if name not in given)):
        decisions = [decision for decision in one.decisions if name in decision.names]
        for decision in decisions:
            if id(decision) not in done:
                done.add(id(decision))
                yield _decide(decision, given, defaults, one)
        value = given.get(name, defaults.get(name, ""))
        found = one.row(name, value)
        if not decisions and found is not None:
            yield Answered({name: value} if name in given else {}, found)
        elif not decisions and name not in given:  # of one name here and there
            yield Answered({}, Translation((f"{name}={value}",)))


def _decide(decision: Decision, given: Mapping[str, str], defaults: Mapping[str, str], one: System) -> Answered:
    typed = {name: value for name, value in given.items() if name in decision.names}
    return Answered(typed, decision.answer(given, defaults, one.maps), is_decision=True)
