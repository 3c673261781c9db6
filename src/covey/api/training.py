"""`covey.train`: a whole run from objects or names."""

import logging
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.api.answers import attention_of, set_attention
from covey.api.objects import Reward
from covey.api.request import Arguments, Request, make_request
from covey.api.result import Result
from covey.config import compose
from covey.config.schema import Config
from covey.environments.base import EnvironmentLike
from covey.environments.reward_functions.call import name_of
from covey.loop import train as run_loop
from covey.policy.models.adapters import BASE
from covey.policy.models.loading import load_policy, policy_in_memory
from covey.policy.own import OwnModel
from covey.policy.policy import Policy
from covey.run.build import Run
from covey.run.checkpoints.checkpoint import load_weights, newest_valid
from covey.run.checkpoints.saved_settings import as_saved, find_run, refuse_changes, settings_of
from covey.run.folder import skipped_by_latest
from covey.run.records.callbacks import Callback
from covey.run.records.notebook import is_notebook
from covey.run.records.record import RunRecorder
from covey.system import machine
from covey.system.lookup import near
from covey.system.waits.signals import EXIT_STATUS, StopRequested

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LOGGER = logging.getLogger(__name__)

Rows = Iterable[Mapping[str, Any]]
Data = str | Path | Rows | Mapping[str, Rows] | EnvironmentLike
"""A path or hub name, rows (a datasets.Dataset, a list of dicts), rows by split, or an environment."""
Tools = Callable[..., Any] | str | Sequence[Callable[..., Any] | str]
"""Functions, one class, or their names as module:function."""

OnStep = Callable[[int, dict[str, float | None]], None]
Callbacks = Callback | OnStep | Sequence[Callback | OnStep]
"""One or several: objects of a Callback class, or functions of a step and its metrics."""


@dataclass
class _Watcher:
    """Prints notes once the run is built, and keeps its parts."""

    notes: Sequence[str]
    wanted: Path
    run: Run | None = None
    record: RunRecorder | None = None

    def built(self, run: Run, record: RunRecorder) -> None:
        self.run, self.record = run, record
        if record.folder != self.wanted:
            record.say(f"{self.wanted} holds a run already: this one is in {record.folder}")
        for note in self.notes:
            record.say(note)


def train(
    model: "str | Path | PreTrainedModel | None" = None,
    rewards: Reward | Sequence[Reward] | None = None,
    data: Data | None = None,
    *,
    tools: "Tools | None" = None,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    reference: "str | Path | PreTrainedModel | None" = None,
    teacher: "str | Path | PreTrainedModel | None" = None,
    config: Config | None = None,
    recipe: str | None = None,
    folder: str | Path | None = None,
    resume: str | Path | None = None,
    callbacks: Callbacks = (),
    **settings: Any,
) -> Result:
    """Train a model by GRPO on rewards, and return the result.

    >>> result = covey.train("Qwen/Qwen2.5-0.5B-Instruct", rewards=exact, data=rows, num_steps=100, lr=1e-6)

    `model` is a hub name, a folder, a preset such as "nano", or a model in memory, which is trained in place and comes
    with its `tokenizer`. `rewards` are functions `(prompts, completions, **columns) -> list[float | None]` or names of
    ready-made ones. `data` are rows with a column "prompt", a path to them, or an environment, an object with `prompts`
    and `score`, which needs no rewards; nor do rows with a `teacher`. `tools` are functions with type hints and a
    docstring, which the policy may call, or a class: each attempt has an object of it, whose public methods are tools.
    `reference` is the model that a KL penalty compares with, where it is not the policy as it began: a name, a folder,
    or a model in memory, of which a frozen copy is made; `teacher` is a model that judges each token the policy samples
    (`algorithm.teacher`), or "self". Settings come by keyword (`num_steps=50`, `lr=1e-5`, `optimizer__lr=1e-5`,
    `sampling={"max_tokens": 64}`), over those of `config` or of a `recipe`.

    The run lies in `folder`, a new one below outputs/ where none is named; `resume` is the folder of a run to go on
    with. Under torchrun and the like every process makes the same call. Raises ValueError for what its caller can fix
    and RunStopped where continuing would be pointless. Ctrl-C saves the last finished step; a notebook gets the Result
    of the steps so far, a script KeyboardInterrupt.
    """
    machine.prepare()
    for name, given in (("folder", folder), ("resume", resume)):
        if given is not None and not (isinstance(given, str | Path) and str(given)):
            raise ValueError(f"{name} must be a path, got {given!r}")
    if folder is not None and resume is not None:
        raise ValueError(f"pass either folder= or resume=, not both, got folder={folder} and resume={resume}")
    chosen = settings if recipe is None else settings | {"recipe": recipe}
    asked = Arguments(model, rewards, data, tokenizer, chosen, tools, reference, teacher)
    request = make_request(asked, config) if resume is None else make_resume_request(asked, Path(resume), config)
    return run_request(request, folder if resume is None else request.config.resume, callbacks)


