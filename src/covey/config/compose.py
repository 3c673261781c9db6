"""Compose command-line words into a checked `Config`, and print a `Config`.

Imports Hydra and OmegaConf, so only composing and printing modules import it.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from types import UnionType
from typing import Any, get_args

import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.version import setbase
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from covey.algorithm.settings import AlgorithmConfig
from covey.config.checks import explain_error, misfit, refuse_aliases, yaml_fault
from covey.config.schema import GROUPS, Config
from covey.config.shelves import CONF as CONF  # for whoever composes
from covey.config.shelves import SHELVES, former, presets
from covey.config.validate import validate
from covey.environments.data.settings import DataConfig
from covey.environments.registry import environment_class, environment_names
from covey.environments.settings import MixtureConfig
from covey.system.disk import cache_folder, read_regular
from covey.system.section import types_of
from covey.system.text.masking import mask

MAX_YAML_BYTES = 1 << 20
"""Maximum bytes of a file of settings; a longer one is refused unread."""
MAX_YAML_DEPTH = 100
"""Maximum depth of brackets in it."""
NUMBER = re.compile(r"[+-]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)([eE][+-]?\d+)?|[+-]?(\.?inf(inity)?|\.?nan)", re.IGNORECASE)
"""Text that OmegaConf reads as a number."""
FILL_SAMPLING: Mapping[str, float] = {"temperature": 0.8, "top_p": 0.95}
"""Sampling settings of engine=fill: masked tokens are drawn as the infill document draws them."""


def register() -> None:
    """Register schemas, environments, engines and optimisers with Hydra."""
    for plugin in (_ShelfSource, _ShelfPath):
        Plugins.instance().register(plugin)
    _register(cache_folder())
    known = ConfigStore.instance().repo["environment"]
    for name in environment_names():  # a package may have come since
        known.setdefault(f"{name}.yaml", _Environment(name))


@lru_cache(maxsize=1)  # of the folder registered last: the store keeps one
def _register(cache_dir: str) -> None:
    """Register once per cache folder."""
    store = ConfigStore.instance()
    # The root, whose environment is chosen later
    root = _settings()
    root.environment = MISSING
    store.store(name="schema_config", node=root)
    store.store(group="algorithm", name="schema_algorithm", node=_open(OmegaConf.structured(AlgorithmConfig)))
    store.repo["environment"] = {}
    for name in GROUPS["optimizer"]:
        store.store(group="optimizer", name=name, node={"name": name})
    for name in GROUPS["engine"]:
        node = {"engine": {"name": name}, "sampling": FILL_SAMPLING if name == "fill" else {}}
        store.store(group="engine", name=name, node=node, package="_global_")


class _Environment(ConfigNode):
    """The settings of an environment, made lazily."""

    def __init__(self, name: str) -> None:
        self.name, self.group, self.package, self.provider = f"{name}.yaml", "environment", None, None
        self._environment = name

    @cached_property
    def node(self) -> DictConfig:  # type: ignore[override]
        return _open_options(environment_class(self._environment))


def _settings() -> DictConfig:
    """Make the schema of all settings, with the options of functions open."""
    node: DictConfig = OmegaConf.structured(Config)
    for section in (node.algorithm, node.model, node.curriculum):
        _open(section)
    return node


def _open_options(schema: Any) -> DictConfig:
    return _open(OmegaConf.structured(schema))


def _open(node: DictConfig) -> DictConfig:
    """Let users choose the keys of fields that are mappings."""
    for value in (node[name] for name in node):
        if isinstance(value, DictConfig) and OmegaConf.get_type(value) is dict:
            OmegaConf.set_struct(value, False)
    return node


def run_one(words: Sequence[str], job: Callable[[DictConfig], None]) -> None:
    """Run one job as `hydra.main` does, composing once."""
    setbase("1.3")
    search_path = create_config_search_path(str(CONF))
    hydra = Hydra.create_main_hydra2(task_name="main", config_search_path=search_path)
    try:
        hydra.run("config", job, [*words, "hydra.mode=RUN"])
    finally:
        GlobalHydra.instance().clear()


class _ShelfSource(FileConfigSource):
    """Lets Hydra find algorithm/opo in algorithm/papers/opo.yaml."""

    @staticmethod
    def scheme() -> str:
        return "shelves"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path in SHELVES

    def is_config(self, config_path: str) -> bool:
        group, _, name = config_path.removesuffix(".yaml").partition("/")
        return name in _find_shelved(group)

    def load_config(self, config_path: str) -> ConfigResult:
        group, _, name = config_path.removesuffix(".yaml").partition("/")
        return super().load_config(_find_shelved(group)[name])

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        found = {} if results_filter is ObjectType.GROUP else _find_shelved(config_path)
        return sorted({*found} - {*former(config_path)})


class _ShelfPath(SearchPathPlugin):
    """Puts the shelves behind covey's own folder, before the user's."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for place in search_path.get_path():
            if place.path.removeprefix("file://") == str(CONF):
                search_path.append("covey", f"shelves://{CONF}", SearchPathQuery(place.provider, place.path))
                return


