"""A transformers model with its tokenizer, and the ways covey runs it.

Shapes: B sequences, T tokens, L chosen positions, V vocabulary, C hidden width.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from covey.policy.attention.base import Heads, Layout
from covey.policy.attention.forked import ForkedLayout, Held
from covey.policy.models.caches import Caching, cache_keyword, takes_last

T = TypeVar("T")

LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions", "context_length")
"""Names in configurations for the longest sequence."""
UNLIMITED = 1 << 20
"""Tokens of a sequence where neither model nor tokenizer names a limit."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True)
class Policy:
    """A causal or masked language model, trained, sampled or held as reference."""

    model: nn.Module
    """Model that is trained: a PreTrainedModel, or peft's wrapper around one."""
    tokenizer: PreTrainedTokenizerBase
    precision: torch.dtype
    """Type that the forward pass computes in (autocast where weights are of another type)."""
    head_is_linear: bool
    """Logits are the output of the modules behind the base model, position by position; else the head runs inside the
    model."""
    sharded: bool = False
    """Weights are shared out over the ranks (`policy.sharding`): every pass is collective."""
    offload: bool = False
    """Activations wait for the backward pass in the host's memory."""
    mask_id: int | None = None
    """Token that a masked policy replaces. None: the policy continues its prompts."""
    first_position: int = 0
    """The number its position encoding gives to the first token of a sequence."""
    path: Literal["fast", "general"] = "fast"
    """fast: attention is covey's, in every layer. general: passes are transformers' own."""
    heads: frozenset[Heads] = frozenset()
    """All kinds of heads its layers have, once its capabilities were detected."""
    attention: str = "sdpa"
    """Attention of packed streams: a name in `layouts.ATTENTIONS`."""
    caching: Caching | None = None
    """Exact computations of its own cache, found at loading on the general path."""
    compiles: bool = False
    """Whether torch compiles all but products (`kernels.gpu.inductor`): sums, norms, gates, softmax of the head."""
    rounding: float = 0.0
    """Nats by which its log-probs differed from those of transformers' float32 on average, when it was loaded."""
    deterministic: bool = False
    """Trained with kernels that repeat bit for bit (`repeating`)."""
    processor: Mapping[str, bytes] = field(default_factory=dict)
    """Files of a processor of pictures, saved beside the tokenizer."""
    complete: "Callable[[Policy], Policy] | None" = None
    """Remaining work after sharding of weights that have no storage yet: `sharding.shard` calls it."""

    @property
    def causal_lm(self) -> PreTrainedModel:
        """Return the transformers model, adapters inside its layers included."""
        inner = self.model.get_base_model() if is_adapted(self.model) else self.model  # type: ignore[operator]
        assert isinstance(inner, PreTrainedModel)
        return inner

    @property
    def device(self) -> torch.device:
        return self.causal_lm.device

    @property
    def num_weights(self) -> int:
        return sum(weight.numel() for weight in self.causal_lm.parameters())

    @property
    def max_length(self) -> int:
        """Return the longest sequence, in tokens, whose positions depend on itself alone.

        Longrope switches tables for a whole pass as soon as one text in it is long. A model without positions, such as
        a recurrent one, reads what its tokenizer says.
        """
        config = self.causal_lm.config.get_text_config(decoder=True)
        named = [getattr(config, name, None) for name in LENGTHS]
        known = [int(length) for length in named if isinstance(length, int) and length > 0]
        limits = [*(known or [min(self.tokenizer.model_max_length, UNLIMITED)])[:1], *original_lengths(config)]
        return min(limits) - self.first_position

    def num_positions(self, num_prompt_tokens: int, max_tokens: int) -> int:
        """Count the positions of a prompt and its completion."""
        return num_prompt_tokens + (max_tokens if self.mask_id is None else 0)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Return the end tokens of the tokenizer and of the generation config.

        A folder without a generation config has the model config's in their place, as transformers loads it.
        """
        ids: set[int] = set()
        generation = self.causal_lm.generation_config
        for found in (generation.eos_token_id if generation else None, self.tokenizer.eos_token_id):
            ids.update(found if isinstance(found, list) else [] if found is None else [found])
        return frozenset(ids)

    def save_tokenizer(self, folder: Path) -> None:
        """Save the tokenizer, and what reads pictures beside it."""
        self.tokenizer.save_pretrained(folder)
        for name, content in self.processor.items():
            (folder / name).write_bytes(content)

    def run_forward(self, make: Callable[[], T]) -> T:
        """Run `make` as one pass, with sharded weights gathered."""
        if not self.sharded:
            return make()
        return self.causal_lm.covey_pass(make)  # type: ignore[operator]  # put there by policy.sharding

    @property
    def computes_whole(self) -> bool:
        """Return True where passes compute without autocast."""
        return not is_half(self.precision)

    def autocast(self) -> AbstractContextManager[object]:
        if self.computes_whole:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.precision)

    def keeping_casts(self) -> AbstractContextManager[object]:
        """Keep half-precision copies of weights over the passes inside.

        Weights must not change there. Nothing is kept where a pass lets copies go: its memory would grow.
        """
        recomputes = any(vars(module).get("gradient_checkpointing") for module in self.model.modules())
        if self.computes_whole or self.sharded or recomputes:
            return nullcontext()
        # One that is off computes nothing, and keeps the cache of those inside
        return torch.autocast(self.device.type, enabled=False)

    def logits(
        self, input_ids_BT: Tensor, position_ids_BT: Tensor, layout: Layout, keep_T: Tensor | None = None
    ) -> Tensor:
        """Return logits (B*T, V) in the model's type, or of positions `keep_T`."""
        with self.autocast():
            if self.path == "general":
                logits_BTV = self._read("logits", input_ids_BT, layout)
                return (logits_BTV if keep_T is None else logits_BTV[:, keep_T]).flatten(0, 1)
            place = self._place(input_ids_BT, position_ids_BT, layout)
            if self.mask_id is not None or not takes_last(type(self.causal_lm).forward):
                logits_BTV = self.causal_lm(**place).logits
                return (logits_BTV if keep_T is None else logits_BTV[:, keep_T]).flatten(0, 1)
            out = self.causal_lm(**place, logits_to_keep=0 if keep_T is None else keep_T)
        return out.logits.flatten(0, 1)

    def hidden(self, input_ids_BT: Tensor, position_ids_BT: Tensor, layout: Layout) -> Tensor:
        """Return last hidden states (B, T, C), after the final norm."""
        with self.autocast(), offload_saved(self.device) if self.offload else nullcontext():
            if self.path == "general":
                return self._read("last_hidden_state", input_ids_BT, layout)
            out = self.causal_lm.base_model(**self._place(input_ids_BT, position_ids_BT, layout))
        return out.last_hidden_state

    def head(self, hidden_LC: Tensor) -> Tensor:
        """Return logits (L, V) of hidden states. Only where `head_is_linear`."""
        with self.autocast():
            for module in head_modules(self.causal_lm):
                hidden_LC = module(hidden_LC)
            return hidden_LC

    def read(
        self, input_ids_RQ: Tensor, held: Held, keeps: bool, name: str = "logits", only_last: bool = False
    ) -> tuple[Tensor, Held]:
        """Run the model's own pass after a cache.

        Return its output of this name (R, Q, ...), or of the last token where the model computes that alone, and the
        cache after it if told to keep one.
        """
        model = self.causal_lm if name == "logits" else self.causal_lm.base_model
        keep = {"logits_to_keep": 1} if only_last and takes_last(type(model).forward) else {}
        with self.autocast():
            out = model(input_ids=input_ids_RQ, use_cache=keeps or bool(held), **keep, **held)
        return out[name], cache_keyword(out) if keeps else {}

    def _read(self, name: str, input_ids_BT: Tensor, layout: Layout) -> Tensor:
        """Return an output (B, T, ...) of the model's own passes."""
        read = partial(self.read, name=name)
        return layout.read(read, input_ids_BT) if isinstance(layout, ForkedLayout) else read(input_ids_BT, {}, False)[0]

    def _place(self, input_ids_BT: Tensor, position_ids_BT: Tensor, layout: Layout) -> dict[str, Any]:
        place = {"input_ids": input_ids_BT, "position_ids": position_ids_BT + self.first_position, "layout": layout}
        return place if self.mask_id is not None else place | {"use_cache": False}


