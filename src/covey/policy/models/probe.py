"""Detect an architecture's capabilities by running it on a few tokens."""

import logging
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from covey.algorithm.softmax import log_softmax
from covey.policy import sharding
from covey.policy.attention.base import ATTENTION, DENSE, Heads, Layout, Rule
from covey.policy.attention.bidirectional import WHOLE
from covey.policy.attention.cache_probe import ERROR, HALF_ERROR, probe_caching
from covey.policy.attention.packed import StreamSegment, packed_layout, star
from covey.policy.kernels.gpu.inductor import without_compiling
from covey.policy.models.general import (
    DrawDetector,
    can_widen,
    general_attention,
    helpful_packages,
    in_float32,
    keep_evaluating,
    logits_error,
)
from covey.policy.models.mask_probe import configs_of, seeing_masks
from covey.policy.models.text import ordinary_ids
from covey.policy.plain import plain_model
from covey.policy.policy import Policy, inference
from covey.policy.recurrence.base import Forest, segment_rows, stream_layout
from covey.policy.recurrence.mixers import is_routed, unroute

LOGGER = logging.getLogger(__name__)
NUM_TOKENS = 8
SLOWER, TIMES = "slower to sample than attention models", {"cpu": "about 2 times "}
"""Ratios by type of device, of benchmarks/speed/paths.py: 2.3 times with SmolLM2-135M on a CPU."""
LISTED = " (docs/develop/architectures.md lists what works)"
NOISE = 1e-2
"""Largest difference between training and evaluation mode, in standard deviations of the logits."""
SHARED, BRANCH = 4, 8
"""Tokens of the common prefix and of the continuations, positions permitting."""
LOUD, QUIET = 100.0, 0.05
"""Sizes of logits that show all that a head does to them; larger leave half precision."""


@dataclass(frozen=True, slots=True)
class Recorder:
    """Attention that notes the calling layers and their heads."""

    layout: Layout
    forest: Forest
    layers: list[int] = field(default_factory=list)
    heads: set[Heads] = field(default_factory=set)

    def attend(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, rule: Rule) -> Tensor:
        self.layers.append(layer)
        widths = key_BKTD.shape[-1], value_BKTD.shape[-1]
        # Under autocast values may be of another type than queries and keys.
        dtypes = {tensor.dtype for tensor in (query_BHTD, key_BKTD, value_BKTD)}
        self.heads.update(Heads(dtype, query_BHTD.device.type, *widths, rule.is_plain) for dtype in dtypes)
        return self.layout.attend(layer, query_BHTD, key_BKTD, value_BKTD, rule)


