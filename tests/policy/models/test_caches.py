"""Forked, joined and dropped rows of caches against whole texts."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.checks.architecture_configs import tiny_config
from covey.policy.models.caches import assign_states, cache_bytes, cache_keyword, fork_rows, join_rows, take_rows

ARCHITECTURES = ("qwen3_5_text", "nemotron_h", "lfm2_moe", "falcon_h1", "deepseek_v4", "minimax", "bloom", "mamba")
PROMPT, FIRST, SECOND, THIRD = [5, 9, 200, 31, 7, 8, 14], [4, 40, 77, 13, 21], [90, 3, 3, 8, 61], [12, 88, 54, 6, 19]


def tiny(architecture: str) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(tiny_config(architecture)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.1) if parameter.dim() > 1 else None
    return model


def read(model: PreTrainedModel, texts: list[list[int]], **cache: Any) -> Any:
    return model(input_ids=torch.tensor(texts), use_cache=True, **cache)


def deviation(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.std())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_rows_of_one_prompt_continue_as_whole_texts_do(architecture: str) -> None:
    model, own = tiny(architecture), [FIRST, SECOND, THIRD]
    held = cache_keyword(read(model, [PROMPT]))
    ((name, cache),) = held.items()
    size = cache_bytes(cache)
    other = fork_rows(cache, torch.tensor([0]))
    take_rows(cache, torch.tensor([0, 0]))
    assert cache_bytes(cache) == 2 * size
    for place in range(3):
        out = read(model, [[own[0][place]], [own[1][place]]], **cache_keyword({name: cache}))
        read(model, [[own[2][place]]], **{name: other})
    # Another row of as many tokens joins, and the first leaves
    cache = fork_rows(join_rows([cache, other]), torch.tensor([1, 2]))
    out = read(model, [[own[1][3]], [own[2][3]]], **{name: cache})
    for row, ids in enumerate(own[1:]):
        whole = model(input_ids=torch.tensor([[*PROMPT, *ids[:4]]]), use_cache=False).logits[0, -1]
        assert deviation(out.logits[row, -1], whole) < 1e-4


def test_gradients_pass_a_forked_recurrent_state() -> None:
    model = tiny("qwen3_5_text").train()
    weight = torch.randn(len(FIRST), model.config.vocab_size, generator=torch.Generator().manual_seed(1))

    def gradients(losses: list[Tensor]) -> list[Tensor]:
        return list(torch.autograd.grad(sum(losses, torch.zeros(())), list(model.parameters()), allow_unused=True))

    own = [FIRST, SECOND]
    alone = [model(input_ids=torch.tensor([[*PROMPT, *ids]])).logits[0, len(PROMPT) :] for ids in own]
    expected = gradients([(logits.log_softmax(-1) * weight).sum() for logits in alone])
    held = cache_keyword(read(model, [PROMPT]))
    ((name, cache),) = held.items()
    assign_states(cache)
    shared = read(model, own, **{name: fork_rows(cache, torch.tensor([0, 0]))}).logits
    found = gradients([(logits.log_softmax(-1) * weight).sum() for logits in shared])
    gaps = [(a - b).norm() ** 2 for a, b in zip(found, expected, strict=True) if b is not None]
    assert float(sum(gaps) ** 0.5 / sum(b.norm() ** 2 for b in expected if b is not None) ** 0.5) < 1e-4
