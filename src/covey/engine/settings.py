"""Settings of the engine and of the sampling distribution."""

from dataclasses import dataclass
from importlib.util import find_spec

from covey.policy.settings import NOT_IN_4_BITS
from covey.system.section import Section
from covey.system.setting import CAUSAL, CONTINUES, FILLS_IN, Requires, is_set, setting

SAMPLES = Requires(
    "an engine that samples",
    ("engine.name", "cold_start.enabled"),
    lambda engine, cold_start: engine != "fake" or cold_start,
)

VLLM = Requires("engine.name = vllm", ("engine.name",), lambda engine: engine == "vllm")
HERE = Requires("engine.url = null", ("engine.url",), lambda url: not is_set(url))
OWN_CACHE = Requires(
    "engine.gpu_memory_utilization = null", ("engine.gpu_memory_utilization",), lambda share: not is_set(share)
)
WHOLE = Requires("model.lora_rank = 0", ("model.lora_rank",), lambda rank: rank == 0, value=2)
"""An adapter's frozen base, once dropped, would never come back."""
ALONE = Requires("source = local", ("source",), lambda source: source == "local")
PUSHED = Requires(
    "engine.name = vllm or source = ray",
    ("engine.name", "source"),
    lambda engine, source: engine == "vllm" or source == "ray",
)
OF_VLLM = (
    Requires(
        "model.precision = float32, bfloat16 or float16",
        ("model.precision",),
        lambda precision: precision != "float64",
        value="vllm",
    ),
    NOT_IN_4_BITS.for_value("vllm"),
    Requires("model.load_in_8bit = false", ("model.load_in_8bit",), lambda eight_bit: not eight_bit, value="vllm"),
    Requires(
        "sampling.min_p = 0 or sampling.top_p = 1",  # vLLM cuts by min-p first
        ("sampling.min_p", "sampling.top_p"),
        lambda min_p, top_p: min_p == 0 or top_p == 1,
        value="vllm",
    ),
    Requires(
        "vLLM here (pip install 'covey[vllm]'), engine.url set or devices.python set",
        ("engine.url", "devices.python"),
        lambda url, python: is_set(url) or is_set(python) or find_spec("vllm") is not None,
        value="vllm",
    ),
)
"""Conditions of vLLM: features that it lacks, or computes differently from the trainer."""


IN_EIGHT_BITS = Requires("engine.name = native", ("engine.name",), lambda engine: engine == "native", value="int8")
CACHE_BYTES = 2**30
"""Default budget of cached keys and values on a CPU, whose memory is shared."""
CACHE_SHARE = 0.8
"""Default share of a GPU's free memory when sampling begins; the rest is for logits."""


def cache_budget(given: int | None, free: int | None) -> int:
    """Return the bytes to cache: `given`, else a share of `free`."""
    if given is not None:
        return given
    return CACHE_BYTES if free is None else max(0, int(CACHE_SHARE * free))


@dataclass
class EngineConfig(Section):
    """Settings of the sampling engine."""

    name: str = setting("native", choices=("native", "transformers", "fill", "fake", "vllm"), needs=OF_VLLM)
    """native, transformers or fill (in process, on the trainer's weights; transformers decodes through the model's own
    cache, and replaces native for models with other layers than attention; fill is for model.kind=masked), vllm
    (on weights of its own, pushed after each update) or fake (scripted). Not set, a new run takes vllm where it is
    installed beside a GPU."""
    cache_bytes: int | None = setting(None, gt=0, needs=(SAMPLES, CAUSAL, OWN_CACHE))
    """Bytes of memory for cached keys and values; admission of prompts waits for room, and episodes that wait for their
    environment give way. null: in process on a GPU four fifths of what is free when sampling begins, else 1 GiB."""
    max_rows: int = setting(512, ge=1, needs=SAMPLES)
    """Most completions sampled at the same time."""
    speculation: str = setting("auto", choices=("auto", "on", "off"), needs=SAMPLES)
    """Drafts of tokens from what was written for a prompt before, several of them verified at a time: auto (where that
    is measured to be faster), on (always) or off. No token depends on it; only decoding in C on a CPU has it."""
    weights: str = setting("trained", choices=("trained", "int8"), needs=IN_EIGHT_BITS)
    """Weights that are sampled from: trained (as they are) or int8 (in eight bits on a CPU, faster with few rows; the
    distribution is another one, which metric `mismatch` measures and algorithm.correction weighs)."""
    url: str | None = setting(None, needs=(VLLM, ALONE))
    """Address of a vLLM server that already runs on this machine or a disk shared with it; null starts vLLM here."""
    gpu_memory_utilization: float | None = setting(None, gt=0, le=1, needs=(VLLM, HERE))
    """Share of the device's memory for vLLM, weights and cached keys and values together; null goes by cache_bytes."""
    sleep: int | None = setting(None, ge=0, le=2, needs=(VLLM, ALONE, WHOLE))
    """Memory that vLLM frees while the trainer works: 0 nothing, 1 its cache and weights, which the host keeps, 2 the
    same without keeping them; null: 2 (1 with adapters) where both share a GPU, else 0."""
    deadline: float = setting(120.0, gt=0, needs=VLLM)
    """Seconds within which vLLM must answer, or take weights; it is then started again, and a server given up."""
    update: str = setting("keep", choices=("keep", "wait", "abort"), needs=PUSHED)
    """Unfinished completions at a push: keep (continue on the new weights), wait (finish first) or abort (restart)."""


@dataclass
class SamplingConfig(Section):
    """The distribution of rollouts, under which the trainer scores too."""

    temperature: float = setting(1.0, gt=0)
    """Divides the logits; must be > 0 for training."""
    top_k: int = setting(0, ge=0)
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = setting(1.0, gt=0, le=1)
    """Nucleus mass; 1 keeps all. Without top_k each draw sorts the whole vocabulary, and so does training."""
    min_p: float = setting(0.0, ge=0, le=0.99)
    """Drop tokens less likely than this share of the most likely one; 0 keeps all."""
    max_tokens: int = setting(256, ge=1)
    """Longest completion, in tokens."""
    max_total_tokens: int | None = setting(None, ge=2, needs=CONTINUES)
    """Most tokens of a prompt and its completion together: long prompts leave shorter answers; null is the model's."""
    stop: list[str] = setting([], needs=(SAMPLES, CONTINUES))
    """Stop strings, besides the model's own stop tokens."""
    num_passes: int = setting(1, ge=1, needs=FILLS_IN)
    """Passes in which a masked policy fills an input, the most certain tokens first; 1 fills all at once."""
    likelihood: str = setting(
        "trajectory",
        choices=("trajectory", "one_step"),
        needs=Requires("sampling.num_passes > 1", ("sampling.num_passes",), lambda passes: passes > 1),
    )
    """Log-probs of a fill: trajectory (of each pass, exact) or one_step (of the first, biased; arXiv 2504.12216)."""
