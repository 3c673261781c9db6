"""The general path: models of which a layer is no attention of covey's, trained as transformers alone computes them."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.checks.architectures import plain, plain_logprobs, save
from covey.policy.logprobs import Scoring, score_tokens
from covey.policy.models.loading import load_policy
from covey.policy.models.probe import tell
from covey.policy.plain import _exactly, plain_model, rollout_logprobs
from covey.policy.policy import Policy, inference
from covey.policy.settings import ModelConfig
from covey.types import Group, MicroBatch, Rollout, Sampling

from ...support.builders import ADVANTAGES, SGD, gradient, make, make_trainer, random_groups, relative_error, rollout_of

PATHS = {
    "mamba2": "forked",
    "zamba2": "forked",
    "llama4_text": "forked",
    "gptj": "forked",
    "jamba": "rows",
}
"""And whether trees through the cache are exact: Jamba's scan starts from zero where several tokens follow a cache."""

PRECISIONS = ("float32", "bfloat16")


def loaded(folder: Path, architecture: str, **settings: object) -> Policy:
    save(architecture, str(folder))
    return load_policy(ModelConfig(name=str(folder), **settings), seed=0)  # type: ignore[arg-type]


def groups() -> list[Group]:
    """Two texts of the first prompt agree in forty tokens, so that the tree forks twice."""
    prompt, agreed = list(range(4, 13)), [5 + 3 * place % 200 for place in range(40)]
    branches = [[*agreed, 60, 61, 62], [*agreed, 90], [7, 8, 9, 10, 11]]
    first, *others = random_groups(vocabulary=250)
    return [replace(first, rollouts=tuple(rollout_of(prompt, branch) for branch in branches)), *others]


def logprobs_of(policy: Policy, micro_batches: Sequence[MicroBatch]) -> Tensor:
    return torch.cat([score_tokens(policy, m, Scoring(Sampling(), 0)).logprob_L for m in micro_batches])


def rollouts() -> list[Rollout]:
    return [rollout for group in groups() for rollout in group.rollouts]


def assert_layouts_agree(policy: Policy, folder: Path) -> None:
    """Log-probs and gradient of every layout are those of transformers alone, loaded from the folder."""
    model = plain(str(folder))
    expected_L = torch.cat([plain_logprobs(model, rollout) for rollout in rollouts()])
    weight_L = torch.linspace(-1.0, 2.0, len(expected_L))
    (weight_L * expected_L).sum().backward()
    expected = torch.cat([p.grad.flatten() for _, p in sorted(model.named_parameters()) if p.grad is not None])
    for packing in ("shared", "packed", "padded"):
        policy.model.train()
        policy.model.zero_grad()
        found_L = logprobs_of(policy, make(groups(), packing, 150, attention=policy.attention).micro_batches)
        (weight_L * found_L).sum().backward()
        own = sorted(policy.causal_lm.named_parameters())
        found = torch.cat([p.grad.flatten() for _, p in own if p.grad is not None])
        assert float((found_L - expected_L).detach().abs().max()) < 1e-5, packing
        assert relative_error(found, expected) < 1e-5, packing


@pytest.mark.parametrize("architecture", PATHS)
def test_layouts_of_the_general_path_are_what_transformers_alone_computes(architecture: str, tmp_path: Path) -> None:
    policy = loaded(tmp_path, architecture)
    assert (policy.path, policy.attention) == ("general", PATHS[architecture])
    assert_layouts_agree(policy, tmp_path)


def test_an_update_is_the_same_padded_and_through_a_forked_cache_in_float64(tmp_path: Path) -> None:
    gradients = []
    for packing, budget in (("padded", 200), ("shared", 10_000), ("shared", 70)):
        policy = loaded(tmp_path / packing / str(budget), "llama4_text", precision="float64")
        with _exactly(torch.float64):  # its norms would compute in float32
            batch = make(groups(), packing, budget, ADVANTAGES, attention=policy.attention)
            make_trainer(policy, optimizer=SGD).step(batch, 0)
        gradients.append(gradient(policy))
    assert relative_error(gradients[1], gradients[0]) < 1e-9
    assert relative_error(gradients[2], gradients[0]) < 1e-9


