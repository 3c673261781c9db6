"""Hydra and OmegaConf compose what they always do, in half the time: what they copy or read again and again is kept.

Commands in processes of their own have them as they are installed.
"""

import copy
from functools import lru_cache
from io import StringIO
from pathlib import Path
from typing import IO, Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import IConfigRepository
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
    for kind in (Metadata, ContainerMetadata):
        patch.setattr(kind, "__deepcopy__", _copied, raising=False)


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
        COMPOSED[key] = _compose(loader, defaults, repo)
    return copy.deepcopy(COMPOSED[key])


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
