"""Hydra and OmegaConf compose what they always do, in half the time: what they copy or read again and again is kept.

Commands in processes of their own have them as they are installed.
"""

import copy
from functools import lru_cache
from io import StringIO
from pathlib import Path
from typing import IO, Any, cast

import pytest
from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository, IConfigRepository
from hydra._internal.hydra import Hydra
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import ResultDefault
from omegaconf import OmegaConf
from omegaconf.base import ContainerMetadata, Metadata

from covey.config.compose import CONF
from covey.system.disk import cache_folder


def compose_faster(patch: pytest.MonkeyPatch) -> None:
    """Let both do less until the patch is undone."""
    patch.setattr(Hydra, "get_mode", _mode_if_typed)
    patch.setattr(OmegaConf, "load", staticmethod(_load))
    # Each composition copies all schemas of the store, and reads them alone.
    patch.setattr(ConfigStore, "__deepcopy__", lambda store, memo: store, raising=False)
    patch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", _composed)
    # Files and schemas are read for their headers and defaults alone, mostly
    patch.setattr(ConfigRepository, "load_config", _loaded)
    patch.setattr(defaults_list, "_create_interpolation_map", _map_if_interpolated)
    for kind in (Metadata, ContainerMetadata):
        patch.setattr(kind, "__deepcopy__", _copied, raising=False)


def forget() -> None:
    """Compose anew what is composed next."""
    LOADED.clear()
    COMPOSED.clear()


_look, _read = Hydra.get_mode, OmegaConf.load


def _mode_if_typed(hydra: Hydra, config_name: str | None, overrides: list[str]) -> Any:
    """Compose once: the first time Hydra only looks for a hydra.mode, which is typed or not."""
    return _look(hydra, config_name, overrides) if any("hydra.mode" in word for word in overrides) else None


def _composed(loader: ConfigLoaderImpl, defaults: list[ResultDefault], repo: IConfigRepository) -> Any:
    """Return what the same files and schemas came to before, where all of them are covey's and Hydra's own."""
    places = {source.path for source in repo.get_sources()}
    if not places <= OWN_PLACES:
        return _compose(loader, defaults, repo)
    key = f"{defaults} {cache_folder()}"
    if key not in COMPOSED:
        COMPOSED[key] = _compose(loader, defaults, cast(IConfigRepository, _Copies(repo)))
    return copy.deepcopy(COMPOSED[key])


class _Copies:
    """A repository whose configurations may be changed: those that it hands out are kept."""

    def __init__(self, repo: IConfigRepository) -> None:
        self.get_schema_source = repo.get_schema_source
        self._load = repo.load_config

    def load_config(self, config_path: str) -> Any:
        return copy.deepcopy(self._load(config_path))


def _loaded(repo: ConfigRepository, config_path: str) -> Any:
    """Return what was read before, where it was covey's or Hydra's own."""
    if not {source.path for source in repo.sources} <= OWN_PLACES:
        return _load_one(repo, config_path)
    key = config_path, cache_folder()  # a default of the schema
    if key not in LOADED:
        found = _load_one(repo, config_path)
        if found is None:  # it may be registered later
            return None
        LOADED[key] = found
    return LOADED[key]


def _map_if_interpolated(overrides: Any, defaults: list[Any], self_added: bool) -> Any:
    """Leave out what is looked up by defaults of the form group: ${choice} alone."""
    return _map(overrides, defaults, self_added) if any(one.is_interpolation() for one in defaults) else None


LOADED: dict[tuple[str, str], Any] = {}
_load_one, _map = ConfigRepository.load_config, defaults_list._create_interpolation_map
OWN_PLACES = {"hydra.conf", str(CONF), ""}
COMPOSED: dict[str, Any] = {}
_compose = ConfigLoaderImpl._compose_config_from_defaults_list


def _load(file: str | Path | IO[str]) -> Any:
    return _read(file) if isinstance(file, str | Path) else copy.deepcopy(_parsed(file.read()))


@lru_cache(maxsize=256)
def _parsed(text: str) -> Any:
    return _read(StringIO(text))


def _copied(metadata: Metadata, memo: dict[int, Any]) -> Metadata:
    """Copy what says of which type a node is: types, names, switches and, where it has any, resolved values."""
    found = object.__new__(type(metadata))
    facts = found.__dict__
    facts.update(metadata.__dict__)
    facts["flags"] = dict(facts["flags"])
    facts["resolver_cache"] = copy.deepcopy(facts["resolver_cache"], memo)
    return found
