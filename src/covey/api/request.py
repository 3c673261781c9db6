"""From a program's arguments to settings and objects of a run."""

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from covey.api import objects
from covey.api.settings import flatten, make_config
from covey.config.schema import Config, group_choices
from covey.environments.base import Environment, EnvironmentLike, adapt
from covey.environments.registry import environment_class
from covey.environments.reward_functions.call import name_of
from covey.environments.reward_functions.settings import RewardFunctionsConfig
from covey.environments.settings import CustomConfig, EnvironmentConfig
from covey.policy.models.naming import OWN_MODULE
from covey.policy.models.reference_model import NO_MODELS, FrozenModels
from covey.run.given import RunObjects
from covey.system.lookup import import_changed, is_function_path, resolve


@dataclass(frozen=True, slots=True)
class Request:
    """A program's request: settings, objects, and notes for its user."""

    config: Config
    given: RunObjects
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of `covey.train` and `covey.build`, as they were given."""

    model: Any = None
    rewards: Any = None
    data: Any = None
    tokenizer: Any = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    tools: Any = None
    reference: Any = None
    teacher: Any = None

    def __post_init__(self) -> None:
        """Wrap modules that are no models of transformers, with their tokenizer."""
        from covey.policy.own import own_model, unwrap
        from covey.policy.own_tokenizer import own_tokenizer

        for name in ("model", "reference", "teacher"):
            given = unwrap(getattr(self, name))
            object.__setattr__(self, name, given)
            is_known = hasattr(given, "config_class") or hasattr(given, "peft_config")
            if isinstance(given, nn.Module) and not is_known:
                object.__setattr__(self, name, made := own_model(given))
                if name == "model" and self.tokenizer is not None:
                    object.__setattr__(self, "tokenizer", own_tokenizer(self.tokenizer, made.config.vocab_size))

    @property
    def tool_list(self) -> list[Any]:
        """Return the tools, named ones loaded."""
        given = [] if self.tools is None else list(self.tools) if isinstance(self.tools, list | tuple) else [self.tools]
        named = (resolve(tool, {}) if isinstance(tool, str) and is_function_path(tool) else tool for tool in given)
        return [objects.current(tool) for tool in named]

    @property
    def unnamed_tools(self) -> list[str]:
        """Return the names of tools that no other process could import."""
        return [name_of(tool) for tool in self.tool_list if objects.importable_name(tool) is None]

    @property
    def model_in_memory(self) -> Any:
        return None if isinstance(self.model, str | Path) else self.model

    @property
    def compared_in_memory(self) -> FrozenModels:
        """Return reference and teacher where they are models in memory."""
        given = (self.reference, self.teacher)
        return FrozenModels(*(None if isinstance(model, str | Path) else model for model in given))

    @property
    def environment(self) -> EnvironmentLike | None:
        """Return the data where they are an environment."""
        return self.data if isinstance(self.data, EnvironmentLike) else None

    @property
    def rows(self) -> Any:
        """Return the data where they are rows in memory."""
        return None if isinstance(self.data, str | Path | EnvironmentLike) else self.data

    @property
    def has_teacher_alone(self) -> bool:
        """Return True for rows that a teacher judges, and nothing else."""
        flat = dict(flatten(self.settings))
        is_named = any(name.startswith(("recipe", "environment")) for name in flat)
        has_teacher = self.teacher is not None or flat.get("algorithm.teacher") is not None
        return has_teacher and self.data is not None and self.environment is None and not is_named

    @property
    def reward_list(self) -> list[objects.Reward]:
        return [] if self.rewards is None else [objects.current(reward) for reward in objects.as_list(self.rewards)]

    @property
    def unnamed_rewards(self) -> list[str]:
        """Return the names of functions that no other process could import."""
        functions = [reward for reward in self.reward_list if callable(reward)]
        return [name_of(function) for function in functions if objects.importable_name(function) is None]


def make_request(asked: Arguments, base: Config | None) -> Request:
    """Return settings and objects. ValueError for inconsistent arguments."""
    changed = import_changed()
    _check_arguments(asked, base)
    if base is not None and not isinstance(base, Config):
        raise ValueError(f"config must be a Config, got a {type(base).__name__}; settings come by keyword")
    base, settings = _chosen_environment(asked, base)
    settings |= _model_setting(asked, base) | frozen_settings(asked) | _task_settings(asked)
    composed = make_config(base, settings)
    config = composed.config
    if asked.unnamed_rewards and "environment.in_process" not in composed.names:
        config.environment.in_process = True
    given = _run_objects(asked)
    _check_places(config, given)
    return Request(config, given, (*changed, *composed.notes, *_notes(asked, config)))


TASK = ("recipe", "environment", "data", "rewards", "resume")
"""Settings of the task to train."""
MEANT = {
    **dict.fromkeys(("dataset", "train_dataset", "rows"), "data"),
    **dict.fromkeys(
        ("reward", "reward_fn", "reward_func", "reward_funcs", "reward_function", "reward_functions"), "rewards"
    ),
}
"""Common misnomers of arguments -> their names here."""
TOOL = "covey_integrations.tools.tool:tool_of"
"""Makes a tool of a function. It is in a package beside covey, as the environment of tools is."""


def _check_arguments(asked: Arguments, base: Config | None) -> None:
    """Refuse arguments of a wrong type, or without meaning together."""
    for name, given in (
        ("model", asked.model_in_memory),
        ("reference", asked.compared_in_memory.reference),
        ("teacher", asked.compared_in_memory.teacher),
    ):
        if given is not None and not isinstance(given, nn.Module):
            key = next(iter(given), "NAME") if name == "model" and isinstance(given, Mapping) else ""
            apart = f"; its settings come by keyword, such as model__{key}=..." if key else ""
            raise ValueError(f"{name} must be a name, a folder or a model in memory, got {given!r:.80}{apart}")
    if misnamed := next((name for name in asked.settings if name in MEANT), None):
        raise ValueError(f"unknown setting {misnamed}; did you mean {MEANT[misnamed]}?")
    given = (asked.rewards, asked.data, asked.tools, base)
    if all(one is None for one in given) and not any(name.startswith(TASK) for name in asked.settings):
        raise ValueError(
            "nothing says what to train: covey.train(model, rewards, data), or recipe='arithmetic' for a first run"
        )
    if any(isinstance(reward, Mapping) and "prompt" in reward for reward in asked.reward_list):
        raise ValueError(f"rewards must be functions or their names, got rows; {objects.ORDER}")
    if any(isinstance(reward, EnvironmentLike) for reward in asked.reward_list):
        raise ValueError(f"an environment is given as data, which needs no rewards; {objects.ORDER}")
    if asked.rows is not None:
        objects.splits_of(asked.rows)
    if isinstance(asked.environment, type):
        name = asked.environment.__name__
        raise ValueError(f"data must be an environment, got the class {name}: give {name}()")
    if asked.environment is not None and asked.rewards is not None:
        raise ValueError("an environment scores its completions itself: leave rewards out, or give rows as data")
    _check_tools(asked)
    has_toolset = any(isinstance(tool, type) for tool in asked.tool_list)
    if asked.rows is not None and asked.rewards is None and not has_toolset and not asked.has_teacher_alone:
        raise ValueError(
            "rows in memory need rewards, functions or names, or a teacher; an environment by name reads a path"
        )
    if asked.tokenizer is not None and asked.model_in_memory is None:
        raise ValueError("tokenizer=... goes with a model in memory; a model by name has its own")


def _check_tools(asked: Arguments) -> None:
    for tool in asked.tool_list:
        if not callable(tool):
            form = " (a name is module:function)" if isinstance(tool, str) else ""
            raise ValueError(f"tools must be functions, a class or their names, got {tool!r:.80}{form}")
        if not isinstance(tool, type):
            resolve(TOOL, {})(tool)  # which refuses a function that no schema can be made of
    if asked.tool_list and asked.environment is not None:
        raise ValueError("an environment has tools of its own: leave tools out, or give rows as data")
    if sum(isinstance(tool, type) for tool in asked.tool_list) > 1:
        raise ValueError("tools may hold one class, of which each attempt has an object of its own")


def _chosen_environment(asked: Arguments, base: Config | None) -> tuple[Config | None, dict[str, Any]]:
    settings, base = dict(asked.settings), copy.deepcopy(base)
    has_rows = asked.rewards is not None or asked.tool_list or (base is None and asked.has_teacher_alone)
    if asked.environment is None and not has_rows:
        return base, settings
    kind, name = _kind(asked)
    chosen = settings.pop("environment", name)
    if isinstance(chosen, Mapping):  # settings of the section
        settings |= {f"environment.{key}": value for key, value in chosen.items()}
        chosen = name
    if chosen != name and not isinstance(chosen, kind):
        raise ValueError(f"environment={chosen} has rewards of its own: leave rewards and data out")
    if base is None or chosen != name:
        return base, settings | {"environment": chosen}
    if not isinstance(base.environment, kind):
        base.environment = kind()
    return base, settings


def _kind(asked: Arguments) -> tuple[type[EnvironmentConfig], str]:
    """Return the arguments' environment: settings and name."""
    if asked.environment is not None:
        return CustomConfig, "custom"
    return (environment_class("tools"), "tools") if asked.tool_list else (RewardFunctionsConfig, "reward_functions")


