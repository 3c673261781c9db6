"""The one loop: take -> batch -> step -> publish -> log -> evaluate -> save. The same on every rank, in every mode."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from covey import accelerate_launch, cold_start, fingerprint, launch
from covey.batch import Row, count, evened, make_batch, make_rows, with_signal, without_truncated
from covey.build import Run, build_environment, build_run
from covey.checkpoint import load_state, load_weights
from covey.cleaning import clean_handlers
from covey.config import Config, validate
from covey.credit import Credit
from covey.disk import CannotWrite
from covey.early import check_early
from covey.environments.base import Environment, Follows, Judges
from covey.environments.infill_settings import InfillConfig
from covey.evaluate import answer
from covey.masking import secrets_in
from covey.opening import crowding, opening
from covey.policy import distribution, sharding
from covey.preflight import before_training
from covey.record import Record, make_watchdog
from covey.resuming import changed_facts, owned, refuse_other_prompts, remember_changes, resume_point, way_on
from covey.source import within_bound
from covey.state import full_state, light_state, restore
from covey.stopping import Stopper, StopRequested, is_in_event_loop
from covey.types import Batch, Group

LOGGER = logging.getLogger(__name__)


def train(config: Config, output_dir: Path | str) -> None:
    """Run GRPO as `config` says in a folder of its own, or with config.resume go on with the run in `output_dir`.

    The folder is what `covey train` leaves, so that `covey train resume=` goes on with it too. Under torchrun and the
    like every process calls this, and they train together. It may be called from a notebook, whose event loop it leaves
    alone, and from any thread; signals stop it unless that thread is not the main one. Raises ValueError where the
    folder holds a run already and config.resume is None, and what `run_train` raises.
    """
    validate(config)
    for warning in check_early(config):
        LOGGER.warning(warning)
    launch.check_ranks()
    accelerate_launch.check(config.model.precision, config.model.device)
    stopper = make_stopper(config)
    if is_in_event_loop():
        stopper.run_apart(lambda: _train(config, Path(output_dir), stopper))
    else:
        _train(config, Path(output_dir), stopper)


def _train(config: Config, folder: Path, stopper: Stopper) -> None:
    old = None if config.resume is None else folder
    with (
        clean_handlers(secrets_in(asdict(config))),
        distribution.joined(config.deadlines.ranks),
        owned(config, folder, exact=True, old=old),
    ):
        run_train(config, folder, stopper)


def make_stopper(config: Config) -> Stopper:
    """Build what lets signals stop a run: of several ranks all at the same moment."""
    together = distribution.all_max_int if launch.world_size() > 1 else None
    return Stopper(config.output.grace_seconds, together)


def run_train(config: Config, output_dir: Path, stopper: Stopper | None = None) -> None:
    """The same in a folder that the caller owns; everything the run leaves behind is there.

    Raises ValueError for what a user can mend, RunStopped where going on would be pointless, and StopRequested after
    Ctrl-C or SIGTERM, once the last finished step is saved.
    """
    checkpoint = found_checkpoint(config, output_dir)
    stopper = stopper or make_stopper(config)
    with stopper.installed(), Record(config, output_dir) as record, farewell(record):
        environment = made_environment(config, record)
        prompts = fingerprint.of_environment(environment)
        if checkpoint is not None:
            distribution.from_first(lambda: refuse_other_prompts(config, output_dir, checkpoint, prompts))
        run = introduced(config, environment, record, prompts)
        if checkpoint is None:
            before_training(run, config, record)
        first = resume(run, record, checkpoint) if checkpoint is not None else 0
        tell_progress(run, config, first)
        if first == 0 or (due(first - 1, config.evaluation.every, config.num_steps) and record.evaluated_at != first):
            look(run, config, record, step=first)  # after a resume: a signal came during this look
        finished = light_state(run, record, step=first)
        if checkpoint is not None:  # not before: a run that cannot be built keeps the settings it had
            distribution.from_first(lambda: remember_changes(config, output_dir, checkpoint, prompts))
        try:
            for step in range(first, config.num_steps):
                train_step(run, config, record, step, stopper)
                finished = light_state(run, record, step=step + 1)
                stopper.release()
                if due(step, config.evaluation.every, config.num_steps):
                    look(run, config, record, step=step + 1)
                    finished = light_state(run, record, step=step + 1)
                if due(step, config.output.save_every, config.num_steps):
                    save(run, record, finished, stopper)
            look(run, config, record, step=config.num_steps)
            finished = light_state(run, record, step=config.num_steps)
            save(run, record, finished, stopper, needed=True)
            stopper.hold()  # a signal from here on comes too late to change anything
        except StopRequested:
            # Writing a step again would first delete the good checkpoint of that step.
            if finished["step"] > max(first, record.saved_step):
                record.save(full_state(run, finished), needed=True)
            raise


def introduced(config: Config, environment: Environment, record: Record, prompts: str) -> Run:
    """Warm the policy up, build the run around it, and say what will be trained on what."""
    warm = warmed(config, environment, record)
    with record.watchdog.waiting(f"the model {warm.model.name} to be loaded", "deadlines.loading"):
        run = build_run(warm, environment, record.timer)
    record.begin(run, prompts)
    record.say(opening(run, config))
    if (crowded := crowding(run, config)) and distribution.is_first():
        LOGGER.warning("%s", crowded)
    return run


def found_checkpoint(config: Config, output_dir: Path) -> Path | None:
    """The checkpoint to go on from; None for a new run."""
    if config.resume is None:
        return None
    waiting_for = f"the checkpoints of {output_dir} to be verified"
    with make_watchdog(config, output_dir) as watchdog, watchdog.waiting(waiting_for, "deadlines.loading"):
        return distribution.from_first(lambda: resume_point(config, output_dir))  # it cuts the logs back: one writer


@contextmanager
def farewell(record: Record) -> Iterator[None]:
    """A run that is stopped, or that cannot write, ends with what is left of it and the command that goes on."""
    try:
        yield
    except StopRequested:
        record.say(way_on(record.folder))
        raise
    except CannotWrite as error:
        raise CannotWrite(f"{error}; {way_on(record.folder)}") from error


def train_step(run: Run, config: Config, record: Record, step: int, stopper: Stopper) -> None:
    """Groups -> advantages -> batch -> update -> publish -> log."""
    groups = take(run, config, record, step)
    stopper.release()
    with record.watchdog.waiting(f"the update of step {step + 1}", "deadlines.update"):
        batch, credit = training_batch(run, config, groups)
        metrics = run.trainer.step(batch, step, stopper.hold)
        if metrics["num_rollouts_trained"] == 0:  # of all ranks
            left_out = [dropped.group for dropped in record.dropped]
            metrics |= run.trainer.measure(untrained_batch(run, config, [*groups, *left_out]), step)
        stopper.hold()
        run.source.publish(run.trainer.weights(), version=step + 1)
        tell_progress(run, config, step + 1)
    with record.watchdog.waiting("the logs to be written", "deadlines.saving"):
        record.step(step, groups, credit, metrics)


def resume(run: Run, record: Record, checkpoint: Path) -> int:
    """Put a checkpoint into the run; returns how many steps it has done."""
    with record.watchdog.waiting(f"{checkpoint} to be read", "deadlines.loading"):
        load_weights(run.policy, checkpoint)
        step = restore(run, record, load_state(checkpoint))
    run.source.publish(run.trainer.weights(), version=step)
    record.say(f"resumed after step {step} from {checkpoint}")
    for change in changed_facts(checkpoint):
        LOGGER.warning("%s: from here on the run is no longer bit for bit what it would have been", change)
    return step


def tell_progress(run: Run, config: Config, step: int) -> None:
    """Let an environment that asks for it know how many steps are finished."""
    if isinstance(run.environment, Follows):
        stream = run.source.stream
        run.environment.follow(step, config.num_steps, stream.position / len(stream.prompts))


def save(run: Run, record: Record, finished: Mapping[str, Any], stopper: Stopper, *, needed: bool = False) -> None:
    """A checkpoint of the last finished step; a signal waits until it is whole."""
    stopper.hold()
    record.save(full_state(run, finished), needed=needed)
    stopper.release()


def take(run: Run, config: Config, record: Record, step: int) -> list[Group]:
    """This rank's share of the next groups, none older than `max_staleness`.

    What scoring adds to the time of sampling is charged to rewards.
    """
    engine = run.source.sampler.engine
    with record.timer.phase("sampling"):
        started = time.monotonic()
        engine.take_stats()
        with sharding.gathered(run.policy):
            groups = run.source.take(distribution.share(config.groups_per_step))
        record.timer.charge("reward", time.monotonic() - started - engine.take_stats().seconds)
    fresh = within_bound(groups, step, config.max_staleness)
    kept = set(map(id, fresh))
    record.drop_stale([group for group in groups if id(group) not in kept])
    return fresh


def due(step: int, every: int, num_steps: int) -> bool:
    """Whether something that is done every so many steps follows this one; the end of the run has its own turn."""
    return every > 0 and (step + 1) % every == 0 and step + 1 < num_steps


def made_environment(config: Config, record: Record) -> Environment:
    """The environment, and a word about its judges where it has some."""
    phase = record.timer.phase("judge") if isinstance(config.environment, InfillConfig) else nullcontext()
    with record.watchdog.waiting("the environment to be made, with its data", "deadlines.loading"), phase:
        environment = build_environment(config, record.say)
    if isinstance(environment, Judges):
        record.say(environment.story)
    return environment


def warmed(config: Config, environment: Environment, record: Record) -> Config:
    """The config of the policy that the cold start made; the config itself where there is none."""
    if not config.cold_start.enabled:
        return config
    waiting = record.watchdog.waiting("the cold start", "deadlines.cold_start")
    with record.timer.phase("cold_start"), waiting:
        try:
            start = cold_start.ensure(config, environment, record.say)
        except StopRequested:
            record.say("stopped during the cold start, which is kept once it is done: it begins again")
            raise
    record.say(f"cold start: {start.story}")
    return replace(config, model=replace(config.model, name=str(start.path)))


def training_batch(run: Run, config: Config, groups: Sequence[Group]) -> tuple[Batch, Credit]:
    """Advantages, then rows, then packed tensors with the global counts that divide the loss.

    Rollouts whose gradient is certainly 0 are left out of the work, never out of the counts.
    """
    in_loss = without_truncated(groups) if config.algorithm.mask_truncated else list(groups)
    credit = run.credit.assign(groups, reward_penalty(run, config, groups))
    rows = make_rows(in_loss, credit.advantages, credit.keep)
    num_loss_tokens, num_sequences = count(rows)
    totals = distribution.all_sum_ints(num_loss_tokens, num_sequences, sum(map(sum, credit.keep)))
    if run.trainer.objective.zero_advantage_is_free:
        rows = with_signal(rows)
    return pack(run, config, rows, totals), credit


def untrained_batch(run: Run, config: Config, groups: Sequence[Group]) -> Batch:
    """Pack one micro-batch a rank of groups that teach nothing: something to measure, so that curves have no holes."""
    rows = make_rows(groups, [[0.0] * len(group.rollouts) for group in groups])
    return pack(run, config, rows, totals=(1, 1, 1), most=1)


def pack(
    run: Run, config: Config, rows: Sequence[Sequence[Row]], totals: Sequence[int], most: int | None = None
) -> Batch:
    """Pack the rows into micro-batches on the policy's device, at most the first `most` of this rank."""
    num_loss_tokens, num_sequences, num_rollouts = totals
    batch = make_batch(
        rows,
        packing=config.packing,
        micro_batch_tokens=config.micro_batch_tokens,
        totals=(num_loss_tokens, num_sequences, num_rollouts),
        device=run.policy.device,
        attention=run.policy.attention,
    )
    return evened(replace(batch, micro_batches=batch.micro_batches[:most]), run.policy)


def reward_penalty(run: Run, config: Config, groups: Sequence[Group]) -> list[list[float]] | None:
    """Return kl_coef x KL(policy || reference) of each rollout, in the loss or not; None where it is not in the reward.

    Rewards are compared within their group, so all of them carry the penalty.
    """
    coef = run.trainer.controller.coef
    if config.algorithm.kl_in != "reward" or coef == 0:
        return None
    rows = make_rows(groups, [[0.0] * len(group.rollouts) for group in groups])
    kl = iter(run.trainer.sequence_kl(pack(run, config, rows, (1, 1, 1))))
    return [[coef * next(kl) if r.num_loss_tokens else 0.0 for r in group.rollouts] for group in groups]


def look(run: Run, config: Config, record: Record, step: int) -> None:
    """Evaluate on the held-out prompts and log what was found."""
    with record.timer.phase("evaluation"), sharding.gathered(run.policy):
        answers = answer(run.source, run.test_prompts, run.source.sampling, config.evaluation)
    with record.watchdog.waiting("the logs to be written", "deadlines.saving"):
        record.evaluation(step, answers)
