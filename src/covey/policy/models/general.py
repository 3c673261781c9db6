"""Probe models that take the general path.

Passes are transformers' own, for layers may be something else than covey's attention.

Which layouts a model computes exactly is found by running it: rows padded on the right, and trees of segments through
its cache (`attention.forked`), each against single texts, logits and gradient.

Shapes: T tokens, V vocabulary, C hidden width.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from covey.algorithm.softmax import log_softmax
from covey.policy import sharding
from covey.policy.attention.base import DENSE, Layout
from covey.policy.attention.forked import forked_layout
from covey.policy.attention.packed import StreamSegment
from covey.policy.models.text import ordinary_ids
from covey.policy.policy import Policy, is_half

PROMPT, AGREED, ENDS = 7, 3, (9, 4, 6)
"""Tokens of the prompt, of two texts' further common prefix, and of the rest: longer than convolutions."""
LAYOUT_ERROR, HALF_LAYOUT_ERROR = 1e-3, 0.1
"""Largest difference to the logits of single texts, in standard deviations; in half precision, of the median token."""
GRADIENT_ERROR, HALF_GRADIENT_ERROR = 1e-3, 0.1
"""Largest relative difference to the gradient of single texts."""
PACKAGES = {"chunk_gated_delta_rule": "flash-linear-attention", "chunk_kda": "flash-linear-attention"}
PACKAGES |= dict.fromkeys(("mamba_chunk_scan_combined", "selective_scan_fn", "mamba_inner_fn"), "mamba-ssm")
PACKAGES |= {"causal_conv1d_fn": "causal-conv1d"}
"""Functions called by modelling files -> the package with their GPU kernels."""


class DrawDetector(TorchDispatchMode):
    """Detect random draws of several numbers, and who makes them.

    Noise may be rare, or small. Single draws decide whether a layer is left out (`remove_dropout`).
    """

    def __init__(self) -> None:
        super().__init__()
        self.makers: set[nn.Module] = set()
        self.made = False
        self._running: list[nn.Module] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Detect draws inside."""
        with ExitStack() as hooks:
            hooks.enter_context(register_module_forward_pre_hook(lambda module, given: self._running.append(module)))
            hooks.enter_context(register_module_forward_hook(lambda module, given, out: self._ends(module)))
            hooks.enter_context(self)
            yield

    def _ends(self, module: nn.Module) -> None:
        while self._running and self._running.pop() is not module:  # what an exception ended
            pass

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        # Fused attention may drop out, and is never told to.
        is_random = torch.Tag.nondeterministic_seeded in func.tags and "attention" not in str(func)  # type: ignore[attr-defined]
        if is_random and any(isinstance(leaf, Tensor) and leaf.numel() > 1 for leaf in tree_leaves(out)):
            self.made = True
            self.makers |= set(self._running[-1:])
        return out


def keep_evaluating(modules: set[nn.Module]) -> None:
    """Keep modules in evaluation mode for good.

    Routers that draw noise in training.
    """
    for module in modules:
        module.train(False)
        vars(module)["train"] = _stay


def _stay(mode: bool = True) -> None:
    """Leave the mode as it is."""


def general_attention(policy: Policy) -> str:
    """Find the model's exact computations, of `forked.GENERAL`.

    `policy` takes the general path and is in training mode. ValueError where tokens see what follows.
    """
    if policy.causal_lm.dtype == torch.float32:
        policy = replace(policy, precision=torch.float32)  # rounding would hide small differences
    texts = _texts(policy)
    alone = _measure(policy, [([text], DENSE, [_places(0, text)]) for text in texts])
    longest = max(map(len, texts))
    padded = [[*text, *text[:1] * (longest - len(text))] for text in texts]
    places = [_places(number * longest, text) for number, text in enumerate(texts)]
    if not _is_same(policy, alone, [(padded, DENSE, places)]):
        _refuse_lookahead(policy, texts[0], alone[0])
        return "alone"
    return "forked" if not policy.sharded and _is_same(policy, alone, [_tree(policy, texts)]) else "rows"


def _refuse_lookahead(policy: Policy, text: Sequence[int], logits_NV: Tensor) -> None:
    begun = text[: PROMPT + AGREED]
    found_TV = _measure(policy, [([begun], DENSE, [_places(0, begun)])])[0]
    error_T = (found_TV - logits_NV[: len(begun)]).abs().amax(dim=-1) / logits_NV.std()
    # Sparse attention may choose otherwise for single tokens
    if float(error_T.median()) > (LAYOUT_ERROR if can_widen(policy) else HALF_LAYOUT_ERROR):
        kind = type(policy.causal_lm).__name__
        raise ValueError(f"model.name needs a causal language model, {kind} sees what follows")


def helpful_packages(model: nn.Module) -> list[str]:
    """Name the packages whose GPU kernels the model's file calls."""
    file = vars(sys.modules[type(model).__module__])
    return sorted({package for name, package in PACKAGES.items() if name in file})


