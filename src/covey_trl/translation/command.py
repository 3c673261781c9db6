"""`covey translate FILE|-- COMMAND`: translate commands of other systems."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import yaml

from covey.cli.command_line import with_whole_numbers
from covey.config.checks import walk
from covey.config.names import did_you_mean, named_elsewhere
from covey.config.schema import Config, setting_names
from covey.config.shelves import preset_file
from covey.system.disk import read_regular
from covey.system.lookup import near
from covey.system.machine import silence_bitsandbytes
from covey_trl import translation as foreign
from covey_trl.fields import MAPPED, REFUSED
from covey_trl.translation.counterparts import System, system
from covey_trl.translation.scripts import (
    ENDS,
    LISTS,
    MAX_BYTES,
    OF_PYTHON,
    READERS,
    SCRIPTS,
    as_text,
    format_word,
    literal_assignments,
    pairs_of,
    read_file,
    unfold,
)

if TYPE_CHECKING:
    from covey_trl.config import GRPOConfig

SEVERAL = 3
"""Fields of TRL in a file of settings that tell it from another."""
LAUNCHER = ("num_processes", "nproc_per_node")
OF_SCRIPTS = ("remove_unused_columns", "trust_remote_code", "hub_model_id", "hub_private_repo", "hub_revision")
"""Fields that the trainer of a script obeys by itself."""
MANY_ROWS = (10**4, 10**5)
"""Two numbers of batches in the rows: what differs between them follows from the rows."""
MULTIRUN = ("--multirun", "-m")
STARTS = ("bash", "sh", "zsh", "sbatch", "source")
SBATCH = {
    "grpo-sync-multi-node.sbatch": "examples/slurm/sync.sbatch",
    "grpo-async-multi-node.sbatch": "examples/slurm/async.sbatch",
}
"""Batch scripts of TorchRL, and covey's."""


@dataclass
class TranslatedCommand:
    """Settings of covey by name, and notes on the rest."""

    words: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    flags: tuple[str, ...] = ()

    def add(self, word: str) -> None:
        """Add a setting in place of an earlier one of that name."""
        self.words[word.partition("=")[0]] = word


def run_translate(words: Sequence[str]) -> None:
    """Print covey's command. ValueError for words without settings."""
    if not words or (words[0] != "--" and len(words) > 1):
        typed = shlex.join(word for word in words if word != "--") or "env.dataset=gsm8k"
        raise ValueError(f"covey translate takes one file, or a command behind --: covey translate -- {typed}")
    tokens = list(words[1:]) if words[0] == "--" else _read_named(Path(words[0]))
    found = translate(tokens)
    is_script = words[0] != "--" and Path(words[0]).suffix not in READERS
    if not found.words and (is_script or not found.notes):
        raise ValueError(f"nothing to translate: no setting and no flag in {shlex.join(words[1:]) or words[0]}")
    print("\n".join(as_lines(found)))


def _read_named(path: Path) -> list[str]:
    """Read a file; the names of some identify them."""
    if not path.exists():
        raise ValueError(f"{path} is no file; a command stands behind --: covey translate -- {path}")
    if path.suffix in SCRIPTS:
        return [str(path)]
    return [path.name, *read_file(path)] if path.suffix in READERS else read_file(path)


def as_lines(found: TranslatedCommand) -> list[str]:
    """Lay out the command, a setting a line, with notes as comments."""
    command = [" ".join(("covey train", *found.flags)), *(f"  {shlex.quote(word)}" for word in found.words.values())]
    once = ["hydra.run.dir holds one run: name another for the next"] if "hydra.run.dir" in found.words else []
    return [" \\\n".join(command), *(f"# {note}" for note in (*found.notes, *once, *missing_settings(found.words)))]


def missing_settings(words: Mapping[str, str]) -> list[str]:
    """Note settings that a run needs and the command lacks."""
    if {"recipe", "resume"} & words.keys():
        return []
    rewarded = words.get("environment", "environment=reward_functions") == "environment=reward_functions"
    needed = {
        "model.name=NAME": {"model", "model.name"},
        "environment=NAME, or environment=reward_functions rewards=[MODULE:FUNCTION]": {"environment", "rewards"},
        **({"data.path=ROWS": {"data.path"}} if rewarded else {}),
    }
    missing = [what for what, names in needed.items() if not names & words.keys()]
    return [f"still to be named: {'; '.join(missing)}"] if missing else []


