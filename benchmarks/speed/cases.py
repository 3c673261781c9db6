"""What is compared: each row of the table, with what it has to reach."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmarks.speed.workloads import MIXED_PROMPTS, Job, Phase, Workload

PROMPTS_256 = (256,) * 8
FEW_256 = (256,) * 2


@dataclass(frozen=True)
class Case:
    """covey against its rivals; the ratio is taken against the best of them."""

    what: str
    covey: Job
    rivals: Mapping[str, Job]
    measure: str = "seconds"
    """"seconds", or "peak_bytes"."""
    at_least: float | None = None
    aim: float | None = None
    is_quick: bool = True
    """Whether --quick runs it."""

    @property
    def jobs(self) -> dict[str, Job]:
        return {"covey": self.covey, **self.rivals}

    def quick(self) -> "Case":
        """Without the rivals that take minutes to start."""
        return replace(self, rivals={name: job for name, job in self.rivals.items() if not job.compiled})


def against_trl(what: str, covey: Job, at_least: float | None = None, aim: float | None = None) -> Case:
    """TRL at its best does the same. Cases without a target are left out of --quick."""
    rival = best_trl(covey)
    return Case(what, covey, {"trl": rival}, at_least=at_least, aim=aim, is_quick=at_least is not None)


def best_trl(covey: Job) -> Job:
    """The settings that were fastest of those tried, in covey's precision: M 8 rows a pass, the smaller ones 16."""
    return replace(covey, contestant="trl", packing="shared")


def against_vllm(what: str, covey: Job, at_least: float, aim: float) -> Case:
    """vLLM eager, eager with the OpenMP library it recommends, and compiled; the best of them counts."""
    eager = replace(covey, contestant="vllm")
    rivals = {
        "vllm-eager": eager,
        "vllm-eager-iomp": replace(eager, intel_openmp=True),
        "vllm-compiled": replace(eager, compiled=True),
    }
    return Case(what, covey, rivals, at_least=at_least, aim=aim)


def step(size: str, prompts: tuple[int, ...], completion_length: int = 128, group_size: int = 8) -> Job:
    """A full step in float32 of all weights."""
    workload = Workload(size, prompts, completion_length, group_size)
    return Job("covey", workload, micro_batch_rollouts=8 if size == "M" else 16)


def sampling(size: str, precision: str = "float32") -> Job:
    """64 rollouts of prompts of mixed lengths."""
    return replace(step(size, MIXED_PROMPTS), phase="sampling", precision=precision)


def memory(size: str) -> Case:
    """One pass after another over given rollouts. TRL has the allocator with which it needs less memory."""
    phase: Phase = "training"
    covey = replace(step(size, FEW_256), phase=phase)
    rival = replace(best_trl(covey), tuned_malloc=False)
    what = f"training pass, peak memory above the model, {size}, prompt 256, completion 128, group 8"
    return Case(what, covey, {"trl": rival}, "peak_bytes", at_least=5.0, aim=8.0)


def own_bf16(size: str) -> Case:
    """covey in bf16 against covey in float32."""
    single = step(size, FEW_256)
    what = f"full step, {size}, bf16 against covey's own float32"
    return Case(what, replace(single, precision="bfloat16"), {"covey-float32": single}, at_least=1.5, aim=2.0)


TARGETS: dict[str, Case] = {
    "step-S": against_trl("full step, S, prompt 256, completion 128, group 8", step("S", PROMPTS_256), 3.5, 5.0),
    "step-M": against_trl("full step, M, prompt 256, completion 128, group 8", step("M", FEW_256), 5.0, 8.0),
    "step-M-bf16": against_trl(
        "full step, M, both in bf16, TRL's fastest for M", replace(step("M", FEW_256), precision="bfloat16"), 5.0, 8.0
    ),
    "step-S-1024": against_trl("full step, S, prompt 1024", step("S", (1024,) * 4), 4.0, 6.0),
    "sampling-XS": against_trl("sampling, XS", sampling("XS"), 3.0, 6.0),
    "sampling-S": against_trl("sampling, S", sampling("S"), 3.0, 6.0),
    "sampling-M": against_trl("sampling, M", sampling("M"), 5.0, 6.0),
    "sampling-M-bf16": against_trl("sampling, M, both in bf16", sampling("M", "bfloat16"), 5.0, 6.0),
    "vllm-XS": against_vllm("sampling, XS, float32", sampling("XS"), 1.3, 2.0),
    "vllm-S": against_vllm("sampling, S, float32", sampling("S"), 1.3, 2.0),
    "vllm-M": against_vllm("sampling, M, float32", sampling("M"), 1.3, 2.0),
    "vllm-M-bf16": against_vllm("sampling, M, bf16", sampling("M", "bfloat16"), 1.3, 2.0),
    "memory-M": memory("M"),
    "bf16-M": own_bf16("M"),
    "packed-S": against_trl(
        "full step, S, without the shared prompt, completion 1024, prompt 64",
        replace(step("S", (64,) * 2, completion_length=1024), packing="packed"),
        1.5,
        2.5,
    ),
}
"""Rows with a figure to reach."""

FOUR_256 = (256,) * 4
MORE: dict[str, Case] = {
    "step-XS": against_trl("full step, XS, prompt 256, completion 128, group 8", step("XS", PROMPTS_256)),
    "step-S-64": against_trl("full step, S, prompt 64", step("S", (64,) * 8)),
    "step-S-g4": against_trl("full step, S, group 4", step("S", FOUR_256, group_size=4)),
    "step-S-g16": against_trl("full step, S, group 16", step("S", FOUR_256, group_size=16)),
    "lora-S": against_trl("full step, S, LoRA r=16", replace(step("S", FOUR_256), lora_rank=16)),
    "lora-M": against_trl("full step, M, LoRA r=16", replace(step("M", FEW_256), lora_rank=16)),
}
"""Rows for the record."""

CASES = TARGETS | MORE
