"""Errors a user can mend, in one line each, with the nearest name that exists."""

import difflib
import errno
import re
from collections.abc import Collection
from pathlib import Path

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from covey import launch
from covey.disk import cannot_write
from covey.settings import CONF, setting_names

MENDABLE = (ValueError, OSError, ImportError, HydraException, OmegaConfBaseException)
"""What a user can mend, besides RunStopped. Anything else is a defect of covey and keeps its traceback."""


OUT_OF_MEMORY = re.compile(r"(?i)can't allocate memory|out of memory")
"""What torch's allocators say, on the CPU and on the GPU."""


NO_WRITING = (errno.EROFS, errno.ENOSPC, errno.EDQUOT)
"""Only writing meets these."""


def is_mendable(error: Exception) -> bool:
    """Whether one line is enough. A run that an environment stopped on purpose has said why."""
    if is_out_of_memory(error):
        return True
    if not isinstance(error, RuntimeError):
        return isinstance(error, MENDABLE)
    from covey.environments.base import RunStopped  # imports torch, which by now is imported

    return isinstance(error, RunStopped)


def is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and bool(OUT_OF_MEMORY.search(str(error)))
    )


def is_heard_elsewhere(error: Exception) -> bool:
    """Whether another rank says it: errors that came before the ranks met are the same on each, rank 0 says them."""
    from covey.policy.distribution import StoppedElsewhere  # imports torch, which by now is imported

    if isinstance(error, StoppedElsewhere):
        return True
    has_notes = "__notes__" in vars(error)
    return launch.rank() > 0 and not has_notes


def explain(error: Exception) -> str:
    """One line for a mendable error."""
    if is_out_of_memory(error):
        return (
            f"out of memory ({one_line(str(error)).removesuffix('.')[:200]}); lower micro_batch_tokens, logprob_chunk "
            "or engine.cache_bytes, or set model.gradient_checkpointing=true; none of them changes the update"
        )
    if isinstance(error, OSError) and error.errno in NO_WRITING and error.filename:
        return str(cannot_write(Path(error.filename), error))
    if isinstance(error, MissingConfigException):
        return _missing_choice(error)
    if isinstance(error, OverrideParseException):
        reason = error.message.splitlines()[1].partition(" expecting ")[0]
        return f'cannot read the override "{error.override}": {reason}'
    if isinstance(error, OmegaConfBaseException):
        return _setting(error)
    if isinstance(error, HydraException):
        return _composition(error)
    if match := re.fullmatch(r"unknown setting (\S+)", str(error)):
        return unknown_setting(match[1])
    return one_line(str(error)) or type(error).__name__


def one_line(text: str) -> str:
    return " ".join(text.split())


def unknown_setting(name: str, place: str = "") -> str:
    """With the nearest settings: spelled alike, or of the same name in another section."""
    known = sorted(set(setting_names()))
    if name in known:
        return f"the chosen environment has no setting {name}{place}; another environment has"
    near = nearest(name, known)
    return f"unknown setting {name}{place}{_did_you_mean(near)}"


def nearest(name: str, known: Collection[str]) -> list[str]:
    """At most three names, the likeliest first.

    >>> nearest("lr", ["optimizer.lr", "seed"])
    ['optimizer.lr']
    """
    leaf = name.rpartition(".")[2]
    peers = [other for other in known if other.count(".") == name.count(".")]
    alike = difflib.get_close_matches(name, peers, n=1, cutoff=0.75)
    same_leaf = [other for other in known if other.rpartition(".")[2] == leaf]
    near_leaf = [
        other for other in known if difflib.SequenceMatcher(None, other.rpartition(".")[2], leaf).ratio() > 0.8
    ]
    return list(dict.fromkeys([*alike, *same_leaf, *near_leaf]))[:3]


def _did_you_mean(names: Collection[str]) -> str:
    return f"; did you mean {' or '.join(names)}?" if names else ""


def _missing_choice(error: MissingConfigException) -> str:
    """A group without such a file, or no such --config-name."""
    group, _, choice = (error.missing_cfg_file or "").rpartition("/")
    choice = choice.removesuffix(".yaml")
    if not group:
        recipe = f"; there is recipe={choice}" if (CONF / "recipe" / f"{choice}.yaml").exists() else ""
        return f'no "{choice}" for --config-name in covey or --config-dir{recipe}'
    options = [option for option in error.options or () if not option.startswith("schema_")]
    if not options:
        return unknown_setting(group)
    close = difflib.get_close_matches(choice, options, n=1)
    return f'{group} has no choice "{choice}"{_did_you_mean(close) or ";"} choices: {", ".join(options)}'


def _composition(error: HydraException) -> str:
    """Hydra wraps OmegaConf's error; sometimes only its text is left."""
    cause = error.__cause__
    if isinstance(cause, OmegaConfBaseException):
        return _setting(cause)
    text = str(error)
    key, where = re.search(r"full_key: (\S+)", text), re.match(r"In '([^']+)'", text)
    place = f" in {where[1]}.yaml" if where else ""
    if key and re.search(r"Key '\S+' (is )?not in", text):
        return unknown_setting(key[1], place)
    if key:
        return f"{key[1]}{place}: {_reason(text.partition('composing config:')[2] or text)}"
    return one_line(text.partition("\nTo append")[0])


def _setting(error: OmegaConfBaseException) -> str:
    """An unknown key, or a value of the wrong type."""
    text = str(error)
    if re.search(r"Key '\S+' (is )?not in", text):
        return unknown_setting(error.full_key or str(error.key))
    return f"{error.full_key}: {_reason(text)}" if error.full_key else _reason(text)


def _reason(text: str) -> str:
    """OmegaConf's message without the lines about its types."""
    return one_line(re.split(r"\n\s+(?:full_key|reference_type|object_type)", text)[0])
