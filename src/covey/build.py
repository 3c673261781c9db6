"""From settings to the parts of a run. Everything else takes plain parameters."""

from collections.abc import Sequence
from dataclasses import dataclass

from covey.config import AlgorithmConfig, Config
from covey.credit import CreditAssigner, bind
from covey.engine import ENGINES
from covey.engine.base import Engine, Sampling
from covey.environments import ENVIRONMENTS
from covey.environments.base import Closes, Environment, Weighs
from covey.objective import build_objective
from covey.policy.loading import load_policy
from covey.policy.policy import Policy
from covey.policy.reference import make_reference
from covey.rollout import Sampler
from covey.selection import GROUP_FILTERS
from covey.source import GroupFilter, LocalSource, PromptStream
from covey.timing import PhaseTimer
from covey.trainer import Trainer, TrainerSettings
from covey.types import Prompt


@dataclass(frozen=True)
class Run:
    """The parts of a run, wired together."""

    environment: Environment
    policy: Policy
    trainer: Trainer
    source: LocalSource
    credit: CreditAssigner
    test_prompts: tuple[Prompt, ...]
    """Held-out prompts that evaluations look at, the same every time."""

    def close(self) -> None:
        """Let go of what would outlive the run: the event loop, worker processes."""
        try:
            self.source.close()
        finally:
            if isinstance(self.environment, Closes):
                self.environment.close()


def build_environment(config: Config) -> Environment:
    """The environment that `environment.name` names."""
    return ENVIRONMENTS[config.environment.name](config.environment, config)


def build_run(config: Config, environment: Environment, timer: PhaseTimer) -> Run:
    """Load the policy and wire trainer, engine and source around it."""
    policy = load_policy(config.model, seed=config.seed)
    trainer = build_trainer(config, policy, timer)
    engine: Engine = ENGINES[config.engine.name](policy, config.engine.cache_bytes, config.engine.max_rows)
    source = build_source(config, Sampler(engine, environment, policy.tokenizer))
    tests = _spread(environment.prompts("test"), config.evaluation.num_prompts)
    credit = CreditAssigner(config.algorithm, environment.part_weights if isinstance(environment, Weighs) else {})
    return Run(environment, policy, trainer, source, credit, tests)


def build_trainer(config: Config, policy: Policy, timer: PhaseTimer) -> Trainer:
    """The trainer, with a reference only where a penalty or a ratio asks for one."""
    settings = TrainerSettings(
        objective=build_objective(config.algorithm, norm_length=config.sampling.max_tokens),
        algorithm=config.algorithm,
        optimizer=config.optimizer,
        num_steps=config.num_steps,
        sampling=training_sampling(config),
        logprob_chunk=config.logprob_chunk,
        updates_per_batch=config.updates_per_batch,
        seed=config.seed,
    )
    refreshed = config.algorithm.reference_refresh_every is not None
    needed = settings.objective.needs_reference or config.algorithm.kl_coef > 0
    reference = make_reference(policy, refreshed=refreshed) if needed else None
    return Trainer(policy, settings, reference, timer)


def build_source(config: Config, sampler: Sampler) -> LocalSource:
    """The stream of groups this config trains on."""
    prompts = sampler.environment.prompts("train")
    if not prompts:
        raise ValueError(f"environment={config.environment.name} has no training prompts")
    return LocalSource(
        sampler=sampler,
        stream=PromptStream(prompts, config.seed, config.shuffle),
        group_size=config.group_size,
        sampling=training_sampling(config),
        keep=build_group_filter(config.algorithm),
        filter_rounds=config.algorithm.group_filter_rounds,
    )


def build_group_filter(algorithm: AlgorithmConfig) -> GroupFilter | None:
    """The dynamic-sampling filter, None where every group is kept."""
    if algorithm.group_filter is None:
        return None
    return bind(algorithm.group_filter, algorithm.group_filter_options, GROUP_FILTERS, "group_filter_options")


def training_sampling(config: Config) -> Sampling:
    """The distribution rollouts are drawn from."""
    s = config.sampling
    return Sampling(s.temperature, s.top_k, s.top_p, s.min_p, s.max_tokens, tuple(s.stop), config.seed)


def _spread(prompts: Sequence[Prompt], n: int) -> tuple[Prompt, ...]:
    """At most n prompts, evenly spread over the split, so that no part of an ordered data set is favoured."""
    if len(prompts) <= n:
        return tuple(prompts)
    return tuple(prompts[index * len(prompts) // n] for index in range(n))
