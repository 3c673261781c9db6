"""The record of a run: metrics, rollouts, checkpoints, summary, display."""

import logging
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from covey.config.compose import to_yaml
from covey.config.schema import Config
from covey.policy import sharding
from covey.rollouts.saved.journal import RolloutJournal
from covey.run.build import Run
from covey.run.checkpoints import fingerprint
from covey.run.checkpoints.checkpoint import complete_checkpoints, prune_checkpoints, save_checkpoint
from covey.run.evaluate import Answers, Evaluation, evaluation_from, evaluation_of, is_graded, numbers_of
from covey.run.folder import ALWAYS_ROWS, ROWS, SCHEDULE, STATUS, SUMMARY, VERDICTS
from covey.run.records import rollout_log, step_metrics
from covey.run.records import summary as results
from covey.run.records.answer_text import as_text
from covey.run.records.callbacks import Callback, Callbacks, make_callbacks
from covey.run.records.facts import environment_facts, manifest_facts
from covey.run.records.notebook import progress_of
from covey.run.records.samplers import SamplersTotals
from covey.run.records.step_metrics import Row, StepResult
from covey.run.records.terminal import Progress
from covey.run.records.trackers import CompositeTracker, Tracker, make_trackers
from covey.run.records.waits import make_watchdog, pulse_of
from covey.run.versions import versions
from covey.system import collectives
from covey.system.behind import Behind
from covey.system.disk import WriteError, catch_write_errors, only_warn, sync
from covey.system.jsonl import JsonlWriter
from covey.system.lookup import resolve
from covey.system.text.masking import mask
from covey.system.waits.timer import PhaseTimer

LOGGER = logging.getLogger(__name__)
TRACES = "covey_report.traces.log:TraceLog"
"""Writes the report's rows on groups and tokens; the core imports nothing of that package."""
PROOF = "covey_report.verify.proof:ProofLog"
"""Writes digests of each step, for `covey verify`."""


