"""Supervised warm-up on an environment's demonstrations: same Batch, same Trainer, loss "nll".

A cold-start policy lies in a content-addressed cache, whose key is everything it depends on: a second run takes it
from there.
"""

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor

import covey
from covey.algorithm.build import build_objective
from covey.algorithm.settings import AlgorithmConfig
from covey.config.schema import Config
from covey.engine.build import sampling_engine
from covey.environments.base import Demonstration, Environment
from covey.environments.settings import Say
from covey.policy import sharding
from covey.policy.models.loading import choose_device, load_policy
from covey.policy.models.naming import COLD_START
from covey.policy.models.naming import COLD_START_REPORT as REPORT
from covey.policy.policy import Policy, is_adapted
from covey.rollouts.demonstrations import demonstration_group
from covey.rollouts.group_checks import stop_where_only_failures
from covey.rollouts.source import LocalSource
from covey.rollouts.stream import PromptStream
from covey.run.build import is_shared_out, make_sampler, shard_policy
from covey.run.checkpoints.checkpoint import name_base, save_policy
from covey.system import collectives
from covey.system.disk import LEFTOVER_SECONDS, atomic_folder, catch_write_errors
from covey.trainer.batch import count, make_batch, make_rows
from covey.trainer.optimizer import TrainerSettings
from covey.trainer.settings import OptimizerConfig
from covey.trainer.trainer import Trainer
from covey.types import Batch, Group, Prompt, Sampling


@dataclass(frozen=True)
class ColdStart:
    """A cold-start policy on disk and its training record."""

    path: Path
    num_steps: int
    accuracy: float
    """Greedy accuracy on prompts that were not demonstrated."""
    cached: bool
    """True where an earlier run had made it."""

    @property
    def summary_line(self) -> str:
        origin = "taken from the cache" if self.cached else "made now"
        accuracy = f"greedy accuracy {self.accuracy:.1%} on prompts held back for this"
        return f"{self.num_steps} supervised steps, {accuracy}, {origin}: {self.path}"


def ensure(config: Config, environment: Environment, say: Say) -> ColdStart:
    """Return the cold start's policy, cached or trained now."""
    demonstrations = environment.demonstrations("train")
    if not demonstrations:
        name = config.environment.name
        raise ValueError(
            f"cold_start.enabled=true needs an environment with demonstrations (a method `demonstrations`), got "
            f"environment={name}"
        )
    folder = Path(config.cold_start.cache_dir) / f"{COLD_START}{_key(config, environment, demonstrations)}"
    if collectives.run_on_rank0((folder / REPORT).is_file):
        report = json.loads((folder / REPORT).read_text())
        return ColdStart(folder, report["num_steps"], report["accuracy"], cached=True)
    return _train_into(folder, config, environment, demonstrations, say)


