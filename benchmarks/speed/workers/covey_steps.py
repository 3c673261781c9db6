"""covey as `covey train` runs it: the same building functions, the same order of calls, no run folder around them."""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.speed.workers.worker import Meter
from benchmarks.speed.workloads import Job, reward_of, to_text
from covey.algorithm.settings import AlgorithmConfig
from covey.config.schema import Config
from covey.config.validate import validate
from covey.engine.settings import SamplingConfig
from covey.policy.settings import ModelConfig
from covey.rollouts.rollout import causal_rollout
from covey.run.build import Run, build_run
from covey.system.waits.timer import PhaseTimer
from covey.trainer.prepare import make_training_batches
from covey.trainer.settings import OptimizerConfig
from covey.types import Completion, Group, Prompt, Reward, Rollout
from tests.support.scripted import Scripted

TRAINING_PHASES = ("logprobs", "backward")


def config_of(job: Job) -> Config:
    """The settings that describe the job; all others are covey's defaults."""
    work = job.workload
    config = Config(
        num_steps=1_000_000,
        groups_per_step=len(work.prompt_lengths),
        group_size=work.group_size,
        algorithm=AlgorithmConfig(advantage="none") if work.group_size == 1 else AlgorithmConfig(),
        micro_batch_tokens=micro_batch_tokens(job),
        packing=job.packing,
        shuffle=False,
        model=ModelConfig(
            name=job.model_dir, precision=job.precision, lora_rank=job.lora_rank, lora_alpha=32.0, device=job.device
        ),
        sampling=SamplingConfig(max_tokens=work.completion_length),
        optimizer=OptimizerConfig(lr=1e-6),
    )
    validate(config)
    return config


def micro_batch_tokens(job: Job) -> int:
    """Room for as many rollouts as the peers put into a pass, the longest prompts together."""
    work, num_rollouts = job.workload, job.micro_batch_rollouts
    longest = max(work.prompt_lengths)
    num_prompts = -(-num_rollouts // work.group_size) if job.packing == "shared" else num_rollouts
    return num_prompts * longest + num_rollouts * work.completion_length


def make_step(job: Job) -> Callable[[], dict[str, Any]]:
    """Load everything; the function it returns does one measured step."""
    config, timer = config_of(job), PhaseTimer()
    texts = [to_text(prompt) for prompt in job.workload.prompts()]
    environment = Scripted({"train": texts, "test": texts[:1]}, lambda prompt, text: reward_of(text))
    run = build_run(config, environment, timer)
    meter = Meter(_cuda_peak if run.policy.device.type == "cuda" else None)
    count = iter(range(config.num_steps))

    def step() -> dict[str, Any]:
        before = dict(timer.seconds)
        meter.start()
        num_tokens = one_step(run, config, job, next(count), meter)
        if run.policy.device.type == "cuda":
            torch.cuda.synchronize()
        return meter.stop(_phases(before, timer.seconds), num_tokens)

    return step


def one_step(run: Run, config: Config, job: Job, step: int, meter: Meter) -> int:
    """Groups -> advantages -> batch -> update -> publish; the number of sampled tokens."""
    timer = run.trainer.timer
    if job.phase == "training":
        groups = given_groups(job, step)
    else:
        with timer.phase("sampling"):
            groups = run.source.take(config.groups_per_step)
    num_tokens = sum(rollout.num_loss_tokens for group in groups for rollout in group.rollouts)
    if job.phase != "sampling":
        (batch,), _ = make_training_batches(groups, run.trainer, run.credit, run.packing, 0)
        run.trainer.step(batch, step, meter.mark_peak)
        run.trainer.drop_gradients()
    run.source.publish(step + 1)
    return num_tokens


def given_groups(job: Job, step: int) -> list[Group]:
    """Random rollouts in place of sampled ones."""
    completions = iter(job.workload.completions(step))
    size = job.workload.group_size
    groups = []
    for index, prompt in enumerate(job.workload.prompts()):
        texts = [next(completions) for _ in range(size)]
        rollouts = tuple(_given(prompt, tokens, step) for tokens in texts)
        groups.append(Group(Prompt(f"train-{index}", "scripted", "", {}), rollouts, ()))
    return groups


def _given(prompt: list[int], tokens: list[int], step: int) -> Rollout:
    value = reward_of(to_text(tokens))
    completion = Completion(tuple(tokens), (-1.0,) * len(tokens), "length", step)
    return causal_rollout(prompt, completion, Reward(value, {}), "")


def _phases(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    spent = {name: seconds - before.get(name, 0.0) for name, seconds in after.items()}
    return {
        "sampling": spent.get("sampling", 0.0),
        "training": sum(spent.get(name, 0.0) for name in TRAINING_PHASES),
        "optimizer": spent.get("optimizer", 0.0),
    }


def _cuda_peak() -> int:
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak
