"""Build a run's parts from settings; all else takes plain parameters."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import nn

from covey.algorithm.build import build_credit, build_objective
from covey.algorithm.credit.groups import CreditAssigner
from covey.algorithm.objective import Objective
from covey.cluster.judges import JudgeActor, JudgedElsewhere, turns_of
from covey.cluster.references import ReferenceActor, RemoteReference
from covey.cluster.serving import Answerers, Serving
from covey.cluster.slot import PoolLimits
from covey.cluster.source import RaySource
from covey.config.schema import Config
from covey.config.validate import with_steps
from covey.engine.base import Closable, Engine, UpdateMode
from covey.engine.build import ENGINES, OWN_WEIGHTS, sampling_engine
from covey.engine.weights import trained_tensors
from covey.environments import registry as environments
from covey.environments.base import Environment, EnvironmentLike, adapt, close_environment
from covey.environments.settings import EnvironmentConfig, EpisodesConfig, MixtureConfig
from covey.policy import sharding
from covey.policy.models.loading import choose_device, load_policy
from covey.policy.models.naming import IN_MEMORY, beginning
from covey.policy.models.reference_model import (
    NO_MODELS,
    FrozenModels,
    Vocabulary,
    load_reference_model,
    model_hash,
    reference_in_memory,
    vocabulary_of,
)
from covey.policy.policy import Policy
from covey.policy.reference import Reference, make_reference
from covey.rollouts.buffer import Bound
from covey.rollouts.sampler import EpisodeLimits, Sampler
from covey.rollouts.source import GroupSource, LocalSource
from covey.rollouts.stream import PromptSampler
from covey.run.build_stream import (
    build_group_filter,
    build_stream,
    check_graded,
    check_prompts,
    check_rendering,
    reads_sampler,
    spread,
    usable_prompts,
)
from covey.run.build_teacher import build_teacher, with_lessons
from covey.run.memory.estimate import with_checkpointing
from covey.run.memory.room import available_bytes
from covey.system import collectives
from covey.system.waits.timer import PhaseTimer
from covey.system.waits.watchdog import PromptWaits, Watchable, Watchdog
from covey.trainer.optimizer import TrainerSettings
from covey.trainer.prepare import Packing
from covey.trainer.trainer import Trainer
from covey.types import Prompt, Sampling

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """Hold the settings of a run and its parts, wired together."""

    config: Config
    """Settings, with the `num_steps` that their budget comes to."""
    environment: Environment
    policy: Policy
    trainer: Trainer
    source: GroupSource
    local: LocalSource
    """The same prompts sampled in this process, for checks before a run, and as the source of a local run."""
    credit: CreditAssigner
    packing: Packing
    test_prompts: tuple[Prompt, ...]
    """Held-out prompts that evaluations look at, the same every time."""
    servings: tuple[Serving, ...] = ()
    """Processes of the reference and of the judge, where they have some."""
    reference_identity: str = ""
    """Tells the reference from others: a resumed run must have it again."""
    code: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Hashes of the user's code by file, the model's under "model", others under setting and name."""

    @cached_property
    def is_held_out(self) -> bool:
        """Return True if evaluations use held-out prompts."""
        looked_at = {repr((prompt.text, prompt.columns)) for prompt in self.test_prompts}
        trained = (repr((prompt.text, prompt.columns)) for prompt in self.environment.prompts("train"))
        return bool(looked_at.difference(trained))

    def close(self) -> None:
        """Release the event loop and worker processes."""
        try:
            self.source.close()
            if isinstance(self.local.sampler.engine, Closable):
                self.local.sampler.engine.close()
        finally:
            close_environment(self.environment)
            for serving in reversed(self.servings):  # the first may have started the cluster
                serving.close()


def build_environment(config: Config, say: Callable[[str], None] = LOGGER.info) -> Environment:
    """Build the environment of `environment.name`, telling `say` of long work.

    ValueError where its prompts cannot be told apart, or where it does not say what a curriculum asks for.
    """
    return checked_environment(config, environments.build(config, say))


def checked_environment(config: Config, environment: Environment) -> Environment:
    """Return the environment. ValueError as in `build_environment`."""
    check_prompts(config.environment.name, environment)
    check_graded(config.environment.name, environment, config.curriculum)
    return environment