def run_request(
    request: Request, folder: str | Path | None, callbacks: Callbacks = (), *, exact: bool = True
) -> Result:
    """Train as requested, and return the result.

    Without `exact` a folder that holds a run leaves its name to it, and the next free one is taken.
    """
    config = request.config
    wanted = Path(folder).expanduser() if folder is not None else Path(time.strftime("outputs/%Y-%m-%d/%H-%M-%S"))
    watcher = _Watcher(request.notes if config.output.progress else (), wanted)
    given = replace(request.given, callbacks=_heard(callbacks), built=watcher.built)
    attention = attention_of(given)
    status = "completed"
    try:
        run_loop(config, wanted, given, exact=exact and folder is not None, as_typed=True)
    except StopRequested as stop:
        if watcher.run is None or not is_notebook():
            if stop.status != EXIT_STATUS[signal.SIGINT]:
                raise
            raise KeyboardInterrupt(str(stop)) from None  # of a subclass Python would end with status 1
        status = "interrupted"
    finally:
        if watcher.run is not None:
            set_attention(watcher.run.policy, attention)
    assert watcher.run is not None, "a run that ends well was built"
    assert watcher.record is not None, "and recorded"
    policy = _whole(watcher.run.policy, config, watcher.record.folder)
    return Result(config, policy, watcher.record.folder, status, tuple(watcher.record.evaluations), given)


def _heard(given: Any) -> tuple[Callback, ...]:
    """Return callbacks, functions wrapped. ValueError for anything else."""
    callbacks = list(given) if isinstance(given, list | tuple) else [given]
    for callback in callbacks:
        if isinstance(callback, type) or not (isinstance(callback, Callback) or callable(callback)):
            raise ValueError(f"callbacks must be objects of Callback classes, or functions, got {callback!r:.80}")
        if not isinstance(callback, Callback) and not _takes(callback, 2):
            raise ValueError(f"callbacks: {name_of(callback)} must take a step and its metrics: (step, metrics)")
        if isinstance(callback, Callback):
            _check_hooks(callback)
    return tuple(callback if isinstance(callback, Callback) else _EveryStep(callback) for callback in callbacks)


def _check_hooks(callback: Callback) -> None:
    """Refuse misspelt hooks, and hooks with other arguments."""
    kind, hooks = type(callback), {name for name in vars(Callback) if name.startswith("on_")}
    for name in (name for name in dir(kind) if name.startswith("on_")):
        method = vars(callback).get(name) or attrgetter(name)(callback)
        if name not in hooks:
            known = sorted(hooks)
            raise ValueError(f"{kind.__name__}.{name} is never called: hooks are {', '.join(known)}{near(name, known)}")
        if not _takes(method, 2):
            wanted = ", ".join(list(signature(vars(Callback)[name]).parameters)[1:])
            raise ValueError(f"{kind.__name__}.{name} must take ({wanted})")


def _takes(function: Callable[..., Any], count: int) -> bool:
    """Return True if a function takes that many arguments."""
    try:
        signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def make_resume_request(asked: Arguments, folder: Path, base: Config | None) -> Request:
    """Return the request of a resumed run, with the same objects.

    ValueError where a setting differs from the run's and resume_changes does not name it.
    """
    if base is not None:
        raise ValueError("resume takes the settings of the run: leave config out, and name changes by keyword")
    settings = dict(asked.settings)
    changes = settings.pop("resume_changes", [])
    changes = [changes] if isinstance(changes, str) else changes
    if not isinstance(changes, list | tuple) or not all(isinstance(name, str) for name in changes):
        raise ValueError(f"resume_changes must be names of settings, got {changes!r:.80}")
    run = find_run(str(folder), root := Path("outputs"))
    for line in skipped_by_latest(run, root) if str(folder) == "latest" else ():
        LOGGER.warning("%s", line)
    saved = settings_of(run, [f"resume_changes=[{','.join(changes)}]"] if changes else [])
    request = make_request(replace(asked, settings=settings), compose.to_unchecked(saved))
    refuse_changes(run, saved, as_saved(request.config), changes)
    return request


@dataclass(frozen=True)
class _EveryStep(Callback):
    function: OnStep

    def on_step(self, step: int, metrics: dict[str, float | None]) -> None:
        self.function(step, metrics)


def _whole(policy: Policy, config: Config, folder: Path) -> Policy:
    """Return a whole policy, read from the last checkpoint if sharded."""
    saved = newest_valid(folder / "checkpoints") if policy.sharded else None
    if saved is None:
        return policy
    own = policy.causal_lm
    if config.model.code is not None or not isinstance(own, OwnModel):
        return load_policy(replace(config.model, name=str(saved / "policy")), seed=config.seed)
    made = own.read(folder / BASE if (folder / BASE).is_dir() else saved / "policy")
    whole = policy_in_memory(made, policy.tokenizer, config.model, seed=config.seed)
    load_weights(whole, saved)
    return whole
