"""The result of a run for a program: model, measurements, folder."""

import copy
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from covey.api.answers import Question, change_sampling, is_conversation, measure, sample
from covey.api.settings import put
from covey.config.schema import Config
from covey.environments.base import Environment, EnvironmentLike, adapt
from covey.policy.policy import Policy
from covey.run.build import build_environment, training_sampling
from covey.run.checkpoints.checkpoint import save_policy
from covey.run.evaluate import Estimate, Evaluation
from covey.run.folder import METRICS, read_summary
from covey.run.given import NO_OBJECTS, RunObjects
from covey.run.records.notebook import curve
from covey.system import ranks
from covey.system.text.format import number_of
from covey.types import Message

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Result:
    """A finished run, or one that was interrupted.

    >>> result = covey.train("nano", rewards=exact, data=rows, num_steps=20)
    >>> result.after.accuracy, result.sample("41+7="), result.save("my_policy")
    """

    config: Config
    policy: Policy
    folder: Path
    """Everything that the run wrote; `covey train resume=FOLDER` and `covey show FOLDER` read it."""
    status: str
    """completed, or interrupted by Ctrl-C in a notebook."""
    evaluations: tuple[Evaluation, ...]
    given: RunObjects = NO_OBJECTS

    @property
    def model(self) -> "nn.Module":
        """Return the trained model: the given object, or a loaded one."""
        return vars(self.policy.model).get("given", self.policy.model)  # of a module of one's own, the module

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        return self.policy.tokenizer

    @property
    def before(self) -> Evaluation | None:
        """Return the evaluation before the first step, None without one."""
        return self.evaluations[0] if self.evaluations else None

    @property
    def after(self) -> Evaluation | None:
        """Return the last evaluation, None if interrupted before it."""
        return self.evaluations[-1] if len(self.evaluations) > 1 else None

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Return the metrics of each step, as they stand in metrics.jsonl (docs/use/metrics.md)."""
        with (self.folder / METRICS).open(encoding="utf-8", newline="\n") as lines:
            found = [json.loads(line) for line in lines]
        return [row for row in found if row["kind"] == "train"]

    @property
    def metrics(self) -> Any:
        """Return metrics as a pandas DataFrame, or `rows` without pandas."""
        try:
            from pandas import DataFrame
        except ImportError:
            return self.rows
        return DataFrame(self.rows)

    @property
    def summary(self) -> dict[str, Any]:
        """Return summary.json: before, after, gain, seconds of each phase, versions."""
        return read_summary(self.folder) or {}

    @overload
    def sample(self, prompts: str | Sequence[Message], n: int = 1, **sampling: Any) -> list[str]: ...

    @overload
    def sample(self, prompts: Sequence[Question], n: int = 1, **sampling: Any) -> list[list[str]]: ...

    def sample(self, prompts: Any, n: int = 1, **sampling: Any) -> Any:
        """Return n completions of a prompt, or a list for several.

        `sampling` are fields of `covey.Sampling` such as temperature=0 and max_tokens=64; the others are those of the
        run.
        """
        how = change_sampling(training_sampling(self.config), sampling)
        if isinstance(prompts, str) or is_conversation(prompts):
            return sample(self.policy, self.config, [prompts], n, how)[0]
        return sample(self.policy, self.config, prompts, n, how)

    def evaluate(self, environment: EnvironmentLike | None = None, **settings: Any) -> Evaluation:
        """Measure the policy on the held-out prompts, or another environment's.

        `settings` are those of the evaluation and of sampling, such as num_prompts=500 and num_samples=8.
        """
        config = copy.deepcopy(self.config)
        for name, value in settings.items():
            put(config, name.replace("__", "."), value)
        return measure(self.policy, config, self._environment(config) if environment is None else adapt(environment))

    def save(self, folder: str | Path) -> Path:
        """Save model (or adapter) and tokenizer, for `from_pretrained` and for `covey.train(folder, ...)`.

        With several processes the first saves.
        """
        if ranks.rank() == 0:
            save_policy(self.policy, Path(folder))
        return Path(folder)

    def _environment(self, config: Config) -> Environment:
        return self.given.environment(config) if self.given.environment else build_environment(config)

    def __repr__(self) -> str:
        lines = [f"{name}: {before} -> {after}" for name, before, after in self._compared()]
        return "\n".join([f"{self._done}, {self.folder}", *lines])

    def _repr_html_(self) -> str:
        lines = [(escape(name), before, after) for name, before, after in self._compared()]
        cells = "".join(f"<tr><td>{name}</td><td>{before}</td><td>{after}</td></tr>" for name, before, after in lines)
        rewards = [row["sampled_reward_mean"] for row in self.rows if row["sampled_reward_mean"] is not None]
        return (
            f"<div>{escape(self._done)}: <code>{escape(str(self.folder))}</code></div>"
            f"<table><tr><th></th><th>before</th><th>after</th></tr>{cells}</table>"
            f"{curve(rewards) if len(rewards) > 1 else ''}"
        )

    @property
    def _done(self) -> str:
        return f"{self.status} after {number_of(len(self.rows), 'step')}"

    def _compared(self) -> list[tuple[str, str, str]]:
        """Return name, before and after of each measure, with intervals."""
        before, after = _estimates(self.before), _estimates(self.after)
        names = [name for name in {**before, **after} if name in (before or after) and name in (after or before)]
        return [(name, _format(before.get(name)), _format(after.get(name))) for name in names]


def _estimates(found: Evaluation | None) -> dict[str, Estimate]:
    if found is None:
        return {}
    passes = {f"pass@{k}": estimate for k, estimate in found.pass_at_k.items()}
    accuracy = {} if found.accuracy is None else {"accuracy": found.accuracy}
    return {**accuracy, "mean reward": found.reward_mean, **passes}


def _format(estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    has_ends = math.isfinite(estimate.low)
    return f"{estimate.value:.3f}" + (f" [{estimate.low:.3f}, {estimate.high:.3f}]" if has_ends else "")
