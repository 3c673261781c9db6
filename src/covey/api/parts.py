"""`covey.build`: a run's parts, wired, for your own loop.

with covey.build(model, rewards, data, num_steps=50) as parts:
    for groups in parts:                     # sampled and scored on the newest weights
        metrics = parts.step(groups)         # advantages, batch, update, new version
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.api.answers import Question, attention_of, sample, set_attention
from covey.api.objects import Reward
from covey.api.request import Arguments, make_request
from covey.api.training import Data
from covey.config.early import check_early
from covey.config.schema import Config
from covey.config.validate import validate
from covey.loop import take, update
from covey.policy import sharding
from covey.policy.policy import Policy
from covey.rollouts.source import Dropped, GroupSource
from covey.run.build import Run, build_run
from covey.run.checkpoints.checkpoint import save_policy
from covey.run.evaluate import Evaluation, evaluate
from covey.run.records.step_metrics import rollout_metrics
from covey.system import accelerate_launch, collectives, machine
from covey.system.waits.timer import PhaseTimer
from covey.trainer.trainer import Trainer
from covey.types import Group

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass
class Parts:
    """The parts of a run; iterating samples groups until `num_steps`."""

    run: Run
    """All parts and their settings, as `covey.train` wires them."""
    num_steps_done: int = 0
    _dropped: list[Dropped] = field(default_factory=list)

    @property
    def config(self) -> Config:
        """Return the settings of the run."""
        return self.run.config

    @property
    def source(self) -> GroupSource:
        """Return where groups come from."""
        return self.run.source

    @property
    def trainer(self) -> Trainer:
        """Return the trainer."""
        return self.run.trainer

    @property
    def policy(self) -> Policy:
        return self.run.policy

    def __iter__(self) -> Iterator[list[Group]]:
        """Yield each step's groups, to be trained on by `step`."""
        while self.num_steps_done < self.config.num_steps:
            before = self.num_steps_done
            yield self.take()
            if self.num_steps_done == before:
                raise ValueError("the loop took groups and did not train on them: call parts.step(groups)")

    def take(self) -> list[Group]:
        """Sample and score this rank's share of the next groups."""
        groups, self._dropped = take(self.run, self.num_steps_done)
        return groups

    def step(self, groups: Sequence[Group]) -> dict[str, float | None]:
        """Train on groups and publish the weights; return metrics."""
        step, dropped = self.num_steps_done, self._dropped
        stepped = update(self.run, groups, dropped, step)
        self.num_steps_done, self._dropped = step + 1, []
        left_out = [one.group for one in dropped]
        return {**rollout_metrics(groups, left_out, stepped.credit, step), **stepped.metrics}

    def evaluate(self) -> Evaluation:
        """Measure the policy on the held-out prompts, with confidence intervals."""
        with sharding.gather_weights(self.policy):
            return evaluate(self.source, self.run.test_prompts, self.source.sampling, self.config.evaluation)

    def sample(self, prompts: Sequence[Question], n: int = 1) -> list[list[str]]:
        """Return n completions of each text or conversation, sampled as in training."""
        return sample(self.policy, self.config, prompts, n, self.source.sampling)

    def save(self, folder: str | Path) -> None:
        """Save model (or adapter) and tokenizer, for `from_pretrained`. Collective."""
        weights = sharding.full_state_dict(self.policy.model) if self.policy.sharded else None
        collectives.run_on_rank0(lambda: save_policy(self.policy, Path(folder), weights))


@contextmanager
def build(
    model: "str | Path | PreTrainedModel | None" = None,
    rewards: Reward | Sequence[Reward] | None = None,
    data: Data | None = None,
    *,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    reference: "str | Path | PreTrainedModel | None" = None,
    teacher: "str | Path | PreTrainedModel | None" = None,
    config: Config | None = None,
    recipe: str | None = None,
    **settings: Any,
) -> Iterator[Parts]:
    """Build a run's parts for your own loop, as `covey.train` does.

    Under torchrun and the like every process does the same, and they train together inside. Raises ValueError for what
    its caller can fix.
    """
    machine.prepare()
    chosen = settings if recipe is None else settings | {"recipe": recipe}
    asked = Arguments(model, rewards, data, tokenizer, chosen, reference=reference, teacher=teacher)
    request = make_request(asked, config)
    config, given = request.config, request.given
    if config.cold_start.enabled:
        raise ValueError("cold_start.enabled=true needs covey.train; begin with the policy of `covey cold-start`")
    validate(config)
    check_early(config, loads_model=given.model is None, loads_beside=given.compared.missing)
    accelerate_launch.check(config.model.precision, config.model.device)
    attention = attention_of(given)
    with collectives.process_group(config.timeouts.ranks, config.model.device), ExitStack() as closing:
        run = build_run(config, given.build_environment(config), PhaseTimer(), given.policy(config), given.compared)
        closing.callback(set_attention, run.policy, attention)
        closing.callback(run.close)
        yield Parts(run)
