"""Check and order the words after a verb, before Hydra reads them.

Imports the schema of the settings and nothing heavier.
"""

import difflib
import os
import re
from collections.abc import Sequence
from decimal import Decimal
from functools import cache
from typing import Any, get_origin

from covey.cli import help as usage
from covey.config.names import explain_foreign, named_elsewhere, nearest, refuse_foreign
from covey.config.schema import setting_types, unknown_setting
from covey.policy.models.naming import check_name
from covey.run.folder import CONFIG, run_of
from covey.system.section import Section

CONFIG_FLAG = "--config"
FLAGS = {
    "--help": 0, "-h": 0, "--hydra-help": 0, "--multirun": 0, "-m": 0, "--run": 0, "-r": 0, "--resolve": 0,
    "--info": 0, "-i": 0, "--cfg": 1, "-c": 1, "--package": 1, "-p": 1, "--config-name": 1, "-cn": 1,
    "--config-dir": 1, "-cd": 1, CONFIG_FLAG: 1,
}  # fmt: skip
"""Flags that may stand after a verb, with the number of words each takes."""
ALL_OF_INFO = {"--info": "--info=all", "-i": "--info=all"}
"""A bare --info takes the next word for its topic, which may be any setting."""
TRAINS = ("train", "cold-start", "check", "audit")
"""Verbs that take the embedded policy and arithmetic unless settings name others."""
TASK = ("recipe", "environment", "data", "rewards", "resume")
"""Settings, sections and groups that say it."""
NO_NAME = re.compile(r"null|true|false|[+-]?\.?\d[\d_.eE+-]*|\{.*\}", re.IGNORECASE)
"""Values that Hydra does not read as the name of a choice."""
POWER_OF_TEN = re.compile(r"(?<![\w.])[+-]?\d+(?:\.\d+)?[eE]\+?\d+(?![\w.])")


def arrange(verb: str, words: Sequence[str]) -> list[str]:
    """Return flags first, then settings with whole numbers written out. ValueError."""
    flags: list[str] = []
    settings: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word.startswith("-"):
            flags += [ALL_OF_INFO.get(word, word), *_values(verb, word, rest)]
        else:
            _refuse_slip(word, rest)
            settings.append(with_whole_numbers(_with_home(word)))
    _refuse_foreign(settings)
    for word in settings:
        _refuse_no_choice(word)
        _refuse_no_section(word)
        _refuse_below(word)
    if verb in ("config", "plan") and {"-m", "--multirun"} & set(flags):
        raise ValueError(f"covey {verb} prints one configuration; --multirun is for covey train")
    of_train = verb in (*TRAINS, "evaluate") and set(flags) <= {"-m", "--multirun", "-r", "--run"}
    if of_train or (verb == "plan" and not words):
        _refuse_without_task(verb, settings)
    return [*flags, *settings]


def read_audit(words: Sequence[str]) -> list[str]:
    """Return the words of `covey audit` as settings: reward functions, then rows.

    >>> read_audit(["my_checks:exact", "rows.jsonl"])
    ['environment=reward_functions', 'rewards=[my_checks:exact]', 'data.path=rows.jsonl']
    """
    of_flags = {n + 1 for n, word in enumerate(words) if FLAGS.get(word) == 1}
    bare = [w for n, w in enumerate(words) if "=" not in w and not w.startswith("-") and n not in of_flags]
    if len(bare) > 2:
        raise ValueError(f"covey audit takes a reward function and a file of rows, got {' '.join(bare)}")
    settings = [f"rewards=[{bare[0]}]"] if bare else []
    settings += [f"data.path={bare[1]}"] if len(bare) > 1 else []
    group = ["environment=reward_functions"] if bare else []
    return [*group, *settings, *(word for word in words if word not in bare)]


def _says_what(word: str) -> bool:
    first = word.lstrip("+~").partition("=")[0].partition(".")[0]
    known = {"hydra", *usage.group_choices(), *(name.partition(".")[0] for name in _setting_types())}
    is_toy = word.startswith(("model=nano", "model.nano"))  # which has arithmetic of its own
    return is_toy or first in TASK or first not in known