def remove_dropout(model: nn.Module) -> None:
    """Remove dropout: policies are sampled, so trained, without it.

    Some architectures keep the rate in a module, others as a number beside the layers.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def detect_capabilities(policy: Policy) -> Policy:
    """Return the policy with its path, head, positions and layers.

    ValueError for an architecture that even the general path computes otherwise than transformers.
    """
    if policy.path == "general":
        return detect_general(policy, "this architecture has attention of its own")
    try:
        return _detect_fast(policy)
    except ValueError as reason:
        if policy.mask_id is not None:
            raise
        return detect_general(policy, str(reason).removeprefix("model.name needs "))


def detect_general(policy: Policy, reason: str) -> Policy:
    """Put the policy on the general path.

    Its model gets transformers' own attention; `reason` says why not the fast one. ValueError where its passes differ
    from transformers' alone.
    """
    model = policy.causal_lm
    unroute(model)
    own = model.get_correct_attn_implementation(None)
    model.set_attn_implementation(own)
    for config in configs_of(model):  # some classes cannot be told, and make no mask for another's attention
        if config._attn_implementation_internal == ATTENTION:
            config._attn_implementation_internal = own
    found, kind = replace(policy, path="general", attention="alone"), type(model).__name__
    with inference(model), without_compiling():
        try:
            found = replace(found, rounding=_check_alone(found))
            logits_TV = _logits(found, DENSE)
            found = replace(found, caching=probe_caching(found))
            is_plain = _has_hidden(found) and _is_plain(found, *_amplify(found, DENSE, logits_TV))
            model.train()
            _remove_noise(found, logits_TV)
            found = replace(found, head_is_linear=is_plain, attention=general_attention(found))
            _logits(found, DENSE)  # the states that some layers keep have no graph then, which nobody can copy
        except ValueError:
            raise
        except Exception as error:  # foreign code
            raise ValueError(f"model.name needs another architecture: {kind} does not run ({_line(error)})") from error
        sharding.reshard(policy)
    slower = TIMES.get(policy.device.type, "") + SLOWER
    tell(f"{kind.removeprefix('FSDP')}: general path, {slower}; {reason.replace('FSDP', '')}{_packages(found)}")
    return found


def _detect_fast(policy: Policy) -> Policy:
    """Return the policy for covey's attention.

    ValueError where a layer is something else, or noisy in training.
    """
    model = policy.causal_lm
    kind, layout = type(model).__name__, DENSE if policy.mask_id is None else WHOLE
    rows = [StreamSegment(row * len(text), len(text)) for row, text in enumerate(_texts(policy))]
    recorder = Recorder(layout, Forest(segment_rows(rows)))
    with inference(model), without_compiling():
        try:
            found = replace(policy, first_position=_first_position(policy, layout))
            found = replace(found, rounding=_check_against_plain(found, recorder))
            assert found.max_length > 0, "there are positions"  # ValueError where a configuration does not say
            logits_TV = _logits(found, layout)
            is_plain = _is_plain(found, *_amplify(found, layout, logits_TV))
            model.train()
            _remove_noise(found, logits_TV)
        except ValueError:
            raise
        except Exception as error:  # foreign code, which may trip over the layout in any way
            raise ValueError(
                f"model.name needs another architecture: {kind} does not run with covey's attention ({_line(error)})"
            ) from error
        sharding.reshard(policy)
        return replace(found, head_is_linear=is_plain, heads=frozenset(recorder.heads))


def _remove_noise(policy: Policy, logits_TV: Tensor) -> None:
    """Keep modules that draw in training in evaluation mode.

    ValueError if noise stays.
    """
    layout = DENSE if policy.mask_id is None else WHOLE
    for _ in range(2):
        draws = DrawDetector()
        with draws.watching():
            trained_TV = _logits(policy, layout)
        if not draws.made and torch.allclose(trained_TV, logits_TV, rtol=0.0, atol=NOISE * float(logits_TV.std())):
            return
        keep_evaluating(draws.makers)
        named = ", ".join(sorted({type(maker).__name__ for maker in draws.makers}))
        tell(f"{type(policy.causal_lm).__name__}: the noise of {named} in training is off, as sampling has none")
    kind = type(policy.causal_lm).__name__
    raise ValueError(f"model.name needs an architecture without noise in training mode, {kind} has it")


def _check_alone(policy: Policy) -> float:
    """Compare single texts with plain transformers.

    Return the mean difference of log-probs in nats.
    """
    sharding.reshard(policy)  # what the fast path's passes left whole
    texts = _texts(policy)
    positions_1T = torch.arange(len(texts[0]), device=policy.device)[None]
    found_NV = torch.cat([policy.logits(torch.tensor([t], device=policy.device), positions_1T, DENSE) for t in texts])
    with sharding.gather_weights(policy):  # some layers read others' weights, which are not made for them
        plain = plain_model(policy)
        expected_NV = torch.cat([plain.logits(text, range(len(text))) for text in texts])
    return _compare(policy, found_NV, expected_NV)


def _has_hidden(policy: Policy) -> bool:
    try:
        policy.hidden(*_probe(policy), DENSE)
    except Exception:  # foreign code
        return False
    return policy.causal_lm.base_model is not policy.causal_lm


def _packages(policy: Policy) -> str:
    """Name missing packages that make such a model faster.

    Their kernels are those of GPUs.
    """
    named = helpful_packages(policy.causal_lm) if policy.device.type == "cuda" else []
    lacking = [
        name for name in named if find_spec(name.replace("flash-linear-attention", "fla").replace("-", "_")) is None
    ]
    return f"; pip install {' '.join(lacking)} makes its layers faster" if lacking else ""


def _check_layers(policy: Policy, recorder: Recorder) -> None:
    """Check that every layer attends at most once, as caches assume."""
    kind, found = type(policy.causal_lm).__name__, len(set(recorder.layers))
    num_layers = policy.causal_lm.config.get_text_config(decoder=True).num_hidden_layers
    has_states = is_routed(policy.causal_lm)
    if found == 0 and not has_states:
        raise ValueError(
            f"model.name needs attention that transformers lets others compute, {kind} has its own{LISTED}"
        )
    if found != num_layers and not has_states:
        raise ValueError(f"model.name needs attention in every layer, {kind} has it in {found} of {num_layers}{LISTED}")
    if has_states and not set(recorder.layers) <= set(range(num_layers)):
        raise ValueError(f"model.name needs layers that are numbered, {kind} shares one for several{LISTED}")
    if len(recorder.layers) != found:
        times = f"{len(recorder.layers)} times in {num_layers}"
        raise ValueError(f"model.name needs attention once in every layer, {kind} has it {times}{LISTED}")


def _check_against_plain(policy: Policy, recorder: Recorder) -> float:
    """Compare with plain transformers, and shared prefixes with separate sequences.

    Return the mean difference of log-probs in nats.
    """
    model = policy.causal_lm
    kind, texts = type(model).__name__, _texts(policy)
    ids_BT = torch.tensor(texts, device=model.device)
    positions_BT = torch.arange(ids_BT.shape[1], device=model.device).expand_as(ids_BT)
    with nullcontext() if policy.mask_id is not None else seeing_masks(model):
        found_NV = policy.logits(ids_BT, positions_BT, recorder)
    _check_layers(policy, recorder)
    sharding.reshard(policy)
    plain = plain_model(policy)
    rounding = _compare(policy, found_NV, torch.cat([plain.logits(text, range(len(text))) for text in texts]))
    if policy.mask_id is not None:
        return rounding
    length = len(texts[0])
    place_T = torch.tensor([*range(length), *range(SHARED, length)], device=model.device)
    ids_1T = torch.tensor([[*texts[0], *texts[1][SHARED:]]], device=model.device)
    segments = list(star(0, SHARED, (length - SHARED,) * 2))
    packed = stream_layout(packed_layout(segments, model.device), segments)
    with in_float32(policy) as exact:  # what half precision rounds away would hide what crosses from text to text
        found_NV = exact.logits(ids_BT, positions_BT, replace(recorder, layers=[], heads=set()))
        packed_NV = exact.logits(ids_1T, place_T[None], packed)
    apart_NV = torch.cat([found_NV[:length], found_NV[length + SHARED :]])
    message = f"texts that are the same beside others, with positions of their own; {kind} changes them"
    _refuse_difference(can_widen(policy), packed_NV, apart_NV, message)
    return rounding


def _compare(policy: Policy, found_NV: Tensor, expected_NV: Tensor) -> float:
    """Return the mean difference of log-probs. ValueError for a large one."""
    kind = type(policy.causal_lm).__name__
    _refuse_difference(
        policy.computes_whole, found_NV, expected_NV, f"what transformers computes, {kind} comes out otherwise"
    )
    gap_NV = log_softmax(found_NV) - log_softmax(expected_NV)
    return float(gap_NV.masked_fill_(~gap_NV.isfinite(), 0.0).abs().mean())


def _refuse_difference(is_exact: bool, found_NV: Tensor, expected_NV: Tensor, message: str) -> None:
    error = logits_error(found_NV, expected_NV, is_exact)
    if not error <= (ERROR if is_exact else HALF_ERROR):
        raise ValueError(f"model.name needs {message} (logits differ by {error:.2g} of their deviation)")


def _texts(policy: Policy) -> list[list[int]]:
    """Return two texts of one length with the same beginning."""
    config = policy.causal_lm.config.get_text_config(decoder=True)
    longest = getattr(config, "max_position_embeddings", None) or SHARED + BRANCH
    branch = max(1, min(BRANCH, longest - policy.first_position - SHARED))
    chosen = ordinary_ids(policy, SHARED + 2 * branch)
    return [chosen[: SHARED + branch], chosen[:SHARED] + chosen[SHARED + branch :]]


@cache
def tell(line: str) -> None:
    """Log a line once per process."""
    LOGGER.warning(line)


def _line(error: Exception) -> str:
    return " ".join(repr(error).split())[:160]


def _first_position(policy: Policy, layout: Layout) -> int:
    """Return the first position: RoBERTa's family reserves some for padding."""
    model = policy.causal_lm
    if policy.mask_id is None and not _leaves_room(model):
        return 0
    ids_1T, _ = _probe(policy)
    with policy.autocast():
        expected_TV = model(input_ids=ids_1T, layout=layout).logits[0]
    # Positions may begin after the padding id
    padding = model.config.pad_token_id
    for first in dict.fromkeys((0, 0 if padding is None else padding + 1)):
        if torch.equal(_logits(replace(policy, first_position=first), layout), expected_TV):
            return first
    raise ValueError(f"model.name needs positions that are counted through, {type(model).__name__} has others")


