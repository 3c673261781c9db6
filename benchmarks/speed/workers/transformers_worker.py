"""transformers' generate, sampling only: rows of a group beside each other, with its cache."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.speed.workers.worker import Channel, Meter, serve
from benchmarks.speed.workloads import Job


def make_step(job: Job) -> Callable[[], dict[str, Any]]:
    work = job.workload
    model = AutoModelForCausalLM.from_pretrained(job.model_dir, dtype=getattr(torch, job.precision)).to(job.device)
    ids = torch.tensor(work.prompts(), device=job.device)  # of one length each
    length = work.completion_length
    how: dict[str, Any] = {"do_sample": True, "top_k": 0, "num_return_sequences": work.group_size, "pad_token_id": 0}
    how |= {"min_new_tokens": length, "max_new_tokens": length, "attention_mask": torch.ones_like(ids)}
    meter = Meter()

    def step() -> dict[str, Any]:
        meter.start()
        with torch.no_grad():
            found = model.eval().generate(ids, **how)
        return meter.stop({}, (found.shape[1] - ids.shape[1]) * found.shape[0])

    return step


if __name__ == "__main__":
    channel = Channel()
    serve(channel, make_step(Job.from_json(sys.argv[1])))
