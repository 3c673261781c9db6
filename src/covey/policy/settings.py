"""Settings of the policy."""

from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from covey.system.section import Section
from covey.system.setting import CAUSAL, Requires, is_positive, setting

NANO = {
    "nano": ("<pad>", "<|endoftext|>", "<turn>", "</turn>"),
    "nano-masked": ("<pad>", "<|endoftext|>", "<mask>"),
}
"""The embedded policies, with the tokens that come before those of the bytes."""
FOLDER = "folder"
"""model.code for the code that lies beside the weights."""
MAX_LOGITS = 2**27
"""Logits that live at the same time, at most: 512 MiB in float32, of which a backward pass takes several."""


def chunk_within_bound(chunk: int, vocabulary: int) -> int:
    """Return the number of loss tokens whose logits fit the memory bound.

    >>> chunk_within_bound(4096, 151936)
    883
    """
    return min(chunk, max(1, MAX_LOGITS // vocabulary))


MIN_PASS_TOKENS, PASS_WORK = 1024, 2**37
"""Tokens, and tokens times weights, from which a longer pass on a CPU is no faster."""


def longest_pass(num_weights: int, group_tokens: int = 1) -> int:
    """Return the tokens of a CPU's pass over whole groups.

    >>> longest_pass(134_515_008), longest_pass(134_515_008, 320)
    (1024, 1280)
    """
    return group_tokens * -(-max(MIN_PASS_TOKENS, PASS_WORK // num_weights) // group_tokens)


WITH_LORA = Requires("model.lora_rank > 0", ("model.lora_rank",), is_positive)
IN_DDP = Requires("parallel.strategy = ddp", ("parallel.strategy",), lambda strategy: strategy == "ddp")
UNSHARDED = replace(IN_DDP, remedy="model.load_in_4bit=true can be sharded")
ON_HUB = Requires("model.name = a hub name", ("model.name",), lambda name: name not in NANO and not Path(name).is_dir())
OF_NANO = Requires("model.name = nano", ("model.name",), lambda name: name in NANO)
SAVED = Requires("saved weights", ("model.name",), lambda name: name not in NANO)
OWN_WEIGHTS = Requires(
    "saved weights, or a cold start that saves some",
    ("model.name", "cold_start.enabled"),
    lambda name, cold_start: name not in NANO or cold_start,
)
NOT_IN_4_BITS = Requires("model.load_in_4bit = false", ("model.load_in_4bit",), lambda four_bit: not four_bit)
PACKED = Requires("packing = shared or packed", ("packing",), lambda packing: packing != "padded")


@dataclass
class ModelConfig(Section):
    name: str = "nano"
    """"nano" or "nano-masked" (built from nothing), a directory, or a hub name of a causal or a masked LM."""
    kind: str = setting("causal", choices=("causal", "masked"))
    """Kind of policy: causal (continues a prompt) or masked (fills in the masked tokens of its input)."""
    revision: str | None = setting(None, needs=ON_HUB)
    """Hub revision; null takes the default branch."""
    code: str | None = setting(None, needs=SAVED)
    """Code that makes the model: module:function, which returns (module, tokenizer) of model.name, or "folder" for
    the code beside the weights (trust_remote_code). null runs none."""
    precision: str = setting(
        "float32", choices=("float32", "bfloat16", "float16", "float64"), needs=IN_DDP.for_value("float16")
    )
    """Type of the forward pass: float32, bfloat16, float16 or float64. Weights train in float32 at least."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Values that the chat template reads, such as {enable_thinking: false}. The saved policy has them as defaults."""
    load_in_4bit: bool = setting(
        False, packages={True: ("bitsandbytes", "quantization")}, needs=(WITH_LORA, OWN_WEIGHTS)
    )
    """Hold frozen base weights in 4 bits (bitsandbytes NF4); needs lora_rank > 0."""
    load_in_8bit: bool = setting(
        False,
        packages={True: ("bitsandbytes", "quantization")},
        needs=(WITH_LORA, OWN_WEIGHTS, UNSHARDED, NOT_IN_4_BITS),
    )
    """Hold frozen base weights in 8 bits (bitsandbytes); needs lora_rank > 0. Activations are not rounded."""
    lora_rank: int = setting(0, ge=0)
    """Rank of the LoRA adapters; 0 trains all weights."""
    lora_alpha: float = setting(32.0, needs=WITH_LORA)
    """LoRA scale numerator: updates are multiplied by lora_alpha / lora_rank."""
    lora_dropout: float = setting(0.0, ge=0, le=0.99, needs=WITH_LORA)
    """Dropout before the adapters during training; above 0 the trained policy is not exactly the sampled one."""
    lora_targets: list[str] = setting(["all-linear"], needs=WITH_LORA)
    """Module names that get an adapter; ["all-linear"] means every linear layer but the output head."""
    gradient_checkpointing: bool | None = None
    """Recompute activations in the backward pass: less memory, about a third more time. null: where they would not fit
    otherwise."""
    activation_offload: bool = False
    """Keep activations of the training pass in the host's memory: less GPU memory, bound by the bus."""
    attention: str = setting("auto", choices=("auto", "sdpa", "varlen"), needs=(PACKED, CAUSAL))
    """Attention of packed rollouts in training: sdpa (scaled_dot_product_attention, batched by length), varlen
    (FlashAttention over all lengths at once, in half precision on a GPU), or auto (varlen where it can be, a kernel
    on a CPU where `kernels` allows one, else sdpa)."""
    kernels: str = setting("auto", choices=("auto", "torch", "liger"), packages={"liger": ("liger_kernel", "liger")})
    """Kernels of training and sampling: auto (on a CPU C and oneDNN where they can and pay; on a GPU a compiled
    softmax of the head, and in half precision Liger's norms, gates and rotary positions where it is installed), torch
    alone, or liger (auto, and Liger's in float32 too)."""
    device: str = "auto"
    """auto (CUDA when there), cpu, cuda, cuda:1, ..."""
    deterministic: bool = setting(
        False, needs=Requires("sampling.top_p = 1", ("sampling.top_p",), lambda top_p: top_p == 1, value=True)
    )
    """Train with kernels that repeat bit for bit on a GPU, and take longer; a CPU repeats without it."""
    nano_architecture: str = setting(
        "qwen2", choices=("qwen2", "qwen3", "llama", "mistral", "modernbert", "bert", "roberta"), needs=OF_NANO
    )
    """Architecture of the nano policy: qwen2, qwen3, llama or mistral; of nano-masked modernbert, bert or roberta."""
    nano_hidden_size: int = setting(128, ge=1, needs=OF_NANO)
    """Width of the nano policy."""
    nano_num_layers: int = setting(4, ge=1, needs=OF_NANO)
    """Layers of the nano policy."""
    nano_num_heads: int = setting(4, ge=1, needs=OF_NANO)
    """Attention heads of the nano policy."""


def chooses_liger(kernels: str, *, is_half: bool) -> bool:
    """Return True where model.kernels makes GPU layers use Liger, which needs Triton."""
    is_there = find_spec("liger_kernel") is not None and find_spec("triton") is not None
    return is_there and (kernels == "liger" or (kernels == "auto" and is_half))