class RunRecorder:
    """Writes a run's folder; a context manager that always writes the summary.

    Every rank has one; rank 0's alone writes and prints, about all ranks.
    """

    def __init__(self, config: Config, folder: Path, callbacks: Sequence[Callback] = ()) -> None:
        disable_progress_bar()
        self.watchdog = make_watchdog(config.timeouts, folder)
        self.timer = PhaseTimer(watchdog=self.watchdog)
        self.behind = Behind(lambda name: self.watchdog.deadline(name, "timeouts.saving"))
        """Writes rows and checkpoints while weights stay as they are; `settle` before they change."""
        self._is_heard = bool(callbacks or config.output.callbacks)
        self._config, self.folder = config, folder
        self.callbacks = Callbacks((*make_callbacks(config, self.say), *callbacks))
        self._started = self._step_started = time.monotonic()
        self._goes_on = config.output.on_write_error == "continue"
        shows = config.output.progress
        self._progress = progress_of(config.num_steps, shows=shows) if collectives.is_main_process() else Progress()
        self._pulse = pulse_of(self._progress, self.timer)
        self._totals: Counter[str] = Counter()
        self._samplers = SamplersTotals()
        self._step_seconds = 0.0
        self._evaluations: list[Evaluation] = []
        self._plain_evaluations: list[dict[str, Any]] = []  # taken apart once: the state is copied every step
        self._seen: list[list[results.PromptKey]] = []
        """The prompts of each evaluation."""
        self.evaluated_at = -1
        """Step of the newest evaluation."""
        self.saved_step = 0
        """Step of the newest checkpoint this process wrote."""
        self.saved_at = time.monotonic()
        """Time of its writing; before the first one, of the run's start."""
        self._run: Run | None = None
        self._schedule: JsonlWriter | None = None
        self._verdicts: JsonlWriter | None = None
        self._traces: Any = None
        self.journal: RolloutJournal | None = None
        self._proof: Any = None
        self._kept_metrics: dict[str, float] | None = None
        self.sides, self.looked_at, self._prompts = results.SIDES, "", ""
        self._is_as_left = config.resume is not None
        """Whether the run has begun without a step yet, so its folder still describes it."""

    def __enter__(self) -> Self:
        self._progress.__enter__()
        self.watchdog.__enter__()
        self._pulse.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        quietly = only_warn(when=kind is not None)  # what ended the run is what its user must read
        with ExitStack() as closing:  # all of it, also where a part fails or Ctrl-C comes again
            closing.push(self.watchdog)
            closing.enter_context(self.watchdog.deadline("the parts of the run to be closed", "timeouts.saving"))
            files = (vars(self).get("_tracker"), self._schedule, self._verdicts, self._traces)
            for part in filter(None, (*files, self.journal, self._proof, self._run)):
                closing.callback(quietly(part.close))
            closing.callback(quietly(self.behind.close))  # before the files
            self._pulse.__exit__()
            self._progress.close()
            if not self._is_as_left:
                stopped = kind is not None and issubclass(kind, KeyboardInterrupt)
                quietly(self._summarise)("completed" if kind is None else "interrupted" if stopped else "failed")

    @cached_property
    def _tracker(self) -> Tracker:
        """Open the logs at first use, after a resume's cut."""
        if not collectives.is_main_process():
            return CompositeTracker(())
        return make_trackers(
            self._config.output, self.folder, mask(asdict(self._config)), self._config.timeouts.tracker, self.say
        )

    @property
    def run(self) -> Run:
        assert self._run is not None, "begin() comes first"
        return self._run

    def say(self, text: str) -> None:
        LOGGER.info(text)
        self._progress.message(text)
        self.watchdog.progress()

    def begin(self, run: Run, prompts: str = "") -> None:
        """Attach the parts of the run, and the `fingerprint.prompt_hash` for checkpoints."""
        self._run, self._prompts, self._config = run, prompts, run.config
        self._progress.expect(self._config.num_steps)
        if self._config.resume is None:
            _ = self._tracker  # a new run has its files, though it stops before their first row
        if run.config.output.traces:
            self._traces = resolve(TRACES, {})(self.folder, run)
            self._proof = resolve(PROOF, {})(self.folder, run, prompts)
        run.source.report_to(self.folder / STATUS)
        self.callbacks.start(run, self.folder)

    def write_behind(self) -> None:
        """Write each step's rows while the next is sampled. `settle` comes before its update."""
        run, self._step_started = self.run, time.monotonic()
        # Other ranks would wait for this one; a GPU that captures a graph bears no other thread; callbacks see files
        is_alone = collectives.world_size() == 1 and run.policy.device.type == "cpu"
        self.behind.apart = is_alone and not run.config.streaming and not self._is_heard

    def settle(self) -> None:
        """Wait for the rows and checkpoint of the steps before. WriteError."""
        self.behind.settle()

    @contextmanager
    def outside_of_steps(self) -> Iterator[None]:
        """Leave what is done inside out of a step's seconds."""
        began, step_started = time.monotonic(), self._step_started
        yield
        self._step_started = step_started + time.monotonic() - began

    def log_step(self, step: int, stepped: StepResult) -> None:
        self._get_under_way()
        drops = step_metrics.count_drops(self.run, stepped.dropped)
        sampled = [*stepped.groups, *(one.group for one in stepped.dropped)]
        num_graded = sum(is_graded(group, self._config.evaluation) for group in sampled)
        num_tokens, num_graded = collectives.all_sum_ints(step_metrics.count_tokens(sampled), num_graded)
        seconds = time.monotonic() - self._step_started
        self._step_seconds += seconds
        num_dropped = sum(n for reason, n in drops.items() if reason != "unscored_rollouts")
        skipped = int(stepped.metrics["skipped"])
        self._totals.update(steps=1, tokens=num_tokens, skipped=skipped, dropped=num_dropped, graded=num_graded)
        counted: Row = {
            **{f"dropped/{name}": float(n) for name, n in drops.items()},
            **self.run.source.take_metrics(),
            **(self._environment_metrics() if self._kept_metrics is None else self._kept_metrics),
            "seconds": seconds,
            "tokens_per_second": num_tokens / seconds,
        }
        row = step_metrics.step_row(self.run, step, stepped, counted)
        self._kept_metrics = None
        self._samplers.add(row)
        self.callbacks.step(step + 1, row)
        LOGGER.info("step %d: reward %s, loss %s", step + 1, row["sampled_reward_mean"], row["loss"])
        self._progress.update(step + 1, row)
        write = partial(self._write_step, step + 1, stepped, row, self.run.source.take_schedule())
        self.behind.do("the logs to be written", write)
        if self._config.output.show_rollouts:
            self.behind.settle()
        if row["num_rollouts_trained"] == 0:
            why = step_metrics.why_no_signal(row, stepped.credit, stepped.dropped)
            self.say(f"step {step + 1}: no signal, {why}; no update")
        self._step_started = time.monotonic()

    def _write_step(self, step: int, stepped: StepResult, row: Row, schedule: Mapping[str, Any]) -> None:
        self._tracker.log(step, row)
        if schedule:
            self._schedule = self._schedule or JsonlWriter(self.folder / SCHEDULE, wait=self._goes_on)
            self._schedule.write({"step": step, **schedule})
        output, credit = self._config.output, stepped.credit
        advantages = [advantage for group in credit.advantages for advantage in group]
        of_turns = [] if credit.of_turns is None else [own for group in credit.of_turns for own in group]
        found = rollout_log.list_sampled(stepped.groups, advantages, stepped.dropped, of_turns)
        logged = rollout_log.spread_over(found, output.rollouts_per_step)
        self._tracker.answers(step, [one.row(step) for one in logged])
        for one in rollout_log.best_to_worst(found, output.show_rollouts):
            self._progress.message(as_text(one.row(step)))
        if self._traces is not None:
            self._traces.step(step, stepped.groups, stepped.credit, stepped.dropped)
            self._proof.step(step, stepped.groups)

    def _get_under_way(self) -> None:
        """Delete the previous end of the run when it is resumed."""
        if self._is_as_left and collectives.is_main_process():
            with suppress(OSError):  # the last word is written over it
                (self.folder / SUMMARY).unlink(missing_ok=True)
        self._is_as_left = False

    def keep_environment_metrics(self) -> None:
        """Take the environment's metrics of a step before its end."""
        self._kept_metrics = self._environment_metrics()

    def _environment_metrics(self) -> dict[str, float]:
        """Return the environment's metrics as means over ranks. Forged rewards are also added up for the summary."""
        of_ranks = step_metrics.environment_metrics(self.run)
        for name, number in ((name, number) for metrics in of_ranks for name, number in metrics.items()):
            if name.rpartition("/")[2] in ("rechecked", "recheck_disagreements"):
                self._totals[name.rpartition("/")[2]] += int(number)
        return {f"environment/{name}": mean for name, mean in step_metrics.means(of_ranks).items()}

    def evaluation(self, step: int, answers: Answers) -> None:
        """Measure and log answers to the held-out prompts."""
        self.settle()
        self._get_under_way()
        settings = self._config.evaluation
        found = evaluation_of(answers, settings)
        self._totals["graded"] += found.accuracy is None and not math.isnan(found.reward_mean.value)
        if self._totals["graded"]:  # rewards that graded answers once always do
            found = replace(found, accuracy=None, pass_at_k={}, correct_greedy=(math.nan,) * found.num_prompts)
        bound = None if found.accuracy is None else settings.correct_above
        most = rollout_log.answers_per_evaluation(self._config.output, settings.every, self._config.num_steps)
        self._tracker.answers(step, rollout_log.evaluation_rows(step, answers, bound, most), kind="evaluate")
        metrics = numbers_of(found)
        for name, part in found.parts.items():
            metrics |= {f"{key}/{name}": value for key, value in numbers_of(part).items() if not key.startswith("pass")}
        self._evaluations.append(found)
        self._plain_evaluations.append(asdict(found))
        self._seen.append(fingerprint.of_prompts(self.run.test_prompts))
        self._log_verdicts(step, found)
        self.evaluated_at = step
        of_parts = {f"reward/{name}": estimate.value for name, estimate in found.reward_parts.items()}
        row = {**metrics, **of_parts, "num_unscored": found.num_unscored, **self._environment_metrics()}
        known = {name: None if math.isnan(number) else number for name, number in row.items()}
        self._tracker.log(step, known, kind="evaluate")
        LOGGER.info("evaluated after step %d: %s", step, metrics)
        self._progress.evaluation(step, metrics)
        if self._proof is not None:
            self._proof.cover_evaluation(step)
        self.callbacks.evaluation(step, found)
        self._step_started = time.monotonic()

    def _log_verdicts(self, step: int, found: Evaluation) -> None:
        if not collectives.is_main_process():
            return
        prompts, ids = [name for _, name in self._seen[-1]], [prompt.id for prompt in self.run.test_prompts]
        row = rollout_log.verdict_row(step, found, prompts, ids)
        if self._verdicts is not None:
            row = {name: value for name, value in row.items() if name not in ("prompts", "ids")}
        self._verdicts = self._verdicts or JsonlWriter(self.folder / VERDICTS, wait=self._goes_on)
        self._verdicts.write(row)

    @property
    def evaluations(self) -> Sequence[Evaluation]:
        """Return all evaluations of the run, those before a resume included."""
        return tuple(self._evaluations)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def save(self, state: Mapping[str, Any], *, needed: bool) -> None:
        """Save a checkpoint of the policy with the state to resume.

        Its score is that of the evaluation after that step. One that is not `needed` may be written while the next step
        is sampled. WriteError where it is `needed` or the run must stop.
        """
        policy, name = self.run.policy, f"the checkpoint of step {state['step']} to be written"
        if needed:
            self.settle()
        with self.watchdog.deadline(name, "timeouts.saving"):
            weights = sharding.full_state_dict(policy.model) if policy.sharded else None
            write = partial(self._save, state, manifest_facts(self.run, self._prompts, state), weights, needed)
            note = partial(self._note_saved, state["step"])
            if needed:
                note(collectives.run_on_rank0(write))
            else:
                self.behind.do(name, lambda: note(collectives.run_on_rank0(write)))
        if needed or not self.behind.apart:
            self._step_started = time.monotonic()

    def _note_saved(self, step: int, is_saved: bool) -> None:
        if is_saved:
            self.saved_step = step
            if self.journal is not None:
                self.journal.forget_before(step)
            self.callbacks.save(step, self.checkpoints)
        self.saved_at = time.monotonic()

    def _save(
        self, state: Mapping[str, Any], facts: Mapping[str, Any], weights: Mapping[str, Tensor] | None, needed: bool
    ) -> bool:
        """Write rank 0's part; return False where the disk refused it."""
        # Rows reach the disk before the checkpoint that counts on them
        self._sync_rows()
        if self.saved_step and not complete_checkpoints(self.checkpoints):
            LOGGER.warning("the checkpoints in %s were deleted while the run was going", self.checkpoints)
        try:
            settings = to_yaml(self._config)
            saved = save_checkpoint(self.checkpoints, state["step"], self.run.policy, state, facts, weights, settings)
        except WriteError as error:
            if needed or not self._goes_on:
                raise
            LOGGER.warning("%s; the run continues (output.on_write_error=continue) without this checkpoint", error)
            return False
        if self._proof is not None:
            self._proof.note_checkpoint(saved, state["step"])
        output = self._config.output
        prune_checkpoints(self.checkpoints, keep_last=output.keep_last, keep_best=output.keep_best)
        return True

    def _sync_rows(self) -> None:
        """Sync the rows before the checkpoint that follows them."""
        for path in map(self.folder.joinpath, ROWS):
            if path.name not in ALWAYS_ROWS and not path.exists():
                continue
            try:
                with catch_write_errors(path):
                    sync(path)
            except WriteError:
                if not self._goes_on:  # else the file itself reports what it could not write
                    raise

    def state_dict(self) -> dict[str, Any]:
        """Return counters, evaluations and seconds, as plain containers."""
        return {
            "totals": dict(self._totals),
            "samplers": asdict(self._samplers),
            "step_seconds": self._step_seconds,
            "seconds": time.monotonic() - self._started,
            "phases": self.timer.seconds,
            "evaluations": list(self._plain_evaluations),
            "seen": list(self._seen),
            "evaluated_at": self.evaluated_at,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._totals = Counter(state["totals"])
        self._samplers = SamplersTotals(**state["samplers"])
        self._step_seconds = state["step_seconds"]
        self._started -= state["seconds"]
        for name, seconds in state["phases"].items():
            self.timer.charge(name, seconds)
        self._plain_evaluations = list(state["evaluations"])
        self._evaluations = [evaluation_from(found) for found in state["evaluations"]]
        self._seen = list(state["seen"])
        self.evaluated_at = state["evaluated_at"]
        self._step_started = time.monotonic()

    def _summarise(self, status: str) -> None:
        if not collectives.is_main_process():
            return
        counted = ("steps", "tokens", "rechecked", "recheck_disagreements")
        facts = results.RunFacts(
            status=status,
            seed=self._config.seed,
            seconds=time.monotonic() - self._started,
            phases=self.timer.seconds,
            skipped_steps=self._totals["skipped"],
            dropped_groups=self._totals["dropped"],
            step_seconds=self._step_seconds,
            peak_memory_bytes=results.peak_memory_bytes("cpu" if self._run is None else str(self._run.policy.device)),
            versions=versions(),
            environment={} if self._run is None else environment_facts(self._run),
            looked_at=self.looked_at
            or (results.HELD_OUT if not self._run or self._run.is_held_out else results.TRAINED),
            sides=self.sides,
            samplers=self._samplers.described(),
            **{name: self._totals[name] for name in counted},
        )
        before = self._evaluations[0] if self._evaluations else None
        after = self._evaluations[-1] if len(self._evaluations) > 1 else None
        compared = results.comparable(before, after, self._seen) if before and after else None
        content = results.summary(facts, before, after, self._config.evaluation.confidence, compared)
        results.write_summary(self.folder, content)
