"""What `covey --help` says. Imports the classes of the settings and nothing heavier: help must not wait."""

import ast
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import get_type_hints

from covey.config.schema import GROUPS, Config, group_choices
from covey.rollouts.settings import GroupSizeStep
from covey.system.lookup import near
from covey.system.section import Section
from covey.system.setting import bounds_of

VERBS = {
    "train": "train by GRPO from verifiable rewards: the whole run, evaluated before and after",
    "cold-start": "run only the supervised warm-up on an environment's demonstrations",
    "judge": "train the judges of environment=infill, and say how often they are right",
    "evaluate": "measure a policy on held-out prompts",
    "audit": "ask a grader what graders are known to fall for, before a policy does",
    "check": "try engine, trainer, tokenizer, gold answers and memory on your model, without training it",
    "show": "print the result of a run again, with its best and worst answers; or several runs side by side",
    "rollouts": "print the answers of a step, episodes turn by turn",
    "report": "write a page of a run, or of several: curves, groups, every token, before and after; needs no server",
    "doctor": "diagnose a run of covey, TRL or verl by its logs: findings with reasons and settings to change",
    "watch": "show the curves of a run in the terminal while it trains",
    "status": "print what the trainer and each sampler of a run with source=ray do now",
    "replay": "train an asynchronous run again on this machine, by its schedule, to the same weights bit for bit",
    "config": "print every setting of a run, resolved, without running it",
    "translate": "print the covey command for a command, script or configuration of TRL, verl or TorchRL",
    "plan": "estimate memory, time and cost of a run before it begins, on named GPUs and on this machine",
    "machines": "draw and simulate a machine in a file, or show the best ones of a run",
}

EXAMPLES = {
    "train": (
        "covey train recipe=arithmetic seed=3",
        "covey train environment=gsm8k data.path=rows/ model=nano num_steps=3",
        "covey train environment=reward_functions data.path=rows.jsonl rewards=[my_module:my_reward]",
        "covey train recipe=arithmetic optimizer.lr=1e-4,3e-4 --multirun",
        "covey train --config outputs/DATE/TIME/config.yaml seed=1",
        "covey train --config-dir my_conf --config-name my_run",
    ),
    "cold-start": ("covey cold-start recipe=arithmetic cold_start.num_steps=50",),
    "judge": ("covey judge recipe=infill_nano environment.judge_num_steps=1000",),
    "evaluate": (
        "covey evaluate model.name=outputs/DATE/TIME/checkpoints/step-000060/policy",
        "covey evaluate model.name=downloaded/checkpoints/step-000060/policy trust_run=true",
        "covey evaluate model.name=FOLDER recipe=my_rewards rewards=[my_checks:right] data.path=my_test.jsonl",
        "covey evaluate model.name=FOLDER --against OTHER --config outputs/DATE/TIME/config.yaml",
    ),
    "audit": (
        "covey audit my_checks:exact rows.jsonl",
        "covey audit recipe=gsm8k data.path=openai/gsm8k data.subset=main evaluation.num_prompts=20",
    ),
    "check": ("covey check recipe=gsm8k data.path=openai/gsm8k data.subset=main",),
    "rollouts": (
        "covey rollouts outputs/DATE/TIME",
        "covey rollouts outputs/DATE/TIME --step 40 --worst --number 3",
    ),
    "report": (
        "covey report outputs/DATE/TIME",
        "covey report outputs/DATE/TIME --follow",
        "covey report FOLDER FOLDER --out compared.html",
    ),
    "doctor": (
        "covey doctor outputs/DATE/TIME",
        "covey doctor outputs/DATE/TIME --json",
        "covey doctor outputs/DATE/TIME --control FOLDER",
        "covey doctor OUTPUT_OF_TRL/checkpoint-500/trainer_state.json",
    ),
    "watch": ("covey watch outputs/DATE/TIME",),
    "status": ("covey status outputs/DATE/TIME",),
    "replay": ("covey replay outputs/DATE/TIME",),
    "show": ("covey show outputs/DATE/TIME", "covey show --answers 10 outputs/DATE/TIME", "covey show FOLDER FOLDER"),
    "config": ("covey config recipe=gsm8k algorithm.kl_coef=0.01",),
    "translate": ("covey translate -- train.sync_iter=False env.dataset=gsm8k", "covey translate run_grpo.sh"),
    "plan": (
        "covey plan recipe=countdown --on h100,l40s",
        "covey plan recipe=gsm8k_lora data.path=openai/gsm8k data.subset=main --on h100 --gpus 4 --answer-tokens 300",
        "covey plan recipe=arithmetic --on here --probe",
        "covey plan model.name=FOLDER_WITH_CONFIG_JSON recipe=countdown --price 2.5 --json",
    ),
    "machines": (
        "covey machines show car.json",
        "covey machines simulate car.json --film car.gif",
        "covey machines gallery outputs/DATE/TIME --best 12",
    ),
}

