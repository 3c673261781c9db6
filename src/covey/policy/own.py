"""Wrap any module as a model of transformers.

A module reads token ids (B, T) and returns logits (B, T, V), alone or among other things. It is run as it is, on the
general path; its weights keep their names, so that `load_state_dict` takes what a run saves.

Shapes: B sequences, T tokens, V vocabulary.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from covey.policy.models.caches import KEYWORDS
from covey.policy.models.general import keep_evaluating

WEIGHTS = "model.safetensors"
LONGEST = 2048
"""Tokens of the longest text that a module's own limit is sought with."""
TARGETS = ("targets", "labels", "target")
"""Further arguments in training code, without which some modules compute the last position alone."""
FILLED: Mapping[str, Callable[[Tensor], Any]] = {
    **dict.fromkeys(TARGETS, lambda ids_BT: ids_BT),
    "attention_mask": torch.ones_like,
    **dict.fromkeys(("start_pos", "offset", "past_length"), lambda ids_BT: 0),
}
"""Further arguments that a forward may require -> what whole texts without padding have there; None for others."""
WRAPPERS = {"OptimizedModule": "_orig_mod", "DataParallel": "module", "DistributedDataParallel": "module"}
"""Wrappers of modules -> their attribute with the module itself."""
SIMILAR = 1e-3
"""Largest difference of a text's logits alone and beside another, in their standard deviation."""


class OwnConfig(PreTrainedConfig):
    """The sizes of a module, those that covey reads."""

    model_type = "covey_module"
    besides: tuple[str, ...] = ()
    """Further arguments of the forward, of `FILLED`."""


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
        besides = _fill(self.config.besides, input_ids)
        if name and not besides.keys() & TARGETS:
            besides |= {"use_cache": use_cache, **({name: more[name]} if more.get(name) is not None else {})}
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
        """Write sizes, and weights under their own names, tied ones under each."""
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        self.config.save_pretrained(save_directory)
        weights = self.state_dict() if state_dict is None else state_dict
        own = {
            name: weight.detach().cpu().clone(memory_format=torch.contiguous_format) for name, weight in weights.items()
        }
        save_file(own, Path(save_directory) / WEIGHTS, metadata={"format": "pt"})

    def convert_constants(self, dtype: torch.dtype) -> None:
        """Convert what is float32 beside weights: buffers and plain attributes."""
        for held in (held for part in (vars(self)["given"], *self.modules()) for held in (part._buffers, vars(part))):
            floats = {name: one for name, one in held.items() if isinstance(one, Tensor) and one.dtype == torch.float32}
            held.update({name: one.to(dtype) for name, one in floats.items()})

    def skeleton(self, dtype: torch.dtype) -> "OwnModel":
        """Return a copy without storage for weights.

        It is as it was at the first call: without adapters, shards and kernels of covey.
        """
        own: dict[str, Any] = vars(self)
        if "_bare" not in own:
            # What was computed in a pass and is kept as an attribute cannot be copied with its graph
            kept = (leaf for part in (own["given"], *self.modules()) for leaf in tree_leaves(vars(part)))
            computed = {
                id(leaf): leaf.detach() for leaf in kept if isinstance(leaf, Tensor) and leaf.grad_fn is not None
            }
            own["_bare"] = copy.deepcopy(self, computed | _without_storage(self, dtype))
        made: OwnModel = copy.deepcopy(own["_bare"], _without_storage(own["_bare"], dtype))
        made.convert_constants(dtype)
        return made

    def read(self, folder: Path) -> "OwnModel":
        """Return another such model, with weights that a run saved."""
        bare: OwnModel = vars(self)["_bare"]
        found = load_file(folder / WEIGHTS)
        named = bare.named_parameters()
        return copy.deepcopy(bare, {id(part): nn.Parameter(found[name]) for name, part in named})


def _without_storage(model: nn.Module, dtype: torch.dtype) -> dict[int, nn.Parameter]:
    return {id(part): nn.Parameter(torch.empty_like(part, device="meta", dtype=dtype)) for part in model.parameters()}


