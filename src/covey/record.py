"""What a run leaves behind: metrics, rollouts, checkpoints, the summary; and what it shows while it goes on."""

import json
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from transformers.utils.logging import disable_progress_bar

from covey.build import Run
from covey.checkpoint import Retention, retire, save_checkpoint
from covey.config import Config
from covey.credit import Credit
from covey.diagnostics import group_metrics, value
from covey.environments.base import Logs
from covey.evaluate import Evaluation, evaluation_from
from covey.progress import make_progress
from covey.summary import RunFacts, peak_memory_bytes, summary, versions, write_summary
from covey.timing import PhaseTimer
from covey.tracker import RolloutLog, make_trackers
from covey.types import Group

LOGGER = logging.getLogger(__name__)


class Record:
    """Writes one run's folder. A context manager, so that files are closed and a summary is there however it ends."""

    def __init__(self, config: Config, folder: Path) -> None:
        disable_progress_bar()
        self.timer = PhaseTimer()
        self._config = config
        self._folder = folder
        self._started = self._step_started = time.monotonic()
        self._tracker = make_trackers(config.output, folder, asdict(config))
        output = config.output
        self._rollouts = RolloutLog(folder / "rollouts.jsonl", output.rollouts_per_step, output.max_rollout_rows)
        self._progress = make_progress(config.num_steps, output.progress)
        self._totals: Counter[str] = Counter()
        self._step_seconds = 0.0
        self._evaluations: list[Evaluation] = []
        self._evaluated_at = -1
        self.saved_step = 0
        """Step of the newest checkpoint this process wrote."""
        self._run: Run | None = None

    def __enter__(self) -> Self:
        self._progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with ExitStack() as closing:  # all of it, also where a part fails or Ctrl-C comes again
            closing.callback(self._rollouts.close)
            closing.callback(self._tracker.close)
            if self._run is not None:
                closing.callback(self._run.close)
            self._progress.close()
            self._summarise("completed" if kind is None else _status(kind))

    @property
    def run(self) -> Run:
        assert self._run is not None, "begin() comes first"
        return self._run

    def say(self, text: str) -> None:
        """Tell the person at the terminal; the log gets it too."""
        LOGGER.info(text)
        self._progress.message(text)

    def begin(self, run: Run) -> None:
        """The parts of the run are there."""
        self._run = run

    def step(self, step: int, groups: Sequence[Group], credit: Credit, metrics: Mapping[str, float]) -> None:
        """Log a finished step: what was sampled, what it was worth, what the update did."""
        drops = self.run.source.take_drops()
        num_tokens = sum(rollout.num_loss_tokens for group in groups for rollout in group.rollouts)
        seconds = time.monotonic() - self._step_started
        self._step_seconds += seconds
        self._totals.update(steps=1, tokens=num_tokens, skipped=int(metrics["skipped"]))
        self._totals.update(dropped=sum(n for reason, n in drops.items() if reason != "unscored_rollouts"))
        row = {
            **rollout_metrics(groups, step),
            **{name: value(average) for name, average in group_metrics(credit.scores).items()},
            **metrics,
            **{f"dropped/{name}": float(n) for name, n in drops.items()},
            **{f"environment/{name}": number for name, number in environment_metrics(self.run).items()},
            "seconds": seconds,
            "tokens_per_second": num_tokens / seconds,
        }
        self._tracker.log(step, row)
        LOGGER.info("step %d: reward %.4f, loss %.4g", step + 1, row.get("reward_mean", 0.0), row.get("loss", 0.0))
        self._rollouts.log(step, groups, [a for group in credit.advantages for a in group])
        self._progress.update(step + 1, row)
        if metrics["num_rollouts_trained"] == 0:
            self.say(f"step {step + 1}: no signal, {_why_no_signal(groups, credit)}; the policy stays as it is")
        self._step_started = time.monotonic()

    def evaluation(self, step: int, found: Evaluation) -> None:
        """Log a look at the held-out prompts."""
        metrics = {"accuracy": found.accuracy.value, "reward_mean": found.reward_mean.value}
        metrics |= {f"pass_at_{k}": estimate.value for k, estimate in found.pass_at_k.items()}
        self._evaluations.append(found)
        self._evaluated_at = step
        self._tracker.log(step, {**metrics, "num_unscored": found.num_unscored}, kind="evaluate")
        LOGGER.info("evaluated after step %d: %s", step, metrics)
        self._progress.evaluation(step, metrics)
        self._step_started = time.monotonic()

    @property
    def folder(self) -> Path:
        return self._folder

    @property
    def checkpoints(self) -> Path:
        return self._folder / "checkpoints"

    def save(self, state: Mapping[str, Any]) -> None:
        """A checkpoint of the policy, which `from_pretrained` loads, with the state to go on from it.

        Its score, by which the best is kept, is the accuracy of the evaluation after that step, if there was one.
        """
        facts: dict[str, Any] = {"versions": versions()}
        if self._evaluations and self._evaluated_at == state["step"]:
            facts["score"] = self._evaluations[-1].accuracy.value
        save_checkpoint(self.checkpoints, state["step"], self.run.policy, state, facts)
        self.saved_step = state["step"]
        output = self._config.output
        retire(self.checkpoints, Retention(output.keep_last, output.keep_best))
        self._step_started = time.monotonic()

    def state_dict(self) -> dict[str, Any]:
        """Counters, evaluations and seconds, as plain containers."""
        return {
            "totals": dict(self._totals),
            "step_seconds": self._step_seconds,
            "seconds": time.monotonic() - self._started,
            "phases": self.timer.seconds,
            "evaluations": [asdict(evaluation) for evaluation in self._evaluations],
            "evaluated_at": self._evaluated_at,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting from there."""
        self._totals = Counter(state["totals"])
        self._step_seconds = state["step_seconds"]
        self._started -= state["seconds"]
        for name, seconds in state["phases"].items():
            self.timer.charge(name, seconds)
        self._evaluations = [evaluation_from(found) for found in state["evaluations"]]
        self._evaluated_at = state["evaluated_at"]
        self._step_started = time.monotonic()

    def cold_start(self, facts: Mapping[str, object]) -> None:
        """What a cold start came to, in cold_start.json."""
        (self._folder / "cold_start.json").write_text(json.dumps(facts, default=str, indent=2) + "\n")

    def _summarise(self, status: str) -> None:
        """summary.json: for programs, and for the tables at the end. Before is the first evaluation, after the last."""
        facts = RunFacts(
            status=status,
            seed=self._config.seed,
            steps=self._totals["steps"],
            seconds=time.monotonic() - self._started,
            phases=self.timer.seconds,
            skipped_steps=self._totals["skipped"],
            dropped_groups=self._totals["dropped"],
            tokens=self._totals["tokens"],
            step_seconds=self._step_seconds,
            peak_memory_bytes=peak_memory_bytes("cpu" if self._run is None else str(self._run.policy.device)),
            versions=versions(),
        )
        before = self._evaluations[0] if self._evaluations else None
        after = self._evaluations[-1] if len(self._evaluations) > 1 else None
        write_summary(self._folder, summary(facts, before, after, self._config.evaluation.confidence))


def environment_metrics(run: Run) -> Mapping[str, float]:
    """What the environment has to log itself, such as values of a reward function's `log_metric`."""
    return run.environment.metrics() if isinstance(run.environment, Logs) else {}


def _status(kind: type[BaseException]) -> str:
    return "interrupted" if issubclass(kind, KeyboardInterrupt) else "failed"


def _why_no_signal(groups: Sequence[Group], credit: Credit) -> str:
    """What left nothing to train on."""
    if not groups:
        return "every group was dropped"
    if any(advantage != 0 for group in credit.advantages for advantage in group):
        return "every completion that could teach something is masked or empty"
    return "the rewards of every group are equal"


def rollout_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Lengths, truncation, parts of the reward and staleness, over the rollouts of a step."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        return {}
    lengths = [rollout.num_loss_tokens for rollout in rollouts]
    metrics = {
        "completion_length_mean": sum(lengths) / len(lengths),
        "completion_length_max": float(max(lengths)),
        "truncated_fraction": sum(r.finish_reason == "length" for r in rollouts) / len(rollouts),
        "staleness_max": float(max(version - rollout.policy_version for rollout in rollouts)),
        "num_groups": float(len(groups)),
    }
    names = dict.fromkeys(name for rollout in rollouts for name in rollout.reward.parts)
    for name in names:
        parts = [r.reward.parts[name] for r in rollouts if name in r.reward.parts]
        metrics[f"reward/{name}"] = sum(parts) / len(parts)
    return metrics
