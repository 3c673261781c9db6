"""Models with layers that have a state, on the fast path: what transformers alone computes, in every layout."""

from pathlib import Path

import pytest
import torch

from covey.policy.plain import _exactly
from covey.policy.recurrence.mixers import is_routed, unroute

from ...support.builders import ADVANTAGES, SGD, gradient, make, make_trainer, relative_error
from ..models.test_general import assert_layouts_agree, groups, loaded

HYBRIDS = ("qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "nemotron_h", "granitemoehybrid", "falcon_h1", "lfm2_moe")


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("architecture", HYBRIDS)
def test_every_layout_computes_what_transformers_alone_computes(
    architecture: str, checkpointing: bool, tmp_path: Path
) -> None:
    policy = loaded(tmp_path, architecture, gradient_checkpointing=checkpointing)
    assert policy.path == "fast"
    assert_layouts_agree(policy, tmp_path)


@pytest.mark.parametrize("architecture", ["qwen3_5_text", "nemotron_h", "lfm2"])
def test_an_update_in_float64_does_not_depend_on_the_layout(architecture: str, tmp_path: Path) -> None:
    gradients = []
    for packing, budget in (("padded", 200), ("packed", 90), ("shared", 10_000), ("shared", 70)):
        policy = loaded(tmp_path / packing / str(budget), architecture, precision="float64")
        with _exactly(torch.float64):  # its norms would compute in float32
            batch = make(groups(), packing, budget, ADVANTAGES, attention=policy.attention)
            make_trainer(policy, optimizer=SGD).step(batch, 0)
        gradients.append(gradient(policy))
    for found in gradients[1:]:
        assert relative_error(found, gradients[0]) < 1e-9


def test_a_trained_model_generates_through_its_own_cache(tmp_path: Path) -> None:
    for architecture in ("qwen3_5_text", "falcon_h1", "lfm2"):
        model = loaded(tmp_path / architecture, architecture).causal_lm.eval()
        ids = torch.tensor([[5, 9, 17, 40]])
        found = model.generate(ids, max_new_tokens=8, do_sample=False)  # type: ignore[operator]
        assert is_routed(model)
        unroute(model)
        assert not is_routed(model)
        assert found.tolist() == model.generate(ids, max_new_tokens=8, do_sample=False).tolist()  # type: ignore[operator]
