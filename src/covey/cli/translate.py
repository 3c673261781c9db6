"""`covey translate FILE|-- COMMAND`: the covey command for what TRL, verl or TorchRL are started with."""

import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, NoReturn

import yaml

from covey.cli.command_line import with_whole_numbers
from covey.config import foreign
from covey.config.checks import format_value, walk, yaml_fault
from covey.config.names import did_you_mean, named_elsewhere
from covey.config.schema import Config, setting_names
from covey.config.shelves import preset_file
from covey.system.disk import read_regular
from covey.system.lookup import near
from covey.system.machine import silence_bitsandbytes
from covey.trl.fields import MAPPED, REFUSED

if TYPE_CHECKING:
    from covey.trl.config import GRPOConfig

MAX_BYTES = 1 << 20
VARIABLE = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(\"[^\"\n]*\"|'[^'\n]*'|[^\s\"'()`]*)\s*$")
READERS: Mapping[str, Callable[[str], Any]] = {
    **{".json": json.loads, ".toml": tomllib.loads},
    **dict.fromkeys((".yaml", ".yml"), yaml.safe_load),
}
"""What reads a file of settings, by its suffix; any other file is a script."""
TRL_WORDS = ("trl", "trl.scripts.grpo", "grpo.py")
OTHER_SCRIPTS = re.compile(r"trl\.scripts\.(?!grpo$)(\w+)|(sft|dpo|kto|rloo|orpo|cpo|gkd)\.py")
"""Scripts of TRL that train otherwise."""
SEVERAL = 3
"""Fields of TRL in a file of settings that tell it from another."""
OF_SCRIPTS: Mapping[str, str] = {
    "output_dir": "hydra.run.dir={}",
    "model_name_or_path": "model.name={}",
    "model_revision": "model.revision={}",
    "dtype": "model.precision={}",
    "torch_dtype": "model.precision={}",
    "load_in_4bit": "model.load_in_4bit={}",
    "load_in_8bit": "model.load_in_8bit={}",
    "use_peft": "",
    "lora_r": "model.lora_rank={}",
    "lora_alpha": "model.lora_alpha={}",
    "lora_dropout": "model.lora_dropout={}",
    "lora_target_modules": "model.lora_targets=[{}]",
    "dataset_name": "data.path={}",
    "dataset_config": "data.subset={}",
    "dataset_train_split": "data.train_split={}",
    "dataset_test_split": "data.test_split={}",
    "reward_funcs": "environment=reward_functions rewards=[{}]",
    "reward_model_name_or_path": "environment=reward_functions rewards=[{{function:reward_model,args:{{model:{}}}}}]",
}
"""What TRL's scripts take besides GRPOConfig, and where a run lies."""
REWARDS_OF_TRL: Mapping[str, str] = {
    "accuracy_reward": "accuracy",
    "reasoning_accuracy_reward": "reasoning_accuracy",
    "think_format_reward": "think_format",
    "get_soft_overlong_punishment": "{function:soft_overlong,args:{max_length:1280,cache:256}}",
}
"""Rewards that TRL's scripts know by name, with the arguments that they give them."""
OF_TRAINERS = {
    "push_to_hub": "a command pushes nothing; GRPOTrainer of covey.trl does",
    "resume_from_checkpoint": "resume=FOLDER goes on with a run of covey's",
}
"""Fields of TRL that a command has no word for."""
LISTS = ("reward_funcs", "reward_weights", "lora_target_modules", "report_to")
"""Flags of TRL that take several words."""
OF_PYTHON = "a script of TRL runs with `from covey.trl import GRPOTrainer, GRPOConfig` in place of its import from trl"
LAUNCHER = ("num_processes", "nproc_per_node")
DROPPED = ("num_steps", "evaluation.every", "output.save_every")
"""Settings that need the number of rows."""


@dataclass
class Translation:
    """Covey's words, by what they set, and what is to be said of the rest."""

    words: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, word: str) -> None:
        """Add a word. Of two that set the same the later counts."""
        self.words[word.partition("=")[0]] = word


def run_translate(words: Sequence[str]) -> None:
    """Print the command. ValueError for words that name nothing to translate."""
    if not words or (words[0] != "--" and len(words) > 1):
        typed = shlex.join(word for word in words if word != "--") or "env.dataset=gsm8k"
        raise ValueError(f"covey translate takes one file, or a command behind --: covey translate -- {typed}")
    tokens = list(words[1:]) if words[0] == "--" else read_file(Path(words[0]))
    found = translate(tokens)
    if not found.words and not found.notes:
        raise ValueError(f"nothing to translate: no setting and no flag in {shlex.join(words[1:]) or words[0]}")
    print("\n".join(as_lines(found)))


def as_lines(found: Translation) -> list[str]:
    """Return the command, a word on each line, and the notes as comments."""
    command = ["covey train", *(f"  {shlex.quote(word)}" for word in found.words.values())]
    return [" \\\n".join(command), *(f"# {note}" for note in (*found.notes, *unnamed(found.words)))]


