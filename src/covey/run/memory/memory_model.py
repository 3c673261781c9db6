"""A GPU's memory by purpose, from shape and settings.

`covey config` prints it, the check of memory compares what it measures with it, and whether activations are computed
again is decided by it. Nothing of torch is imported. A layer keeps for its backward pass what autograd saves of
transformers' modules under covey's attention, which tests count for shapes of public models.

Weights that train are float32 and computed under autocast, frozen ones below adapters have the type they compute in.
"""

from dataclasses import dataclass, replace

from covey.policy.settings import chunk_within_bound
from covey.run.memory.model_shapes import ALL_LINEAR, Layer, Shape

VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
FOUR_BIT_BYTES = 0.55
"""NF4 with doubly quantised scales, for a weight of a linear layer."""
EIGHT_BIT_BYTES = 1.01
"""A byte for a weight of a linear layer, and a scale for each of its rows."""
MOMENTS = {"adamw": 2, "adamw8bit": 2, "sgd": 0}
"""Numbers that an optimiser keeps of each trained weight: as long as the weight is, of adamw8bit a byte."""
LOGIT_COPIES = 3
"""Logits, log-probabilities and probabilities live at the same time while tokens are drawn."""
SOFTMAX_ENTRIES = 2**28
"""Logits that become probabilities at once on a GPU (`policy.head.SLICE`)."""
GATHERED_LAYERS = 2
"""Layers of sharded weights gathered at once: the one that computes, and the next, fetched meanwhile."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Work of a run on one GPU.

    >>> memory_of(shape_of(ModelConfig(name="Qwen/Qwen2.5-1.5B")), Workload(precision="bfloat16"))["optimizer"]
    12349714432
    """

    precision: str = "float32"
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ALL_LINEAR
    load_in_4bit: bool = False
    load_in_8bit: bool = False
    gradient_checkpointing: bool = False
    activation_offload: bool = False
    optimizer: str = "adamw"
    micro_batch_tokens: int = 16384
    """Tokens of a micro-batch, padding included."""
    single_pass: bool = False
    """One micro-batch is the whole step: gradients are made while its activations go."""
    logprob_chunk: int = 4096
    """Loss tokens whose logits live at the same time; 0: all."""
    num_shards: int = 1
    """GPUs that weights, gradients and optimiser state are shared out over (FSDP); 1: each holds all."""
    has_reference: bool = False
    reference: Shape | None = None
    """Shape of a separate reference; None: it has the policy's weights."""
    keeps_gradients: bool = False
    """Gradients of the coming step exist while sampling."""
    engine: str = "native"
    num_rows: int = 0
    """Completions sampled at the same time on this GPU."""
    num_cached: int = 0
    """Tokens of them and of their prompts that are cached."""
    fuses_layers: bool = False
    """Norms and gates compute through covey's C on a CPU or Liger's kernels on a GPU, which keep their inputs alone."""
    group_tokens: int = 0
    """Tokens of a group, where passes end with groups."""
    computes_in_c: bool = False
    """Training multiplies in covey's C, which casts no weight and keeps no gate's product."""
    lays_out: bool = False
    """Sampling reads all linear layers as covey's C lays them out on a CPU, those in 4 and 8 bits as plain numbers."""
    cache_bytes: int | None = None
    """Most that keys and values may take; None: no bound."""

    @property
    def value_bytes(self) -> int:
        """Return the bytes of a number in matrix products."""
        return VALUE_BYTES[self.precision]

    @property
    def whole_bytes(self) -> int:
        """Return the bytes of a trained weight, gradient, and norm number."""
        return 8 if self.precision == "float64" else 4

    @property
    def stream_bytes(self) -> int:
        """Return the bytes of a number passed between layers."""
        return self.value_bytes if self.lora_rank else self.whole_bytes

    @property
    def is_half(self) -> bool:
        return self.value_bytes == 2