def _refuse_without_task(verb: str, settings: Sequence[str]) -> None:
    """Refuse words without a task; a run's policy has that run's."""
    policies = [word.removeprefix("model.name=") for word in settings if word.startswith("model.name=")]
    if any(map(_says_what, settings)) or (verb == "evaluate" and any(map(run_of, policies))):
        return
    code = next((word.removeprefix("model.code=") for word in settings if word.startswith("model.code=")), None)
    for name in policies:
        check_name(name, code)
    what = "to measure" if verb == "evaluate" else "to train"
    raise ValueError(
        f"nothing says what {what}: covey {verb} recipe=arithmetic is a first run; "
        f"recipes: {', '.join(usage.group_choices()['recipe'])}; settings: covey {verb} --help"
    )


def _refuse_foreign(settings: Sequence[str]) -> None:
    """Refuse settings of TorchRL, verl and TRL, with covey's words."""
    pairs = [(name.lstrip("+~"), value) for name, _, value in (word.partition("=") for word in settings)]
    known = {*_setting_types(), *usage.group_choices()}
    refuse_foreign([name for name, _ in pairs if name not in known], dict(pairs), _setting_types())


def _refuse_no_section(word: str) -> None:
    name, equals, _ = word.lstrip("+").partition("=")
    sections = {"hydra", *(setting.partition(".")[0] for setting in _setting_types())}
    if equals and "." in name and not re.search("[@/]", name) and name.partition(".")[0] not in sections:
        raise ValueError(unknown_setting(name))


def _refuse_below(word: str) -> None:
    """Refuse a name below a single value or a list."""
    name, equals, value = word.lstrip("+").partition("=")
    for above, kind in _setting_types().items() if equals else ():
        below, is_list = name.removeprefix(f"{above}."), get_origin(kind) is list
        if below != name and get_origin(kind) is not dict and not (is_list and below[:1].isdigit()):
            what, meant = ("a list", "[...]") if is_list else ("one value", value)
            raise ValueError(f"{name}={value} sets nothing: {above} is {what}; write {above}={meant}")


def _refuse_no_choice(word: str) -> None:
    """Refuse a group with a value that is no choice."""
    group, _, value = word.lstrip("+").partition("=")
    groups = usage.group_choices()
    above, _, leaf = group.partition(".")
    if leaf and "." not in leaf and group not in _setting_types() and value in groups.get(above, ()):
        raise ValueError(f"unknown setting {group}; did you mean {above}={value}?")
    if group in groups and NO_NAME.fullmatch(value):
        own = f" (settings are written {group}.NAME=VALUE)" if value.startswith("{") else ""
        raise ValueError(f'{group} has no choice "{value}"{own}; choices: {", ".join(groups[group])}')


def _values(verb: str, word: str, rest: list[str]) -> list[str]:
    """Take the values that a flag needs off the rest."""
    flag, equals, _ = word.partition("=")
    if flag not in FLAGS:
        raise ValueError(f'no flag "{flag}"{_guess_meaning(verb, word, rest)}; see `covey {verb} --help`')
    named = word.partition("=")[2] if equals else (rest or [""])[0]
    is_theirs = flag in ("--config-name", "-cn") and not {"--config-dir", "-cd"} & {*rest}
    line = explain_foreign("config_name", named, {}) if is_theirs else ""
    if line.endswith(" here"):
        raise ValueError(line.replace("config_name=", "--config-name ", 1))
    count = 0 if equals else FLAGS[flag]
    if len(rest) < count:
        raise ValueError(f"{flag} needs a value")
    if flag in ("--cfg", "-c") and named not in ("job", "hydra", "all"):
        raise ValueError(f"{flag} must be one of job, hydra, all, got {named}; a file is {CONFIG_FLAG} {named}")
    return [rest.pop(0) for _ in range(count)]


