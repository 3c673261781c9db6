"""Real vLLM on folders of text and pictures: greedy tokens are those of transformers, before and after a push.

Files of some classes name weights otherwise than the class, or hold experts one by one.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForMultimodalLM

from covey.engine.vllm.build import build
from covey.engine.weights import make_weight_set
from covey.policy.models.loading import load_policy
from covey.policy.policy import Policy
from covey.policy.settings import ModelConfig
from covey.run.checkpoints.checkpoint import save_policy
from covey.types import Sampling

from ....support.models.composite_models import TOWERS, composite_folder
from .tiny_served import PROMPT, SETTINGS, sample, train_a_little

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

SIZES = {"hidden_size": 128, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"head_dim": 32, "max_position_embeddings": 512}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
DELTA: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2}
DELTA |= {"linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
DELTA |= {"rope_parameters": {**ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}}
TEXTS: dict[str, dict[str, Any]] = {
    "gemma3": {},
    "gemma4": {},
    "internvl": {},
    "mistral3": {},
    "smolvlm": {},
    "qwen3_vl": {"rope_parameters": {**ROPE, "mrope_section": [6, 5, 5]}},
    "qwen3_5": DELTA,
}
"""What vLLM serves on a CPU."""


def behind(folder: Path, token_ids: Sequence[int]) -> float:
    """The most nats by which transformers find another token likelier than one that was drawn."""
    model = AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids, drawn = torch.tensor([[*PROMPT, *token_ids]]), torch.tensor(token_ids)[:, None]
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(PROMPT) - 1 : -1]
    return float((logits.max(-1).values - logits.gather(-1, drawn)[:, 0]).max())


def given(name: str, folder: Path) -> Policy:
    wide = {"out_hidden_size": 128} if "out_hidden_size" in TOWERS[name] else {}
    text = {**SIZES, **TEXTS[name]}
    precision = "bfloat16" if name == "qwen3_5" else "float32"  # vLLM's delta rule on a CPU has no other
    composite_folder(name, folder, text, wide)
    return load_policy(ModelConfig(name=str(folder), device="cpu", precision=precision))


@pytest.mark.parametrize("name", TEXTS)
def test_text_and_pictures_are_sampled_on_the_weights_pushed_last(name: str, tmp_path: Path) -> None:
    policy = given(name, tmp_path / "given")
    engine, sampling = build(policy, SETTINGS), Sampling(temperature=0.0, max_tokens=12)
    try:
        said = []
        for version in (0, 1):
            if version:
                train_a_little(policy, seed=3)
                asyncio.run(engine.update(make_weight_set(policy, version), "keep"))
            (completion,) = asyncio.run(engine.generate(PROMPT, 1, sampling))
            save_policy(policy, tmp_path / str(version))
            nats = 0.0 if policy.precision == torch.float32 else 0.2  # rounding of half precision
            assert behind(tmp_path / str(version), completion.token_ids) <= nats
            said.append([free.token_ids for free in sample(engine, Sampling(max_tokens=12, seed=3))])
        assert said[0] != said[1], "training shows"
    finally:
        engine.close()