def translate(tokens: Sequence[str]) -> TranslatedCommand:
    """Translate a command. ValueError for contradictory fields of TRL."""
    found = TranslatedCommand()
    tokens = list(_open_files(tokens, found))
    _refuse_other_trainers(tokens)
    given = dict(pairs_of(tokens))
    processes = next((int(given.pop(name)) for name in LAUNCHER if given.get(name, "").isdigit()), 1)
    if processes > 1:
        found.notes.append(f"{processes} processes: torchrun --nproc-per-node={processes} -m covey train ...")
    # Whose command it is decides what its words mean
    known = set(setting_names())
    if one := foreign.system_of(tokens, {name: value for name, value in given.items() if name not in known}):
        _translate_system(one, tokens, given, known, found)
        return found
    given = _with_files_of_trl(given)
    # TRL's fields mean something together: batch sizes, defaults
    trl = system("trl")
    of_trl = [name for name in given if (name in MAPPED or name in REFUSED) and name not in trl.settings]
    documents = system("words").maps["documents"]
    of_document = [foreign.full_name(name) for name in given if foreign.full_name(name) in documents]
    is_trl = not of_document and (any(map(trl.programs.fullmatch, tokens)) or len(of_trl) >= SEVERAL)
    if is_trl:
        meant = {name: field for name, field in trl.maps["fields"].items() if name in given and field not in given}
        given |= {field: given.pop(name) for name, field in meant.items()}
        of_trl += meant.values()
        _translate_trl({name: given.pop(name) for name in of_trl}, processes, found)
        if adapters := {name: given.pop(name) for name in trl.defaults if name in given}:
            _add(next(foreign.answers(trl, adapters)), found)
    scripts = [word for word in tokens if word.endswith(".py") and "=" not in word and not trl.programs.fullmatch(word)]
    _translate_words(given, known, found)
    of_scripts = [system("words").maps["scripts"].get(Path(script).name) for script in scripts]
    recipe = next(filter(None, [*of_scripts, *map(documents.get, of_document)]), None)
    if recipe is not None and "recipe" not in found.words:  # a script of one of the documents
        found.words = {"recipe": recipe} | found.words
    elif recipe is None and scripts:
        found.notes.append(f"{scripts[0]} was not read: {OF_PYTHON}")
    if {"num_steps", "num_epochs"} <= found.words.keys():
        found.notes.append(f"{found.words.pop('num_epochs')} is left out: num_steps says how long the run is")
    return found


def _open_files(tokens: Sequence[str], found: TranslatedCommand) -> Iterator[str]:
    """Yield the words of a command, scripts and files expanded."""
    rest = list(unfold(tokens))
    before = "--"
    while rest:
        is_value = before.startswith("-") and "=" not in before
        word = before = rest.pop(0)
        path = Path(rest[0]) if rest and word in (*STARTS, "@", "--config_path") else Path(word)
        if word in ENDS or word.startswith((">", "2>")):
            return
        if path.name in SBATCH and (word not in STARTS or path.is_file()):
            found.notes.append(f"{path.name}: {SBATCH[path.name]} starts covey train with these words")
        if path.is_file() and (word in STARTS or path.suffix in SCRIPTS):
            yield from read_file(path, rest[1:] if word in STARTS else rest)
            return
        if word == "@" and path.suffix in READERS:  # a file of settings, as pydantic's command lines name it
            rest.pop(0)
            yield from read_file(path)
        elif word.startswith("--") and rest[:1] == ["@"] != rest:  # one of a section
            yield from (f"{word[2:].replace('-', '_')}.{setting}" for setting in read_file(Path(rest[1])))
            del rest[:2]
        elif not is_value and _holds_settings(path):  # as scripts take a file of settings by its place
            yield from read_file(path)
        else:
            yield word


def _holds_settings(path: Path) -> bool:
    if path.suffix != ".py" or not path.is_file():
        return path.suffix in READERS and path.is_file()
    return bool(literal_assignments(read_regular(path, MAX_BYTES).decode(errors="replace")))


