"""How settings of other programs are answered: words of covey, computed where they count something else."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import yaml

from covey.policy.models.naming import device_of_map

Words = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """What stands for a foreign setting here."""

    words: Words = ()
    """Covey's words; none where nothing need be said, or nothing can."""
    note: str = ""
    """Why there are no words, or what differs."""


@dataclass(frozen=True, slots=True)
class Counterpart:
    """How a foreign setting is answered."""

    template: Words = ()
    """Covey's words, {} standing for the value."""
    choices: Mapping[str, Words] = field(default_factory=dict)
    """Words of each value, in small letters; another value has the note alone."""
    note: str = ""
    """Given with every answer; of choices, where a value has no words."""
    computed: Callable[[str, Mapping[str, str]], Words] | None = None
    """Words from the value and all settings that were given."""

    def answer(self, value: str, given: Mapping[str, str]) -> Answer:
        """Return the words for a value. `given` holds all foreign settings by name."""
        if self.computed is not None:
            try:
                return Answer(self.computed(value, given), self.note)
            except ValueError:  # a number that is missing or none
                return Answer((), self.note or f"{value} is no number")
        if self.choices:
            known = self.choices.get(value.strip("'\"").lower())
            if known is not None:
                return Answer(known, "" if known else self.note)
            return Answer((), self.note or f"no counterpart for {value}; there is one for {', '.join(self.choices)}")
        return Answer(tuple(word.format(value) for word in self.template), self.note)


def same(*template: str, note: str = "") -> Counterpart:
    return Counterpart(template, note=note)


def switch(on: str = "", off: str = "", note: str = "") -> Counterpart:
    """Answer a truth value with words, none where what it asks for is so in any case."""
    said = {"true": tuple(on.split()), "false": tuple(off.split())}
    return Counterpart(choices=said | {"1": said["true"], "0": said["false"]}, note=note)


def choice(note: str = "", **choices: str) -> Counterpart:
    """Answer a word out of several, written with "_" or "-"."""
    said = {name: tuple(words.split()) for name, words in choices.items()}
    return Counterpart(choices=said | {name.replace("_", "-"): words for name, words in said.items()}, note=note)


def none(reason: str) -> Counterpart:
    return Counterpart(note=reason)


def groups_of_turns(value: str, given: Mapping[str, str]) -> Words:
    """Count prompts: TorchRL counts completions."""
    return (f"groups_per_step={max(1, int(float(value)) // int(given.get('env.repeats', '16')))}",)


def epochs(setting: str) -> Callable[[str, Mapping[str, str]], Words]:
    """Answer a number of passes, which does not count where `setting` is a number of steps."""

    def words(value: str, given: Mapping[str, str]) -> Words:
        return () if steps(given.get(setting, ""), given) else (f"num_epochs={float(value):g}",)

    return words


def steps(value: str, _: Mapping[str, str]) -> Words:
    """Answer a number of steps; nothing, or one below 1, leaves the length of the run to the passes."""
    if value.strip().lower() in ("", "null", "none") or float(value) < 1:
        return ()
    return (f"num_steps={int(float(value))}",)


def whole(setting: str) -> Callable[[str, Mapping[str, str]], Words]:
    """Answer a whole number that may be written 1e5 or 100_000."""
    return lambda value, _: (f"{setting}={int(float(value))}",)


def off_below_1(setting: str) -> Callable[[str, Mapping[str, str]], Words]:
    """Answer a number of steps of which -1 means never."""
    return lambda value, _: (f"{setting}={max(0, int(float(value)))}",)


def loggers(value: str, _: Mapping[str, str]) -> Words:
    known = [name for name in ("tensorboard", "wandb") if name in value]
    return (f"output.trackers=[{','.join(known)}]",) if known else ()


def device(value: str, _: Mapping[str, str]) -> Words:
    """Answer transformers' device_map, which may be written as JSON."""
    try:
        given = yaml.safe_load(value)
    except yaml.YAMLError:
        given = value
    return (f"model.device={device_of_map(given)}",)


def targets(value: str, _: Mapping[str, str]) -> Words:
    """Answer one name, or a list of names in brackets and quotes."""
    names = ",".join(re.findall(r"[\w.*-]+", value))
    return (f"model.lora_targets=[{names}]",)


def reference(value: str, _: Mapping[str, str]) -> Words:
    """Answer the name of a model that is compared with, of which None is the policy as it began."""
    is_own = value.strip("'\"").lower() not in ("", "none", "null")
    return (f"algorithm.reference_model={value}",) if is_own else ()