def _train_into(
    folder: Path, config: Config, environment: Environment, demonstrations: Sequence[Demonstration], say: Say
) -> ColdStart:
    with catch_write_errors(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
    num_steps = config.cold_start.num_steps
    say(f"cold start: up to {num_steps} steps on demonstrations first, kept for later runs in {folder.parent}")
    model, strategy = config.warmed_model, config.parallel.strategy
    policy = load_policy(model, seed=config.seed, on_host=is_shared_out(strategy))
    policy, _ = shard_policy(policy, None, strategy, choose_device(model.device))
    num_steps, accuracy = warm_up(policy, config, environment, demonstrations, say)
    weights = sharding.full_state_dict(policy.model) if policy.sharded else None
    report = json.dumps({"num_steps": num_steps, "accuracy": accuracy})
    collectives.run_on_rank0(lambda: _keep(folder, policy, weights, report))
    return ColdStart(folder, num_steps, accuracy, cached=False)


def _keep(folder: Path, policy: Policy, weights: Mapping[str, Tensor] | None, report: str) -> None:
    """Put the whole folder into the cache, or nothing."""
    try:
        with atomic_folder(folder, family=f"{COLD_START}*", max_age=LEFTOVER_SECONDS) as aside:
            if is_adapted(policy.model):
                name_base(policy, policy.causal_lm.name_or_path or "")
            save_policy(policy, aside, weights)
            (aside / REPORT).write_text(report)
    except OSError:
        if not (folder / REPORT).is_file():  # else another run made the same policy in the meantime
            raise


def warm_up(
    policy: Policy, config: Config, environment: Environment, demonstrations: Sequence[Demonstration], say: Say
) -> tuple[int, float]:
    """Train on demonstrations; return steps taken and accuracy.

    The accuracy is measured on training prompts whose demonstrations are held back, never on the test split.
    """
    settings = config.cold_start
    held_back, trained_on = _hold_back(demonstrations, settings.num_check_prompts, config.seed)
    if len(held_back) < settings.num_check_prompts:
        say(f"cold start: {len(held_back)} of {len(demonstrations)} demonstrations validate it, the rest train")
    trainer = Trainer(policy, _trainer_settings(config))
    prompts = [prompt for prompt, _ in held_back]
    engine = sampling_engine(policy, config.engine, config.model.kernels)
    sampler = make_sampler(config, engine, environment, policy)
    how, stop = config.sampling, tuple(config.sampling.stop)
    sampling = Sampling(temperature=0.0, max_tokens=how.max_tokens, max_total_tokens=how.max_total_tokens, stop=stop)
    source = LocalSource(sampler, PromptStream(prompts, 0, False), 1, sampling)
    groups = [demonstration_group(policy, p, shown, stop, environment.tool_schemas(p)) for p, shown in trained_on]
    order = random.Random(f"{config.seed}/cold-start/order")
    accuracy = 0.0
    with closing(source):
        for step in range(settings.num_steps):
            chosen = order.sample(groups, min(settings.batch_size, len(groups)))
            metrics = trainer.step(_batch(chosen, config, policy), step)
            if (step + 1) % settings.check_every and step + 1 < settings.num_steps:
                continue
            engine.load_weights(step + 1)
            with sharding.gather_weights(policy):
                accuracy = _accuracy(source, prompts, sampling, config.evaluation.correct_above)
            line = f"cold start {step + 1}/{settings.num_steps}  loss {metrics['loss']:.3f}"
            say(f"{line}  greedy accuracy {accuracy:.1%}")
            if settings.target_accuracy is not None and accuracy >= settings.target_accuracy:
                return step + 1, accuracy
    return settings.num_steps, accuracy


def _hold_back(
    demonstrations: Sequence[Demonstration], count: int, seed: int
) -> tuple[list[Demonstration], list[Demonstration]]:
    """Split off demonstrations for validation, at most half. ValueError where there is only one."""
    shuffled = random.Random(f"{seed}/cold-start").sample(list(demonstrations), len(demonstrations))
    if len(shuffled) < 2:
        raise ValueError("a cold start needs two demonstrations at least, as one is held back to validate it, got 1")
    if count >= len(shuffled):
        count = len(shuffled) // 2
    return shuffled[:count], shuffled[count:]


def _batch(groups: Sequence[Group], config: Config, policy: Policy) -> Batch:
    rows = make_rows(groups, [[1.0]] * len(groups))
    num_tokens, num_sequences = count(rows)
    return make_batch(
        rows[collectives.rank() :: collectives.world_size()],
        packing="packed",  # a prompt has one demonstration: nothing to share
        micro_batch_tokens=config.micro_batch_tokens,
        totals=(num_tokens, num_sequences, num_sequences),
        device=policy.device,
        attention=policy.attention,
    )


def _accuracy(source: LocalSource, prompts: Sequence[Prompt], sampling: Sampling, correct_above: float) -> float:
    groups = source.run(prompts, 1, sampling)
    stop_where_only_failures(groups)
    return sum(reward >= correct_above for group in groups for reward in group.rewards) / len(prompts)


def _trainer_settings(config: Config) -> TrainerSettings:
    settings = config.cold_start
    algorithm = AlgorithmConfig(loss="nll")
    return TrainerSettings(
        objective=build_objective(algorithm, norm_length=1),
        algorithm=algorithm,
        optimizer=OptimizerConfig(name="adamw", lr=settings.lr, warmup_steps=settings.warmup_steps),
        num_steps=settings.num_steps,
        sampling=Sampling(max_tokens=config.sampling.max_tokens),
        logprob_chunk=config.logprob_chunk,
        kernels=config.model.kernels,
        are_sampled=False,
    )


def _key(config: Config, environment: Environment, demonstrations: Sequence[Demonstration]) -> str:
    how, model = config.sampling, asdict(config.warmed_model)
    for name in ("device", "gradient_checkpointing", "activation_offload", "attention"):
        del model[name]
    if config.warmed_model.lora_rank == 0:
        for name in ("lora_alpha", "lora_dropout", "lora_targets"):
            del model[name]
    settings = asdict(config.cold_start)
    del settings["cache_dir"], settings["enabled"], settings["all_weights"]
    parts = {
        "covey": covey.__version__,
        "seed": config.seed,
        "model": model,
        "files": _files(Path(config.model.name)),
        "cold_start": settings,
        "sampling": [value for value in (how.max_tokens, how.stop, how.max_total_tokens) if value is not None],
        "correct_above": config.evaluation.correct_above,
        "demonstrations": [(p.id, p.text, shown, environment.tool_schemas(p)) for p, shown in demonstrations],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _files(folder: Path) -> list[tuple[str, int, int]]:
    """Return each file's name, size and time of a local model. The same path may hold another one tomorrow."""
    if not folder.is_dir():
        return []
    status = [(path, path.stat()) for path in sorted(folder.rglob("*")) if path.is_file()]
    return [(str(path.relative_to(folder)), found.st_size, found.st_mtime_ns) for path, found in status]
