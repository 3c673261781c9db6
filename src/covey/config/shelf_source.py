"""Hydra finds a preset on a shelf by its bare name: typed, in a list of defaults, in a sweep and by tab completion."""

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin

from covey.config.shelves import CONF, SHELVES, presets


def register() -> None:
    """Let Hydra look on the shelves wherever it looks in covey's own folder."""
    for plugin in (ShelfSource, ShelfPath):
        Plugins.instance().register(plugin)


class ShelfSource(FileConfigSource):
    """Takes algorithm/opo for algorithm/papers/opo.yaml."""

    @staticmethod
    def scheme() -> str:
        return "shelves"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path in SHELVES

    def is_config(self, config_path: str) -> bool:
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        return name in _shelved(group)

    def load_config(self, config_path: str) -> ConfigResult:
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        return super().load_config(_shelved(group)[name])

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return [] if results_filter is ObjectType.GROUP else list(_shelved(config_path))


class ShelfPath(SearchPathPlugin):
    """Puts the shelves right behind covey's own folder, before what the user adds."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for place in search_path.get_path():
            if place.path.removeprefix("file://") == str(CONF):
                search_path.append("covey", f"shelves://{CONF}", SearchPathQuery(place.provider, place.path))
                return


def _shelved(group: str) -> dict[str, str]:
    """Return the presets on the shelves of a group, each with where it lies under conf/."""
    found = presets(group) if group in SHELVES else {}
    paths = {name: file.relative_to(CONF) for name, file in found.items()}
    return {name: path.as_posix() for name, path in paths.items() if path.parts[1] in SHELVES[group]}
