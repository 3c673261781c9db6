"""Attention sinks and soft caps: scores, gradients and samples are those of transformers' own attention, in float64."""

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from covey.engine.base import Session
from covey.engine.native import graph
from covey.engine.native.engine import NativeEngine
from covey.policy.attention.base import ATTENTION, register
from covey.policy.attention.choice import choose_attention
from covey.policy.logprobs import Scoring, score_tokens
from covey.policy.models.loading import load_policy
from covey.policy.models.nano import nano_tokenizer
from covey.policy.models.probe import detect_capabilities, remove_dropout
from covey.policy.policy import Policy
from covey.policy.settings import ModelConfig
from covey.types import Completion, Group, Sampling

from ...support.builders import SHAPE, VOCABULARY, make, probe_logits, random_groups, saved_model

WINDOW = 5
LAYERS = {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
VARIANTS: dict[str, dict[str, Any]] = {
    "gpt_oss": {**LAYERS, **EXPERTS, "sliding_window": WINDOW},
    "gemma2": {**LAYERS, "sliding_window": WINDOW, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 5.0},
    "vaultgemma": {**LAYERS, "sliding_window": WINDOW, "attn_logit_softcapping": 1.5},
    "granite_swa": {**LAYERS, "sliding_window": WINDOW},
}
"""Sinks or caps, and layers with and without a window; a cap of 1.5 bends most scores."""
PROMPTS = [[5, 9, 20], [17, 3, 4, 11, 7, 25, 31, 30, 29, 12, 6], [8]]
TOLERANCE = 1e-9


@pytest.fixture(autouse=True)
def whole_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep float64 where transformers' norms, softmaxes and rotary positions compute in float32 whatever they get."""
    softmax, to, single = F.softmax, Tensor.to, Tensor.float

    def kept(tensor: Tensor, *args: Any, **keywords: Any) -> Tensor:
        return tensor if tensor.dtype == torch.float64 and args == (torch.float32,) else to(tensor, *args, **keywords)

    def precise(scores: Tensor, *args: Any, dtype: torch.dtype | None = None, **keywords: Any) -> Tensor:
        return softmax(scores, *args, dtype=scores.dtype if scores.dtype == torch.float64 else dtype, **keywords)

    monkeypatch.setattr(Tensor, "to", kept)
    monkeypatch.setattr(Tensor, "float", lambda tensor: tensor if tensor.dtype == torch.float64 else single(tensor))
    monkeypatch.setattr(F, "softmax", precise)


def model_of(architecture: str, attention: str) -> PreTrainedModel:
    """Large random weights, sinks among them, the same for every attention."""
    register()
    config = AutoConfig.for_model(architecture, vocab_size=VOCABULARY, **{**SHAPE, **VARIANTS[architecture]})
    generator = torch.Generator().manual_seed(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).double().eval()
    model.set_experts_implementation("eager")  # the grouped product of experts has no float64
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 1.0 if "sink" in name else 0.3 if parameter.dim() > 1 else 0.1
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    remove_dropout(model)
    return model


def policy_of(architecture: str) -> Policy:
    tokenizer = copy.deepcopy(nano_tokenizer())
    tokenizer.eos_token = None
    model = model_of(architecture, ATTENTION)
    model.generation_config.eos_token_id = []
    return detect_capabilities(Policy(model, tokenizer, torch.float64, head_is_linear=False))


def plain_logprobs(model: PreTrainedModel, groups: list[Group]) -> Tensor:
    """Rollout after rollout, as transformers alone computes them."""
    pieces = []
    for rollout in (r for g in groups for r in g.rollouts):
        logprobs_TV = model(input_ids=torch.tensor([rollout.input_ids])).logits[0].log_softmax(-1)
        chosen_T = logprobs_TV.gather(1, torch.tensor(rollout.target_ids)[:, None])[:, 0]
        pieces.append(chosen_T[torch.tensor(rollout.loss_mask)])
    return torch.cat(pieces)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.long
@pytest.mark.parametrize("packing", ["shared", "packed", "padded"])
@pytest.mark.parametrize("architecture", VARIANTS)
def test_scores_and_gradients_of_every_layout_are_those_of_plain_transformers(architecture: str, packing: str) -> None:
    policy, plain, groups = policy_of(architecture), model_of(architecture, "eager"), random_groups()
    expected_L = plain_logprobs(plain, groups)
    weight_L = torch.linspace(-1.0, 2.0, len(expected_L), dtype=torch.float64)
    expected = gradients(plain, (weight_L * expected_L).sum())
    for budget in (12, 10_000):
        micro_batches = make(groups, packing, budget).micro_batches
        found_L = torch.cat([score_tokens(policy, m, Scoring(Sampling(), 0)).logprob_L for m in micro_batches])
        found = gradients(policy.model, (weight_L * found_L).sum())
        assert float((found_L - expected_L).detach().abs().max()) < TOLERANCE
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            assert torch.allclose(found[name], gradient, rtol=1e-8, atol=1e-8 * float(gradient.abs().max())), name


@pytest.mark.parametrize("architecture", VARIANTS)
def test_what_the_engine_samples_has_the_log_probs_of_plain_transformers(architecture: str) -> None:
    plain = model_of(architecture, "eager")
    engine = NativeEngine(policy_of(architecture), 1 << 26, max_rows=5)

    async def run() -> list[list[Completion]]:
        calls = [engine.generate(ids, 3, Sampling(max_tokens=14, seed=i)) for i, ids in enumerate(PROMPTS)]
        return list(await asyncio.gather(*calls))

    for prompt, completions in zip(PROMPTS, asyncio.run(run()), strict=True):
        for completion in completions:
            token_ids = torch.tensor([[*prompt, *completion.token_ids]])
            with torch.no_grad():
                logprobs_TV = plain(input_ids=token_ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            expected = logprobs_TV.gather(1, token_ids[0, len(prompt) :, None])[:, 0]
            assert len(completion.logprobs) == 14
            assert completion.logprobs == pytest.approx(expected.tolist(), abs=TOLERANCE)


@pytest.mark.parametrize("is_graph", [False, True])
@pytest.mark.parametrize("architecture", VARIANTS)
def test_another_turn_has_the_log_probs_of_plain_transformers_too(
    architecture: str, is_graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = model_of(architecture, "eager")
    monkeypatch.setattr(graph, "is_wanted", lambda policy: is_graph)
    engine = NativeEngine(policy_of(architecture), 1 << 26, max_rows=5)

    async def converse(session: Session, prompt: list[int]) -> tuple[list[int], Completion]:
        history = [*prompt, *(await session.first()).token_ids, 3, 4, 5]
        completion = await session.extend([3, 4, 5], Sampling(max_tokens=9, seed=len(prompt)))
        session.close()
        return history, completion

    async def run() -> list[tuple[list[int], Completion]]:
        opened = [(engine.open(ids, 2, Sampling(max_tokens=6, seed=i)), ids) for i, ids in enumerate(PROMPTS)]
        return list(await asyncio.gather(*(converse(one, ids) for sessions, ids in opened for one in sessions)))

    for history, completion in asyncio.run(run()):
        token_ids = torch.tensor([[*history, *completion.token_ids]])
        with torch.no_grad():
            logprobs_TV = plain(input_ids=token_ids).logits[0, len(history) - 1 : -1].log_softmax(-1)
        expected = logprobs_TV.gather(1, token_ids[0, len(history) :, None])[:, 0]
        assert completion.logprobs == pytest.approx(expected.tolist(), abs=TOLERANCE)


@pytest.mark.parametrize("architecture", VARIANTS)
def test_the_variant_moves_the_scores_it_is_tested_on(architecture: str) -> None:
    groups = random_groups()
    model = model_of(architecture, "eager")
    before = plain_logprobs(model, groups)
    for module in model.modules():
        if hasattr(module, "attn_logit_softcapping"):
            module.attn_logit_softcapping = None
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(-1e4) if "sink" in name else None
    assert float((plain_logprobs(model, groups) - before).detach().abs().max()) > 0.05


HEADS_16 = {"head_dim": 16, "hidden_size": 32}
"""As wide as compiled kernels take them."""


@pytest.mark.parametrize("architecture", ["gemma2", "gpt_oss"])
def test_kernels_that_do_not_know_the_variant_leave_it_to_torch_or_say_so(architecture: str, tmp_path: Path) -> None:
    name = saved_model(tmp_path, architecture, **{**VARIANTS[architecture], **HEADS_16})
    policy = load_policy(ModelConfig(name=name), seed=0)
    assert policy.attention == "sdpa"
    assert NativeEngine(policy, 1 << 24, max_rows=4).kernels == "torch"
    with pytest.raises(ValueError, match=r"^model\.attention=varlen knows neither attention sinks nor soft caps; take"):
        choose_attention("varlen", "auto", policy.heads)


def test_experts_are_computed_in_float64_where_that_is_asked_for(tmp_path: Path) -> None:
    name = saved_model(tmp_path, "gpt_oss", **VARIANTS["gpt_oss"])
    assert probe_logits(load_policy(ModelConfig(name=name, precision="float64"), seed=0)).dtype == torch.float64