def memory_of(shape: Shape, load: Workload) -> dict[str, int]:
    """Return bytes by purpose, and the peak `in_all`.

    "weights", "reference", "gradients", "optimizer" and "decode_copy" stay. "training", "sampling" and "saving" take
    turns: each is what comes on top. Parts that the settings do not ask for are left out.
    """
    kept = kept_bytes(shape, load)
    turns = {"training": training_bytes(shape, load), "sampling": sampling_bytes(shape, load)}
    if load.num_shards > 1:
        turns["saving"] = load.whole_bytes * max(map(_size, shape.layers))  # moments come whole one after the other
    # Gradients are let go before sampling, unless those of the coming step are made while it is sampled.
    idle = 0 if load.keeps_gradients else kept["gradients"]
    most = max(turns["training"], turns["sampling"] - idle, turns.get("saving", 0) - idle)
    optional = ("reference", "decode_copy")
    named = {name: count for name, count in kept.items() if count or name not in optional}
    return named | turns | {"in_all": sum(kept.values()) + most}


def trained_weights(shape: Shape, load: Workload) -> int:
    return shape.adapter_weights(load.lora_rank, load.lora_targets) if load.lora_rank else shape.weights


def kept_bytes(shape: Shape, load: Workload) -> dict[str, int]:
    """Return the bytes that stay on a GPU, by purpose."""
    trained, each = trained_weights(shape, load), load.whole_bytes
    beside = shape.beside * (load.value_bytes if load.lora_rank else each)
    kept = {
        "weights": _frozen_bytes(shape, load) + each * trained + beside,
        "reference": _reference_bytes(shape, load) if load.has_reference else 0,
        "gradients": each * trained,
        "optimizer": optimizer_bytes(load.optimizer, trained, each * trained),
    }
    if load.num_shards > 1:
        return {name: -(-count // load.num_shards) for name, count in kept.items()}
    return kept | {"decode_copy": 0 if _repacks(load) else _decode_copy_bytes(shape, load)}


def _reference_bytes(shape: Shape, load: Workload) -> int:
    """Return a frozen reference's bytes, none under adapters alone."""
    if load.reference is None:
        return 0 if load.lora_rank else load.whole_bytes * (shape.weights + shape.beside)
    return _frozen_bytes(load.reference, load) or load.whole_bytes * load.reference.weights


def optimizer_bytes(name: str, num_weights: int, num_bytes: int) -> int:
    return MOMENTS[name] * (num_weights if name == "adamw8bit" else num_bytes)


def training_bytes(shape: Shape, load: Workload) -> int:
    """Return a micro-batch's peak bytes, on top of weights and gradients.

    The fullest moment is when the head computes, or in the backward pass of the last layer, when what is around the
    head is gone; where activations are computed again, it may also be the end of the forward pass, when all weights
    are cast. The gradients of a single pass grow by layers while activations shrink, so that either the last layer or
    the first is the fullest.
    """
    tokens = load.micro_batch_tokens
    kept = tokens * kept_by_layer(shape, load)
    passing = tokens * passing_in_layer(shape, load)
    # Around the head: norms, rows of hidden states and their gradients
    around = tokens * shape.hidden * (load.stream_bytes + 3 * load.whole_bytes)
    head = head_bytes(shape, load) + around
    gathered = _gathered_bytes(shape, load) if load.num_shards > 1 else 0
    casts = 0 if load.num_shards > 1 else cast_bytes(shape, load)
    # While the head computes, then from the backward pass of the last layer to that of the first
    if load.gradient_checkpointing:
        between = 0 if load.activation_offload else shape.depth * tokens * shape.hidden * load.stream_bytes
        of_one = 0 if load.num_shards > 1 else cast_bytes(replace(shape, layers=block_layers(shape)), load)
        at_head, first_layer = between + max(casts + around, head), kept + passing + of_one
        last_layer = between + first_layer
    else:
        held = GATHERED_LAYERS if load.activation_offload else shape.depth
        at_head, first_layer = held * kept + casts + head, kept + casts + passing
        last_layer = held * kept + casts + passing
    if load.single_pass:
        # The gradient of the head's weight is the first that a backward pass makes
        of_head = 0 if load.lora_rank else load.whole_bytes * shape.vocabulary * shape.hidden // load.num_shards
        gradients = kept_bytes(shape, load)["gradients"]
        at_head += (0 if _is_chunked(shape, load) else of_head) - gradients
        last_layer = max(last_layer + of_head - gradients, first_layer)
    return gathered + max(at_head, last_layer)


def _is_chunked(shape: Shape, load: Workload) -> bool:
    """Return True if the head sums its gradient over chunks."""
    return 0 < chunk_within_bound(load.logprob_chunk, shape.vocabulary) < load.micro_batch_tokens


def kept_by_layer(shape: Shape, load: Workload) -> int:
    """Return a layer's saved bytes per token, without weights."""
    widths, value = _widths(shape), load.value_bytes
    is_cast = load.is_half and not load.lora_rank and not (load.fuses_layers or load.computes_in_c)
    adapted = {layer.name for layer in shape.adapted(load.lora_targets)} if load.lora_rank else None
    layers = block_layers(shape)
    trained = [layer for layer in layers if adapted is None or layer.name in adapted]
    # Norms compute in float32: their inputs, and where their weights train what these multiply
    keeps_one = bool(load.lora_rank) or load.fuses_layers
    norm = 2 * shape.hidden * (load.stream_bytes if load.fuses_layers else load.whole_bytes) * (1 if keeps_one else 2)
    if shape.has_head_norms:
        heads = widths.queries + widths.keys_and_values // 2
        norm += heads * ((value if load.fuses_layers else load.whole_bytes) + (0 if keeps_one else value))
    # Attention keeps what goes in, what comes out, and a sum of each head
    attention = value * (2 * widths.queries + widths.keys_and_values) + 4 * shape.num_heads
    gates = value * (3 if widths.is_gated and not load.fuses_layers else 2) * widths.between
    narrow = value * load.lora_rank * len(trained)
    if load.computes_in_c and widths.is_gated:
        trained = [layer for layer in trained if layer.inputs != widths.between]
    return norm + attention + gates + _input_bytes(trained, value, is_cast) + narrow


def passing_in_layer(shape: Shape, load: Workload) -> int:
    # Liger writes the gradients of a gate where its factors were
    streams = 1 if load.fuses_layers and load.is_half and not load.lora_rank else 2
    return streams * shape.hidden * load.stream_bytes + 2 * load.value_bytes * _widths(shape).between


def head_bytes(shape: Shape, load: Workload) -> int:
    """Return the bytes of logits, gradient and the head's weight gradient."""
    chunk = chunk_within_bound(load.logprob_chunk, shape.vocabulary)
    tokens = min(chunk or load.micro_batch_tokens, load.micro_batch_tokens)
    entries = tokens * shape.vocabulary
    other = max(load.value_bytes * entries if load.is_half else 0, load.whole_bytes * min(entries, SOFTMAX_ENTRIES))
    # The weight's gradient: the sum over chunks so far, and in half precision that of one; there the weight cast, too
    cast = load.value_bytes * (load.is_half and not load.computes_in_c)
    each = 0 if load.lora_rank else load.whole_bytes * _is_chunked(shape, load) + cast
    logits = load.value_bytes * entries if load.computes_in_c else load.whole_bytes * entries + other
    return logits + (each + cast) * shape.vocabulary * shape.hidden


def sampling_bytes(shape: Shape, load: Workload) -> int:
    """Return the bytes of the cache, logits, and engine weights."""
    if load.engine not in ("native", "transformers", "vllm"):
        return 0
    cached = cache_and_logits(load, shape.key_value_width * load.value_bytes, shape.vocabulary)
    is_whole = load.num_shards > 1 or load.engine == "vllm"
    packed = _decode_copy_bytes(shape, load) if _repacks(load) and load.num_shards == 1 else 0
    return cached + packed + (load.value_bytes * shape.weights if is_whole else 0)


def cache_and_logits(load: Workload, slot_bytes: int, vocabulary: int) -> int:
    """Return the bytes of cached tokens within bounds, and of logits."""
    cached = load.num_cached * slot_bytes
    if load.cache_bytes is not None:
        cached = min(load.cache_bytes, cached)
    return cached + LOGIT_COPIES * 4 * load.num_rows * vocabulary


@dataclass(frozen=True, slots=True)
class Widths:
    """Numbers of a token within one layer."""

    queries: int
    keys_and_values: int
    between: int
    """Width between the two products of the feed-forward part."""
    is_gated: bool


def _widths(shape: Shape) -> Widths:
    """Read the widths off the linear layers, under any names."""
    layers = block_layers(shape)
    attention = [layer for layer in layers if _is_attention(layer)]
    others = [layer for layer in layers if not _is_attention(layer)]
    keys_and_values = shape.key_value_width // shape.depth
    queries = sum(layer.outputs for layer in attention) - shape.hidden - keys_and_values
    if shape.expert_width:
        return Widths(max(0, queries), keys_and_values, shape.expert_width, True)
    before = sum(layer.outputs for layer in others) - shape.hidden
    after = others[-1].inputs if others else 0
    return Widths(max(0, queries), keys_and_values, after, before >= 2 * after)


def block_layers(shape: Shape) -> tuple[Layer, ...]:
    plain = [layer for layer in shape.body if ".experts." not in layer.name]
    return tuple(plain[len(plain) - len(plain) // shape.depth :])


def _is_attention(layer: Layer) -> bool:
    return "attn" in layer.name or "attention" in layer.name


def _input_bytes(trained: list[Layer], value: int, is_cast: bool) -> int:
    """Return the bytes of inputs to products whose weights train.

    autocast makes a copy for each of them. Without it, or where they are cast once, layers side by side share their
    input. Attention's output is kept anyway.
    """
    inputs = [(_is_attention(layer), layer.inputs, layer.outputs) for layer in trained if not _closes_attention(layer)]
    if not is_cast:
        inputs = list({(is_attention, width): (is_attention, width, 0) for is_attention, width, _ in inputs}.values())
    return value * sum(width for _, width, _ in inputs)


def _closes_attention(layer: Layer) -> bool:
    return _is_attention(layer) and layer.name.rpartition(".")[2] in ("o_proj", "out_proj", "dense", "c_proj", "Wo")


def cast_bytes(shape: Shape, load: Workload) -> int:
    """Return the bytes of weights cast by autocast."""
    if not load.is_half or load.computes_in_c:
        return 0
    return load.value_bytes * (trained_weights(shape, load) if load.lora_rank else shape.cast_weights)


def _gathered_bytes(shape: Shape, load: Workload) -> int:
    layer = sum(map(_size, block_layers(shape)))
    root = max(0, shape.weights - shape.linear_weights)
    of_gradients = 0 if load.lora_rank else (load.value_bytes + load.whole_bytes) * max(root, layer)
    return load.value_bytes * (root + GATHERED_LAYERS * layer) + of_gradients


def _frozen_bytes(shape: Shape, load: Workload) -> int:
    if not load.lora_rank:
        return 0
    linear = FOUR_BIT_BYTES if load.load_in_4bit else EIGHT_BIT_BYTES if load.load_in_8bit else load.value_bytes
    return int(linear * shape.linear_weights) + load.value_bytes * (shape.weights - shape.linear_weights)


def _repacks(load: Workload) -> bool:
    """Return True if sampling's packed weights are freed between."""
    return load.lays_out and not load.lora_rank and load.engine == "native"


def _decode_copy_bytes(shape: Shape, load: Workload) -> int:
    """Return the bytes of the weights' copy that decoding reads."""
    if load.lays_out:
        beside = shape.adapter_weights(load.lora_rank, load.lora_targets) if load.is_half else 0
        return load.value_bytes * (shape.cast_weights + beside)
    if load.is_half:
        return load.value_bytes * (shape.adapter_weights(load.lora_rank, load.lora_targets) or shape.cast_weights)
    adapted = shape.adapted(load.lora_targets) if load.lora_rank else ()
    return load.value_bytes * sum(map(_size, adapted))


def _size(layer: Layer) -> int:
    return layer.inputs * layer.outputs
