"""The one loop: take, prepare, step, publish, record, on every rank."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from covey.cluster.ending import ended_with_cluster
from covey.cluster.start import ClusterLost
from covey.cluster.trainers import trainer_ranks
from covey.config.auto_adjust import add_correction
from covey.config.budget import resolve_budget
from covey.config.early import check_early
from covey.config.schema import Config
from covey.config.validate import validate
from covey.policy import sharding
from covey.rollouts.source import STALE, Dropped
from covey.run import stages
from covey.run.build import Run
from covey.run.checkpoints import fingerprint
from covey.run.checkpoints.resume import (
    check_before_ranks,
    check_same_prompts,
    check_unfinished,
    cut_rows,
    locked_run_folder,
    log_setting_changes,
)
from covey.run.checkpoints.saved_settings import check_changes
from covey.run.folder import begin_log, discard_refused, names_in, write_num_steps
from covey.run.given import NO_OBJECTS, RunObjects
from covey.run.records.record import RunRecorder
from covey.run.records.step_metrics import StepResult
from covey.run.stages import evaluate_and_log, report_interruption, save
from covey.run.state import checkpoint_state, snapshot
from covey.system import accelerate_launch, collectives, ranks
from covey.system.machine import Heap, ask_for_large_pages
from covey.system.text.masking import clean_handlers, secrets_in
from covey.system.waits.signals import Stopper, StopRequested, is_in_event_loop
from covey.trainer.prepare import make_measured_batch, make_training_batches, train_ahead
from covey.trainer.update_gain import is_gain_measured, measure_update_gain
from covey.types import Group

LOGGER = logging.getLogger(__name__)


def train(
    config: Config,
    output_dir: Path | str,
    given: RunObjects = NO_OBJECTS,
    *,
    exact: bool = True,
    as_typed: bool = False,
) -> None:
    """Run GRPO in a new folder, or resume the run in `output_dir`.

    The folder is what `covey train` leaves, so that `covey train resume=` continues it too. Under torchrun and the
    like every process calls this, and they train together. It may be called from a notebook, whose event loop it leaves
    alone, and from any thread; signals stop it unless that thread is not the main one. Raises ValueError where the
    folder holds a run already and config.resume is None (without `exact`, the next free name is taken), where a setting
    differs from the resumed run's and config.resume_changes does not name it, and what `run_train` raises. `given` are
    objects in place of those that settings name. If vLLM or older weights sample and the config has no correction for
    it, it gets the one of the command line, unless it is `as_typed`; whoever typed it has then refused such a change.
    """
    if not as_typed:
        config, changed = add_correction(config)
        for line in changed:
            LOGGER.warning(line)
    validate(config)
    if config.resume is not None and not as_typed:
        check_changes(config, Path(output_dir))
    for warning in check_early(config, loads_model=given.model is None, loads_beside=given.compared.missing):
        LOGGER.warning(warning)
    ranks.check_ranks()
    accelerate_launch.check(config.model.precision, config.model.device)

    stopper = stages.make_stopper(config)
    if is_in_event_loop():
        stopper.run_apart(lambda: _train(config, Path(output_dir), stopper, given, exact))
    else:
        _train(config, Path(output_dir), stopper, given, exact)


def _train(config: Config, wanted: Path, stopper: Stopper, given: RunObjects, exact: bool) -> None:
    old, before = None if config.resume is None else wanted, names_in(wanted)
    check_before_ranks(config, old)
    with (
        clean_handlers(secrets_in(asdict(config))),
        trainer_ranks(config.devices, partial(train_rank, config, wanted, exact=exact, old=old)),
        collectives.process_group(config.timeouts.ranks, config.model.device),
        locked_run_folder(config, wanted, exact=exact, old=old) as folder,
    ):
        try:
            run_train(config, folder, stopper, given)
        except ValueError:
            if old is None and ranks.rank() == 0:
                kept = before if folder == wanted else None
                discard_refused(folder, num_parents=0 if exact else 2, keeps_checks=False, before=kept)
            raise


def train_rank(config: Config, wanted: Path, *, exact: bool, old: Path | None) -> None:
    """Train as one rank beside rank 0, started by Ray."""
    with (
        collectives.process_group(config.timeouts.ranks, config.model.device),
        locked_run_folder(config, wanted, exact=exact, old=old) as folder,
    ):
        begin_log(folder, tuple(secrets_in(asdict(config))))
        run_train(config, folder)


def run_train(config: Config, output_dir: Path, stopper: Stopper | None = None, given: RunObjects = NO_OBJECTS) -> None:
    """Train in a folder that the caller owns.

    Raises ValueError for what a user can fix, RunStopped where continuing would be pointless, and StopRequested after
    Ctrl-C or SIGTERM, once the last finished step is saved.
    """
    config = resolve_budget(config)
    ask_for_large_pages()
    checkpoint = stages.find_checkpoint(config, output_dir)
    stopper = stopper or stages.make_stopper(config)
    with (
        stopper.installed(),
        ended_with_cluster(config.devices, stopper) as ending,
        RunRecorder(config, output_dir, given.callbacks) as record,
        report_interruption(record),
    ):
        environment = stages.load_environment(config, record, given)
        prompts = fingerprint.prompt_hash(environment)
        if checkpoint is not None:
            collectives.run_on_rank0(lambda: check_same_prompts(config, output_dir, checkpoint, prompts))
        began = stages.run_cold_start(config, environment, record, checkpoint, stopper.release)
        run = stages.load_run(config, environment, record, prompts, given, began)
        given.built(run, record)
        stages.announce(run, record)
        if checkpoint is None:
            collectives.run_on_rank0(lambda: write_num_steps(output_dir, run.config.num_steps))
            stages.run_preflight(run, record)
            run.source.follow(0, run.config.num_steps)
        else:
            check_unfinished(run.config, output_dir, checkpoint)
        stages.open_journal(run, record, prompts, checkpoint)
        if checkpoint is None and config.resume is not None:
            collectives.run_on_rank0(lambda: cut_rows(output_dir, None))
        first = stages.resume(run, record, checkpoint) if checkpoint is not None else 0
        # Evaluate before the first step, once there is a sampler, and where a signal came during one that was due.
        stages.await_samplers(run, record)
        evaluation_is_due = is_due(first - 1, config.evaluation.every, run.config.num_steps)
        record.write_behind()
        evaluates = first == 0 or (evaluation_is_due and record.evaluated_at != first)
        evaluates_late = first == 0 and stages.may_answer_first(run, record)
        if evaluates and not evaluates_late:
            evaluate_and_log(run, record, step=first)
        if checkpoint is not None:  # not before: a run that cannot be built keeps the settings it had
            collectives.run_on_rank0(
                lambda: log_setting_changes(run.config, output_dir, checkpoint, prompts, record.say)
            )
        stages.stop_with_cluster(run, ending)
        train_steps(run, record, first, stopper, evaluates_late=evaluates_late)
    collectives.run_on_rank0(lambda: None)  # no rank reads the folder before rank 0 has written the summary


def train_steps(run: Run, record: RunRecorder, first: int, stopper: Stopper, *, evaluates_late: bool = False) -> None:
    """Train from step `first` to the last, evaluating and saving in between.

    The evaluation before training comes after the first step's answers if it is late. A signal or the loss of the
    cluster saves the last finished step, then it is raised. A callback may end it earlier.
    """
    config, finished, heap = run.config, snapshot(run, record, step=first), Heap()

    def settle() -> None:
        """Finish what belongs to the weights that the update will change."""
        with record.outside_of_steps():
            record.settle()
            if evaluates_late and record.evaluated_at < 0:
                record.keep_environment_metrics()
                evaluate_and_log(run, record, step=0)

    try:
        for step in range(first, first if ends_early(record, first) else config.num_steps):
            began = time.perf_counter()
            stepped = train_step(run, step, stopper, settle)
            with record.watchdog.deadline("the logs to be written", "timeouts.saving"):
                record.log_step(step, stepped)
            finished = snapshot(run, record, step=step + 1)
            stopper.release()
            heap.after_step(time.perf_counter() - began)
            if is_due(step, config.evaluation.every, config.num_steps):
                evaluate_and_log(run, record, step=step + 1)
                finished = snapshot(run, record, step=step + 1)
            if ends_early(record, step + 1):  # before a save: a run killed after it would not know of the stop
                break
            is_due_by_steps = is_due(step, config.output.save_every, config.num_steps)
            if is_due_by_steps or stages.save_is_overdue(run, record, step + 1):
                save(run, record, finished, stopper)
        if record.evaluated_at != finished["step"]:
            evaluate_and_log(run, record, step=finished["step"])
        finished = snapshot(run, record, step=finished["step"])
        save(run, record, finished, stopper, needed=True)
        if record.journal is not None:
            record.journal.forget_before(finished["step"] + 1)
        stopper.hold()  # a signal from here on comes too late to change anything
    except (StopRequested, ClusterLost) as ended:
        stopper.hold()  # a signal must not interrupt the save that follows
        if isinstance(ended, ClusterLost) and collectives.world_size() > 1:  # the other ranks are lost with it
            raise
        record.settle()
        # Writing a step again would first delete the good checkpoint of that step.
        if finished["step"] > max(first, record.saved_step):
            record.save(checkpoint_state(run, finished), needed=True)
        raise


def ends_early(record: RunRecorder, num_steps: int) -> bool:
    """Return True if a callback ends the run, reporting it. Collective."""
    ends = record.callbacks.want_to_stop()
    if ends:
        record.say(f"stopped after step {num_steps}: {record.callbacks.reason}")
    return ends


def train_step(run: Run, step: int, stopper: Stopper, settle: Callable[[], None] = lambda: None) -> StepResult:
    """Take groups, settle what is due before an update, update, publish."""
    groups, dropped = take(run, step)
    settle()
    stopper.release()
    return update(run, groups, dropped, step, stopper.hold)


def take(run: Run, step: int) -> tuple[list[Group], list[Dropped]]:
    """Take this rank's groups within `max_staleness`, and the dropped ones.

    With `streaming`, groups that are there early are trained ahead. Time that scoring adds to sampling is
    charged to rewards.
    """
    config, timer = run.config, run.trainer.timer

    def meanwhile(groups: Sequence[Group]) -> None:
        with timer.watchdog.deadline(f"the update of step {step + 1}", "timeouts.update"):
            fresh = drop_stale(groups, step, config.max_staleness, config.publish_every)
            train_ahead(fresh, run.trainer, run.credit, run.packing, step)

    with timer.phase("sampling"):
        with sharding.gather_weights(run.policy):
            share = collectives.local_share(config.groups_per_step)
            groups = run.source.take(share, meanwhile if config.streaming else None)
        timer.charge("reward", run.source.take_scoring_seconds())
    fresh = drop_stale(groups, step, config.max_staleness, config.publish_every)
    kept = set(map(id, fresh))
    stale = [Dropped(group, STALE) for group in groups if id(group) not in kept]
    return fresh, [*run.source.dropped, *stale]


def update(
    run: Run, groups: Sequence[Group], dropped: Sequence[Dropped], step: int, hold: Callable[[], None] = lambda: None
) -> StepResult:
    """Compute advantages, make the batch, step, publish the weights."""
    trainer, config = run.trainer, run.config
    with trainer.timer.watchdog.deadline(f"the update of step {step + 1}", "timeouts.update"):
        batches, credit = make_training_batches(groups, trainer, run.credit, run.packing, step)
        metrics = trainer.step(batches, step, hold)
        trainer.drop_gradients()
        if metrics["num_rollouts_trained"] == 0:  # of all ranks: measured all the same, so that curves have no holes
            batch = make_measured_batch([*groups, *(one.group for one in dropped)], trainer, run.packing)
            metrics |= trainer.measure(batch, step)
        elif config.doctor.enabled and is_gain_measured(step):
            metrics |= measure_update_gain(groups, trainer, run.packing)
        hold()
        run.source.follow(step + 1, config.num_steps)
        run.source.publish(step + 1)
    return StepResult(list(groups), list(dropped), credit, metrics)


def drop_stale(groups: Sequence[Group], step: int, max_staleness: int, publish_every: int = 1) -> list[Group]:
    """Return the groups within `max_staleness` published versions of a step.

    Every source bounds that itself; this holds whatever source gave them.
    """
    oldest = [min((r.policy_version for r in group.rollouts), default=step) for group in groups]
    ages = [step // publish_every - version // publish_every for version in oldest]
    return [group for group, age in zip(groups, ages, strict=True) if age <= max_staleness]


def is_due(step: int, every: int, num_steps: int) -> bool:
    """Return True for every `every`-th step but the last."""
    return every > 0 and (step + 1) % every == 0 and step + 1 < num_steps