def build_run(
    config: Config,
    environment: EnvironmentLike,
    timer: PhaseTimer,
    policy: Policy | None = None,
    compared: FrozenModels = NO_MODELS,
    began: Path | None = None,
) -> Run:
    """Load the policy unless given, and wire trainer, engine and source.

    `compared` are models in memory that the settings ask for, `began` the policy of a cold start.
    """
    loaded = config if began is None else replace(config, model=replace(config.model, name=str(began)))
    if policy is None and config.model.gradient_checkpointing is None:
        device = choose_device(config.model.device)
        free = min(collectives.all_gather(available_bytes(device)))
        loaded = with_checkpointing(loaded, collectives.world_size(), free, is_gpu=device.type == "cuda")
    policy = policy or load_policy(loaded.model, seed=config.seed, on_host=is_shared_out(config.parallel.strategy))
    servings: list[Serving] = []
    try:
        run = _wire(loaded, adapt(environment), timer, policy, servings, compared)
        return replace(run, config=replace(config, num_steps=run.config.num_steps))
    except Exception:
        for serving in reversed(servings):
            serving.close()
        raise


def _wire(
    config: Config,
    environment: Environment,
    timer: PhaseTimer,
    policy: Policy,
    servings: list[Serving],
    compared: FrozenModels = NO_MODELS,
) -> Run:
    """Wire the parts; started processes are added to `servings`."""
    known = _reference_identity(config, policy, compared.reference)
    reference = build_reference(config, policy, servings, compared.reference)
    teacher = build_teacher(config, policy, reference, compared.teacher)
    judged = build_judged(config, environment, policy, servings)
    policy, reference = shard_policy(policy, reference, config.parallel.strategy, choose_device(config.model.device))
    # Samplers may have an engine that this process has no packages for; checks before the run use the one in process.
    build_engine = sampling_engine if has_samplers(config) else ENGINES[config.engine.name]
    engine = build_engine(policy, config.engine, config.model.kernels)
    if isinstance(engine, Watchable):
        engine.watched_by(timer.watchdog)
    environment.watched_by(timer.watchdog)
    sampler = make_sampler(config, engine, environment, policy, PromptWaits(timer.watchdog, config.timeouts.scoring))
    prompts = usable_prompts(sampler, "train", policy.max_length, config.sampling, config.data.bad_rows)
    check_rendering(config.model, policy, prompts)
    config = with_steps(config, len(prompts))
    settings = with_lessons(trainer_settings(config), config, sampler, policy, teacher, prompts)
    trainer = Trainer(policy, settings, reference, timer, teacher)
    local = build_source(config, sampler, prompts)
    if judged is not None:
        local.sampler = replace(sampler, environment=judged)
    tests = held_out_prompts(config, sampler, policy.max_length)
    credit = CreditAssigner(build_credit(config.algorithm), environment.part_weights)
    packing = Packing(config.packing, config.micro_batch_tokens)
    source: GroupSource = local
    if has_samplers(config):  # last: what is refused above has started none
        source = build_ray_source(config, local, policy, timer.watchdog, judged)
    return Run(config, environment, policy, trainer, source, local, credit, packing, tests, tuple(servings), known)


def has_samplers(config: Config) -> bool:
    """Return True for separate sampler processes."""
    return config.source == "ray" and config.devices.sampler > 0


def build_reference(
    config: Config, policy: Policy, servings: list[Serving], compared: nn.Module | None = None
) -> Reference | RemoteReference | None:
    """Copy the policy, load another reference, or serve it elsewhere.

    None where no penalty and no ratio asks for a reference. Started processes are added to `servings`.
    """
    if not (_objective(config).needs_reference or config.algorithm.kl_coef > 0):
        return None
    if config.source == "ray" and config.devices.reference > 0:
        given, threads = (partial(load_reference, config, vocabulary_of(policy)),), torch.get_num_threads()
        answerers = start_serving(config, "reference", ReferenceActor, given, servings, threads)
        return RemoteReference(answerers, servings[-1].check if servings else lambda: None)
    if compared is not None:
        return reference_in_memory(compared, config.model, policy)
    if config.algorithm.reference_model is not None:
        return load_reference(config, vocabulary_of(policy), on_host=is_shared_out(config.parallel.strategy))
    refreshed = config.algorithm.refreshes_reference
    return make_reference(policy, refreshed=refreshed, is_empty=is_shared_out(config.parallel.strategy))