def _translate_system(
    one: System, tokens: Sequence[str], given: Mapping[str, str], known: set[str], found: TranslatedCommand
) -> None:
    """Translate a command of a system, its defaults included."""
    program = next((token for token in tokens if "=" not in token and one.programs.fullmatch(token)), "")
    if program in tokens:  # what stands before it is its launcher's
        after = list(tokens[tokens.index(program) + 1 :])
        given = dict(pairs_of(after))
        found.flags = ("--multirun",) if set(MULTIRUN) & set(after) else ()
    last = foreign.last_parts(one.name)
    given = {one.aliases.get(name, name): value for name, value in given.items()}
    given = {name if one.has(name) or name in known else last.get(name, name): given[name] for name in given}
    whole = {name: [f"{section}.{name}" for section in one.sections] for name in given if name not in known}
    given = {next((n for n in whole.get(name, ()) if n in one.settings), name): given[name] for name in given}
    given = _interpolate(given, one.defaults, found)
    ours = [name for name in given if (name in known or name.startswith("hydra.")) and not one.has(name)]
    own = {name: given[name] for name in ours}
    theirs = {name: value for name, value in given.items() if one.has(name)}
    if one.has("program"):
        theirs["program"] = program
    for answered in foreign.answers(one, {**own, **theirs}):
        _add(answered, found)
    for name, value in own.items():
        found.add(with_whole_numbers(f"{name}={value}"))
    _translate_words({name: value for name, value in given.items() if name not in {*own, *theirs}}, known, found)
    found.words = dict(sorted(found.words.items(), key=lambda word: word[0] not in ("recipe", "algorithm")))
    found.notes.append(f"defaults of {one.name.replace('_', '-')} not carried over: {'; '.join(one.not_carried)}")


def _add(answered: foreign.Answered, found: TranslatedCommand) -> None:
    """Add the settings of an answer; of defaults only those that differ."""
    words, note = answered.answer.words, answered.answer.note
    if not answered.typed and "recipe" not in found.words:
        words = tuple(word for word in words if not _is_default(word))
    for word in words:
        found.add(word)
    if answered.is_decision and not answered.typed and note and not answered.answer.words:
        found.notes.append(note)
    elif answered.typed and (note or not (words or answered.is_decision)):
        found.notes.append(foreign.in_a_line(answered))


def _is_default(word: str) -> bool:
    """Check that a word sets covey's default."""
    name, _, text = word.partition("=")
    defaults = {one.name: one.value for one in walk(Config())}
    value = yaml.safe_load(text)
    if isinstance(value, str) and re.fullmatch(r"[\d.]+e-?\d+", value):
        value = float(value)
    return name in defaults and bool(defaults[name] == value)


def _interpolate(given: Mapping[str, str], defaults: Mapping[str, str], found: TranslatedCommand) -> dict[str, str]:
    """Fill in ${...} of settings, and note variables of the shell."""
    filled: dict[str, str] = {}
    for name, value in given.items():
        text = re.sub(r"\$\{([\w.]+\.[\w.]+)\}", lambda one: given.get(one[1], defaults.get(one[1], one[0])), value)
        if hole := re.search(r"\$\{?[A-Za-z_(@*][^}\s/]*\}?", text):
            found.notes.append(f"{name}={value} is left out: {hole[0]} has no value here; write it in")
        else:
            filled[name] = text
    return filled


def _with_files_of_trl(given: dict[str, str]) -> dict[str, str]:
    """Merge the fields of the named file into TRL's flags, which win."""
    if (file := Path(given.get("config", ""))).suffix in READERS:
        del given["config"]
        given = dict(pairs_of(read_file(file))) | given
    given |= {name: as_text(value) for name, value in _mapping(given.pop("model_init_kwargs", "")).items()}
    if "reward_funcs" in given:
        given["reward_funcs"] = _rewards(given["reward_funcs"])
    return given


def _refuse_other_trainers(tokens: Sequence[str]) -> None:
    """Refuse commands of TRL's other trainers."""
    for before, word in pairwise(["", *(token for token in tokens if "=" not in token)]):
        script = system("trl").others.fullmatch(word)
        is_verb = Path(before).name == "trl" and word != "grpo" and re.fullmatch("[a-z][a-z-]*", word)
        if script or is_verb:
            name = word.removeprefix("trl.scripts.").rpartition("/")[2].removesuffix(".py")
            here = f"; there is algorithm={name}" if preset_file("algorithm", name) else near(name, ["grpo"])
            what = word if script else f"trl {word}"
            raise ValueError(f"{what} does not train by GRPO, which is all that covey does{here}")


def _mapping(text: str) -> Mapping[str, Any]:
    """Parse keyword arguments of a flag or file. ValueError for another type."""
    try:
        found = yaml.safe_load(text) or {}
    except yaml.YAMLError:
        found = None
    if not isinstance(found, Mapping):
        raise ValueError(f"model_init_kwargs must be a mapping such as {{dtype: bfloat16}}, got {text}")
    return {str(name): value for name, value in found.items()}


