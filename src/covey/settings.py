"""From the words on the command line to a checked `Config`, and from a `Config` to what a person reads.

Imports Hydra and OmegaConf, so only what composes or prints a configuration imports this module.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from covey import launch, memory_plan
from covey.algorithm_config import AlgorithmConfig
from covey.config import Config, validate
from covey.curriculum_config import group_sizes
from covey.disk import read_regular
from covey.environment_config import ENVIRONMENT_SETTINGS
from covey.environments.data_settings import DataConfig
from covey.environments.settings import CustomConfig, MixtureConfig
from covey.masking import mask
from covey.units import memory

CONF = Path(__file__).resolve().parent / "conf"
"""The folder of YAML that only chooses among what the dataclasses allow."""

MAX_YAML_BYTES = 1 << 20
"""Of a file of settings; a longer one is refused unread."""
MAX_YAML_DEPTH = 100
"""Of brackets in it."""

OPTION_FIELDS = ("advantage_options", "shaping", "selection_options", "group_filter_options", "loss_options")
"""Settings whose keys a function defines, not the schema; `validate` refuses those it does not take."""
FREE_FIELDS: Mapping[Any, tuple[str, ...]] = {MixtureConfig: ("parts", "weights", "data"), CustomConfig: ("options",)}
"""Settings of environments whose keys their users choose."""


def register() -> None:
    """Put the dataclasses where YAML finds them: schema_config, schema_algorithm and schema_ENVIRONMENT."""
    store = ConfigStore.instance()
    root = OmegaConf.structured(Config)
    root.environment = MISSING
    _open_options(root.algorithm)
    OmegaConf.set_struct(root.model.chat_template_kwargs, False)
    OmegaConf.set_struct(root.curriculum.options, False)
    store.store(name="schema_config", node=root)
    algorithm = OmegaConf.structured(AlgorithmConfig)
    _open_options(algorithm)
    store.store(group="algorithm", name="schema_algorithm", node=algorithm)
    for name, schema in ENVIRONMENT_SETTINGS.items():
        store.store(group="environment", name=f"schema_{name}", node=_opened(schema))


def _open_options(algorithm: DictConfig) -> None:
    for name in OPTION_FIELDS:
        OmegaConf.set_struct(algorithm[name], False)


def _opened(schema: Any) -> DictConfig:
    """Settings of an environment; some have keys that its user chooses."""
    node: DictConfig = OmegaConf.structured(schema)
    for name in FREE_FIELDS.get(schema, ()):
        OmegaConf.set_struct(node[name], False)
    return node


def load(path: Path) -> DictConfig:
    """Return the settings in a saved config.yaml, typed by the schema. ValueError where it does not fit it."""
    saved = read_yaml(path)
    node = OmegaConf.structured(Config)
    _open_options(node.algorithm)
    OmegaConf.set_struct(node.model.chat_template_kwargs, False)
    OmegaConf.set_struct(node.curriculum.options, False)
    try:
        node.environment = _opened(ENVIRONMENT_SETTINGS[saved.environment.name])
        node.merge_with(saved)
    except (OmegaConfBaseException, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not from this version of covey: {str(error)[:200]}") from error
    return node


def read_yaml(path: Path) -> DictConfig:
    """Return the settings in a YAML file that others may have written. ValueError where it is broken or no settings."""
    try:
        text = read_regular(path, MAX_YAML_BYTES).decode()
        if max(accumulate((c in "[{") - (c in "]}") for c in text), default=0) > MAX_YAML_DEPTH:  # minutes to parse
            raise ValueError(f"it is nested more than {MAX_YAML_DEPTH} deep")
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):  # a few of them fill the memory
            raise ValueError("it uses aliases (*name)")
        found = OmegaConf.create(text)
    except yaml.MarkedYAMLError as error:
        place = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ValueError(f"{path} cannot be read: {place}{error.problem or error.context}") from error
    except (OSError, ValueError, RecursionError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"{path} cannot be read: {str(error)[:200]}") from error
    if not isinstance(found, DictConfig) or not isinstance(found.get("environment"), DictConfig):
        raise ValueError(f"{path} holds no settings of a run (it has no environment)")
    return found


def to_config(composed: DictConfig) -> Config:
    """The composed settings as dataclasses, every cross-field rule checked.

    ValueError for what `to_unchecked` refuses, or a broken rule.
    """
    config = to_unchecked(composed)
    validate(config)
    return config


def to_unchecked(composed: DictConfig) -> Config:
    """Return the composed settings as dataclasses, before any rule is checked.

    ValueError for an unknown key (also one added with "+"), or one deleted with "~".
    """
    if OmegaConf.get_type(composed) is not Config:
        raise ValueError('a configuration of your own must begin with "defaults: [config, _self_]"')
    _check_keys(composed, "")
    if OmegaConf.get_type(composed.environment) is MixtureConfig:
        composed = composed.copy()
        _type_parts(composed.environment)
    config: Any = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    return config


def _check_keys(node: DictConfig, prefix: str) -> None:
    """Hydra lets "+key=value" add keys to a schema, which nothing would read, and "~key" delete what is read."""
    schema: Any = OmegaConf.get_type(node)
    known = {field.name for field in fields(schema)}
    for key in sorted(known - {str(key) for key in node}):
        raise ValueError(f"{prefix}{key} cannot be deleted; every setting has a value")
    for key in map(str, node):
        if key not in known:
            raise ValueError(f"unknown setting {prefix}{key}")
        value = node[key]
        if isinstance(value, DictConfig) and is_dataclass(OmegaConf.get_type(value)):
            _check_keys(value, f"{prefix}{key}.")


def _type_parts(mixture: DictConfig) -> None:
    """Give the parts of a mixture, and their rows, the schema of the environment that each of them is."""
    for part, given in ((str(key), value) for key, value in mixture.parts.items()):
        name = str(given.get("name", part)) if isinstance(given, DictConfig) else part
        if name not in ENVIRONMENT_SETTINGS or name == "mixture":
            known = ", ".join(other for other in ENVIRONMENT_SETTINGS if other != "mixture")
            raise ValueError(f"environment.parts.{part} needs name = one of {known}, got {name}")
        mixture.parts[part] = _typed(ENVIRONMENT_SETTINGS[name], given, f"environment.parts.{part}")
    for part, given in ((str(key), value) for key, value in mixture.data.items()):
        mixture.data[part] = _typed(DataConfig, given, f"environment.data.{part}")


def _typed(schema: Any, given: Any, place: str) -> DictConfig:
    """Free settings as those of a schema. ValueError for a key that it does not have or a value of another type."""
    node: DictConfig = OmegaConf.structured(schema)
    if given is not None and not isinstance(given, DictConfig):
        raise ValueError(f"{place} must be settings such as {{{fields(schema)[-1].name}: ...}}, got {given}")
    for key, value in ((str(k), v) for k, v in (given or {}).items()):
        if key not in node:
            raise ValueError(f"unknown setting {place}.{key}")
        try:
            node[key] = value
        except OmegaConfBaseException as error:
            raise ValueError(f"{place}.{key}: {str(error).splitlines()[0]}") from error
    return node


def to_yaml(config: Config) -> str:
    """Return every setting, resolved, in the order of the schema. Secrets are masked."""
    content = OmegaConf.to_container(OmegaConf.structured(config))
    return OmegaConf.to_yaml(OmegaConf.create(mask(content)))


def derived(config: Config, num_ranks: int | None = None) -> dict[str, int]:
    """Numbers that follow from the settings; never set, only shown. `num_ranks` None reads WORLD_SIZE, else 1.

    Evaluations are smaller where the held-out split has fewer prompts. Micro-batches are counted as if every completion
    had its full length, without prompts.
    """
    ranks = num_ranks or launch.world_size()
    sizes = group_sizes(config.group_size, config.group_size_schedule)
    changes = [0, *(entry.step for entry in config.group_size_schedule), config.num_steps]
    completions = sum(size * (end - start) for size, (start, end) in zip(sizes, pairwise(changes), strict=True))
    rollouts = config.groups_per_step * max(sizes)
    of_rank = -(-config.groups_per_step // ranks) * max(sizes)
    evaluations = 2 + (max(0, config.num_steps - 1) // config.evaluation.every if config.evaluation.every else 0)
    return {
        "rollouts_per_step": rollouts,
        "rollouts_in_all": config.groups_per_step * completions,
        "groups_per_rank": -(-config.groups_per_step // ranks),
        "rollouts_per_rank": of_rank,
        "micro_batches_per_rank": -(-of_rank // max(1, config.micro_batch_tokens // config.sampling.max_tokens)),
        "optimizer_steps": config.num_steps * config.updates_per_batch,
        "buffer_groups": (config.max_staleness + 1) * config.groups_per_step,
        "most_completion_tokens_per_step": rollouts * config.sampling.max_tokens,
        "tokens_per_micro_batch": config.micro_batch_tokens,
        "evaluations": evaluations,
        "completions_per_evaluation": config.evaluation.num_prompts * (config.evaluation.num_samples + 1),
    }


def report(config: Config) -> str:
    """What `covey config` prints: YAML, and as comments at its end the derived numbers and what memory a GPU needs."""
    parts: list[tuple[str, Mapping[str, int | str]]] = [("derived", derived(config))]
    if weights := memory_plan.weights(config.model):
        trained, total = weights
        share = {"weights": f"{total:,}", "trained": f"{trained:,} ({trained / total:.2%})"}
        parts.append(("weights of the model, adapters included", share))
    if planned := memory_plan.plan(config, launch.world_size()):
        sizes = {name: memory(count) for name, count in planned.items()}
        parts.append(("memory of each GPU, estimated from the shape of the model; `covey check` measures", sizes))
    lines = [line for title, found in parts for line in (f"# {title}:", *(f"#   {k}: {v}" for k, v in found.items()))]
    return f"{to_yaml(config)}{chr(10).join(lines)}\n"


def setting_names(schema: Any = Config, prefix: str = "") -> list[str]:
    """Every setting by its dotted name, those of all environments included."""
    names = []
    for field in fields(schema):
        names.append(prefix + field.name)
        if is_dataclass(field.type):
            names += setting_names(field.type, f"{prefix}{field.name}.")
        elif field.name == "environment":
            for environment in ENVIRONMENT_SETTINGS.values():
                names += setting_names(environment, "environment.")
    return names