def load_reference(config: Config, vocabulary: Vocabulary, *, on_host: bool = False) -> Reference:
    """Load the reference model, by default the initial policy. ValueError where it has another vocabulary."""
    name, revision, seed = config.algorithm.reference_model, config.algorithm.reference_revision, config.seed
    if name is not None:
        return load_reference_model(config.model, name, revision, vocabulary, seed=seed, on_host=on_host)
    return make_reference(load_policy(config.model, seed=seed), refreshed=False)


def _reference_identity(config: Config, policy: Policy, compared: nn.Module | None) -> str:
    """Return a fingerprint of the reference's weights, or its origin."""
    name, revision = config.algorithm.reference_model, config.algorithm.reference_revision
    if name is None and not config.model.name.startswith(IN_MEMORY):
        return beginning(config.model.name, config.seed)
    given = policy.model if name is None else compared  # the first may have been trained since, in place
    told = collectives.run_on_rank0(lambda: model_hash(name or "", revision, given))
    return told if name is not None else f"{config.model.name} with weights {told[:8]}"


def build_judged(
    config: Config, environment: Environment, policy: Policy, servings: list[Serving]
) -> JudgedElsewhere | None:
    """Start the processes of devices.judge, and return their client.

    ValueError where the environment has no judge, or episodes. Started processes are added to `servings`.
    """
    if config.source != "ray" or config.devices.judge == 0:
        return None
    if config.environment.name == "custom" and environment.judge_summary() is None:
        raise ValueError(f"devices.judge={config.devices.judge} needs an environment with a judge_summary, got none")
    # As many threads as where it would be scored otherwise: the last bits of a judge depend on them.
    threads = config.devices.cpus_per_sampler if has_samplers(config) else torch.get_num_threads()
    turns = turns_of(environment, config.devices.judge)
    given = (partial(build_environment, config), policy.tokenizer)
    answerers = start_serving(config, "judge", JudgeActor, given, servings, threads)
    return JudgedElsewhere(answerers, turns, servings[-1] if servings else None)


def start_serving(
    config: Config, role: str, kind: type, given: Sequence[object], servings: list[Serving], threads: int
) -> Answerers:
    """Start a role's processes on rank 0; return their address."""

    def start() -> Answerers:
        servings.append(Serving(config.devices, role, kind, given, config.timeouts.loading, threads))
        return servings[-1].answerers

    return collectives.run_on_rank0(start)


def trainer_settings(config: Config) -> TrainerSettings:
    return TrainerSettings(
        objective=_objective(config),
        algorithm=config.algorithm,
        optimizer=config.optimizer,
        num_steps=config.num_steps,
        sampling=training_sampling(config),
        max_staleness=config.max_staleness,
        logprob_chunk=config.logprob_chunk,
        updates_per_batch=config.updates_per_batch,
        num_mini_batches=config.num_mini_batches,
        streaming=config.streaming,
        groups_per_step=config.groups_per_step,
        seed=config.seed,
        kernels=config.model.kernels,
    )


def _objective(config: Config) -> Objective:
    return build_objective(config.algorithm, norm_length=config.sampling.max_tokens)


def held_out_prompts(config: Config, sampler: Sampler, max_length: int) -> tuple[Prompt, ...]:
    prompts = usable_prompts(sampler, "test", max_length, config.sampling, config.data.bad_rows)
    return spread(prompts, config.evaluation.num_prompts)


def training_stream(config: Config, environment: Environment, prompts: Sequence[Prompt]) -> PromptSampler:
    name, order = config.environment.name, config.curriculum
    return build_stream(name, environment, prompts, order, seed=config.seed, shuffle=config.shuffle)


