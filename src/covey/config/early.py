"""Check paths and names before torch and transformers are imported."""

import ast
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from covey.config.schema import Config, group_choices
from covey.environments.settings import part_configs
from covey.policy.models.naming import check_device, check_name
from covey.policy.settings import NANO
from covey.system.extensions import CALLBACKS
from covey.system.hub import HUB_NAME, check_hub_model
from covey.system.lookup import is_function_path, near, resolve


def check_early(
    config: Config,
    *,
    loads_model: bool = True,
    loads_reference: bool = True,
    asks_hub: bool = True,
    imports_rewards: bool = False,
) -> list[str]:
    """Return warnings. ValueError for missing files, functions, devices or models.

    Closer checks are left to the loaders, reward functions too unless `imports_rewards`.
    """
    # Functions are imported from the working directory, as in the run
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    for part in part_configs(config).values() if config.environment.name == "mixture" else (config,):
        _check_data(part)
    warnings: list[str] = []
    if loads_model:
        check_device(config.model.device)
        warnings += _check_model(config.model.name, asks_hub, config.model.code)
    compared = config.algorithm.reference_model
    if compared is not None and loads_reference:
        warnings += _check_reference_model(compared, asks_hub, config.model.code)
    for name in config.output.callbacks:
        if ":" in name and not _is_plausible(name):
            resolve(name, {})
        elif ":" not in name and name not in CALLBACKS:
            CALLBACKS.load(name)  # which says what there is
    for entry in config.rewards:
        _check_reward(entry, imports_rewards)
    return warnings


def _check_data(config: Config) -> None:
    path = config.data.path
    if path is None:
        return
    if is_function_path(path):
        if not _is_plausible(path):
            resolve(path, {})
        return
    from covey.environments.data.files import is_row_file, read_file
    from covey.environments.data.folders import check_place

    check_place(path)
    file = Path(path).expanduser()
    if config.environment.reads_rows == "always" and file.is_file() and not is_row_file(file):
        next(read_file(file))  # which says what it reads


def _check_reward(entry: object, imports: bool) -> None:
    from covey.environments.reward_functions.specs import find_reward, reward_spec

    spec = reward_spec(entry)
    if spec.ready_made is None and (imports or not _is_plausible(spec.function)):
        find_reward(spec)  # which says what is wrong


def _check_reference_model(name: str, asks_hub: bool, code: str | None) -> Iterator[str]:
    try:
        yield from (text.replace("model.name=", REFERENCE) for text in _check_model(name, asks_hub, code))
    except ValueError as error:
        raise ValueError(str(error).replace("model.name=", REFERENCE)) from error


REFERENCE = "algorithm.reference_model="


def _check_model(name: str, asks_hub: bool, code: str | None = None) -> Iterator[str]:
    if name in NANO:
        return
    check_name(name, code)
    if code is not None and is_function_path(code):
        if not _is_plausible(code):
            resolve(code, {})  # which says what is wrong
        return
    path = Path(name)
    if asks_hub and not path.exists() and HUB_NAME.fullmatch(name):
        try:
            warning = check_hub_model(name)
        except ValueError as error:
            preset = "" if "/" in name else near(name, group_choices()["model"])  # else it is a hub name already
            raise ValueError(f"{error}{preset.replace('mean ', 'mean model=')}") from error
        if warning:
            yield warning


def _is_plausible(name: str) -> bool:
    """Return True if a module's source may define `module:function`, without importing it."""
    module, _, attribute = name.partition(":")
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, SyntaxError):
        return False
    if spec is None:
        return False
    # A module without Python source (an extension) may define anything
    if spec.origin is None or not spec.origin.endswith(".py"):
        return True
    try:
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return False
    return attribute.partition(".")[0] in _bound_in(tree)


def _bound_in(tree: ast.Module) -> set[str]:
    """Return every name that a module binds."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names
