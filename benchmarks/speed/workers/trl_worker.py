"""TRL's GRPOTrainer on the same files, prompts and number of tokens, at the settings that are fastest for it."""

import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from benchmarks.speed.workers.worker import Channel, Meter
from benchmarks.speed.workloads import Job, reward_of, to_text
from trl import GRPOConfig, GRPOTrainer

NEVER = 10**6


class Stop(Exception):
    """The driver has gone."""


class Clock(TrainerCallback):
    """Waits for the driver before a step, and reports after it."""

    def __init__(self, channel: Channel, meter: Meter, job: Job) -> None:
        self.channel, self.meter = channel, meter
        self.num_tokens = job.workload.num_tokens
        self.steps_are_measured = job.phase != "sampling"  # else generations are, inside the first step
        self.sampling = self.optimizer = 0.0
        self._started = 0.0

    def wait(self) -> None:
        if not self.channel.wait():
            raise Stop
        self.sampling = self.optimizer = 0.0
        self.meter.start()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if self.steps_are_measured:
            self.wait()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        synchronize()
        self.meter.mark_peak()
        self._started = time.perf_counter()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        synchronize()
        self.optimizer = time.perf_counter() - self._started

    def on_step_end(self, *_: Any, **__: Any) -> None:
        synchronize()
        found = self.meter.stop({"sampling": self.sampling, "optimizer": self.optimizer}, self.num_tokens)
        seconds = found["seconds"]
        seconds["training"] = seconds["total"] - self.sampling - self.optimizer
        self.channel.send(found)


def main(job: Job) -> None:
    channel = Channel()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(job, folder)
        synchronize()
        clock = Clock(channel, Meter(_cuda_peak if job.device == "cuda" else None), job)
        trainer.add_callback(clock)
        trainer._generate_single_turn = generator(job, clock, trainer._generate_single_turn)  # type: ignore[method-assign]
        channel.send({"ready": True})
        try:
            trainer.train()
        except Stop:
            return


def make_trainer(job: Job, folder: str) -> GRPOTrainer:
    """No reference, no checkpointing of activations, no logging: nothing that a step could do without."""
    work = job.workload
    batch_size = min(job.micro_batch_rollouts, work.num_rollouts)
    args = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=work.num_rollouts // batch_size,
        num_generations=work.group_size,
        max_completion_length=work.completion_length,
        temperature=1.0,
        top_k=0,
        beta=0.0,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        max_steps=NEVER,
        bf16=job.precision == "bfloat16",
        gradient_checkpointing=False,
        use_cpu=job.device == "cpu",
        dataloader_pin_memory=False,
        shuffle_dataset=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    lora = LoraConfig(r=job.lora_rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(job.model_dir, dtype=torch.float32),
        reward_funcs=rewards,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": to_text(prompt)} for prompt in work.prompts()]),
        processing_class=PreTrainedTokenizerFast.from_pretrained(job.model_dir),
        peft_config=lora if job.lora_rank > 0 else None,
    )


def rewards(completions: list[str], **_: Any) -> list[float | None]:
    return [reward_of(text) for text in completions]


def generator(job: Job, clock: Clock, original: Callable[..., Any]) -> Callable[..., Any]:
    """TRL's own generation, timed; in phase "sampling" again and again; in phase "training" random completions."""
    steps = iter(range(NEVER))

    def generate(*args: Any, **kwargs: Any) -> Any:
        if job.phase == "training":
            return job.workload.completions(next(steps)), None
        started = time.perf_counter()
        made = original(*args, **kwargs)
        synchronize()
        assert sum(map(len, made[0])) == clock.num_tokens, "a completion ended early"
        clock.sampling = time.perf_counter() - started
        return made

    def only_generate(*args: Any, **kwargs: Any) -> Any:
        while True:
            clock.wait()
            generate(*args, **kwargs)
            seconds = {"sampling": clock.sampling, "training": 0.0, "optimizer": 0.0}
            clock.channel.send(clock.meter.stop(seconds, clock.num_tokens))

    return only_generate if job.phase == "sampling" else generate


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _cuda_peak() -> int:
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak


if __name__ == "__main__":
    main(Job.from_json(sys.argv[1]))