def build_source(config: Config, sampler: Sampler, prompts: Sequence[Prompt]) -> LocalSource:
    return LocalSource(
        sampler=sampler,
        stream=training_stream(config, sampler.environment, prompts),
        group_size=config.group_size,
        sampling=training_sampling(config),
        keep=build_group_filter(config.algorithm),
        filter_rounds=config.algorithm.group_filter_rounds,
        later_sizes=config.group_size_schedule,
        correct_above=config.evaluation.correct_above,
    )


def build_ray_source(
    config: Config, local: LocalSource, policy: Policy, watchdog: Watchdog, judged: JudgedElsewhere | None = None
) -> RaySource:
    """Start the samplers on rank 0, and build their source."""
    bound = Bound(config.groups_per_step, config.max_staleness, config.publish_every)
    is_read = reads_sampler(_objective(config))
    source = RaySource(local, policy, bound, watchdog, judged, records_logprobs=is_read)
    if collectives.is_main_process():
        how: UpdateMode = config.engine.update  # type: ignore[assignment] # checked with the settings
        limits = PoolLimits(loading=config.timeouts.loading, silence=config.timeouts.samplers)
        weight_bytes = sum(tensor.nbytes for tensor in trained_tensors(policy).values())
        asks = None if judged is None else partial(JudgedElsewhere, judged.answerers, judged.turns)
        source.start(partial(build_sampler, config, asks), config.devices, how, limits, weight_bytes)
    return source


def build_sampler(config: Config, asks: Callable[[], Environment] | None = None) -> Sampler:
    environment = adapt(build_environment(config)) if asks is None else asks()
    policy = load_policy(config.model, seed=config.seed)
    engine = OWN_WEIGHTS[config.engine.name](policy, config.engine, config.model.kernels)
    return make_sampler(config, engine, environment, policy, PromptWaits(scoring_seconds=config.timeouts.scoring))


def make_sampler(
    config: Config, engine: Engine, environment: Environment, policy: Policy, waits: PromptWaits | None = None
) -> Sampler:
    """Make the roller of prompts, with the settings' episode limits."""
    longest = min(policy.max_length, config.sampling.max_total_tokens or policy.max_length)
    limits = episode_limits(config.environment, longest)
    parts = config.environment.parts if isinstance(config.environment, MixtureConfig) else {}
    of_parts = {name: episode_limits(part, longest) for name, part in parts.items()}
    sampler = Sampler(engine, environment, policy.tokenizer, waits or PromptWaits(), policy.mask_id, limits, of_parts)
    sampler.environment.read_with(policy.tokenizer)
    return sampler


def episode_limits(settings: EnvironmentConfig, longest: int) -> EpisodeLimits:
    """Return the limits of episodes; `longest` bounds every context."""
    if not isinstance(settings, EpisodesConfig):
        return EpisodeLimits(max_context=longest)
    longest = longest if settings.max_context is None else min(settings.max_context, longest)
    return EpisodeLimits(settings.max_turns, longest, settings.turn_timeout, settings.history)


def training_sampling(config: Config) -> Sampling:
    """Return the distribution that rollouts are drawn from."""
    chosen = vars(config.sampling)
    return Sampling(**{**chosen, "stop": tuple(chosen["stop"])}, seed=config.seed)


def is_shared_out(strategy: str) -> bool:
    """Return True if `strategy` ("ddp" or "fsdp") shards weights."""
    return strategy == "fsdp" and collectives.is_distributed()


def shard_policy(
    policy: Policy, reference: Reference | RemoteReference | None, strategy: str, device: torch.device | None = None
) -> tuple[Policy, Reference | RemoteReference | None]:
    """Distribute policy and reference by `strategy`, onto `device`.

    With ddp every rank holds all of both. Every rank must hold the same weights before; a reference without storage
    gets those of the policy.
    """
    if not is_shared_out(strategy):
        return policy, reference
    sharded = sharding.shard(policy, device)
    if not isinstance(reference, Reference):
        return sharded, reference
    if reference.policy.model is policy.model:
        return sharded, replace(reference, policy=sharded)
    is_empty = not reference.is_own and all(parameter.is_meta for parameter in reference.policy.model.parameters())
    own = sharding.shard_like(reference.policy, sharded) if is_empty else sharding.shard(reference.policy, device)
    return sharded, replace(reference, policy=own)