Pass = tuple[Sequence[Sequence[int]], Layout, Sequence[Sequence[int]]]
"""Token ids (B, T), their layout, and where in the flattened pass each text's tokens are."""


def _texts(policy: Policy) -> list[list[int]]:
    """Return three texts of one beginning, of which two agree beyond it."""
    first, second, third = (min(end, max(1, policy.max_length - PROMPT - AGREED)) for end in ENDS)
    chosen = ordinary_ids(policy, PROMPT + AGREED + first + second + third)
    prompt, rest = chosen[:PROMPT], chosen[PROMPT + AGREED :]
    longer = chosen[: PROMPT + AGREED]
    return [longer + rest[:first], longer + rest[first : first + second], prompt + rest[first + second :]]


def _places(start: int, text: Sequence[int]) -> range:
    return range(start, start + len(text))


def _tree(policy: Policy, texts: Sequence[Sequence[int]]) -> Pass:
    """Return the texts as a stream, with common prefixes once."""
    prompt = StreamSegment(0, PROMPT)
    both = StreamSegment(PROMPT, AGREED, prompt)
    segments, stream, places = [prompt, both], list(texts[0][: PROMPT + AGREED]), []
    for text, before in zip(texts, (both, both, prompt), strict=True):
        begun = before.start + before.length
        segments.append(StreamSegment(len(stream), len(text) - begun, before))
        places.append([*range(begun), *_places(len(stream), text[begun:])])
        stream += text[begun:]
    return [stream], forked_layout(segments, policy.device), places


def _measure(policy: Policy, passes: Sequence[Pass]) -> tuple[Tensor, Tensor]:
    """Measure logits (N, V), in float32 where possible, and the gradient."""
    if policy.sharded:  # gradients of shards are those of whole backward passes
        return _logits(policy, passes), torch.zeros(1)
    logits_NV, gradient = _gradient(policy, passes)
    with in_float32(policy) as exact:
        return logits_NV if exact is policy else _logits(exact, passes), gradient


def _logits(policy: Policy, passes: Sequence[Pass]) -> Tensor:
    found = []
    for ids, layout, places in passes:
        ids_BT = torch.tensor(ids, device=policy.device)
        position_BT = torch.arange(ids_BT.shape[1], device=policy.device).expand_as(ids_BT)
        place_N = torch.tensor([place for of_text in places for place in of_text], device=policy.device)
        found.append(policy.logits(ids_BT, position_BT, layout)[place_N])
    return torch.cat(found)


