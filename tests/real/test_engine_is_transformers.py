"""covey's engine beside transformers on real models and texts: the same tokens, log-probs and ends.

Greedy, fifty prompts, ten of them for Qwen: 20 word problems (of GSM8K where the shared data are at hand, else
generated), 20 instructions, 10 chats. transformers reads each answer in one pass, so that every token is compared on
the same prefix. In float32 every fifth answer, else every one, is read in another way too: how far transformers is
from itself.
"""

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from covey.engine.native.decode_weights import build_decode_policy, is_fused
from covey.engine.native.engine import NativeEngine
from covey.engine.native.runner import detect_capabilities
from covey.policy.models.loading import load_policy
from covey.policy.settings import ModelConfig
from covey.types import Completion, Sampling
from covey_tasks.ifeval.generator import generate
from covey_tasks.ifeval.settings import IfevalConfig
from covey_tasks.math.generated import word_problems
from covey_tasks.rows.short_answers import brief

from .conftest import HEAVY

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

LONGEST = 48
"""Tokens of an answer."""
ROUNDINGS = 3.0
"""How many times as far from transformers in float32 as that is from float64: two roundings, and a half. A matrix of
SmolLM2 that is off by 1e-4 moves log-probs by 1.7e-4 on average."""
OUTLIER = 60.0
"""Mean roundings that a single token may be apart: 20 were seen among 2,400 tokens, 6 between transformers and float64
among 480. The largest alone would compare the tails of two sets of different size."""
BFLOAT16_DIGITS = 7


@dataclass(frozen=True)
class Compared:
    """One token of the engine beside transformers' logits of the same place."""

    is_argmax: bool
    behind: float
    """Logits between transformers' best token and the engine's, in steps of bfloat16 at that size."""
    apart: float
    """Nats between the two log-probs."""
    rounding: float = 0.0
    """Nats between transformers' own log-probs in this and in another way, where it was read so."""
    behind_itself: float = 0.0
    """As `behind`, of the best token of transformers in that other way."""


def questions() -> list[str]:
    data = Path(os.environ.get("COVEY_SHARED", "")) / "data" / "gsm8k" / "test.jsonl"
    rows = [json.loads(line) for line in islice(data.open(), 20)] if data.is_file() else word_problems()["test"][:20]
    asked = [row["question"] for row in rows]
    asked += [request.text for request in generate(IfevalConfig(num_train=20, num_test=1))["train"]]
    return asked + [row["prompt"][-1]["content"] for row in brief()["test"][:10]]


def answered(engine: NativeEngine, prompts: Sequence[Sequence[int]]) -> list[Completion]:
    """Sample all prompts at the same time, greedily."""

    async def run() -> list[list[Completion]]:
        greedy = Sampling(temperature=0, max_tokens=LONGEST)
        return list(await asyncio.gather(*(engine.generate(prompt, 1, greedy) for prompt in prompts)))

    return [completion for (completion,) in asyncio.run(run())]


@torch.inference_mode()
def compared(
    model: PreTrainedModel, other: PreTrainedModel | None, prompt: Sequence[int], answer: Completion
) -> list[Compared]:
    """Compare with the model; `other` is the same in float64, or with another kind of attention in half precision."""
    ids, chosen_T = torch.tensor([[*prompt, *answer.token_ids]]), torch.tensor(answer.token_ids)

    def passed(reader: PreTrainedModel) -> tuple[Tensor, Tensor, Tensor]:
        """All logits, those of the chosen tokens, and their log-probs."""
        logits_TV = reader(ids).logits[0, len(prompt) - 1 : -1].double()
        picked_T = logits_TV.gather(-1, chosen_T[:, None])[:, 0]
        return logits_TV, picked_T, picked_T - logits_TV.logsumexp(-1)

    logits_TV, picked_T, log_probs_T = passed(model)
    best_T = logits_TV.max(-1).values
    step_T = 2.0 ** (best_T.abs().log2().floor() - BFLOAT16_DIGITS)
    apart_T = (log_probs_T - torch.tensor(answer.logprobs).double()).abs()
    columns = [logits_TV.argmax(-1) == chosen_T, (best_T - picked_T) / step_T, apart_T]
    if other is not None:
        other_TV, _, other_T = passed(other)
        own_T = logits_TV.gather(-1, other_TV.argmax(-1)[:, None])[:, 0]
        columns += [(log_probs_T - other_T).abs(), (best_T - own_T) / step_T]
    return [Compared(bool(a), *map(float, numbers)) for a, *numbers in zip(*columns, strict=True)]


CASES = [
    pytest.param("smollm2-135m", "float32", 50),
    pytest.param("smollm2-135m", "bfloat16", 50, marks=pytest.mark.long),
    pytest.param("qwen2.5-coder-0.5b", "float32", 10, marks=[pytest.mark.long, HEAVY]),
]


@pytest.mark.parametrize(("name", "precision", "num_prompts"), CASES)
def test_greedy_answers_are_transformers_own(
    name: str, precision: str, num_prompts: int, real_model: Callable[[str], Path]
) -> None:
    folder = real_model(name)
    policy = load_policy(ModelConfig(name=str(folder), precision=precision), trainable=False)
    chats = [[{"role": "user", "content": question}] for question in questions()[:: 50 // num_prompts]]
    prompts = [policy.tokenizer.apply_chat_template(c, add_generation_prompt=True)["input_ids"] for c in chats]
    assert len(prompts) == num_prompts
    answers = answered(NativeEngine(policy, 1 << 29, max_rows=64), prompts)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, precision)).eval()
    kind = (
        {"dtype": torch.float64} if precision == "float32" else {"dtype": model.dtype, "attn_implementation": "eager"}
    )
    other = AutoModelForCausalLM.from_pretrained(folder, **kind).eval()
    pairs, every = list(zip(prompts, answers, strict=True)), 5 if precision == "float32" else 1
    looked_at_twice = [one for pair in pairs[::every] for one in compared(model, other, *pair)]
    once = [one for place, pair in enumerate(pairs) if place % every for one in compared(model, None, *pair)]
    found = looked_at_twice + once

    if precision == "float32":
        assert [one for one in found if not one.is_argmax] == []
        rounding = fmean(one.rounding for one in looked_at_twice)
        assert fmean(one.apart for one in found) < ROUNDINGS * rounding
        assert max(one.apart for one in found) < OUTLIER * rounding
    else:  # ties of a coarse grid, which transformers breaks otherwise itself with the other kind of attention
        for worst in (max, fmean):
            own = worst([one.behind_itself for one in looked_at_twice])
            assert worst([one.behind for one in found]) <= 2 * own

    end = policy.tokenizer.eos_token_id
    assert any(answer.finish_reason == "stop" for answer in answers)
    for answer in answers:
        assert end not in answer.token_ids[:-1]
        assert (answer.token_ids[-1] == end) is (answer.finish_reason == "stop")
        assert answer.finish_reason == "stop" or len(answer.token_ids) == LONGEST


@pytest.mark.parametrize("setting", [{"lora_rank": 64}, pytest.param({"load_in_4bit": True}, marks=pytest.mark.long)])
def test_decoding_goes_through_c_with_adapters_of_any_width(
    setting: dict[str, Any], real_model: Callable[[str], Path]
) -> None:
    """From rank 43 on, an adapter's own products are so wide that training computes them in another kind of layer."""
    model = ModelConfig(name=str(real_model("smollm2-135m")), precision="bfloat16", **{"lora_rank": 16, **setting})
    policy = load_policy(model)
    assert is_fused(build_decode_policy(policy, detect_capabilities(policy).rules))
