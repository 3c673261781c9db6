"""What is measured: model sizes, prompts, and the job a worker gets. Plain Python, for every worker's venv."""

import json
import random
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

Phase = Literal["step", "sampling", "training"]
"""step: sample, score, train. sampling: only sample. training: train on rollouts that are given."""


@dataclass(frozen=True)
class Shape:
    """A model with random weights."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    intermediate: int
    tied: bool = True
    kind: str = "qwen2"
    """Its type in transformers."""
    head_dim: int | None = None
    """None is hidden / heads."""

    @property
    def head_width(self) -> int:
        return self.head_dim or self.hidden // self.heads


SHAPES = {
    "tiny": Shape(64, 32, 2, 2, 2, 64),
    "XS": Shape(64, 128, 4, 4, 4, 344),
    "S": Shape(512, 256, 6, 4, 4, 704),
    "M": Shape(32768, 512, 8, 8, 2, 1792),
    "0.5B": Shape(151936, 896, 24, 14, 2, 4864),
    "1.5B": Shape(151936, 1536, 28, 12, 2, 8960),
    "135M": Shape(49152, 576, 30, 9, 3, 1536, kind="llama"),
    "0.6B": Shape(151936, 1024, 28, 16, 8, 3072, kind="qwen3", head_dim=128),
    "4B": Shape(151936, 2560, 36, 32, 8, 9728, kind="qwen3", head_dim=128),
}
"""XS, S and M fit two CPU cores; then shapes of Qwen2.5-0.5B and -1.5B, SmolLM2-135M, Qwen3-0.6B and -4B."""

MIXED_PROMPTS = (64, 91, 119, 146, 174, 201, 229, 256)
"""Prompt lengths of the sampling cases."""


@dataclass(frozen=True)
class Workload:
    """One step's work; every completion has exactly `completion_length` tokens, because no stop token can be drawn."""

    size: str
    prompt_lengths: tuple[int, ...]
    """One prompt each."""
    completion_length: int = 128
    group_size: int = 8
    vocabulary: int | None = None
    """Other than the size's own."""

    @property
    def shape(self) -> Shape:
        shape = SHAPES[self.size]
        return shape if self.vocabulary is None else replace(shape, vocabulary=self.vocabulary)

    @property
    def model_key(self) -> str:
        return f"{self.size}-{self.shape.vocabulary}"

    @property
    def num_rollouts(self) -> int:
        return len(self.prompt_lengths) * self.group_size

    @property
    def num_tokens(self) -> int:
        """Sampled in one step."""
        return self.num_rollouts * self.completion_length

    def prompts(self) -> list[list[int]]:
        """Random token ids, the same every time; 0 is the padding token and does not occur."""
        draw = random.Random("prompts")
        return [[draw.randrange(1, self.shape.vocabulary) for _ in range(length)] for length in self.prompt_lengths]

    def completions(self, step: int) -> list[list[int]]:
        """Random completions in prompt order, for training without sampling."""
        draw = random.Random(f"completions/{step}")
        length, vocabulary = self.completion_length, self.shape.vocabulary
        return [[draw.randrange(1, vocabulary) for _ in range(length)] for _ in range(self.num_rollouts)]


@dataclass(frozen=True)
class Job:
    """What one worker process does, step after step."""

    contestant: str
    """covey, trl, vllm, transformers or llama: the beginning of its worker's name."""
    workload: Workload
    phase: Phase = "step"
    precision: str = "float32"
    """float32 or bfloat16; of the forward pass, the weights that are trained stay float32."""
    lora_rank: int = 0
    packing: str = "shared"
    """How covey lays rollouts out; "packed" encodes the prompt for every completion."""
    micro_batch_rollouts: int = 16
    """Rollouts of one forward/backward pass."""
    compiled: bool = False
    """vLLM: its compiled mode instead of the eager one."""
    intel_openmp: bool = False
    """vLLM: Intel's OpenMP library, which its documentation asks for, instead of GNU's."""
    tuned_malloc: bool = True
    """Whether the process gets the allocator settings that make the peers fastest."""
    device: str = "cpu"
    model_dir: str = ""
    """Filled in by the driver."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Job":
        values: dict[str, Any] = json.loads(text)
        workload = values.pop("workload")
        workload["prompt_lengths"] = tuple(workload["prompt_lengths"])
        return Job(workload=Workload(**workload), **values)


def to_text(token_ids: list[int]) -> str:
    """The text that the benchmark tokenizer encodes to exactly these ids."""
    return " ".join(f"t{token}" for token in token_ids)


def reward_of(text: str) -> float:
    """A value in [0, 1) that costs nothing and that practically no two completions share: none has advantage 0."""
    return random.Random(text).random()
