"""Wrap any module, and any two functions, as model and tokenizer.

A module reads token ids (B, T) and returns logits (B, T, V), alone, first in a tuple, or as `.logits`. It is run as it
is, on the general path; its weights keep their names, so that `load_state_dict` takes what a run saves.

Shapes: B sequences, T tokens, V vocabulary.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from inspect import signature
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import CausalLMOutputWithPast

from covey.policy.models.caches import KEYWORDS
from covey.policy.models.general import keep_evaluating

WEIGHTS = "model.safetensors"
LONGEST = 2048
"""Tokens of the longest text that a module's own limit is sought with."""
TARGETS = ("targets", "labels", "target")
"""Further arguments in training code, without which some modules compute the last position alone."""
ENDS = ("eos_token_id", "eot_token", "eos_id", "end_id")
"""Names in tokenizers for the token that ends a text."""


class OwnConfig(PreTrainedConfig):
    """The sizes of a module, those that covey reads."""

    model_type = "own"
    targets: str = ""


class OwnModel(PreTrainedModel, GenerationMixin):
    """A module, its parts and its weights under their own names."""

    config_class = OwnConfig

    def __init__(self, given: nn.Module, config: OwnConfig) -> None:
        super().__init__(config)
        held, forward = vars(self), signature(given.forward).parameters
        held["given"] = given
        held["_caches"] = next((name for name in KEYWORDS if name in forward and "use_cache" in forward), "")
        # The module's parts are this model's own, so that no name stands before theirs
        for parts in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            held[parts] = vars(given)[parts]

    def forward(self, input_ids: Tensor, use_cache: bool = False, **more: Any) -> CausalLMOutputWithPast:
        """Return logits (B, T, V), and the cache that the module gives."""
        name: str = vars(self)["_caches"]
        besides: dict[str, Any] = {}
        if self.config.targets:
            besides[self.config.targets] = input_ids
        elif name:
            besides = {"use_cache": use_cache, **({name: more[name]} if more.get(name) is not None else {})}
        with _Double() if self.dtype == torch.float64 else nullcontext():
            logits_BTV, found = read_logits(vars(self)["given"], input_ids, besides)
        return CausalLMOutputWithPast(logits=logits_BTV, past_key_values=found if use_cache else None)  # type: ignore[arg-type]

    def train(self, mode: bool = True) -> "OwnModel":
        self.training = mode
        vars(self)["given"].train(mode)
        return self

    def set_attn_implementation(self, *_: object, **__: object) -> None:
        """Leave attention to the module."""

    def get_input_embeddings(self) -> nn.Module | None:  # type: ignore[override]
        embeddings = [part for part in self.modules() if isinstance(part, nn.Embedding)]
        return next((part for part in embeddings if part.num_embeddings >= self.config.vocab_size), None)

    def get_output_embeddings(self) -> nn.Module | None:
        linear = [part for part in self.modules() if isinstance(part, nn.Linear)]
        return next((part for part in reversed(linear) if part.out_features == self.config.vocab_size), None)

    def save_pretrained(  # type: ignore[override]
        self, save_directory: str | Path, state_dict: Mapping[str, Tensor] | None = None, **_: object
    ) -> None:
        """Write the weights under the module's own names; tied ones under each."""
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        weights = self.state_dict() if state_dict is None else state_dict
        own = {
            name: weight.detach().cpu().clone(memory_format=torch.contiguous_format) for name, weight in weights.items()
        }
        save_file(own, Path(save_directory) / WEIGHTS, metadata={"format": "pt"})

    def skeleton(self, dtype: torch.dtype) -> "OwnModel":
        """Return a copy without storage for weights, and without adapters."""
        empty = {
            id(part): nn.Parameter(torch.empty_like(part, device="meta", dtype=dtype)) for part in self.parameters()
        }
        made = copy.deepcopy(self, empty)
        for part in made.modules():
            wide = {name: held for name, held in part._buffers.items() if held is not None and held.is_floating_point()}
            part._buffers.update({name: held.to(dtype) for name, held in wide.items() if dtype == torch.float64})
        for name, part in list(made.named_modules()):
            while (inner := vars(part)["_modules"].get("base_layer")) is not None:
                made.set_submodule(name, part := inner)
        return made


