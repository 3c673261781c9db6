"""Diagnose a run while it trains, and end it on request."""

import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.config.schema import Config
from covey.run.checkpoints import fingerprint
from covey.run.evaluate import numbers_of
from covey.run.folder import METRICS, VERDICTS
from covey.run.records.callbacks import Callback, StopTraining
from covey.run.records.rollout_log import verdict_row
from covey.system.jsonl import read_rows
from covey.system.section import flat
from covey_doctor.diagnose import diagnose
from covey_doctor.finding import Finding, Level
from covey_doctor.log import RunLog
from covey_doctor.verdicts import with_prompts
from covey_report.doctor.health import facts_of

if TYPE_CHECKING:
    from covey.run.build import Run
    from covey.run.evaluate import Evaluation

LOGGER = logging.getLogger(__name__)


class Doctor(Callback):
    """Diagnoses at each full window and evaluation, without effect on the update."""

    def __init__(self, config: Config, say: Callable[[str], None]) -> None:
        self._stop_on = frozenset(config.doctor.stop_on)
        # Once: as a message where these are shown, else as a warning
        self._say = say if config.output.progress else LOGGER.warning
        self._log = RunLog(settings=flat(asdict(config)))
        self._verdicts: list[dict[str, Any]] = []
        self._log.verdicts = self._verdicts
        self._prompts: tuple[list[str], list[str]] = [], []
        """Fingerprints of the prompts of evaluations, and their ids."""
        self._said: dict[str, Level] = {}
        self._folder: Path | None = None

    def on_start(self, run: "Run", folder: Path) -> None:
        self._folder = folder
        names = [name for _, name in fingerprint.of_prompts(run.test_prompts)]
        self._prompts = names, [prompt.id for prompt in run.test_prompts]
        self._log.summary = {"after": {"num_prompts": len(names)}}
        self._log.settings = {**self._log.settings, "num_steps": run.config.num_steps}

    def on_step(self, step: int, metrics: dict[str, float | None]) -> None:
        self._take_up(step, step)
        self._log.add_row({"step": step, **metrics})
        if len(self._log.steps) % self._log.width == 0 or len(self._log.steps) == 3:
            self._look()

    def on_evaluation(self, step: int, evaluation: "Evaluation") -> None:
        self._take_up(step + 1, step)
        self._log.add_row({"step": step, **numbers_of(evaluation)}, is_look=True)
        # Rules read only the right answers of looks between the first and the newest
        self._verdicts[1:] = [
            {name: row[name] for name in ("step", "prompts", "ids", "right")} for row in self._verdicts[1:]
        ]
        self._verdicts.append(verdict_row(step, evaluation, *self._prompts))
        self._look()

    def _take_up(self, step: int, look: int) -> None:
        """Read a resumed run's rows, whose findings are known."""
        if self._folder is None:
            return
        folder, self._folder = self._folder, None
        self._verdicts += [row for row in with_prompts(read_rows(folder / VERDICTS)) if row["step"] < look]
        for row in read_rows(folder / METRICS):
            is_look = row.get("kind") == "evaluate"
            if row["step"] < (look if is_look else step):
                self._log.add_row(row, is_look=is_look)
        if self._log.steps:
            self._said = {finding.rule.id: finding.level for finding in self._findings()}

    def _look(self) -> None:
        """Report new or worse findings; raise StopTraining for those of `stop_on`."""
        new = [one for one in self._findings() if one.level > self._said.get(one.rule.id, Level.NOTE)]
        for finding in new:
            self._said[finding.rule.id] = finding.level
            turn = f"; try first: {finding.advice[0]}" if finding.cause is None else ""
            self._say(f"doctor, {finding.level.word}: {finding.title}{turn}")
        for finding in new:
            if finding.rule.id in self._stop_on or ("sick" in self._stop_on and finding.level is Level.SICK):
                raise StopTraining(f"doctor.stop_on has {finding.rule.id}: {finding.title}")

    def _findings(self) -> list[Finding]:
        return diagnose(self._log, facts_of(self._log.settings))