def _guess_meaning(verb: str, word: str, rest: Sequence[str]) -> str:
    flag, equals, value = word.partition("=")
    name = flag.lstrip("-").replace("-", "_")
    if not equals:
        value = rest[0] if rest and not rest[0].startswith("-") and "=" not in rest[0] else "..."
    groups = usage.group_choices()
    if name in groups or name in _setting_types():
        return f"; settings are written {name}={value}"
    if line := explain_foreign(name, value, {}):
        return f"; {line}"
    of_plan = re.findall(r"--[a-z-]+", " ".join(usage.PLAN)) if verb == "plan" else []
    close = difflib.get_close_matches(flag, [*FLAGS, *of_plan], n=1)
    if close:
        return f"; did you mean {close[0]}?"
    known = list(_setting_types())
    found = named_elsewhere(name, known) or nearest(name, known)
    written = [other if "=" in other else f"{other}={value}" for other in found]
    return f"; did you mean {' or '.join(written)}?" if written else ""


def _refuse_slip(word: str, rest: Sequence[str]) -> None:
    """Refuse a word that sets nothing, or whose value follows a blank."""
    after = rest[0] if rest else ""
    if word.endswith("=") and after and "=" not in after and not after.startswith(("-", "~")):
        raise ValueError(f"{word} is empty; write {word}{after} without a blank")
    if word.startswith("="):
        raise ValueError(f"{word} names no setting; settings are written name=value, such as recipe=arithmetic")
    if word == "hydra.run.dir=":
        raise ValueError("hydra.run.dir is empty; name the folder of the run")
    if "=" in word or word.startswith("~"):
        return
    if after.startswith("="):
        value = after[1:] or (rest[1] if len(rest) > 1 else "...")
        raise ValueError(f"{word} sets nothing; write {word}={value} without blanks")
    if word.endswith((".py", ".sh", ".sbatch")):
        raise ValueError(
            f"{word} sets nothing: covey is no script; `covey translate -- COMMAND` turns the command line of verl or "
            "TorchRL into covey's, and a script of TRL runs with `from covey.trl import GRPOTrainer, GRPOConfig`"
        )
    if os.path.exists(os.path.join(word, CONFIG)):
        raise ValueError(
            f'"{word}" sets nothing: it is a run; resume={word} continues it, --config {word}/{CONFIG} takes its '
            f"settings, model.name={word}/checkpoints/STEP/policy its policy"
        )
    if os.path.exists(word) or "/" in word:
        raise ValueError(f'"{word}" sets nothing; did you mean model.name={word}?')
    groups = usage.group_choices()
    for group in ("recipe", *groups):
        if word in groups[group]:
            raise ValueError(f'"{word}" sets nothing; did you mean {group}={word}?')


def _with_home(word: str) -> str:
    """Expand a ~ after =, which shells leave as it is."""
    name, equals, value = word.partition("=")
    return f"{name}={os.path.expanduser(value)}" if equals and value.startswith("~/") else word


def with_whole_numbers(word: str) -> str:
    """Write out powers of ten in the value of an integer setting.

    >>> with_whole_numbers("num_steps=1e3"), with_whole_numbers("seed=1e1,2"), with_whole_numbers("optimizer.lr=1e3")
    ('num_steps=1000', 'seed=10,2', 'optimizer.lr=1e3')
    """
    name, equals, value = word.partition("=")
    kind = _setting_types().get(name.lstrip("+"))
    if not equals or kind not in (int, int | None, list[int]):
        return word

    def written_out(found: re.Match[str]) -> str:
        number = Decimal(found[0])
        return str(int(number)) if number == int(number) and abs(number) < Decimal(10) ** 20 else found[0]

    return f"{name}={POWER_OF_TEN.sub(written_out, value)}"


@cache
def _setting_types() -> dict[str, Any]:
    """Return the type of each dotted setting, int where environments differ."""
    found: dict[str, Any] = {}
    for name, kind in setting_types():
        is_section = name == "environment" or (isinstance(kind, type) and issubclass(kind, Section))
        if not is_section and found.get(name) not in (int, int | None, list[int]):
            found[name] = kind
    return found