def _gradient(policy: Policy, passes: Sequence[Pass]) -> tuple[Tensor, Tensor]:
    """Return logits (N, V) and the gradient (U, C) of distinct embeddings."""
    model, embedded = policy.causal_lm, []

    def begin(module: nn.Module, given: Any, out: Tensor) -> Tensor:
        embedded.append((given[0].flatten(), out.detach().requires_grad_()))
        return embedded[-1][1].clone()  # some add to it in place

    table = model.get_input_embeddings()
    with nullcontext() if table is None else table.register_forward_hook(begin), torch.enable_grad():
        logits_NV = _logits(policy, passes)
        draw = torch.Generator().manual_seed(0)
        weight_NV = torch.randn(logits_NV.shape, generator=draw).to(logits_NV.device)
        loss = (log_softmax(logits_NV) * weight_NV).sum()
        if table is None:
            trained = [weight for weight in model.parameters() if weight.requires_grad]
            found = torch.autograd.grad(loss, trained, materialize_grads=True)
            return logits_NV.detach(), torch.cat([part.flatten().double() for part in found])
        parts = torch.autograd.grad(loss, [out for _, out in embedded])
    ids_N = torch.cat([ids for ids, _ in embedded])
    known_U, place_N = ids_N.unique(return_inverse=True)
    gradient_NC = torch.cat([part.flatten(0, -2) for part in parts]).double()
    found_UC = gradient_NC.new_zeros(len(known_U), gradient_NC.shape[1]).index_add(0, place_N, gradient_NC)
    return logits_NV.detach(), found_UC


def _is_same(policy: Policy, expected: tuple[Tensor, Tensor], passes: Sequence[Pass]) -> bool:
    """Return True if passes agree with single texts."""
    try:
        found = _measure(policy, passes)
    except Exception:  # foreign code, which may trip over a cache in any way
        return False
    gradient = float((found[1] - expected[1]).norm() / expected[1].norm().clamp(min=1e-30))
    is_exact = can_widen(policy)
    is_close = logits_error(found[0], expected[0], is_exact) <= (LAYOUT_ERROR if is_exact else HALF_LAYOUT_ERROR)
    return is_close and gradient <= (GRADIENT_ERROR if policy.computes_whole else HALF_GRADIENT_ERROR)


def logits_error(found_NV: Tensor, expected_NV: Tensor, is_exact: bool) -> float:
    """Return the largest logit difference of a token, in standard deviations.

    In half precision that of the median token, for rounding may route one to other experts.
    """
    error_N = (found_NV.double() - expected_NV.double()).abs().amax(dim=-1) / expected_NV.double().std()
    return float(error_N.max() if is_exact else error_N.median())


def can_widen(policy: Policy) -> bool:
    """Return True where float32 is exact: shards and quantised weights stay."""
    return policy.computes_whole or not (policy.sharded or getattr(policy.causal_lm, "is_quantized", False))


@contextmanager
def in_float32(policy: Policy) -> Iterator[Policy]:
    """Yield the policy in float32, or unchanged where it cannot be widened.

    Passes have no gradient. One layer is wide at a time, and what lies outside of layers.
    """
    if policy.computes_whole or not can_widen(policy):
        yield policy
        return
    model, layers = policy.causal_lm, sharding.layers_of(policy.causal_lm)
    inside = {module for layer in layers for module in layer.modules()}
    with ExitStack() as held, torch.no_grad():
        held.enter_context(_wide([module for module in model.modules() if module not in inside]))
        for layer in layers:
            _widen_at_calls(layer, held)
        yield replace(policy, precision=torch.float32)


def _widen_at_calls(layer: nn.Module, held: ExitStack) -> None:
    own = ExitStack()

    def begin(module: nn.Module, given: Any) -> None:
        own.enter_context(_wide(list(layer.modules())))

    def end(module: nn.Module, given: Any, out: Any) -> None:
        own.close()

    held.callback(layer.register_forward_pre_hook(begin).remove)
    held.callback(layer.register_forward_hook(end, always_call=True).remove)
    held.callback(own.close)


@contextmanager
def _wide(modules: list[nn.Module]) -> Iterator[None]:
    """Hold wide copies of weights in half precision inside."""
    places = [
        (module._parameters, name, weight)
        for module in modules
        for name, weight in module._parameters.items()
        if weight is not None and is_half(weight.dtype)
    ]
    made = {id(weight): nn.Parameter(weight.detach().float(), requires_grad=False) for _, _, weight in places}
    for table, name, weight in places:
        table[name] = made[id(weight)]  # tied weights stay one
    try:
        yield
    finally:
        for table, name, weight in places:
            table[name] = weight