class _Double(TorchFunctionMode):
    """Makes float64 of narrower casts, in a model of float64.

    Code that compares types sees float32.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
            return args[0].double()
        if func == Tensor.dtype.__get__:  # type: ignore[attr-defined] # a property of C, another object each time
            return torch.float32 if func(*args) == torch.float64 else func(*args)
        return func(*(_wide(each) for each in args), **{name: _wide(each) for name, each in (kwargs or {}).items()})


def _wide(given: Any) -> Any:
    return torch.float64 if given in (torch.float32, torch.float16, torch.bfloat16) else given


def unwrap(given: Any) -> Any:
    """Return the module inside of torch.compile, DataParallel and DDP."""
    while isinstance(given, nn.Module) and type(given).__name__ in WRAPPERS:
        given = getattr(given, WRAPPERS[type(given).__name__])
    return given


def own_model(given: nn.Module) -> OwnModel:
    """Wrap a module. ValueError where its output is nothing that covey trains."""
    kind = type(given).__name__
    if not any(weight.requires_grad for weight in given.parameters()):
        raise ValueError(f"model must have weights to train, {kind} has none")
    if any(weight.is_meta for weight in given.parameters()):
        raise ValueError(f"model must hold its weights, {kind} has some on the meta device: load them first")
    was_training = given.training
    keep_evaluating({part for part in given.modules() if isinstance(part, _BatchNorm)})  # texts would depend on others
    is_whole = all(weight.dtype == torch.float32 for weight in given.parameters())
    alone = given if is_whole else copy.deepcopy(given)  # as it will be trained: in float32
    for weight in () if is_whole else alone.parameters():
        weight.data = weight.data.float()
    alone.eval()
    logits_1TV, besides = _first_logits(alone)
    _check_gradient(alone, logits_1TV)
    _check_logits(alone, logits_1TV.detach(), besides)
    with torch.no_grad():
        longest = _longest(alone, besides)
        try:
            read_logits(alone.train(), _ids(alone, 1, 3), besides)
        except ValueError:  # a loss, in training mode
            keep_evaluating(set(given.modules()))
    given.train(was_training)
    limits: dict[str, Any] = {"vocab_size": logits_1TV.shape[-1], "max_position_embeddings": longest}
    made: OwnModel = type(kind, (OwnModel,), {})(given, OwnConfig(**_sizes(given), **limits, besides=besides))
    made.skeleton(torch.float32)
    return made


def _check_gradient(given: nn.Module, logits_1TV: Tensor) -> None:
    try:
        weights = [weight for weight in given.parameters() if weight.requires_grad]
        torch.autograd.grad(logits_1TV.sum(), weights, allow_unused=True)
    except RuntimeError as error:
        reason = "its forward runs in no_grad or inference_mode" if not logits_1TV.requires_grad else _line(error)
        raise ValueError(f"model must give gradients, {type(given).__name__} gives none: {reason}") from error


def _check_logits(given: nn.Module, logits_1TV: Tensor, besides: tuple[str, ...]) -> None:
    """Refuse logits that are no numbers, and texts that mix."""
    kind, sums_1T = type(given).__name__, logits_1TV.sum(dim=-1)
    if not logits_1TV.isfinite().all():
        raise ValueError(f"model must return finite logits, {kind} returns some that are not: are its weights loaded?")
    if bool((logits_1TV >= 0).all()) and torch.allclose(sums_1T, torch.ones_like(sums_1T), atol=1e-3):
        raise ValueError(f"model must return logits, {kind} returns probabilities: leave its softmax out")
    ids_BT = _ids(given, 2, 3)
    ids_BT[1] = min(1, logits_1TV.shape[-1] - 1)
    with torch.no_grad():
        apart_BTV = torch.cat([read_logits(given, row_T[None], besides)[0] for row_T in ids_BT])
        error = (read_logits(given, ids_BT, besides)[0] - apart_BTV).abs().max()
    if float(error) > SIMILAR * float(apart_BTV.std()):
        raise ValueError(f"model must read each row of token ids (B, T) as a text of its own, {kind} mixes rows")


def read_logits(
    given: nn.Module, ids_BT: Tensor, besides: Mapping[str, Any] | tuple[str, ...] = ()
) -> tuple[Tensor, object]:
    """Return a module's logits (B, T, V) and cache.

    Logits are float32 at least. `besides` are further arguments, or their names in `FILLED`. ValueError where it
    raises, or returns none.
    """
    kind, shape = type(given).__name__, tuple(ids_BT.shape)
    more = _fill(besides, ids_BT) if isinstance(besides, tuple) else besides
    try:
        out = given(ids_BT.clone(), **more)  # some write into what they are given
    except Exception as error:  # foreign code
        raise ValueError(f"model must read token ids {shape}, {kind} raises {_line(error)}") from error
    parts = list(_parts(out))
    fitting = [part for part in parts if part.dim() == 3 and part.shape[:2] == shape and part.is_floating_point()]
    if len(fitting) > 1:  # hidden states beside logits
        rows = {part.num_embeddings for part in given.modules() if isinstance(part, nn.Embedding)}
        fitting.sort(key=lambda part: part.shape[-1] not in rows)
    for part in fitting[:1]:
        named = next((of for name in KEYWORDS if (of := _entry(out, name)) is not None), None)
        after = named if named is not None or not isinstance(out, tuple) else out[1]
        return part.to(torch.promote_types(part.dtype, torch.float32)), after
    shapes = " and ".join(str(tuple(part.shape)) for part in parts) or type(out).__name__
    raise ValueError(f"model must return logits (B, T, V) of token ids (B, T), {kind} returns {shapes} of {shape}")


def _first_logits(given: nn.Module) -> tuple[Tensor, tuple[str, ...]]:
    """Return logits (1, T, V), and further arguments that give them."""
    parameters = list(signature(given.forward).parameters.values())[1:]
    takes = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    required = tuple(one.name for one in takes if one.default is one.empty)
    targets = [one.name for one in takes if one.name in TARGETS and one.name not in required]
    ids_1T = _ids(given, 1, 3)
    try:
        return read_logits(given, ids_1T, required)[0], required
    except ValueError:
        if not targets:
            raise
        besides = (*required, targets[0])
        return read_logits(given, ids_1T, besides)[0], besides


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:160]


def _ids(given: nn.Module, rows: int, length: int) -> Tensor:
    return torch.zeros((rows, length), dtype=torch.int64, device=next(given.parameters()).device)


def _fill(names: Iterable[str], ids_BT: Tensor) -> dict[str, Any]:
    return {name: FILLED[name](ids_BT) if name in FILLED else None for name in names}


def _parts(out: Any) -> Iterator[Tensor]:
    """Yield the tensors that may be logits, likely ones first."""
    held = _entry(out, "logits")
    if held is None and not isinstance(out, Tensor | tuple | list):
        out = list((out if isinstance(out, Mapping) else getattr(out, "__dict__", {})).values())
    candidates = [held] if held is not None else out if isinstance(out, tuple | list) else [out]
    yield from (part for part in candidates if isinstance(part, Tensor))


def _entry(out: Any, name: str) -> Any:
    return out.get(name) if isinstance(out, Mapping) else getattr(out, name, None)


def _longest(given: nn.Module, besides: tuple[str, ...]) -> int | None:
    """Return the longest text that a module reads, None for no limit."""

    def reads(length: int) -> bool:
        try:
            return bool(read_logits(given, _ids(given, 1, length), besides)[0].isfinite().all())
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
