"""Check paths and names before torch and transformers are imported."""

import ast
import importlib.util
import json
import os
import sys
from collections.abc import Collection, Iterator
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError

from covey.algorithm.teacher.settings import SELF, is_address
from covey.config.schema import Config, group_choices
from covey.environments.settings import part_configs
from covey.policy.models.naming import check_device, check_name
from covey.policy.settings import NANO, ModelConfig
from covey.system.extensions import CALLBACKS
from covey.system.hub import HUB_NAME, check_hub_model
from covey.system.lookup import is_function_path, near, resolve
from covey.system.text.format import one_line

BESIDE = ("reference_model", "teacher")
"""Settings of the algorithm that name models beside the policy."""
TOKENIZER = "tokenizer.json"


def check_early(
    config: Config,
    *,
    loads_model: bool = True,
    loads_beside: Collection[str] = BESIDE,
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
    for setting in loads_beside:
        name = vars(config.algorithm)[setting]
        if is_address(name) and asks_hub:
            _check_address(f"algorithm.{setting}={name}", name)
        elif name not in (None, SELF) and not is_address(name):
            warnings += _check_beside(f"algorithm.{setting}=", name, config.model, asks_hub)
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


def _check_beside(setting: str, name: str, model: ModelConfig, asks_hub: bool) -> Iterator[str]:
    try:
        yield from (text.replace("model.name=", setting) for text in _check_model(name, asks_hub, model.code))
    except ValueError as error:
        raise ValueError(str(error).replace("model.name=", setting)) from error
    own, its = (_numbers(one) for one in (model.name, name))
    if (other := next((token for token in own if its.get(token, own[token]) != own[token]), None)) is not None:
        raise ValueError(
            f"{setting}{name} must have the policy's tokens, its tokenizer numbers others: {other!r} is {its[other]}, "
            f"and {own[other]} in {model.name}"
        )


def _check_address(setting: str, address: str) -> None:
    """Refuse a server that nothing answers for. ValueError."""
    from urllib.request import urlopen  # 40 ms, for which a refused setting need not wait

    try:
        urlopen(f"{address.rstrip('/').removesuffix('/generate')}/v1/models", timeout=20).close()
    except HTTPError:  # it is there: the loader asks with the key, and says what is wrong
        return
    except (OSError, ValueError, HTTPException) as error:
        raise ValueError(f"{setting} must be a server that lists its model, got {one_line(str(error))}") from error


def _numbers(name: str) -> dict[str, int]:
    """Return a model's tokens with their numbers, of nano the first; nothing if unreadable."""
    if name in NANO:
        return {token: place for place, token in enumerate((*NANO[name], *map(chr, range(ord("!"), ord("~")))))}
    try:
        saved = json.loads((Path(name) / TOKENIZER).read_bytes())
        listed = saved["model"]["vocab"]
        known = listed if isinstance(listed, dict) else {piece: place for place, (piece, _) in enumerate(listed)}
        return known | {one["content"]: one["id"] for one in saved["added_tokens"]}
    except (OSError, ValueError, LookupError, TypeError, RecursionError):  # as loading says, in its own words
        return {}


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