def _model_setting(asked: Arguments, base: Config | None) -> dict[str, Any]:
    """Return the model's setting: a preset, name, folder or object. A folder comes before a preset of the same name."""
    model = asked.model
    if model is None:
        return {}
    if asked.model_in_memory is not None:
        return {"model.name": objects.model_name(model)}
    is_preset = base is None and str(model) in group_choices()["model"] and not Path(model).exists()
    return {"model" if is_preset else "model.name": os.path.expanduser(model)}


def frozen_settings(asked: Arguments) -> dict[str, Any]:
    """Return the settings of reference and teacher: names, folders or objects."""
    given = {"algorithm.reference_model": asked.reference, "algorithm.teacher": asked.teacher}
    return {
        name: str(os.path.expanduser(model)) if isinstance(model, str | Path) else objects.model_name(model)
        for name, model in given.items()
        if model is not None
    }


def _task_settings(asked: Arguments) -> dict[str, Any]:
    if asked.environment is not None:
        options = {"kind": type(asked.environment).__name__}
        return {"environment.factory": f"{objects.HOME}:environment", "environment.options": options}
    found: dict[str, Any] = {}
    if asked.rewards is not None:
        found["rewards"] = [objects.reward_entry(reward) for reward in asked.reward_list]
    if asked.tool_list:
        toolset = next((tool for tool in asked.tool_list if isinstance(tool, type)), None)
        found["environment.tools"] = [objects.tool_entry(tool) for tool in asked.tool_list if tool is not toolset]
        found["environment.toolset"] = None if toolset is None else objects.tool_entry(toolset)
    if asked.data is not None:
        found["data.path"] = f"{objects.HOME}:rows" if asked.rows is not None else str(asked.data)
    return found