def _find_shelved(group: str) -> dict[str, str]:
    """Return the presets on a group's shelves, with their places."""
    found = presets(group) if group in SHELVES else {}
    paths = {name: file.relative_to(CONF) for name, file in found.items()}
    shelved = {name: path.as_posix() for name, path in paths.items() if path.parts[1] in SHELVES[group]}
    return shelved | {old: shelved[name] for old, name in former(group).items()}


def load(path: Path) -> DictConfig:
    """Load a saved config.yaml, typed by the schema. ValueError."""
    saved = read_yaml(path)
    node = _settings()
    name = saved.environment.get("name")
    try:
        if name not in environment_names():
            raise ValueError(f"there is no environment={name} (pip install the package that has it)")
        node.environment = _open_options(environment_class(name))
        node.merge_with(saved)
    except OmegaConfBaseException as error:
        raise ValueError(f"{path} is not from this version of covey: {explain_error(error)}") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not from this version of covey: {str(error)[:200]}") from error
    return node


def read_yaml(path: Path) -> DictConfig:
    """Load settings from an untrusted YAML file. ValueError where it is broken."""
    try:
        text = read_regular(path, MAX_YAML_BYTES).decode()
        if max(accumulate((c in "[{") - (c in "]}") for c in text), default=0) > MAX_YAML_DEPTH:  # minutes to parse
            raise ValueError(f"it is nested more than {MAX_YAML_DEPTH} deep")
        refuse_aliases(text)
        found = OmegaConf.create(text)
    except yaml.MarkedYAMLError as error:
        raise ValueError(f"{path} cannot be read: {yaml_fault(error, text)}") from error
    except (OSError, ValueError, RecursionError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"{path} cannot be read: {str(error)[:200]}") from error
    if not isinstance(found, DictConfig) or not isinstance(found.get("environment"), DictConfig):
        raise ValueError(
            f"{path} does not hold all settings of a run, as `covey config` prints them (it has no environment); make "
            "a few settings a recipe in --config-dir"
        )
    return found


def to_config(composed: DictConfig) -> Config:
    """Convert composed settings to dataclasses and check all rules.

    ValueError for what `to_unchecked` refuses, or a broken rule.
    """
    config = to_unchecked(composed)
    validate(config)
    return config


def to_unchecked(composed: DictConfig) -> Config:
    """Convert composed settings to dataclasses without checking rules.

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
    """Refuse keys that were added or deleted.

    Hydra lets "+key=value" add keys to a schema, which nothing would read, and "~key" delete what is read.
    """
    # A plain DictConfig says nothing of its schema; the type does
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
    """Type the parts of a mixture by their environments' schemas."""
    for part, given in ((str(key), value) for key, value in mixture.parts.items()):
        name = str(given.get("name", part)) if isinstance(given, DictConfig) else part
        if name not in environment_names() or name == "mixture":
            known = ", ".join(other for other in environment_names() if other != "mixture")
            raise ValueError(f"environment.parts.{part} needs name = one of {known}, got {name}")
        mixture.parts[part] = _convert_settings(environment_class(name), given, f"environment.parts.{part}")
    for part, given in ((str(key), value) for key, value in mixture.data.items()):
        mixture.data[part] = _convert_settings(DataConfig, given, f"environment.data.{part}")


def _convert_settings(schema: Any, given: Any, place: str) -> DictConfig:
    """Convert free settings to those of a schema. ValueError for an unknown key or a value of another type."""
    # Fill the schema key by key, so that an error names its place
    node: DictConfig = OmegaConf.structured(schema)
    if given is not None and not isinstance(given, DictConfig):
        raise ValueError(f"{place} must be settings such as {{{fields(schema)[-1].name}: ...}}, got {given}")
    for key, value in ((str(k), v) for k, v in (given or {}).items()):
        if key not in node:
            raise ValueError(f"unknown setting {place}.{key}")
        try:
            node[key] = value
        except OmegaConfBaseException as error:
            raise ValueError(misfit(f"{place}.{key}", str(error))) from error
    return node


def to_yaml(config: Config) -> str:
    """Return all resolved settings in the schema's order, secrets masked."""
    # OmegaConf writes the same text, in sixty times the time: every run writes its settings as it begins.
    return yaml.dump(mask(_plain(config, Config)), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _plain(value: Any, hint: Any) -> Any:
    """Convert sections to dicts, sequences to lists, numbers to their fields' types."""
    if is_dataclass(value):
        section: Any = type(value)  # hashable, which mypy denies
        hints = types_of(section)
        return {name: _plain(getattr(value, name), hints[name]) for name in hints}
    if isinstance(value, Mapping):
        return {key: _plain(one, None) for key, one in value.items()}
    choices = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if isinstance(value, list | tuple):
        of_each = next((get_args(choice)[0] for choice in choices if get_args(choice)), None)
        return [_plain(one, of_each) for one in value]
    if float in choices and int not in choices and type(value) is int:
        return float(value)
    return str(value) if str in choices and value is not None else value


class _Dumper(yaml.CSafeDumper):
    """Quotes text that OmegaConf would read as a number, such as 1e-6."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _write_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'" if NUMBER.fullmatch(text) else None)


_Dumper.add_representer(str, _write_text)
