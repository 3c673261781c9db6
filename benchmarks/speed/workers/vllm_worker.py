"""vLLM, sampling only, from a virtual environment of its own: it must not import covey."""

import sys
from collections.abc import Callable
from typing import Any

from vllm import LLM, SamplingParams

from benchmarks.speed.workers.worker import Channel, Meter, serve
from benchmarks.speed.workloads import Job


def make_step(job: Job) -> Callable[[], dict[str, Any]]:
    """Prefix caching shares a prompt's keys and values among its group, but never with the step before: after an
    update they would be those of old weights."""
    work = job.workload
    engine = LLM(
        model=job.model_dir,
        skip_tokenizer_init=True,
        dtype=job.precision,
        enforce_eager=not job.compiled,
        enable_prefix_caching=True,
        max_model_len=max(work.prompt_lengths) + work.completion_length,
        max_num_seqs=work.num_rollouts,
        seed=0,
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in work.prompts()]
    sampling = SamplingParams(
        n=work.group_size, temperature=1.0, max_tokens=work.completion_length, ignore_eos=True, detokenize=False
    )
    meter = Meter()

    def step() -> dict[str, Any]:
        engine.reset_prefix_cache()
        meter.start()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        num_tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
        return meter.stop({}, num_tokens)

    return step


if __name__ == "__main__":
    channel = Channel()
    serve(channel, make_step(Job.from_json(sys.argv[1])))
