"""llama.cpp, sampling only: its server, asked for all answers to a prompt at once, from a thread for each prompt."""

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xllamacpp

from benchmarks.speed.workers.llama_types import TYPES
from benchmarks.speed.workers.worker import Channel, Meter, serve
from benchmarks.speed.workloads import Job


def make_step(job: Job) -> Callable[[], dict[str, Any]]:
    work, threads = job.workload, len(os.sched_getaffinity(0))
    asked = xllamacpp.CommonParams()
    asked.model.path = str(Path(job.model_dir) / f"model-{TYPES[job.precision]}.gguf")
    asked.n_gpu_layers, asked.n_parallel, asked.kv_unified, asked.warmup = 0, work.num_rollouts, True, False
    asked.cpuparams.n_threads = asked.cpuparams_batch.n_threads = threads
    asked.n_ctx = work.num_rollouts * (max(work.prompt_lengths) + work.completion_length + 8)
    asked.verbosity = -1
    server, meter = xllamacpp.Server(asked), Meter()
    how: dict[str, Any] = {"n_predict": work.completion_length, "ignore_eos": True, "cache_prompt": False}
    how |= {"temperature": 1.0, "samplers": ["temperature"], "n_probs": 0, "return_tokens": True}
    prompts, pool = work.prompts(), ThreadPoolExecutor(len(work.prompt_lengths))

    def ask(place: int) -> int:
        found = server.handle_completions({"prompt": prompts[place], "seed": place, "n": work.group_size, **how})
        return len(found["choices"]) * work.completion_length

    def step() -> dict[str, Any]:
        meter.start()
        return meter.stop({}, sum(pool.map(ask, range(len(prompts)))))

    return step


if __name__ == "__main__":
    channel = Channel()
    serve(channel, make_step(Job.from_json(sys.argv[1])))