class _Double(TorchFunctionMode):
    """Makes float64 of narrower casts, in a model of float64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
            return args[0].double()
        return func(*(_wide(each) for each in args), **{name: _wide(each) for name, each in (kwargs or {}).items()})


def _wide(given: Any) -> Any:
    return torch.float64 if given in (torch.float32, torch.float16, torch.bfloat16) else given


def own_model(given: nn.Module) -> OwnModel:
    """Wrap a module. ValueError where its output is nothing that covey trains."""
    kind = type(given).__name__
    if not any(weight.requires_grad for weight in given.parameters()):
        raise ValueError(f"model must have weights to train, {kind} has none")
    was_training = given.training
    keep_evaluating({part for part in given.modules() if isinstance(part, _BatchNorm)})  # texts would depend on others
    alone = given if next(given.parameters()).device.type == "cpu" else copy.deepcopy(given).cpu()
    alone.eval()
    with torch.no_grad():
        logits_1TV, targets = _first_logits(alone)
        sums_1T = logits_1TV.float().sum(dim=-1)
        if bool((logits_1TV >= 0).all()) and torch.allclose(sums_1T, torch.ones_like(sums_1T), atol=1e-3):
            raise ValueError(f"model must return logits, {kind} returns probabilities: leave its softmax out")
        limits: dict[str, Any] = {
            "vocab_size": logits_1TV.shape[-1],
            "max_position_embeddings": _longest(alone, targets),
        }
        config = OwnConfig(**_sizes(given), **limits, targets=targets)
    given.train(was_training)
    return type(kind, (OwnModel,), {})(given, config)


def read_logits(
    given: nn.Module, ids_BT: Tensor, besides: Mapping[str, Any] = MappingProxyType({})
) -> tuple[Tensor, object]:
    """Return a module's logits (B, T, V) and cache.

    Logits are float32 at least. ValueError where it raises, or returns none.
    """
    kind, shape = type(given).__name__, tuple(ids_BT.shape)
    try:
        out = given(ids_BT, **besides)
    except Exception as error:  # foreign code
        said = " ".join(f"{type(error).__name__}: {error}".split())[:160]
        raise ValueError(f"model must read token ids {shape}, {kind} raises {said}") from error
    parts = list(_parts(out))
    for part in parts:
        if part.dim() == 3 and part.shape[:2] == shape and part.is_floating_point():
            named = next((of for name in KEYWORDS if (of := _entry(out, name)) is not None), None)
            after = named if named is not None or not isinstance(out, tuple) else out[1]
            return part.to(torch.promote_types(part.dtype, torch.float32)), after
    shapes = " and ".join(str(tuple(part.shape)) for part in parts) or type(out).__name__
    raise ValueError(f"model must return logits (B, T, V) of token ids (B, T), {kind} returns {shapes} of {shape}")


def _first_logits(given: nn.Module) -> tuple[Tensor, str]:
    """Return logits (1, T, V), and the needed targets' name or ""."""
    ids_1T = torch.zeros((1, 3), dtype=torch.int64)
    names = [name for name in TARGETS if name in signature(given.forward).parameters]
    try:
        return read_logits(given, ids_1T)[0], ""
    except ValueError:
        if not names:
            raise
        return read_logits(given, ids_1T, {names[0]: ids_1T})[0], names[0]


def _parts(out: Any) -> Iterator[Tensor]:
    """Yield the tensors that may be logits, likely ones first."""
    held = _entry(out, "logits")
    candidates = [held] if held is not None else out if isinstance(out, tuple | list) else [out]
    yield from (part for part in candidates if isinstance(part, Tensor))


def _entry(out: Any, name: str) -> Any:
    return out.get(name) if isinstance(out, Mapping) else getattr(out, name, None)


