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
from covey.tables import near

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
        if reason.startswith("missing EQUAL"):
            reason = "settings are written name=value, such as recipe=arithmetic"
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
    near = named_elsewhere(name, known) or nearest(name, known)
    return f"unknown setting {name}{place}{_did_you_mean(near)}"


def named_elsewhere(name: str, known: Collection[str]) -> list[str]:
    """What a setting of TRL, verl or transformers is called here, in the same section where that has it too.

    >>> named_elsewhere("cold_start.learning_rate", ["optimizer.lr", "cold_start.lr"])
    ['cold_start.lr']
    """
    section, _, leaf = name.rpartition(".")
    own = OTHER_NAMES.get(leaf, ())
    here = [f"{section}.{other.rpartition('.')[2]}" for other in own]
    return [other for other in here if other in known] or list(own)


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
    return f'{group} has no choice "{choice}"{near(choice, options) or ";"} choices: {", ".join(options)}'


def _composition(error: HydraException) -> str:
    """Hydra wraps OmegaConf's error; sometimes only its text is left."""
    cause = error.__cause__
    if isinstance(cause, OmegaConfBaseException):
        return _setting(cause)
    text = str(error)
    if several := re.match(r"Ambiguous value for argument '([^=]+)=(.*)'", text):
        name, values = several[1].lstrip("+"), several[2]
        return f"{name}={values} holds several values: add --multirun for a run of each; a list is {name}=[{values}]"
    if absent := re.match(r"Could not override '([^']+)'", text):
        return f"{absent[1]} is no group of covey's own; +{absent[1]}=NAME adds a choice of a group in --config-dir"
    key, where = re.search(r"full_key: (\S+)", text), re.match(r"In '([^']+)'", text)
    place = f" in {where[1]}.yaml" if where else ""
    if key and re.search(r"Key '\S+' (is )?not in", text):
        group = where[1].partition("/")[0] if where else ""
        if key[1].partition(".")[0] == group and group not in OWN_SECTIONS:
            return f"{group} is no section of settings{place}; begin the file with the line `# @package _global_`"
        return unknown_setting(key[1], place)
    if key:
        return f"{key[1]}{place}: {_reason(text.partition('composing config:')[2] or text)}"
    return one_line(text.partition("\nTo append")[0])


def _setting(error: OmegaConfBaseException) -> str:
    """An unknown key, or a value of the wrong type."""
    text = str(error)
    if re.search(r"Key '\S+' (is )?not in", text):
        return unknown_setting(error.full_key or str(error.key))
    if error.full_key and "is not a ListConfig" in text:
        return f"{error.full_key} is a list: write {error.full_key}=[{error.value}]"
    return f"{error.full_key}: {_reason(text)}" if error.full_key else _reason(text)


def _reason(text: str) -> str:
    """OmegaConf's message without the lines about its types."""
    return one_line(re.split(r"\n\s+(?:full_key|reference_type|object_type)", text)[0])


OWN_SECTIONS = ("model", "environment", "engine", "algorithm", "optimizer")
"""Groups of files whose settings lie in the section of their name."""
OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "adam_beta1": ("optimizer.betas",),
    "adam_beta2": ("optimizer.betas",),
    "adam_epsilon": ("optimizer.eps",),
    "adv_estimator": ("algorithm.advantage",),
    "beta": ("algorithm.kl_coef",),
    "bf16": ("model.precision",),
    "clip_ratio": ("algorithm.loss_options.eps_low", "algorithm.loss_options.eps_high"),
    "clip_ratio_high": ("algorithm.loss_options.eps_high",),
    "clip_ratio_low": ("algorithm.loss_options.eps_low",),
    "dataset_name": ("data.path",),
    "dtype": ("model.precision",),
    "entropy_coeff": ("algorithm.entropy_coef",),
    "epsilon": ("algorithm.loss_options.eps_low", "algorithm.loss_options.eps_high"),
    "epsilon_high": ("algorithm.loss_options.eps_high",),
    "eval_steps": ("evaluation.every",),
    "fp16": ("model.precision",),
    "gradient_accumulation_steps": ("groups_per_step", "micro_batch_tokens"),
    "grad_clip": ("optimizer.max_grad_norm",),
    "kl_loss_coef": ("algorithm.kl_coef",),
    "learning_rate": ("optimizer.lr",),
    "lora_r": ("model.lora_rank",),
    "lora_target_modules": ("model.lora_targets",),
    "loss_agg_mode": ("algorithm.aggregation",),
    "loss_type": ("algorithm.loss", "algorithm.aggregation"),
    "lr_scheduler_type": ("optimizer.schedule",),
    "lr_warmup_steps": ("optimizer.warmup_steps",),
    "mask_truncated_completions": ("algorithm.mask_truncated",),
    "max_completion_length": ("sampling.max_tokens",),
    "max_new_tokens": ("sampling.max_tokens",),
    "max_response_length": ("sampling.max_tokens",),
    "max_steps": ("num_steps",),
    "model_name_or_path": ("model.name",),
    "num_generations": ("group_size",),
    "num_iterations": ("updates_per_batch",),
    "per_device_train_batch_size": ("groups_per_step", "micro_batch_tokens"),
    "ppo_epochs": ("updates_per_batch",),
    "ppo_mini_batch_size": ("updates_per_batch",),
    "report_to": ("output.trackers",),
    "reward_funcs": ("rewards",),
    "save_freq": ("output.save_every",),
    "save_steps": ("output.save_every",),
    "save_total_limit": ("output.keep_last",),
    "scale_rewards": ("algorithm.advantage",),
    "sync_ref_model": ("algorithm.reference_refresh_every",),
    "test_freq": ("evaluation.every",),
    "torch_dtype": ("model.precision",),
    "total_training_steps": ("num_steps",),
    "train_batch_size": ("groups_per_step",),
    "train_files": ("data.path",),
    "warmup_ratio": ("optimizer.warmup_steps",),
}
"""What settings are called in TRL, verl and transformers, and what does that here."""
