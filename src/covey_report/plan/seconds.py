"""Predict the seconds of a step by phase, without torch.

Decoding reads all weights once a token of the longest answer, so the tail of the lengths decides; training multiplies
every token by every weight, forth and back. A machine's share of its data sheet, and fixed costs of a token, a pass and
an answer, are constants: of GPUs from published steps, not measured by covey, of CPUs fitted to runs. A probe replaces
them by the times of a short run of the very settings.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from covey.run.memory.memory_model import VALUE_BYTES, Workload, trained_weights
from covey.run.memory.model_shapes import Shape
from covey_report.plan.hardware import Hardware

PHASES = ("sampling", "reward", "logprobs", "backward", "optimizer", "other")
"""Named as the summary of a run names them."""


@dataclass(frozen=True, slots=True)
class Work:
    """Work of one process in a step."""

    num_groups: int
    group_size: int
    prompt_tokens: float
    completion_tokens: float
    """Mean length of an answer."""
    max_tokens: int
    """Its bound."""
    max_rows: int
    num_updates: int = 1
    """Passes over the batch."""
    num_mini_batches: int = 1
    reads_old: bool = False
    """Whether log-probs are computed before the update."""
    has_reference: bool = False
    shares_prompts: bool = True

    @property
    def num_rollouts(self) -> int:
        return self.num_groups * self.group_size

    @property
    def sampled_tokens(self) -> float:
        return self.num_rollouts * self.completion_tokens

    @property
    def read_tokens(self) -> float:
        """Count tokens of a pass, a shared prompt once a group."""
        prompts = self.num_groups * (1 if self.shares_prompts else self.group_size) * self.prompt_tokens
        return prompts + self.sampled_tokens

    @property
    def longest(self) -> float:
        """Estimate the longest answer, by exponential lengths up to the bound."""
        rest = 1 - math.exp(-self.max_tokens / max(1.0, self.completion_tokens))
        spread = min(1.0, 4 * rest * (1 - self.completion_tokens / self.max_tokens)) if self.max_tokens > 1 else 0.0
        return min(self.max_tokens, self.completion_tokens * (1 + spread * math.log(max(1, self.num_rollouts))))


@dataclass(frozen=True, slots=True)
class Constants:
    """Throughput of a kind of machine, and fixed costs."""

    decode_flops: float
    """Share of the peak."""
    decode_bandwidth: float
    train_flops: float
    layer: float
    """Seconds of one layer of one decode step, besides its arithmetic."""
    step: float
    """... of one decode step."""
    row: float
    """... of one token of one row."""
    pass_layer: float
    """... of one layer of one micro-batch, forth and back."""
    train_token: float
    """... of one token of the batch in one layer: norms, gates and softmax."""
    attended: float
    """... of one cached token that a sampled one attends to, in one layer."""
    rollout: float
    """... of one answer: judged, credited, packed, logged."""
    text: float
    """... of one token of it."""
    base: float
    """... of a step."""
    spread: float
    """Factor by which a prediction may be off, either way."""


ON_GPU = Constants(0.40, 0.70, 0.40, 40e-6, 4e-3, 0.0, 400e-6, 0.0, 0.0, 2e-3, 0.0, 0.2, 1.35)
ON_CPU = Constants(0.83, 1.00, 0.93, 230e-6, 0.0, 2.1e-6, 1.8e-3, 7e-6, 0.12e-6, 0.0, 8.4e-6, 0.02, 1.3)


def active_weights(shape: Shape) -> float:
    """Count the weights that multiply one token, active experts alone."""
    plain = sum(x.inputs * x.outputs for x in shape.body if ".experts." not in x.name)
    experts = 3 * shape.hidden * shape.expert_width * shape.depth
    return plain + experts + shape.vocabulary * shape.hidden


def step_seconds(
    shape: Shape, load: Workload, work: Work, on: Hardware, factors: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Predict seconds of a step by phase, corrected by a probe's `factors`."""
    own = constants(on)
    found = {
        "sampling": _sampling(shape, load, work, on),
        "reward": 0.3 * own.rollout * work.num_rollouts + 0.7 * own.text * work.sampled_tokens,
        "logprobs": _passes(shape, work, on, forwards=work.reads_old + _reference_passes(shape, load, work)),
        "backward": work.num_updates * _update(shape, load, work, on),
        "optimizer": work.num_updates * work.num_mini_batches * _optimizer(shape, load, on),
        "other": 0.7 * own.rollout * work.num_rollouts + 0.3 * own.text * work.sampled_tokens + own.base,
    }
    return {name: seconds * (factors or {}).get(name, 1.0) for name, seconds in found.items()}


def _reference_passes(shape: Shape, load: Workload, work: Work) -> float:
    """Divide the cost of a reference pass by a policy pass."""
    own = active_weights(load.reference) / active_weights(shape) if load.reference is not None else 1.0
    return own if work.has_reference else 0.0


def constants(on: Hardware) -> Constants:
    return ON_GPU if on.is_gpu else ON_CPU


def _sampling(shape: Shape, load: Workload, work: Work, on: Hardware) -> float:
    """Predict sampling: prompts, then decode steps of the longest answers."""
    own, active, each = constants(on), active_weights(shape), VALUE_BYTES[load.precision]
    steps = max(work.longest, work.sampled_tokens / max(1, work.max_rows))
    rows = work.sampled_tokens / max(1.0, steps)
    # A step reads the weights and the cached tokens of its rows, and multiplies
    context = work.prompt_tokens + work.completion_tokens / 2
    reading = (each * active + rows * context * shape.key_value_width * each) / (own.decode_bandwidth * on.bandwidth)
    computing = 2 * active * rows / (own.decode_flops * on.flops)
    starting = own.step + own.layer * shape.depth
    attending = own.attended * shape.depth * context * work.sampled_tokens
    prompts = 2 * active * work.num_groups * work.prompt_tokens / (own.train_flops * on.flops)
    return steps * (max(reading, computing) + starting) + own.row * work.sampled_tokens + attending + prompts


def _passes(shape: Shape, work: Work, on: Hardware, forwards: float) -> float:
    own = constants(on)
    if not forwards:
        return 0.0
    computing = 2 * active_weights(shape) * work.read_tokens / (own.train_flops * on.flops)
    return forwards * (computing + 0.3 * own.train_token * shape.depth * work.read_tokens)


def _update(shape: Shape, load: Workload, work: Work, on: Hardware) -> float:
    """Predict forward and backward: six operations a weight and token, or four."""
    own, tokens = constants(on), work.read_tokens
    products = (4 if load.lora_rank else 6) + (2 if load.gradient_checkpointing else 0)
    context = work.prompt_tokens + work.completion_tokens
    queries = shape.key_value_width / max(1, 2 * shape.depth)
    attention = 12 * shape.depth * max(queries, shape.hidden) * tokens * context / 2
    computing = (products * active_weights(shape) * tokens + attention) / (own.train_flops * on.flops)
    passes = max(1.0, math.ceil(tokens / load.micro_batch_tokens))
    return computing + shape.depth * (own.pass_layer * passes + own.train_token * tokens)


def _optimizer(shape: Shape, load: Workload, on: Hardware) -> float:
    """Weights, gradients and moments are read, and all but gradients written."""
    return 7 * load.whole_bytes * trained_weights(shape, load) / load.num_shards / (0.5 * on.bandwidth)
