"""Callbacks: a program receives a run's events, adds metrics, ends it early."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from covey.config.schema import Config
from covey.run.checkpoints.checkpoint import POLICY
from covey.run.checkpoints.manifest import folder_name
from covey.system import collectives
from covey.system.extensions import CALLBACKS
from covey.system.lookup import resolve

if TYPE_CHECKING:
    from covey.run.build import Run
    from covey.run.evaluate import Evaluation


class StopTraining(Exception):
    """A callback ends the run; the message is the reason."""


class Callback:
    """Receives a run's events on the first process; override as needed.

    >>> class Patience(Callback):
    ...     def on_evaluation(self, step, evaluation):
    ...         if evaluation.accuracy.value > 0.9:
    ...             raise StopTraining("accuracy above 0.9")
    """

    def on_start(self, run: "Run", folder: Path) -> None:
        """Receive the run and its folder, before the first evaluation."""

    def on_step(self, step: int, metrics: dict[str, float | None]) -> None:
        """Receive a finished step (from 1); metrics added here are logged."""

    def on_evaluation(self, step: int, evaluation: "Evaluation") -> None:
        """Receive the evaluation after `step` steps."""

    def on_save(self, step: int, policy: Path) -> None:
        """Receive the folder of the policy that was saved after `step` steps."""


class Callbacks:
    """All callbacks of a run, called on the first process."""

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        self._callbacks = tuple(callbacks)
        self.reason: str | None = None
        """Reason why the run is to end early."""

    def start(self, run: "Run", folder: Path) -> None:
        for callback in self._called:
            callback.on_start(run, folder)

    def step(self, step: int, metrics: dict[str, float | None]) -> None:
        for callback in self._called:
            with self._heeding():
                callback.on_step(step, metrics)

    def evaluation(self, step: int, evaluation: "Evaluation") -> None:
        for callback in self._called:
            with self._heeding():
                callback.on_evaluation(step, evaluation)

    def save(self, step: int, checkpoints: Path) -> None:
        for callback in self._called:
            with self._heeding():
                callback.on_save(step, checkpoints / folder_name(step) / POLICY)

    def want_to_stop(self) -> bool:
        """Return True if a callback has asked to stop. Collective."""
        return bool(self._callbacks) and bool(collectives.all_max_int(int(self.reason is not None)))

    @contextmanager
    def _heeding(self) -> Iterator[None]:
        try:
            yield
        except StopTraining as stop:
            self.reason = str(stop) or "a callback asked for it"

    @property
    def _called(self) -> Sequence[Callback]:
        return self._callbacks if collectives.is_main_process() else ()


DOCTOR = "covey_report.doctor.live:Doctor"
"""Covey's own callback, on while `doctor.enabled`."""


def make_callbacks(config: Config, say: Callable[[str], None]) -> list[Callback]:
    """Make the doctor and the callbacks of `output.callbacks`.

    Each is made by a function (config, say), whose `say` shows a line in the terminal and logs it.
    """
    named = [*([DOCTOR] if config.doctor.enabled else []), *config.output.callbacks]
    return [(resolve(name, {}) if ":" in name else CALLBACKS.load(name))(config, say) for name in named]
