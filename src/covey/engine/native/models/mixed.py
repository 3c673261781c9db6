"""Layers with a state in mixer.h, for decoding.

Shapes: T tokens, W width of the convolution, C channels, H heads, P value width.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import Tensor, nn

from covey.policy.attention.base import Layout
from covey.policy.kernels.compiler import KERNELS, struct_of
from covey.policy.kernels.support import LANES
from covey.policy.recurrence.mixers import SILU, mixer_of

Numbers = dict[str, float]
Tensors = dict[str, Tensor]
MixerStruct = struct_of(KERNELS / "mixer.h", "Mixer")


@dataclass(frozen=True, slots=True)
class Mixed:
    """The description of a class of layers with a state."""

    into: tuple[str, ...]
    """Names of the linear layers before the convolution, in the order of their columns."""
    numbers: Callable[[Any], Numbers]
    tensors: Callable[[Any], Tensors]
    output: str = "out_proj"
    factors: tuple[str, ...] = ()
    """Names of what multiplies the linear layers' outputs, and is in their weights."""


def own_name(module: nn.Module | None) -> str:
    """Return the name of a class of transformers' own, "" for another."""
    kind = type(module)
    return kind.__name__ if kind.__module__.startswith("transformers.models.") else ""


def mixed_of(module: nn.Module | None) -> Mixed | None:
    """Return the description of a layer, None where mixer.h cannot compute it."""
    mixed = MIXED.get(own_name(module))
    if mixed is None or module is None or mixer_of(module) is None:
        return None
    is_known = getattr(module, "activation", "silu") in SILU  # LFM2's has none
    return mixed if is_known and mixed.numbers(module).get("value_width", 0) % LANES == 0 else None


class MixedLayer:
    """The buffers of a layer's other weights for mixer.h, filled by `take`."""

    def __init__(self, module: Any) -> None:
        mixed, mixer = mixed_of(module), mixer_of(module)
        assert mixed is not None and mixer is not None, "chosen for a known layer"  # noqa: PT018
        self.place, self._mixed = mixer.place, mixed
        self._tensors = {name: tensor.contiguous() for name, tensor in self._weights(module).items()}
        self.call = MixerStruct(**{name: tensor.data_ptr() for name, tensor in self._tensors.items()})
        for name, number in (ABSENT | mixed.numbers(module)).items():
            setattr(self.call, name, number)
        self._sizes = [module._modules[name].out_features for name in mixed.into]

    def take(self, module: Any) -> None:
        for name, tensor in self._weights(module).items():
            self._tensors[name].copy_(tensor)
        self._module = _between(module, self._mixed)

    def mix(self, hidden_TC: Tensor, projected_TO: Tensor, layout: Layout) -> Tensor:
        """Return the output product's input (T, H*P), as transformers computes it."""
        names = self._mixed.into
        for name, part in zip(names, projected_TO.split(self._sizes, dim=1), strict=True):
            self._module._modules[name].out = part[None]
        out: Tensor = self._module(hidden_TC[None], layout=layout)
        return out[0].float().contiguous()

    def _weights(self, module: Any) -> Tensors:
        return {name: tensor.detach().float() for name, tensor in self._mixed.tensors(module).items()}


class Given(nn.Module):
    """Stands for a linear layer whose product is known."""

    out: Tensor

    def forward(self, input: Tensor) -> Tensor:
        return self.out


def _between(module: Any, mixed: Mixed) -> Any:
    """Return the layer on the same weights without its linear layers."""
    shell = copy.copy(module)
    shell.training = False
    shell._modules = {**module._modules, **{name: Given() for name in mixed.into}, mixed.output: nn.Identity()}
    vars(shell).update(dict.fromkeys(mixed.factors, 1.0))
    shell.forward = MethodType(module.forward.__func__, shell)
    return shell


def _convolution(layer: Any) -> Tensors:
    bias = {} if layer.bias is None else {"bias": layer.bias}
    return {"weight": layer.weight[:, 0].T} | bias


def _delta_numbers(layer: Any) -> Numbers:
    keys, values, heads = layer.key_dim, layer.value_dim, layer.num_v_heads
    channels, norm = 2 * keys + values, _norm_of(layer)
    return {
        **{"channels": channels, "width": layer.conv_kernel_size, "silu": 1, "gate": channels, "gate_silu": 1},
        **{"beta": channels + values, "rate": channels + values + heads, "key": keys, "value": 2 * keys},
        **{"num_keys": layer.num_k_heads, "num_heads": heads, "key_width": layer.head_k_dim},
        **{"value_width": layer.head_v_dim, "norm_width": layer.head_v_dim, "eps": norm.variance_epsilon},
        "beta_scale": 2.0 if vars(layer).get("allow_neg_eigval") else 1.0,
    }


def _delta_tensors(layer: Any) -> Tensors:
    norm = _norm_of(layer).weight.repeat(layer.num_v_heads)
    return _convolution(layer.conv1d) | {"decay": -layer.A_log.float().exp(), "shift": layer.dt_bias, "norm": norm}


def _norm_of(layer: Any) -> Any:
    return layer._modules["norm" if "norm" in layer._modules else "o_norm"]


def _select_numbers(layer: Any) -> Numbers:
    inner, channels, keys = layer.intermediate_size, layer.conv_dim, layer.n_groups * layer.ssm_state_size
    (least, most), norm = layer.time_step_limit, vars(layer.norm)  # Falcon-H1 may have none
    return {
        **{"channels": channels, "width": layer.conv_kernel_size, "silu": 1, "convolved": inner, "gate": 0},
        **{
            "gate_silu": 1,
            "gates_first": not norm.get("norm_before_gate"),
            "rate": inner + channels,
            "key": inner,
            "query": inner + keys,
        },
        **{"num_keys": layer.n_groups, "num_heads": layer.num_heads, "key_width": layer.ssm_state_size},
        **{"value_width": layer.head_dim, "norm_width": inner // layer.n_groups},
        **{"eps": norm.get("variance_epsilon", 0.0), "least": least, "most": most},
    }


def _select_tensors(layer: Any) -> Tensors:
    rates = {"decay": -layer.A_log.float().exp(), "shift": layer.dt_bias, "skip": layer.D}
    norm = {} if isinstance(layer.norm, nn.Identity) else {"norm": layer.norm.weight}
    return _convolution(layer.conv1d) | rates | norm


def _short_numbers(layer: Any) -> Numbers:
    width = layer.out_proj.in_features
    return {"channels": width, "width": layer.conv_kernel_size, "factor": 0, "gate": width, "convolved": 2 * width}


ABSENT: Numbers = {"factor": -1, "gate": -1, "beta": -1, "beta_scale": 1.0}
MIXED: Mapping[str, Mixed] = {
    "Qwen3_5GatedDeltaNet": Mixed(
        ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), _delta_numbers, _delta_tensors
    ),
    "OlmoHybridGatedDeltaNet": Mixed(
        ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"), _delta_numbers, _delta_tensors, "o_proj"
    ),
    **dict.fromkeys(
        ("NemotronHMamba2Mixer", "GraniteMoeHybridMambaLayer", "BambaMixer"),
        Mixed(("in_proj",), _select_numbers, _select_tensors),
    ),
    "FalconH1Mixer": Mixed(("in_proj",), _select_numbers, _select_tensors, factors=("mup_vector",)),
    **dict.fromkeys(
        ("Lfm2ShortConv", "Lfm3ShortConv"),
        Mixed(("in_proj",), _short_numbers, lambda layer: _convolution(layer.conv)),
    ),
}