def _run_objects(asked: Arguments) -> RunObjects:

    def make_environment(config: Config) -> Environment:
        if asked.environment is not None:
            return adapt(asked.environment)
        rows = None if asked.rows is None else objects.splits_of(asked.rows)
        assert isinstance(config.environment, RewardFunctionsConfig), "_kind chose it"
        return config.environment.build_of(config, asked.reward_list, rows, asked.tool_list)

    model, tokenizer = asked.model_in_memory, asked.tokenizer
    if model is not None and tokenizer is None:
        if not model.name_or_path:
            said = "a model in memory needs tokenizer=..., for a module of your own tokenizer=(encode, decode)"
            raise ValueError(said)
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
    unnamed = asked.unnamed_rewards + asked.unnamed_tools
    has_objects = asked.environment is not None or asked.rows is not None or bool(unnamed)
    environment = make_environment if has_objects else None
    parts = [("rewards", one) for one in asked.reward_list if callable(one)]
    parts += [("environment.tools", one) for one in asked.tool_list]
    own: dict[str, Any] = {f"{key} {name_of(one)}": one for key, one in parts if objects.importable_name(one) is None}
    own |= {} if asked.environment is None else {f"environment {type(asked.environment).__name__}": asked.environment}
    return RunObjects(model, tokenizer, environment, compared=asked.compared_in_memory, code=own)


def _check_places(config: Config, given: RunObjects) -> None:
    """Refuse settings that need objects in other processes or files."""
    # Other processes of Ray cannot reach objects in memory
    has_model = given.model is not None or given.compared != NO_MODELS
    what = "a model" if has_model else "rewards, rows or an environment" if given.environment else ""
    what = what or " and ".join(objects.unnamed_functions(config))
    if what and (config.source == "ray" or config.devices.trainer > 1):
        raise ValueError(
            f"source=ray works in other processes, which cannot have {what} in memory: give names or paths"
        )
    needs_a_name = {
        "cold_start.enabled=true": config.cold_start.enabled,
        "model.load_in_4bit=true": config.model.load_in_4bit,
        "model.load_in_8bit=true": config.model.load_in_8bit,
        "model.revision": config.model.revision is not None,
        "engine.name=vllm": config.engine.name == "vllm" and config.model.name.startswith(OWN_MODULE),
    }
    if given.model is not None and any(needs_a_name.values()):
        (name, *_) = [name for name, is_set in needs_a_name.items() if is_set]
        raise ValueError(f"{name} needs a model by name or folder, got one in memory")


def _notes(asked: Arguments, config: Config) -> list[str]:
    """Describe the objects of this process, and the way to resume."""
    notes = []
    unnamed = asked.unnamed_rewards
    if unnamed and config.environment.in_process:
        notes.append(
            f"rewards in this process: {', '.join(unnamed)} (worker processes, which outlive a call that hangs, can "
            "import functions of a file alone)"
        )
    kept = [
        *(["the model with the weights it begins with"] if asked.model_in_memory is not None else []),
        *(f"the {name}" for name in ("reference", "teacher") if vars(asked.compared_in_memory)[name] is not None),
        *(["the environment"] if asked.environment is not None else []),
        *(["the rows"] if asked.rows is not None else []),
        *unnamed,
        *asked.unnamed_tools,
        *objects.unnamed_functions(config),
    ]
    if kept:
        notes.append(f"of this program alone: {', '.join(kept)}; {objects.RESUMES}")
    return notes