def _longest(given: nn.Module, targets: str) -> int | None:
    """Return the longest text that a module reads, None for no limit."""

    def reads(length: int) -> bool:
        try:
            ids_1T = torch.zeros((1, length), dtype=torch.int64)
            return bool(read_logits(given, ids_1T, {targets: ids_1T} if targets else {})[0].isfinite().all())
        except ValueError:
            return False

    low, high = 3, LONGEST
    if reads(high):
        return None
    while high - low > 1:
        middle = min(2 * low, (low + high) // 2)
        low, high = (middle, high) if reads(middle) else (low, middle)
    return low


def _sizes(given: nn.Module) -> dict[str, Any]:
    """Estimate a module's depth and width."""
    depth = max((len(part) for part in given.modules() if isinstance(part, nn.ModuleList | nn.Sequential)), default=1)
    width = next((part.embedding_dim for part in given.modules() if isinstance(part, nn.Embedding)), 1)
    return {"num_hidden_layers": depth, "hidden_size": width, "num_attention_heads": 1, "tie_word_embeddings": False}


class OwnTokenizer(PreTrainedTokenizerBase):
    """Two functions: text to token ids, and back."""

    is_fast, chat_template, added_tokens_decoder = False, None, {}

    def __init__(
        self, encode: Callable[[str], Any], decode: Callable[[list[int]], str], end: int | None, size: int
    ) -> None:
        super().__init__()
        vars(self).update(_encode=encode, _decode_ids=decode, _end=end, _size=size)

    @property
    def eos_token_id(self) -> int | None:
        return vars(self)["_end"]

    @property
    def eos_token(self) -> str | None:
        return None if self.eos_token_id is None else self._text([self.eos_token_id])

    @property
    def pad_token_id(self) -> int:  # texts are padded with tokens of their own
        return self.eos_token_id or 0

    @property
    def all_special_ids(self) -> list[int]:
        return [] if self.eos_token_id is None else [self.eos_token_id]

    def __call__(self, text: Any, *_: object, **__: object) -> dict[str, Any]:
        """Return token ids of texts. ValueError where the function raises."""
        if not isinstance(text, str):
            return {"input_ids": [self(one)["input_ids"] for one in text]}
        try:
            found = vars(self)["_encode"](text)
            return {"input_ids": [int(number) for number in getattr(found, "ids", found)]}
        except Exception as error:  # foreign code
            said = " ".join(f"{type(error).__name__}: {error}".split())[:100]
            raise ValueError(f"the tokenizer's encode must take every prompt, {text[:40]!r} raises {said}") from error

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **_: object) -> str:
        """Return the text of those token ids that are known."""
        ids = [int(token_ids)] if isinstance(token_ids, int) else [int(number) for number in token_ids]
        ends = self.all_special_ids if skip_special_tokens else []
        return self._text([number for number in ids if number not in ends and number in self._known])

    @cached_property
    def _known(self) -> dict[int, str]:
        return dict(self._decodable())

    def get_vocab(self) -> dict[str, int]:
        """Return every token that the function can decode, named by its number."""
        return {f"{number}:{text}": number for number, text in self._known.items()}

    def __len__(self) -> int:
        return len(self._known)

    def save_pretrained(self, *_: object, **__: object) -> tuple[str, ...]:
        """Write nothing: functions stay with the program."""
        return ()

    def _text(self, ids: list[int]) -> str:
        return str(vars(self)["_decode_ids"](ids))

    def _decodable(self) -> Iterator[tuple[int, str]]:
        for number in range(vars(self)["_size"]):
            try:
                yield number, self._text([number])
            except Exception:  # foreign code: fewer tokens than logits
                continue


def own_tokenizer(given: Any, size: int) -> PreTrainedTokenizerBase:
    """Return a tokenizer of transformers as it is, or wrap two functions.

    `given` is a pair (encode, decode), with the number of the token that ends a text as third where there is one, or an
    object with these methods. `size` counts the logits.
    """
    if isinstance(given, PreTrainedTokenizerBase):
        return given
    if isinstance(given, Sequence) and not isinstance(given, str) and 2 <= len(given) <= 3:
        encode, decode, end = [*given, None][:3]
    else:
        encode, decode = getattr(given, "encode", None), getattr(given, "decode", None)
        end = next((number for name in ENDS if (number := getattr(given, name, None)) is not None), None)
        end = end() if callable(end) else end
    if not callable(encode) or not callable(decode):
        raise ValueError(
            f"tokenizer must be (encode, decode), with the end token's number as third if there is one, or an object "
            f"with these methods, got {given!r:.80}"
        )
    return OwnTokenizer(encode, decode, end if end is None else int(end), size)
