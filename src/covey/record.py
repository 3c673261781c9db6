"""What a run leaves behind: metrics, rollouts, checkpoints, the summary; and what it shows while it goes on."""

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

from covey.build import Run
from covey.checkpoint import save_checkpoint
from covey.config import Config
from covey.credit import Credit
from covey.diagnostics import group_metrics, value
from covey.evaluate import Evaluation
from covey.progress import make_progress
from covey.summary import RunFacts, peak_memory_bytes, summary, versions, write_summary
from covey.tracker import RolloutLog, make_trackers
from covey.types import Group


class Record:
    """Writes one run's folder. A context manager, so that files are closed however the run ends."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._started = self._step_started = time.monotonic()
        self._tracker = make_trackers(config.output, folder, asdict(config))
        output = config.output
        self._rollouts = RolloutLog(folder / "rollouts.jsonl", output.rollouts_per_step, output.max_rollout_rows)
        self._progress = make_progress(config.num_steps, output.progress)
        self._totals: Counter[str] = Counter()
        self._run: Run | None = None

    def __enter__(self) -> Self:
        self._progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.close()
        self._tracker.close()
        self._rollouts.close()
        if self._run is not None:
            self._run.close()

    @property
    def run(self) -> Run:
        assert self._run is not None, "begin() comes first"
        return self._run

    def say(self, text: str) -> None:
        self._progress.message(text)

    def begin(self, run: Run) -> None:
        """The parts of the run are there; time and tokens count from here on."""
        self._run = run

    def step(self, step: int, groups: Sequence[Group], credit: Credit, metrics: Mapping[str, float]) -> None:
        """Log a finished step: what was sampled, what it was worth, what the update did."""
        drops = self.run.source.take_drops()
        seconds = -self._step_started + (now := time.monotonic())
        self._step_started = now
        sampled = {**rollout_metrics(groups, step), **{k: value(v) for k, v in group_metrics(credit.scores).items()}}
        num_tokens = sum(rollout.num_loss_tokens for group in groups for rollout in group.rollouts)
        pace = {"seconds": seconds, "tokens_per_second": num_tokens / seconds}
        self._totals.update(tokens=num_tokens, skipped=int(metrics["skipped"]))
        self._totals.update(dropped=sum(n for reason, n in drops.items() if reason != "unscored_rollouts"))
        row = {**sampled, **metrics, **{f"dropped/{name}": n for name, n in drops.items()}, **pace}
        self._tracker.log(step, row)
        self._rollouts.log(step, groups, [a for group in credit.advantages for a in group])
        self._progress.update(step + 1, row)
        if metrics["num_rollouts_trained"] == 0:
            self.say(f"step {step + 1}: no signal, every group has equal rewards; the policy stays as it is")

    def evaluation(self, step: int, found: Evaluation) -> None:
        """Log a look at the held-out prompts."""
        metrics = {"accuracy": found.accuracy.value, "reward_mean": found.reward_mean.value}
        metrics |= {f"pass_at_{k}": estimate.value for k, estimate in found.pass_at_k.items()}
        self._tracker.log(step, metrics, kind="evaluate")
        self._progress.evaluation(step, metrics)

    def save(self, step: int) -> None:
        """A checkpoint of the policy that `from_pretrained` loads."""
        keep = self._config.output.keep_last
        save_checkpoint(self._folder / "checkpoints", step, self.run.policy, versions(), keep_last=keep)

    def cold_start(self, facts: Mapping[str, object]) -> None:
        """What a cold start came to, in cold_start.json."""
        (self._folder / "cold_start.json").write_text(json.dumps(facts, default=str, indent=2) + "\n")

    def finish(self, before: Evaluation | None, after: Evaluation | None, steps: int | None = None) -> None:
        """summary.json, for programs and for the tables at the end."""
        facts = RunFacts(
            status="completed",
            seed=self._config.seed,
            steps=self._config.num_steps if steps is None else steps,
            seconds=time.monotonic() - self._started,
            phases=self.run.trainer.timer.seconds,
            skipped_steps=self._totals["skipped"],
            dropped_groups=self._totals["dropped"],
            tokens=self._totals["tokens"],
            peak_memory_bytes=peak_memory_bytes(str(self.run.policy.device)),
            versions=versions(),
        )
        write_summary(self._folder, summary(facts, before, after, self._config.evaluation.confidence))


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
