"""The file to read first computes what covey does: same draws, loss, gradients and weights, to the bit."""

import ast
import importlib.util
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import covey
from covey.policy.models.loading import load_policy
from covey.policy.sampling import random_uniform, row_key
from covey.policy.settings import ModelConfig
from covey.rollouts.stream import rollout_seed
from covey.types import Group

from ..support.byte_rewards import digits, share_of_digits

FILE = Path(__file__).resolve().parents[2] / "examples" / "grpo_from_scratch.py"
STEPS, GROUPS = 5, 4


@pytest.fixture(scope="module")
def twin() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grpo_from_scratch", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A policy of a few thousand weights, with transformers' own loader for both."""
    policy = load_policy(ModelConfig(nano_hidden_size=32, nano_num_layers=2, nano_num_heads=2), seed=1)
    policy.causal_lm.save_pretrained(tmp_path / "policy")
    policy.tokenizer.save_pretrained(tmp_path / "policy")
    return str(tmp_path / "policy")


def sums(twin: ModuleType) -> list[dict[str, str]]:
    generator = random.Random(0)
    prompts = dict.fromkeys(twin.make_sum(generator)[0] for _ in range(60))
    return [{"prompt": prompt} for prompt in prompts]


def covey_parts(twin: ModuleType, folder: str) -> Any:
    settings: Mapping[str, Any] = {
        "num_steps": STEPS,
        "groups_per_step": GROUPS,
        "group_size": twin.GROUP_SIZE,
        "max_tokens": twin.MAX_TOKENS,
        "packing": "padded",
        "precision": "float64",
        "optimizer": {"lr": 1e-2, "betas": list(twin.BETAS)},
        "progress": False,
        "preflight": {"enabled": False},
    }
    return covey.build(folder, digits, sums(twin), **settings)


def draws_of(groups: Sequence[Group], num_tokens: int) -> Tensor:
    """The numbers in [0, 1) that covey's engine drew each rollout's tokens by, (N, T)."""
    keys = [row_key(rollout_seed(0, g.prompt.id, 0), index) for g in groups for index in range(len(g.rollouts))]
    columns = [random_uniform(torch.tensor(keys), torch.full((len(keys),), t)) for t in range(num_tokens)]
    return torch.stack(columns, dim=1)


def written(groups: Sequence[Group]) -> list[list[int]]:
    """The tokens that the policy chose, of each rollout."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return [[i for i, own in zip(r.target_ids, r.loss_mask, strict=True) if own] for r in rollouts]


def same_weights(own: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(own.parameters(), other.parameters(), strict=True))


def watch_gradients(model: nn.Module) -> dict[int, Tensor]:
    """Keep the gradient of each weight, by number, as the last backward pass left it: before it is clipped."""
    kept: dict[int, Tensor] = {}
    for number, weight in enumerate(model.parameters()):
        weight.register_post_accumulate_grad_hook(lambda w, number=number: kept.update({number: w.grad.clone()}))
    return kept


def test_from_the_same_draws_it_learns_the_same_to_the_bit(twin: ModuleType, folder: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=twin.BETAS, weight_decay=0.0, fused=True)
    curve, of_covey = [], []
    gradients = watch_gradients(model)
    with covey_parts(twin, folder) as parts:
        of_trainer = watch_gradients(parts.policy.model)
        for groups in parts:
            texts = [group.prompt.text for group in groups for _ in group.rollouts]
            prompts = torch.tensor([tokenizer(text)["input_ids"] for text in texts])
            drawn = draws_of(groups, twin.MAX_TOKENS)
            rollouts = twin.sample(model, prompts, tokenizer.eos_token_id, drawn)
            own = [t[m].tolist() for t, m in zip(rollouts.tokens[:, 1:], rollouts.mask, strict=True)]
            assert own == written(groups)
            completions = tokenizer.batch_decode(rollouts.tokens[:, prompts.shape[1] :], skip_special_tokens=True)
            rewards = torch.tensor([share_of_digits(c) for c in completions], dtype=torch.float64)
            loss = twin.update(model, optimizer, rollouts, rewards)
            metrics = parts.step(groups)
            curve.append((float(rewards.mean()), float(loss)))
            of_covey.append((metrics["sampled_reward_mean"], metrics["loss"]))
            assert same_weights(model, parts.policy.model)
            assert len(gradients) == len(of_trainer) == len(list(model.parameters()))
            assert all(torch.equal(gradients[number], other) for number, other in of_trainer.items())
    assert curve == of_covey
    assert len(curve) == STEPS
    # Groups without signal have a loss of 0, which steps depends on the processor
    assert len({loss for _, loss in curve}) > STEPS // 2, "a loss that never moves shows nothing"


def test_it_is_short_and_needs_torch_and_transformers_alone() -> None:
    text = FILE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    tree = ast.walk(ast.parse(text))
    names = [
        node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
        for node in tree
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert {str(name).split(".")[0] for name in names} <= {"argparse", "random", "dataclasses", "torch", "transformers"}


def test_its_own_loop_raises_the_share_that_its_reward_counts(
    twin: ModuleType, folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"NUM_STEPS": 30, "NUM_GROUPS": 8, "LEARNING_RATE": 1e-2}.items():
        monkeypatch.setattr(twin, name, value)
    monkeypatch.setattr(twin, "reward", lambda completion, answer: share_of_digits(completion))
    twin.train(AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder), seed=0)
    right = [float(line.split()[3]) for line in capsys.readouterr().out.splitlines()]
    assert len(right) == 30
    assert sum(right[-5:]) > 5 * 0.5 > 5 * right[0]
