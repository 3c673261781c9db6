"""The one loop: take -> batch -> step -> publish -> log -> evaluate -> save. The same on every rank, in every mode."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from covey import cold_start
from covey.batch import Row, count, make_batch, make_rows, with_signal, without_truncated
from covey.build import Run, build_environment, build_run
from covey.checkpoint import load_state, load_weights
from covey.config import Config
from covey.credit import Credit
from covey.environments.base import Environment
from covey.evaluate import evaluate
from covey.policy import distribution
from covey.record import Record
from covey.resuming import resume_point
from covey.state import full_state, light_state, restore
from covey.stopping import Stopper, StopRequested
from covey.types import Batch, Group


def train(config: Config, output_dir: Path) -> None:
    """Run GRPO as `config` says, or go on with the run in `output_dir`; everything it leaves behind is there.

    Raises ValueError for what a user can mend, RunStopped where going on would be pointless, and StopRequested after
    Ctrl-C or SIGTERM, once the last finished step is saved.
    """
    distribution.refuse_to_run_beside_others()
    checkpoint = resume_point(config, output_dir)
    with Stopper().installed() as stopper, Record(config, output_dir) as record:
        environment = build_environment(config)
        run = build_run(warmed(config, environment, record), environment, record.timer)
        record.begin(run)
        first = resume(run, record, checkpoint) if checkpoint is not None else 0
        if first == 0:
            look(run, config, record, step=0)
        finished = light_state(run, record, step=first)
        try:
            for step in range(first, config.num_steps):
                train_step(run, config, record, step, stopper.hold)
                finished = light_state(run, record, step=step + 1)
                stopper.release()
                if due(step, config.evaluation.every, config.num_steps):
                    look(run, config, record, step=step + 1)
                    finished = light_state(run, record, step=step + 1)
                if due(step, config.output.save_every, config.num_steps):
                    save(run, record, finished, stopper)
            look(run, config, record, step=config.num_steps)
            finished = light_state(run, record, step=config.num_steps)
            save(run, record, finished, stopper)
        except StopRequested:
            # Writing a step again would first delete the good checkpoint of that step.
            if finished["step"] > max(first, record.saved_step):
                record.save(full_state(run, finished))
                record.say(f"saved after step {finished['step']}; covey train resume={output_dir} goes on from there")
            raise


def train_step(run: Run, config: Config, record: Record, step: int, before_change: Callable[[], None]) -> None:
    """Groups -> advantages -> batch -> update -> publish -> log."""
    groups = take(run, config, record)
    batch, credit = training_batch(run, config, groups)
    metrics = run.trainer.step(batch, step, before_change)
    before_change()
    run.source.publish(run.trainer.weights(), version=step + 1)
    record.step(step, groups, credit, metrics)


def resume(run: Run, record: Record, checkpoint: Path) -> int:
    """Put a checkpoint into the run; returns how many steps it has done."""
    load_weights(run.policy, checkpoint)
    step = restore(run, record, load_state(checkpoint))
    run.source.publish(run.trainer.weights(), version=step)
    record.say(f"resumed after step {step} from {checkpoint}")
    return step


def save(run: Run, record: Record, finished: Mapping[str, Any], stopper: Stopper) -> None:
    """A checkpoint of the last finished step; a signal waits until it is whole."""
    stopper.hold()
    record.save(full_state(run, finished))
    stopper.release()


def take(run: Run, config: Config, record: Record) -> list[Group]:
    """This rank's share of the next groups. What scoring adds to the time of sampling is charged to rewards."""
    engine = run.source.sampler.engine
    with record.timer.phase("sampling"):
        started = time.monotonic()
        engine.take_stats()
        groups = run.source.take(config.groups_per_step // distribution.world_size())
        record.timer.charge("reward", time.monotonic() - started - engine.take_stats().seconds)
    return groups


def due(step: int, every: int, num_steps: int) -> bool:
    """Whether something that is done every so many steps follows this one; the end of the run has its own turn."""
    return every > 0 and (step + 1) % every == 0 and step + 1 < num_steps


def warmed(config: Config, environment: Environment, record: Record) -> Config:
    """The config of the policy that the cold start made; the config itself where there is none."""
    if not config.cold_start.enabled:
        return config
    with record.timer.phase("cold_start"):
        start = cold_start.ensure(config, environment, record.say)
    record.say(f"cold start: {start.story}")
    return replace(config, model=replace(config.model, name=str(start.path)))


def training_batch(run: Run, config: Config, groups: Sequence[Group]) -> tuple[Batch, Credit]:
    """Advantages, then rows, then packed tensors with the global counts that divide the loss.

    Rollouts whose gradient is certainly 0 are left out of the work, never out of the counts.
    """
    in_loss = without_truncated(groups) if config.algorithm.mask_truncated else list(groups)
    credit = run.credit.assign(groups, reward_penalty(run, config, in_loss))
    rows = make_rows(in_loss, credit.advantages, credit.keep)
    num_loss_tokens, num_sequences = count(rows)
    totals = distribution.all_sum_ints(num_loss_tokens, num_sequences, sum(map(sum, credit.keep)))
    if run.trainer.objective.zero_advantage_is_free:
        rows = with_signal(rows)
    return pack(run, config, rows, totals), credit


def pack(run: Run, config: Config, rows: Sequence[Sequence[Row]], totals: Sequence[int]) -> Batch:
    """The rows as micro-batches on the policy's device."""
    num_loss_tokens, num_sequences, num_rollouts = totals
    return make_batch(
        rows,
        packing=config.packing,
        micro_batch_tokens=config.micro_batch_tokens,
        totals=(num_loss_tokens, num_sequences, num_rollouts),
        device=run.policy.device,
    )


def reward_penalty(run: Run, config: Config, groups: Sequence[Group]) -> list[list[float]] | None:
    """kl_coef x KL(policy || reference) of each rollout where the penalty enters the reward, else None."""
    coef = run.trainer.controller.coef
    if config.algorithm.kl_in != "reward" or coef == 0:
        return None
    rows = make_rows(groups, [[0.0] * len(group.rollouts) for group in groups])
    kl = iter(run.trainer.sequence_kl(pack(run, config, rows, (1, 1, 1))))
    return [[coef * next(kl) if r.num_loss_tokens else 0.0 for r in group.rollouts] for group in groups]


def look(run: Run, config: Config, record: Record, step: int) -> None:
    """Evaluate on the held-out prompts and log what was found."""
    with record.timer.phase("evaluation"):
        found = evaluate(run.source, run.test_prompts, run.source.sampling, config.evaluation)
    record.evaluation(step, found)