FLAGS = {
    "--config FILE": "begin with every setting in FILE: a run's config.yaml, or what `covey config` printed",
    "--config-name NAME, -cn": "begin with NAME.yaml of covey or of --config-dir instead of config.yaml",
    "--config-dir FOLDER, -cd": "look for configuration in FOLDER too (FOLDER/recipe/mine.yaml: recipe=mine)",
    "--multirun, -m": "one run for each combination of values separated by commas",
    "--cfg job, --info all, --hydra-help": "look into the composition (Hydra's own flags)",
    "--help, -h": "this help; `covey config --help` lists every setting",
}

MACHINES = {
    "show FILE": "say what a machine is made of, and draw it from four sides",
    "simulate FILE": "say where it goes and what it is worth under each rule, and draw that",
    "gallery FOLDER": "draw the machines with the highest scores among the rollouts a run has kept",
    "--out PICTURE.png": "where to draw; beside the file, or in the run folder",
    "--film FILM.gif": "simulate, gallery: also film it (the best one)",
    "--task car|catapult": "simulate: whose walls and rules; catapult for a machine with a boulder",
    "--best N": "gallery: how many",
}

TRUST = """\
The policy of a run is measured with the settings of that run. If you did not make the run on this account, nothing that
its settings name is imported (rewards, environments, data, advantages and losses as module:function), no link in it is
followed, and the command says what it would have been; trust_run=true takes it all as it is. Code beside weights
(trust_remote_code) is never run. docs/trust/reliability.md has the details."""

ROLLOUTS = {
    "--step N": "those of step N; of the last step that kept any",
    "--prompt ID": "those of one prompt",
    "--number N": "how many, the best first",
    "--worst": "the worst first",
    "--evaluation": "answers of evaluations instead of training",
}

REPORT = {
    "--out FILE.html": "where the page goes; report.html in the first folder",
    "--follow": "write it again every 10 seconds while a run trains; the page reloads itself",
    "--text": "print it instead",
    "--png FOLDER": "draw the curves as pictures instead (covey[report])",
}

EVALUATE = {
    "--against POLICY": "measure this policy too, on the same prompts, and print the paired differences",
}

DOCTOR = {
    "--json": "print it as JSON, for programs",
    "--control RUN": "the same run with shuffled rewards: what it gains is not from the rewards",
}

DOCTOR_EXIT = """\
Exit codes: 0 healthy, 3 something to watch, 4 sick; 1 a defect of covey, 2 a mistake in the words. While a run trains,
the same findings are warnings; doctor.stop_on=[D4,D12] ends it there. docs/use/doctor.md lists them all."""

PLAN = {
    "--on NAMES": "a100, h100, h200, b200, l40s, rtx4090, rtx5090, here; by default h100, l40s, rtx4090 and here",
    "--gpus N": "how many train; samplers of source=ray come on top",
    "--probe": "train four steps here first: their seconds and lengths correct the plan, and later ones of the model",
    "--answer-tokens N, --prompt-tokens N": "mean lengths, where you know them",
    "--price DOLLARS": "of one GPU and hour, in the place of the table's",
    "--json": "print it as JSON, for programs",
}