def _leaves_room(model: nn.Module) -> bool:
    return any(
        isinstance(module, nn.Embedding) and module.padding_idx is not None
        for name, module in model.named_modules()
        if name.endswith("position_embeddings")
    )


def _amplify(policy: Policy, layout: Layout, logits_TV: Tensor) -> tuple[Tensor, Tensor]:
    """Return hidden states (T, C) scaled until logits are large, and logits.

    In half precision, small logits pass a soft cap unchanged.
    """
    factor = LOUD / float(logits_TV.abs().max().clamp(min=QUIET))

    def amplify(module: nn.Module, given: Any, out: Any) -> Any:
        out.last_hidden_state = out.last_hidden_state * factor
        return out

    hook = policy.causal_lm.base_model.register_forward_hook(amplify)
    try:
        hidden_TC = policy.run_forward(lambda: policy.hidden(*_probe(policy), layout)[0])
        return hidden_TC, _logits(policy, layout)
    finally:
        hook.remove()


def _is_plain(policy: Policy, hidden_TC: Tensor, logits_TV: Tensor) -> bool:
    try:
        found_TV = policy.run_forward(lambda: policy.head(hidden_TC))
    except (TypeError, RuntimeError):  # modules that take something else, or stand in another order
        return False
    # A library may take another algorithm for the same product; a head that does more differs by far more.
    near = 8 * torch.finfo(policy.precision).eps * float(logits_TV.abs().max())
    if not isinstance(found_TV, Tensor) or found_TV.shape != logits_TV.shape:
        return False
    return bool(torch.allclose(found_TV.to(logits_TV.dtype), logits_TV, rtol=0.0, atol=near))


def _logits(policy: Policy, layout: Layout) -> Tensor:
    return policy.logits(*_probe(policy), layout)


def _probe(policy: Policy) -> tuple[Tensor, Tensor]:
    chosen = torch.tensor([ordinary_ids(policy, NUM_TOKENS)], device=policy.device)
    return chosen, torch.arange(chosen.shape[1], device=policy.device)[None]