def _rewards(names: str) -> str:
    """Translate names of rewards, custom ones to module:function.

    >>> _rewards("accuracy_reward,my_lib.rewards.short")
    'accuracy,my_lib.rewards:short'
    """
    split = [name.strip(" '\"") for name in names.strip("[]").split(",")]
    return ",".join(system("trl").maps["rewards"].get(name) or ":".join(name.rsplit(".", 1)) for name in split)


def _translate_words(given: Mapping[str, str], known: set[str], found: TranslatedCommand) -> None:
    """Translate settings of no particular system, or note why not."""
    done: set[str] = set()
    for name, value in _interpolate(given, {}, found).items():
        row = system("trl").row(name, value)  # else of any system
        of_trl = row and foreign.Answered({name: value} if row.note else {}, row)
        answered = of_trl or (None if name in known else foreign.answer(name, value, given))
        if answered is not None and name not in done and done & answered.typed.keys():
            answered = foreign.answer(name, value, {name: value})  # what it would be said with has been answered
        if answered is not None and not done & answered.typed.keys():
            done |= answered.typed.keys()
            _add(answered, found)
        elif answered is None and (name in known or name.startswith("hydra.")):
            is_named = name == "model" and preset_file("model", value) is None
            found.add(with_whole_numbers(f"{'model.name' if is_named else name}={value}"))
        elif answered is None:
            _name_elsewhere(name, value, known, found)


def _name_elsewhere(name: str, value: str, known: set[str], found: TranslatedCommand) -> None:
    names = named_elsewhere(name, known) or [one for one in known if one.rpartition(".")[2] == name.rpartition(".")[2]]
    if len(names) == 1:
        found.add(names[0] if "=" in names[0] else with_whole_numbers(f"{names[0]}={value}"))
    else:
        theirs = {*foreign.last_parts(), *MAPPED, *REFUSED, *system("trl").settings}
        said = " or ".join(names) or f"covey has nothing like it{did_you_mean(name, known | theirs)}"
        found.notes.append(f"{name}={value}: {said}")


def _translate_trl(given: Mapping[str, str], processes: int, found: TranslatedCommand) -> None:
    """Translate fields of GRPOConfig that differ from covey's defaults."""
    silence_bitsandbytes()
    from covey_trl.config import changed_fields, default_of
    from covey_trl.mapping import settings_of

    words = []
    # Processes and accumulated micro-batches are one product: what a step has
    accumulated = given.get("gradient_accumulation_steps", "1")
    if processes > 1 and accumulated.isdigit() and not {"generation_batch_size", "steps_per_generation"} & set(given):
        given = {**given, "gradient_accumulation_steps": str(int(accumulated) * processes)}
    for name, value in given.items():
        listed = [one.strip(" '\"") for one in value.strip("[]").split(",")]
        words += [f"--{name}", *(listed if name in LISTS else [value])]
    args = _read_fields(words)
    for name, value in changed_fields(args).items():
        if name in given and (why := REFUSED.get(name) or system("trl").maps["trainers"].get(name)):
            found.notes.append(f"{name}={value} is no setting here ({why})")
        if name in REFUSED:
            setattr(args, name, default_of(name))
        if name in OF_SCRIPTS:
            found.notes.append(f"{name}={value} is for scripts ({MAPPED[name]})")
    if args.reward_weights:
        found.add(f"reward_weights={format_word(args.reward_weights)}")
    few, many = (settings_of(args, (args.generation_batch_size or 1) * number) for number in MANY_ROWS)
    defaults = {one.name: one.value for one in walk(Config())}
    for name, value in few.items():
        if value == many[name] and defaults.get(name) != value:
            found.add(f"{name.removesuffix('.name')}={format_word(value)}")
    if of_rows := [name for name, value in few.items() if value != many[name] and name != "num_steps"]:
        found.notes.append(f"still to be set, by the number of rows: {', '.join(of_rows)}")
    if args.max_steps <= 0:
        found.add(f"num_epochs={args.num_train_epochs:g}")
        note = system("words").settings["num_train_epochs"].note
        found.notes.append(f"num_train_epochs={args.num_train_epochs:g}: {note}")


def _read_fields(words: Sequence[str]) -> "GRPOConfig":
    """Parse flags of TRL. ValueError for an impossible value."""
    from transformers import HfArgumentParser

    from covey_trl.config import GRPOConfig

    class Parser(HfArgumentParser):
        """Parser that raises instead of exiting."""

        def error(self, message: str) -> NoReturn:
            raise ValueError(message)

    parser = Parser(GRPOConfig)  # type: ignore[arg-type] # a dataclass
    parsed: tuple[GRPOConfig, ...] = parser.parse_args_into_dataclasses(list(words))
    return parsed[0]