def to_device(values: Sequence[Any] | Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copy numbers to `device` without waiting for its queue.

    `dtype` None: torch's default.
    """
    pinned = device.type == "cuda"
    if isinstance(values, Tensor):
        host = values.pin_memory() if pinned else values
    else:
        host = torch.tensor(values, dtype=dtype, pin_memory=pinned)
    return host.to(device, non_blocking=pinned)


def is_half(precision: torch.dtype) -> bool:
    return precision not in (torch.float32, torch.float64)


def original_lengths(config: PreTrainedConfig) -> list[int]:
    """Return the lengths at which longrope changes its table."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    return [int(kind["original_max_position_embeddings"]) for kind in kinds if kind.get("rope_type") == "longrope"]


def head_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules behind the base model, such as the output embedding."""
    return [module for module in model.children() if module is not model.base_model]


def is_adapted(model: nn.Module) -> bool:
    """Return True for peft's wrapper, without importing peft, which takes seconds."""
    return not isinstance(model, PreTrainedModel)


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Turn off gradients and dropout inside, and restore the training mode afterwards."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


@contextmanager
def repeating(wanted: bool) -> Iterator[None]:
    """Allow only deterministic kernels inside, if `wanted`.

    RuntimeError, of torch, where an operation has none.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(before or wanted, warn_only=warns and not wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)


MIN_BYTES = 2**20
"""Smaller tensors stay: fetching them would cost more than their room."""


def offload_saved(device: torch.device, min_bytes: int = MIN_BYTES) -> torch.autograd.graph.saved_tensors_hooks:
    """Keep tensors that autograd saves in host memory until the backward pass.

    Weights stay where they are. The numbers are the same bits.
    """

    def pack(tensor: Tensor) -> Tensor:
        is_large = tensor.numel() * tensor.element_size() >= min_bytes
        if tensor.device != device or not is_large or _is_weight(tensor):
            return tensor
        pinned = device.type == "cuda"
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        # Not asynchronous: the tensor's room may be given away as soon as this returns.
        return host.copy_(tensor)

    def unpack(saved: Tensor) -> Tensor:
        return saved if saved.device == device else saved.to(device, non_blocking=True)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


CASTS_AND_VIEWS = frozenset({"ToCopyBackward0", "TBackward0", "TransposeBackward0", "ViewBackward0"})
"""Operations of autocast on a weight before it enters a product, as autograd names them."""


def _is_weight(tensor: Tensor) -> bool:
    """Return True for a parameter, its view, or autocast's copy of one."""
    if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
        return True
    node = tensor.grad_fn
    while node is not None and node.name() in CASTS_AND_VIEWS:
        node = node.next_functions[0][0]
    return isinstance(getattr(node, "variable", None), nn.Parameter)  # of the node that adds up its gradient