SHOW = {
    "--answers N": "so many of the best answers, and of the worst",
}

USAGES = {
    "machines": "covey machines show|simulate FILE.json [flags]\n       covey machines gallery FOLDER [flags]",
    "show": "covey show RUN [RUN ...] [--answers N]",
    "rollouts": "covey rollouts RUN [flags]",
    "report": "covey report RUN [RUN ...] [flags]",
    "doctor": "covey doctor RUN [RUN ...] [flags]",
    "watch": "covey watch RUN",
    "status": "covey status RUN",
    "replay": "covey replay RUN",
    "translate": "covey translate FILE|-- COMMAND",
}
"""Of the verbs without settings."""
OWN_FLAGS = {
    "machines": (MACHINES, 22),
    "show": (SHOW, 12),
    "rollouts": (ROLLOUTS, 15),
    "report": (REPORT, 18),
    "doctor": (DOCTOR, 15),
}
"""Flags of these verbs, and the width of the column of names."""

OVERVIEW = """\
covey: GRPO post-training of language models from verifiable rewards

usage: covey VERB [setting=value ...] [flags]

{verbs}

{examples}

covey VERB --help                      settings and flags
covey --version
covey --shell-completion install=bash  tab completion: eval "$(covey --shell-completion install=bash)" (zsh, fish)

The run folder is outputs/DATE/TIME; hydra.run.dir=FOLDER names another. covey show latest, and other verbs that take a
run folder, mean the one below outputs or multirun that was begun last. COVEY_DEBUG=1 shows tracebacks."""


def overview() -> str:
    """Return the text of `covey --help`."""
    examples = [f"  {EXAMPLES[verb][0]}" for verb in VERBS]
    return OVERVIEW.format(verbs=_columns(VERBS, 12), examples="\n".join(examples))


def unknown_verb(verb: str, rest: Sequence[str]) -> str:
    """Say that there is no such verb, and what may be meant: another, or a setting or resume= after train."""
    word = f"resume={''.join(rest[:1]) or 'FOLDER'}" if verb == "resume" else verb
    meant = f"; did you mean covey train {word}?" if "=" in word else near(verb, VERBS)
    return f'no verb "{verb}"{meant}; verbs: {", ".join(VERBS)}'


def verb_help(verb: str) -> str:
    """Return the text of `covey VERB --help`: flags, groups and settings.

    For config these are all settings, else those of the top level.
    """
    # Leave verbs without settings to pages of their own
    if verb in USAGES:
        return _page_without_settings(verb)
    # Describe usage, flags and groups
    parts = [f"usage: covey {verb} [setting=value ...] [flags]\n\n{VERBS[verb]}"]
    parts.append("examples:\n" + "\n".join(f"  {line}" for line in EXAMPLES[verb]))
    if verb == "evaluate":
        parts += [TRUST, "flags of this verb:\n" + _columns(EVALUATE, 37)]
    if verb == "plan":
        parts.append("flags of this verb:\n" + _columns(PLAN, 37))
    parts.append("flags:\n" + _columns(FLAGS, 37))
    groups = {group: ", ".join(choices) for group, choices in group_choices().items()}
    parts.append("choices (GROUP=NAME):\n" + _columns(groups, 14))
    # Describe settings, of all sections for config
    sections = all_settings()
    root = {"Config": sections.pop("Config")}
    shown = root | sections if verb == "config" else root
    for name, settings in shown.items():
        title = f"settings of {section_of(name)}:" if name != "Config" else "settings:"
        described = {f"{s.name} = {s.default}": s.explanation for s in settings}
        parts.append(f"{title}\n" + _columns(described, 44))
    return "\n\n".join(parts)


