"""One-line user errors with the nearest existing name."""

import errno
import re
from pathlib import Path

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from covey.config.checks import explain_error, misfit
from covey.config.schema import group_choices, unknown_setting
from covey.config.shelves import preset_file
from covey.system import ranks
from covey.system.disk import cannot_write
from covey.system.lookup import is_out_of_memory, near
from covey.system.text.format import one_line

MENDABLE = (ValueError, OSError, ImportError, HydraException, OmegaConfBaseException)
"""User errors, besides RunStopped. Anything else is a defect of covey and keeps its traceback."""


NO_WRITING = (errno.EROFS, errno.ENOSPC, errno.EDQUOT)
"""Only writing meets these."""


def is_user_error(error: Exception) -> bool:
    """Return True where one line is enough for this error."""
    if is_out_of_memory(error):
        return True
    if not isinstance(error, RuntimeError):
        return isinstance(error, MENDABLE)
    from covey.engine.base import EngineLost  # imports torch, which by now is imported
    from covey.types import RunStopped

    return isinstance(error, RunStopped | EngineLost)


def reported_by_other_rank(error: Exception) -> bool:
    """Return True where another rank prints this error.

    Errors from before the ranks met are the same on each: rank 0 prints them.
    """
    from covey.system.collectives import PeerRankFailed  # imports torch, which by now is imported

    if isinstance(error, PeerRankFailed):
        return True
    has_notes = "__notes__" in vars(error)
    return ranks.rank() > 0 and not has_notes


def explain(error: Exception) -> str:
    if is_out_of_memory(error):
        return (
            f"out of memory ({one_line(str(error)).removesuffix('.')[:200]}); lower micro_batch_tokens, logprob_chunk "
            "or engine.cache_bytes, or set model.gradient_checkpointing=true; none of them changes the update"
        )
    if isinstance(error, OSError) and error.errno in NO_WRITING and error.filename:
        return str(cannot_write(Path(error.filename), error))
    if isinstance(error, FileNotFoundError) and error.errno and error.filename is None:  # os.getcwd says no more
        return "the working directory has been deleted; change to another one"
    if isinstance(error, MissingConfigException):
        return _missing_choice(error)
    if isinstance(error, OverrideParseException):
        return f'cannot read the override "{error.override}": {_unreadable(error.override)}'
    if isinstance(error, OmegaConfBaseException):
        return explain_error(error)
    if isinstance(error, HydraException):
        return _composition(error)
    if match := re.fullmatch(r"unknown setting (\S+)", str(error)):
        return unknown_setting(match[1])
    return one_line(str(error)) or type(error).__name__


TYPOGRAPHIC = "“”„‘’‐‑‒–—−＝０１２３４５６７８９．\u00a0"
"""Quotes, dashes, signs, digits and blanks that word processors and web pages have in the place of plain ones."""


def _unreadable(word: str) -> str:
    """Describe the syntax of a word that Hydra cannot read."""
    name, equals, value = word.partition("=")
    if odd := next((c for c in word if c in TYPOGRAPHIC), None):
        quoted = ", or quote the value" if re.search(r"[^\W\d_eE]", value) else ""  # of numbers it would be no number
        return f"{odd} is not the plain character of programs; type it anew{quoted}"
    if value.startswith("=") and value.strip("="):
        return f"a setting has one =: write {name}={value.lstrip('=')}"
    if re.search(r"\s[\w.]+=", value):
        return "it holds several settings: write each as a word of its own"
    if value.endswith(","):
        return "it ends with a comma"
    if not equals or not re.fullmatch(r"[+~]*[\w.@:/-]+", name):
        return "settings are written name=value, such as recipe=arithmetic"
    if value.startswith(("[", "{")) or "'" in value:
        unclosed = "a bracket or a quote is not closed, or a text within needs quotes"
        return "names within braces have no quotes" if re.search(r'[{,]\s*"\w+"\s*:', value) else unclosed
    return f"quote the value, for the shell and for Hydra: \"{name}='{value}'\""


def _missing_choice(error: MissingConfigException) -> str:
    """Explain a missing group choice or --config-name."""
    file = (error.missing_cfg_file or "").removesuffix(".yaml")
    group, _, choice = file.partition("/")
    if not choice or group not in group_choices():  # of the user's own, which may lie in folders
        group, _, choice = file.rpartition("/")
    if not group:
        recipe = f"; there is recipe={choice}" if preset_file("recipe", choice) else ""
        return f'no "{choice}" for --config-name in covey or --config-dir{recipe}'
    found = [option for option in error.options or () if not option.startswith("schema_")]
    options = sorted({*found, *group_choices().get(group, ())} - {"fake"})  # which is of the tests
    if not options:
        return unknown_setting(group)
    said = f'{group} has no choice "{choice}"'
    if path := _path_of_choice(group, choice):
        return f"{said}; {path}"
    return f"{said}{near(choice, options) or ';'} choices: {', '.join(options)}"


def _path_of_choice(group: str, choice: str) -> str:
    """Describe how to write a path or class given as a choice."""
    if not choice:
        return ""
    if group == "model" and ("/" in choice or Path(choice).exists()):
        return f"a folder or a hub name is model.name={choice}"
    if group == "environment" and ":" in choice:
        return f"a class of yours is environment=custom environment.factory={choice}"
    name = Path(choice).name
    is_file = Path(f"{choice}.yaml").is_file()
    return f"with --config-dir FOLDER, FOLDER/{group}/{name}.yaml is {group}={name}" if is_file else ""


def _composition(error: HydraException) -> str:
    """Explain an error of Hydra or OmegaConf."""
    cause = error.__cause__
    if isinstance(cause, OmegaConfBaseException):
        return explain_error(cause)
    text = str(error)
    if several := re.match(r"Ambiguous value for argument '([^=]+)=(.*)'", text):
        name, values = several[1].lstrip("+"), several[2]
        return f"{name}={values} holds several values: add --multirun for a run of each; a list is {name}=[{values}]"
    if absent := re.match(r"Could not override '([^']+)'", text):
        return f"{absent[1]} is no group of covey's own; +{absent[1]}=NAME adds a choice of a group in --config-dir"
    if other := re.match(r"Could not delete from config. The value of '([^']+)'", text):
        return f"{other[1]} cannot be deleted; every setting has a value"
    if gone := re.match(r"Could not delete (?:from config\. )?'([^'=]*)", text):
        return f"{gone[1] or '~'} is not there to be deleted; settings are written name=value"
    if twice := re.search(r"An item is already at '([^']+)'", text):
        return f"{twice[1]} is a setting already: write it without +"
    # Explain a key that a file sets
    key, where = re.search(r"full_key: (\S+)", text), re.match(r"In '([^']+)'", text)
    place = f" in {where[1]}.yaml" if where else ""
    if key and re.search(r"Key '\S+' (is )?not in", text):
        group = where[1].partition("/")[0] if where else ""
        if key[1].partition(".")[0] == group and group not in OWN_SECTIONS:
            return f"{group} is no section of settings{place}; begin the file with the line `# @package _global_`"
        return unknown_setting(key[1], place)
    if key:
        return misfit(f"{key[1]}{place}", text.partition("composing config:")[2] or text)
    return one_line(text.partition("\nTo append")[0])


OWN_SECTIONS = ("model", "environment", "engine", "algorithm", "optimizer")
"""Groups of files whose settings lie in the section of their name."""
