"""Run callbacks of transformers, and write `state.log_history`."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from transformers import EarlyStoppingCallback, TrainerCallback, TrainerControl, TrainerState

from covey.run.build import Run
from covey.run.evaluate import Evaluation
from covey.run.records.callbacks import Callback, StopTraining
from covey_report.logs.other_metrics import TRL_LOG
from covey_trl.config import GRPOConfig
from covey_trl.mapping import steps_of

LOGGER = logging.getLogger(__name__)
SAME = ("loss", "grad_norm", "learning_rate", "reward_std", "entropy", "kl")
NAMES = {name: name for name in SAME} | TRL_LOG
"""TRL's name of a metric -> covey's."""
HEARD = (
    *("on_init_end", "on_train_begin", "on_train_end", "on_step_begin", "on_step_end", "on_log", "on_evaluate"),
    *("on_epoch_begin", "on_epoch_end", "on_save"),
)
"""Events that a run of covey has."""
WISHES = {
    "should_save": "save_steps says when policies are saved",
    "should_evaluate": "eval_steps says when policies are evaluated",
    "should_log": "logging_steps says when state.log_history grows",
    "should_epoch_stop": "should_training_stop ends a run",
}
"""Flags of `TrainerControl` that are not obeyed, and what is."""

Heard = TrainerCallback | type[TrainerCallback]


class Bridge(Callback):
    """Call callbacks of transformers, keep the state they read, stop on request."""

    def __init__(self, args: GRPOConfig, callbacks: Sequence[Heard], *, num_steps: int, is_evaluated: bool) -> None:
        """Instantiate callbacks. ValueError for an event that never comes.

        `num_steps` is that of the optimiser in the whole run. `is_evaluated` says whether there is an eval_dataset,
        whose evaluations scripts hear of.
        """
        self.args, self.state, self.control = args, TrainerState(), TrainerControl()
        self.callbacks: list[TrainerCallback] = []
        for callback in callbacks:
            self.add(callback)
        self.num_steps, self.is_evaluated = num_steps, is_evaluated
        self.model: Any = None
        self.tokenizer: Any = None
        self._told: set[str] = set()
        self._run: Run | None = None
        self._since: list[Mapping[str, float | None]] = []
        """Steps since the last row of the log."""
        self._epoch = 0

    def add(self, callback: Heard) -> None:
        """Add a callback. ValueError for another object."""
        made = callback() if isinstance(callback, type) else callback
        if not isinstance(made, TrainerCallback):
            raise ValueError(f"callbacks must be TrainerCallbacks of transformers, got {made!r:.80}")
        if isinstance(made, EarlyStoppingCallback):
            raise ValueError(
                "EarlyStoppingCallback needs metric_for_best_model, which covey has not: a callback whose on_evaluate "
                "sets control.should_training_stop ends the run"
            )
        own = [name for name in dir(TrainerCallback) if name.startswith("on_") and name not in HEARD]
        unheard = [name for name in own if getattr(type(made), name) is not getattr(TrainerCallback, name)]
        if unheard:
            raise ValueError(f"{type(made).__name__}.{unheard[0]} would never be called: covey has {', '.join(HEARD)}")
        self.callbacks.append(made)

    def on_start(self, run: Run, folder: Path) -> None:
        self._run, self.model, self.tokenizer = run, run.policy.model, run.policy.tokenizer
        self.state.max_steps = self.num_steps
        self.state.is_world_process_zero = self.state.is_local_process_zero = True
        for event in ("on_train_begin", "on_epoch_begin", "on_step_begin"):
            self._tell(event)

    def on_step(self, step: int, metrics: dict[str, float | None]) -> None:
        assert self._run is not None
        self.state.global_step = step * self.args.steps_per_batch
        self.state.epoch = self._run.source.epochs()
        self._tell("on_step_end")
        self._since.append(metrics)
        if self._is_logged(step):
            self.log(log_row(self._since))
            self._since = []
        if int(self.state.epoch) > self._epoch:
            self._epoch = int(self.state.epoch)
            self._tell("on_epoch_end")
            self._tell("on_epoch_begin")
        self._stop_where_asked()
        self._tell("on_step_begin")

    def on_evaluation(self, step: int, evaluation: Evaluation) -> None:
        if not self.is_evaluated:
            return
        metrics = evaluation_metrics(evaluation, "eval", with_parts=True)
        self.log(metrics)
        self._tell("on_evaluate", metrics=metrics)
        if step > 0:
            self._stop_where_asked()

    def on_save(self, step: int, policy: Path) -> None:
        self._tell("on_save")
        self._stop_where_asked()

    def end(self) -> None:
        """Log the last steps and call `on_train_end`."""
        if self._since and self.args.logging_strategy != "no":
            self.log(log_row(self._since))
        self._since = []
        self._tell("on_train_end")

    def log(self, row: Mapping[str, float | None]) -> None:
        """Append a row to `state.log_history` and call `on_log`."""
        logs: dict[str, Any] = {**row, "epoch": self.state.epoch or 0.0}
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self._tell("on_log", logs=logs)

    def _is_logged(self, step: int) -> bool:
        if str(getattr(self.args.logging_strategy, "value", self.args.logging_strategy)) == "no":
            return False
        every = steps_of(self.args.logging_steps, self.state.max_steps)
        done = step * self.args.steps_per_batch
        return (step == 1 and self.args.logging_first_step) or (every > 0 and done % every < self.args.steps_per_batch)

    def _tell(self, event: str, **keywords: Any) -> None:
        keywords |= {"model": self.model, "processing_class": self.tokenizer}
        for callback in self.callbacks:
            self.control = getattr(callback, event)(self.args, self.state, self.control, **keywords) or self.control
            for wish in (name for name in WISHES if getattr(self.control, name)):
                setattr(self.control, wish, False)
                if wish not in self._told:
                    self._told.add(wish)
                    LOGGER.warning(
                        "%s set control.%s, which nothing obeys here: %s", type(callback).__name__, wish, WISHES[wish]
                    )

    def _stop_where_asked(self) -> None:
        if self.control.should_training_stop:
            raise StopTraining("a callback set should_training_stop")


def log_row(steps: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """Average the metrics of several steps under TRL's names.

    >>> log_row([{"loss": 1.0, "reward/exact": 0.0}, {"loss": 3.0, "reward/exact": 1.0}])
    {'loss': 2.0, 'rewards/exact/mean': 0.5}
    """
    names = {theirs: ours for theirs, ours in NAMES.items() if ours in steps[-1]}
    for ours in steps[-1]:
        for prefix, ending in (("reward/", "mean"), ("reward_std/", "std")):
            if ours.startswith(prefix):
                names[f"rewards/{ours.removeprefix(prefix)}/{ending}"] = ours
    return {theirs: _mean([step.get(ours) for step in steps]) for theirs, ours in names.items()}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def evaluation_metrics(found: Evaluation, prefix: str, *, with_parts: bool = False) -> dict[str, float]:
    """Name the metrics of an evaluation as TRL does, such as eval_NAME_reward."""
    values = {f"{prefix}_reward": found.reward_mean.value}
    values |= {} if found.accuracy is None else {f"{prefix}_accuracy": found.accuracy.value}
    for name, part in found.reward_parts.items() if with_parts else ():
        values[f"{prefix}_rewards/{name}/mean"] = part.value
    for name, part_of in found.parts.items():
        values |= evaluation_metrics(part_of, f"{prefix}_{name}", with_parts=with_parts)
    return values
