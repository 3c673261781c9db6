"""From settings to the parts of a run. Everything else takes plain parameters."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from covey import custom, environments
from covey.algorithm_config import AlgorithmConfig
from covey.build_stream import build_stream, check_graded
from covey.config import Config
from covey.credit import CreditAssigner
from covey.deadlines import Stages, Watchable
from covey.engine import ENGINES
from covey.engine.base import Engine, Sampling
from covey.environments.base import Closes, Environment, Split, Weighs
from covey.objective import Objective, build_objective
from covey.policy import sharding
from covey.policy.loading import load_policy
from covey.policy.nano import CHAT_TEMPLATE
from covey.policy.policy import Policy
from covey.policy.reference import Reference, make_reference
from covey.prompt_lengths import fitting
from covey.rollout import Sampler
from covey.selection import GROUP_FILTERS
from covey.source import GroupFilter, LocalSource
from covey.timing import PhaseTimer
from covey.trainer import Trainer, TrainerSettings
from covey.types import Prompt

LOGGER = logging.getLogger(__name__)

SPLITS: tuple[Split, ...] = ("train", "test")


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


def build_environment(config: Config, say: Callable[[str], None] = LOGGER.info) -> Environment:
    """The environment that `environment.name` names; `say` hears of what takes a while.

    ValueError where its prompts cannot be told apart, or where it does not say what a curriculum asks for.
    """
    environment = environments.build(config, say)
    check_prompts(config.environment.name, environment)
    check_graded(config, environment)
    return environment


def check_prompts(name: str, environment: Environment) -> None:
    """Refuse prompts that are none, or that share an id: seeds, verdicts and groups are told apart by it."""
    seen: dict[str, Split] = {}
    for split in SPLITS:
        prompts = environment.prompts(split)
        wrong = [prompt for prompt in prompts if not isinstance(prompt, Prompt)]
        if wrong or not prompts:
            got = f"a {type(wrong[0]).__name__}" if wrong else "none"
            raise ValueError(f"environment={name} must give Prompts for split {split}, got {got}")
        for prompt in prompts:
            if prompt.id in seen:
                where = f"two prompts of split {split}" if seen[prompt.id] == split else "prompts of train and test"
                raise ValueError(
                    f"environment={name} must give each prompt an id of its own, {where} have {prompt.id!r}"
                )
            seen[prompt.id] = split


def build_run(config: Config, environment: Environment, timer: PhaseTimer) -> Run:
    """Load the policy and wire trainer, engine and source around it."""
    policy = load_policy(config.model, seed=config.seed)
    policy, reference = sharding.distributed(policy, build_reference(config, policy), config.distribution.strategy)
    trainer = build_trainer(config, policy, reference, timer)
    settings = config.engine
    engine: Engine = ENGINES[settings.name](policy, settings.cache_bytes, settings.max_rows, settings.kernels)
    for part in (engine, environment):
        if isinstance(part, Watchable):
            part.watched_by(timer.watchdog)
    stages = Stages(timer.watchdog, config.deadlines.scoring)
    sampler = Sampler(engine, environment, policy.tokenizer, stages, policy.mask_id)
    prompts = usable_prompts(config, sampler, policy.max_length, "train")
    check_rendering(config, policy, prompts)
    source = build_source(config, sampler, prompts)
    tests = _spread(usable_prompts(config, sampler, policy.max_length, "test"), config.evaluation.num_prompts)
    credit = CreditAssigner(config.algorithm, environment.part_weights if isinstance(environment, Weighs) else {})
    return Run(environment, policy, trainer, source, credit, tests)


def build_reference(config: Config, policy: Policy) -> Reference | None:
    """The policy as it is now, where a penalty or a ratio asks for a reference."""
    needed = _objective(config).needs_reference or config.algorithm.kl_coef > 0
    refreshed = config.algorithm.reference_refresh_every is not None
    return make_reference(policy, refreshed=refreshed) if needed else None


def build_trainer(config: Config, policy: Policy, reference: Reference | None, timer: PhaseTimer) -> Trainer:
    """The trainer of this very policy."""
    return Trainer(policy, trainer_settings(config), reference, timer)


def trainer_settings(config: Config) -> TrainerSettings:
    """How this config trains."""
    return TrainerSettings(
        objective=_objective(config),
        algorithm=config.algorithm,
        optimizer=config.optimizer,
        num_steps=config.num_steps,
        sampling=training_sampling(config),
        logprob_chunk=config.logprob_chunk,
        updates_per_batch=config.updates_per_batch,
        seed=config.seed,
    )


def _objective(config: Config) -> Objective:
    return build_objective(config.algorithm, norm_length=config.sampling.max_tokens)


def usable_prompts(config: Config, sampler: Sampler, max_length: int, split: Split) -> list[Prompt]:
    """The prompts of a split; with data.bad_rows=skip those are left out that a policy of `max_length` cannot answer.

    With data.bad_rows=error the check before the run, or the engine, refuses the first of them by its id.
    """
    prompts = sampler.environment.prompts(split)
    if config.data.bad_rows == "error":
        return prompts
    added = config.sampling.max_tokens if sampler.mask_id is None else 0
    return fitting(prompts, sampler.tokenizer, max_length - added)


def check_rendering(config: Config, policy: Policy, prompts: Sequence[Prompt]) -> None:
    """Warn where a chat template stays unused because all prompts are text; ValueError where a setting is about it."""
    template = policy.tokenizer.chat_template
    if template is None or any(not isinstance(prompt.text, str) for prompt in prompts):
        return
    if config.model.chat_template_kwargs:
        raise ValueError(
            f"model.chat_template_kwargs={config.model.chat_template_kwargs} needs prompts that are conversations, "
            "got text only"
        )
    if template != CHAT_TEMPLATE:
        LOGGER.warning(
            "all prompts are text and go to %s without its chat template; a prompt that is a list of messages "
            "(role, content) goes through it",
            config.model.name,
        )


def build_source(config: Config, sampler: Sampler, prompts: Sequence[Prompt]) -> LocalSource:
    """The stream of groups this config trains on."""
    return LocalSource(
        sampler=sampler,
        stream=build_stream(config, sampler.environment, prompts),
        group_size=config.group_size,
        sampling=training_sampling(config),
        keep=build_group_filter(config.algorithm),
        filter_rounds=config.algorithm.group_filter_rounds,
        later_sizes=config.group_size_schedule,
        correct_above=config.evaluation.correct_above,
    )


def build_group_filter(algorithm: AlgorithmConfig) -> GroupFilter | None:
    """The dynamic-sampling filter, None where every group is kept."""
    if algorithm.group_filter is None:
        return None
    name, options = algorithm.group_filter, algorithm.group_filter_options
    return custom.lookup(custom.GROUP_FILTER, name, GROUP_FILTERS, options)


def training_sampling(config: Config) -> Sampling:
    """The distribution rollouts are drawn from."""
    s = config.sampling
    return Sampling(
        temperature=s.temperature,
        top_k=s.top_k,
        top_p=s.top_p,
        min_p=s.min_p,
        max_tokens=s.max_tokens,
        stop=tuple(s.stop),
        num_passes=s.num_passes,
        likelihood=s.likelihood,
        seed=config.seed,
    )


def _spread(prompts: Sequence[Prompt], n: int) -> tuple[Prompt, ...]:
    """At most n prompts, as many of each environment as of another, each evenly spread over its split, so that no part
    of an ordered data set is favoured."""
    if len(prompts) <= n:
        return tuple(prompts)
    chosen: list[Prompt] = []
    names = list(dict.fromkeys(prompt.environment for prompt in prompts))
    for place, name in enumerate(names):
        own = [prompt for prompt in prompts if prompt.environment == name]
        share = min(len(own), n // len(names) + (place < n % len(names)))
        chosen += [own[index * len(own) // share] for index in range(share)]
    return tuple(chosen)