def test_a_shared_prompt_is_read_once_and_the_padding_of_its_ends_counts(tmp_path: Path) -> None:
    policy, read = loaded(tmp_path, "gptj"), []
    batch = make(groups(), "shared", 120, attention=policy.attention)
    hook = policy.causal_lm.get_input_embeddings().register_forward_hook(
        lambda module, given, out: read.append(given[0].numel())
    )
    sizes = []
    with hook, inference(policy.model):
        for micro_batch in batch.micro_batches:
            read.clear()
            logprobs_of(policy, [micro_batch])
            sizes.append(sum(read))
    # 9 prompt tokens, 40 of both, 2 padded to 3; then the third, which would make it 9 + 40 + 2 * 3 + 5 = 60
    assert sizes[0] <= 120
    assert max(sizes) <= 120
    assert sum(sizes) < sum(len(rollout.input_ids) for rollout in rollouts())


def test_a_model_without_exact_trees_reads_padded_rows_where_shared_ones_are_asked_for(tmp_path: Path) -> None:
    policy = loaded(tmp_path, "jamba")
    shared = make(groups(), "shared", 150, attention=policy.attention).micro_batches
    padded = make(groups(), "padded", 150, attention=policy.attention).micro_batches
    assert [m.input_ids_BT.tolist() for m in shared] == [m.input_ids_BT.tolist() for m in padded]


def test_checkpointing_which_keeps_no_cache_reads_padded_rows(tmp_path: Path) -> None:
    policy = loaded(tmp_path, "gptj", gradient_checkpointing=True)
    assert (policy.path, policy.attention) == ("general", "rows")


@pytest.mark.parametrize("architecture", ["qwen3_5_moe_text", "qwen3_next", "llama4_text", "nemotron_h", "gptj"])
def test_adapters_on_all_linear_layers_are_proved_against_transformers_alone(architecture: str, tmp_path: Path) -> None:
    policy = loaded(tmp_path, architecture, lora_rank=4)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            parameter.normal_(0, 0.05, generator=torch.Generator().manual_seed(1)) if ".lora_B." in name else None
    with inference(policy.model):
        plain_policy = plain_model(policy)
        expected_L = torch.cat([rollout_logprobs(plain_policy, rollout, Sampling()) for rollout in rollouts()])
        found_L = logprobs_of(policy, make(groups(), attention=policy.attention).micro_batches)
    assert float((found_L - expected_L).abs().max()) < 1e-5


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize(
    ("architecture", "path"),
    [("jamba", "general"), ("mamba", "general"), ("qwen3_5_text", "fast"), ("gptj", "general")],
)
def test_half_precision_takes_the_path_and_the_layouts_of_float32(
    architecture: str, path: str, rank: int, tmp_path: Path
) -> None:
    whole, half = (loaded(tmp_path, architecture, precision=precision, lora_rank=rank) for precision in PRECISIONS)
    assert (half.path, whole.path) == (path, path)
    assert path == "fast" or half.attention == whole.attention
    assert half.caching is None or (half.caching.forks, half.caching.reads_on) == (
        whole.caching.forks,  # type: ignore[union-attr]
        whole.caching.reads_on,  # type: ignore[union-attr]
    )
    assert {weight.dtype for name, weight in half.causal_lm.named_parameters() if "lora" not in name} == {
        torch.bfloat16 if rank else torch.float32
    }, "what was widened to look is as it was"


def test_what_the_path_is_and_why_is_said_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tell.cache_clear()  # each line is said once in a process
    loaded(tmp_path, "stablelm")
    (said,) = [record.message for record in caplog.records if "general path" in record.message]
    assert said.startswith("StableLmForCausalLM: general path, ")
    assert "has its own" in said
    assert "\n" not in said


def test_a_model_that_sees_what_follows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a causal language model, CpmAntForCausalLM sees what follows"):
        loaded(tmp_path, "cpmant")


def test_attention_of_covey_s_is_not_to_be_had_on_the_general_path(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.attention=varlen needs covey's attention, GPTJForCausalLM has"):
        loaded(tmp_path, "gptj", attention="varlen")


def test_a_model_whose_layers_keep_states_can_be_copied_for_its_engine(tmp_path: Path) -> None:
    policy = loaded(tmp_path, "recurrent_gemma", lora_rank=2)
    assert set(copy.deepcopy(policy.model).state_dict()) == set(policy.model.state_dict())