def unnamed(words: Mapping[str, str]) -> list[str]:
    """Say what a run needs that none of the words names, for which covey would take what it has."""
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


def read_file(path: Path) -> list[str]:
    """Return the words of a script, or of a file of settings as `name=value`. ValueError where there are none."""
    # Refuse files that hold no settings
    if not path.is_file():
        raise ValueError(f"{path} is no file; a command stands behind --: covey translate -- {path}")
    if path.suffix == ".py":
        raise ValueError(f"{path} is Python: {OF_PYTHON}; a command line that starts it is translated behind --")
    try:
        text = read_regular(path, MAX_BYTES).decode()
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    # Words of a shell script's command
    if path.suffix not in READERS:
        return words_of_script(text)
    # Settings of a file
    try:
        content = READERS[path.suffix](text)
    except yaml.MarkedYAMLError as error:
        raise ValueError(f"{path} cannot be read: {yaml_fault(error, text)}") from error
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no settings: it is no mapping")
    said = {name: _plain(value) if isinstance(value, Mapping) else _written(value) for name, value in flat(content)}
    return [f"{name}={value}" for name, value in said.items()]


def flat(content: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings by dotted names. Keyword arguments of TRL stay whole."""
    for name, value in content.items():
        if isinstance(value, Mapping) and value and not str(name).endswith("_kwargs"):
            yield from flat(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", value


def words_of_script(text: str) -> list[str]:
    """Return the words of the command in a shell script that sets most, its variables filled in. ValueError without."""
    variables = {"HOME": str(Path.home())}
    commands: list[list[str]] = []
    for line in text.replace("\\\n", " ").splitlines():
        filled = Template(line).safe_substitute(variables)
        if found := VARIABLE.match(filled):
            variables[found[1]] = found[2].strip("\"'")
            continue
        try:
            commands.append(shlex.split(filled, comments=True))
        except ValueError:  # an open quotation: no command that sets anything
            continue
    best = max(commands, key=lambda words: sum("=" in word or word.startswith("--") for word in words), default=[])
    if not best:
        raise ValueError("the script holds no command with settings")
    return best


def pairs_of(tokens: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of the settings and flags of a command. A flag alone is true."""
    rest = list(tokens)
    while rest:
        word = rest.pop(0)
        is_flag = word.startswith("-")
        name, equals, value = word.lstrip("-+~").partition("=")
        if not name or (not equals and not is_flag) or (equals and name.isupper()):  # a program, or its environment
            continue
        if is_flag:
            name = name.replace("-", "_")
        if not equals:
            most = None if name in LISTS else 1
            values = list(takewhile(lambda after: not after.startswith("-") and "=" not in after, rest[:most]))
            del rest[: len(values)]
            value = ",".join(values) or "true"
        if word != "-m":  # a module of Python's
            yield name, value


def translate(tokens: Sequence[str]) -> Translation:
    """Return covey's words for those of TRL, verl or TorchRL. ValueError for fields of TRL that contradict."""
    found = Translation()
    _refuse_other_trainers(tokens)
    given = dict(pairs_of(tokens))
    if (file := Path(given.get("config", ""))).suffix in READERS:  # TRL's: flags go before what it holds
        del given["config"]
        given = dict(pairs_of(read_file(file))) | given
    given |= {name: _plain(value) for name, value in _mapping(given.pop("model_init_kwargs", "")).items()}
    if "reward_funcs" in given:
        given["reward_funcs"] = _rewards(given["reward_funcs"])
    # Say how several processes are started
    processes = next((int(given.pop(name)) for name in LAUNCHER if given.get(name, "").isdigit()), 1)
    if processes > 1:
        found.notes.append(f"{processes} processes: torchrun --nproc-per-node={processes} -m covey train ...")
    # TRL's fields mean something together: batch sizes, defaults
    of_trl = [name for name in given if (name in MAPPED or name in REFUSED) and name not in OF_SCRIPTS]
    is_trl = any(Path(word).name in TRL_WORDS for word in tokens) or len(of_trl) >= SEVERAL
    if is_trl:
        _translate_trl({name: given.pop(name) for name in of_trl}, processes, found)
    scripts = [word for word in tokens if word.endswith(".py") and "=" not in word and Path(word).name not in TRL_WORDS]
    if scripts and (is_trl or not given):
        found.notes.append(f"{scripts[0]} was not read: {OF_PYTHON}")
    known = set(setting_names())
    for name, value in given.items():
        _translate_one(name, value, given, known, found)
    return found


def _refuse_other_trainers(tokens: Sequence[str]) -> None:
    """Refuse a command of TRL that trains by something else than GRPO: its flags mean other things."""
    for before, word in pairwise(["", *(token for token in tokens if "=" not in token)]):
        script = OTHER_SCRIPTS.fullmatch(Path(word).name)
        is_verb = Path(before).name == "trl" and word != "grpo" and re.fullmatch("[a-z][a-z-]*", word)
        if script or is_verb:
            name = script[1] or script[2] if script else word
            here = f"; there is algorithm={name}" if preset_file("algorithm", name) else near(name, ["grpo"])
            what = word if script else f"trl {word}"
            raise ValueError(f"{what} does not train by GRPO, which is all that covey does{here}")


def _mapping(text: str) -> Mapping[str, Any]:
    """Return keyword arguments that a flag or a file holds, none of an empty text. ValueError for anything else."""
    try:
        found = yaml.safe_load(text) or {}
    except yaml.YAMLError:
        found = None
    if not isinstance(found, Mapping):
        raise ValueError(f"model_init_kwargs must be a mapping such as {{dtype: bfloat16}}, got {text}")
    return {str(name): value for name, value in found.items()}


def _rewards(names: str) -> str:
    """Return what TRL's scripts call rewards by covey's names, those of somebody's own as module:function.

    >>> _rewards("accuracy_reward,my_lib.rewards.short")
    'accuracy,my_lib.rewards:short'
    """
    split = [name.strip(" '\"") for name in names.strip("[]").split(",")]
    return ",".join(REWARDS_OF_TRL.get(name) or ":".join(name.rsplit(".", 1)) for name in split)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _translate_one(name: str, value: str, given: Mapping[str, str], known: set[str], found: Translation) -> None:
    """Add the words for one setting, or a note of why there are none."""
    # TRL's scripts, TorchRL and verl
    if name in OF_SCRIPTS:
        for word in OF_SCRIPTS[name].format(value).split():
            found.add(word)
        return
    if name in ("cn", "config_name"):
        if value in foreign.CONFIG_NAMES:
            found.add(foreign.CONFIG_NAMES[value])
        else:
            found.notes.append(f"--config-name {value}: recipe=NAME begins with settings of covey's")
        return
    answer = foreign.answer(name, value, given)
    if answer is not None:
        for word in answer.words:
            found.add(word)
        if answer.note or not answer.words:
            found.notes.append(foreign.in_a_line(name, value, answer))
        return
    # What is covey's own, or has one other name here
    if name in known or name.startswith("hydra."):
        found.add(f"{name}={value}")
        return
    names = named_elsewhere(name, known)
    if len(names) == 1:
        found.add(names[0] if "=" in names[0] else with_whole_numbers(f"{names[0]}={value}"))
    else:
        theirs = {*foreign.LAST_PARTS, *MAPPED, *REFUSED, *OF_SCRIPTS}
        said = " or ".join(names) or f"covey has nothing like it{did_you_mean(name, known | theirs)}"
        found.notes.append(f"{name}={value}: {said}")


def _translate_trl(given: Mapping[str, str], processes: int, found: Translation) -> None:
    """Add what a GRPOConfig with these fields means, where it differs from covey's defaults."""
    silence_bitsandbytes()
    from covey.trl.config import changed_fields, default_of
    from covey.trl.mapping import settings_of

    # Read the fields as TRL's command line does
    words = []
    for name, value in given.items():
        words += [f"--{name}", *(value.split(",") if name in LISTS else [value])]
    args = _read_fields(words)
    for name, value in changed_fields(args).items():
        if name in given and (why := REFUSED.get(name) or OF_TRAINERS.get(name)):
            found.notes.append(f"{name}={value} is no setting here ({why})")
        if name in REFUSED:
            setattr(args, name, default_of(name))
    # Processes and accumulated micro-batches are one product: what a step has
    if processes > 1 and not {"generation_batch_size", "steps_per_generation"} & set(given):
        args.gradient_accumulation_steps *= processes
        args.steps_per_generation = args.generation_batch_size = None
        args._derive_batches()
    # Write what differs from covey's defaults
    num_rows = args.generation_batch_size or 1
    defaults = {one.name: one.value for one in walk(Config())}
    for name, value in settings_of(args, num_rows).items():
        depends = name in DROPPED and args.max_steps <= 0
        if not depends and defaults.get(name) != value:
            found.add(f"{name.removesuffix('.name')}={_written(value)}")
    if args.max_steps <= 0:
        found.add(f"num_epochs={args.num_train_epochs:g}")
        found.notes.append(f"num_train_epochs={args.num_train_epochs:g}: {foreign.TRL_STEPS}")


def _read_fields(words: Sequence[str]) -> "GRPOConfig":
    """Return the fields of TRL's flags. ValueError for a value that a field cannot have."""
    from transformers import HfArgumentParser

    from covey.trl.config import GRPOConfig

    class Parser(HfArgumentParser):
        """Raises in place of printing every field there is, and leaving."""

        def error(self, message: str) -> NoReturn:
            raise ValueError(message)

    parser = Parser(GRPOConfig)  # type: ignore[arg-type] # a dataclass
    parsed: tuple[GRPOConfig, ...] = parser.parse_args_into_dataclasses(list(words))
    return parsed[0]


def _written(value: Any) -> str:
    """Write a value as a word of the command line takes it."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{_written(one)}" for name, one in value.items()) + "}"
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return "inf" if value > 0 else "-inf"
    return format_value(value)