def _page_without_settings(verb: str) -> str:
    examples = "examples:\n" + "\n".join(f"  {line}" for line in EXAMPLES[verb])
    rows, width = OWN_FLAGS.get(verb, ({}, 0))
    flags = [_columns(rows | {"--help, -h": "this help"}, width)] if rows else []
    ending = [DOCTOR_EXIT] if verb == "doctor" else []
    return "\n\n".join([f"usage: {USAGES[verb]}", VERBS[verb], examples, *flags, *ending])


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of the schema, as its source says it."""

    name: str
    default: str
    explanation: str


def all_settings() -> dict[str, list[Setting]]:
    """Return the settings of every section of the schema, by the name of its class."""
    from covey.config.schema import ENVIRONMENT_SETTINGS

    sections = [Config, *_sections_of(Config), GroupSizeStep, *ENVIRONMENT_SETTINGS.values()]
    return {section.__name__: read_settings(section) for section in sections}


def _sections_of(config: type[Config]) -> list[type]:
    kinds = get_type_hints(config).values()
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]


def read_settings(section: type) -> list[Setting]:
    """Return the fields of a dataclass, those it inherits last, each with its docstring and its bounds."""
    bounds = {found.name: bounds_of(found) for found in fields(section)}
    own = [name for kind in section.__mro__ if is_dataclass(kind) for name in _fields_of(kind).items()]
    found: dict[str, Setting | None] = {}
    # Fields without a docstring are no settings to show; limits come from their metadata
    for name, (default, explanation) in own:
        limits = bounds[name].in_words(explanation)
        said = f"{explanation} [{limits}]" if limits else explanation
        found.setdefault(name, Setting(name, default, said) if explanation else None)
    return [setting for setting in found.values() if setting is not None]


def _fields_of(section: type) -> dict[str, tuple[str, str]]:
    """Return default and docstring of the fields that a class itself defines."""
    (node,) = (node for node in _classes(sys.modules[section.__module__]) if node.name == section.__name__)
    found = {}
    for statement, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and not ast.unparse(statement.annotation).endswith("Config"):
            found[ast.unparse(statement.target)] = (_default(statement.value), _docstring(after))
    return found


@cache
def _classes(module: ModuleType) -> list[ast.ClassDef]:
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    return [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]


def _docstring(node: ast.stmt | None) -> str:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return " ".join(ast.literal_eval(node.value).split()) if is_text and isinstance(node, ast.Expr) else ""


def _default(node: ast.expr | None) -> str:
    """Return a default as YAML would write it, what it makes where it is a factory."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "setting":
        return "..." if isinstance(node.args[0], ast.Name) else _default(node.args[0])
    if isinstance(node, ast.Call):
        factory = next(keyword.value for keyword in node.keywords if keyword.arg == "default_factory")
        return _default(factory.body) if isinstance(factory, ast.Lambda) else EMPTY.get(ast.unparse(factory), "...")
    text = ast.unparse(node) if node is not None else ""
    return {"None": "null", "True": "true", "False": "false"}.get(text, text.replace("'", ""))


EMPTY = {"list": "[]", "dict": "{}"}


def section_of(class_name: str) -> str:
    """Return the name in front of the dot.

    ColdStartConfig is cold_start, an environment's own class is environment=NAME.
    """
    words = "".join(f"_{c.lower()}" if c.isupper() else c for c in class_name.removesuffix("Config")).strip("_")
    return f"environment={words}" if words in GROUPS["environment"] else words


def _columns(rows: dict[str, str], width: int) -> str:
    """Lay out two columns, the right one wrapped to the terminal."""
    total = max(shutil.get_terminal_size().columns, width + 40)
    indent = " " * (width + 3)
    lines = [f"  {name:<{width}} {text}" for name, text in rows.items()]
    wrapped = [
        textwrap.fill(line, total, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
        for line in lines
    ]
    return "\n".join(wrapped)
