"""Liger's kernels, by a stand-in in plain torch: which modules take them, and what they are given."""

import pickle
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from covey.policy import settings
from covey.policy.attention.base import DENSE
from covey.policy.kernels.gpu import inductor, liger, residual
from covey.policy.policy import Policy

from ....support.builders import CPU, nano, probe_logits
from ....support.pretend_gpu import PretendGpu


class Norm:
    @staticmethod
    def apply(x: Tensor, weight: Tensor, eps: float, offset: float, mode: str, in_place: bool, rows: Any) -> Tensor:
        CALLED.append("norm")
        assert (offset, mode, in_place) == (0.0, "llama", False)
        return F.rms_norm(x.float(), weight.shape, eps=eps).to(x.dtype) * weight


class Gate:
    @staticmethod
    def apply(gate: Tensor, up: Tensor, gate_multiplier: float, down_multiplier: float) -> Tensor:
        CALLED.append("gate")
        return F.silu(gate) * up


def rope(query_BHTD: Tensor, key_BHTD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    CALLED.append("rope")

    def turned(x: Tensor) -> Tensor:
        low, high = x.chunk(2, dim=-1)
        return x * cos[:, None] + torch.cat((-high, low), dim=-1) * sin[:, None]

    return turned(query_BHTD), turned(key_BHTD)


CALLED: list[str] = []


@pytest.fixture(autouse=True)
def _liger(monkeypatch: pytest.MonkeyPatch) -> None:
    CALLED.clear()
    parts: dict[str, dict[str, Any]] = {
        "liger_kernel": {},
        "liger_kernel.ops": {"LigerRMSNormFunction": Norm, "LigerSiLUMulFunction": Gate},
        "liger_kernel.transformers": {},
        "liger_kernel.transformers.rope": {"liger_rotary_pos_emb": rope},
    }
    for name, values in parts.items():
        module = ModuleType(name)
        vars(module).update(values)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)


def gradient_of(policy: Policy) -> Tensor:
    ids_1T = torch.arange(1, 9, device=policy.device)[None]
    policy.logits(ids_1T, ids_1T - 1, DENSE).float().square().mean().backward()
    return torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None])


@pytest.mark.long
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_all_norms_gates_and_positions_go_through_liger_and_the_numbers_stay(architecture: str) -> None:
    with PretendGpu() as gpu:
        plain, liger = (nano(nano_architecture=architecture, kernels=kernels) for kernels in ("torch", "liger"))
        CALLED.clear()
        torch.testing.assert_close(gradient_of(liger), gradient_of(plain), rtol=1e-4, atol=1e-6)
        assert not gpu.mixed
    num_norms = 1 + 2 * (4 if architecture == "qwen3" else 2)
    assert (CALLED.count("norm"), CALLED.count("gate"), CALLED.count("rope")) == (num_norms, 2, 2)
    assert plain.model.state_dict().keys() == liger.model.state_dict().keys()


@pytest.mark.long
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_layers_join_their_norms_with_the_sums_before_where_torch_compiles(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = []
    monkeypatch.setattr(liger, "add_norm", lambda *given: joined.append(given) or residual.add_norm(*given))
    monkeypatch.setattr(residual, "compile_once", lambda function: function)
    with PretendGpu() as gpu:
        plain = nano(nano_architecture=architecture, kernels="torch")
        monkeypatch.setattr(inductor, "is_wanted", lambda kernels, device: True)
        compiled = nano(nano_architecture=architecture, kernels="liger")
        deterministic = nano(nano_architecture=architecture, kernels="liger", deterministic=True)
        joined.clear()
        wanted = gradient_of(plain)
        torch.testing.assert_close(gradient_of(compiled), wanted, rtol=1e-4, atol=1e-6)
        assert not gpu.mixed
        assert [given[1] is not None for given in joined] == [False, True] * 2, "the norm before a layer has no sum"
        joined.clear()
        torch.testing.assert_close(gradient_of(deterministic), wanted, rtol=1e-4, atol=1e-6)
        assert joined == [], "another process may add up in another order"
    assert plain.model.state_dict().keys() == compiled.model.state_dict().keys()


def test_its_classes_are_found_by_name_as_pickle_looks_for_them() -> None:
    for made in (*liger.JOINED.values(), *liger.LIGER.values()):
        assert pickle.loads(pickle.dumps(made)) is made


def test_without_a_gpu_it_is_refused_in_one_line() -> None:
    with pytest.raises(
        ValueError, match=r"^model.kernels=liger needs a GPU, got model.device=cpu; take model.kernels=auto$"
    ):
        probe_logits(nano(kernels="liger"))


def test_half_precision_gpu_layers_use_liger_where_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "triton", triton := ModuleType("triton"))
    triton.__spec__ = ModuleSpec("triton", None)
    cuda = torch.device("cuda")
    assert liger.is_wanted("auto", torch.bfloat16, cuda)
    assert liger.is_wanted("auto", torch.float16, cuda)
    assert not liger.is_wanted("auto", torch.float32, cuda)
    assert not liger.is_wanted("auto", torch.bfloat16, CPU)
    assert not liger.is_wanted("torch", torch.bfloat16, cuda)
    assert liger.is_wanted("liger", torch.float32, cuda)
    monkeypatch.setattr(settings, "find_spec", lambda name: None if name == "liger_kernel" else triton.__spec__)
    assert not liger.is_wanted("auto", torch.bfloat16, cuda)


def test_what_enters_several_products_is_cast_once_where_autocast_would_cast_it_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entering = liger._OnGpu()
    hidden = torch.ones(2, 3)
    assert entering._cast_once(hidden) is hidden
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.bfloat16)
    assert entering._cast_once(hidden).dtype == torch.bfloat16


def test_float64_is_not_computed_by_kernels_that_add_up_in_float32() -> None:
    with PretendGpu():
        exact = nano(kernels="liger", precision="float64")
        CALLED.clear()
        gradient_of(exact)
        assert CALLED == []
