"""A saved policy that will be shared out: each rank reads its own rows, and nothing is whole on the way."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from covey.policy import sharding
from covey.policy.logprobs import Scoring
from covey.policy.models.loading import load_policy
from covey.policy.models.nano import nano_masked_tokenizer
from covey.policy.policy import Policy
from covey.policy.settings import ModelConfig
from covey.run.build import shard_policy
from covey.run.checkpoints.checkpoint import save_policy
from covey.types import Sampling

from ...support.builders import CPU, logprobs, make, masked_config, random_groups, save_random, saved_model, weights
from ...support.models.storage_bytes import StorageBytes
from ...support.processes import on_two_ranks

LAYERS = 20


def tied(folder: Path) -> ModelConfig:
    name = saved_model(folder / "model", "qwen2", tie_word_embeddings=True)
    return ModelConfig(name=name, lora_rank=2, gradient_checkpointing=True, precision="bfloat16")


def in_parts(folder: Path) -> ModelConfig:
    model = AutoModelForCausalLM.from_pretrained(saved_model(folder / "whole", "llama"))
    model.save_pretrained(folder / "whole" / "parts", max_shard_size="20KB")
    (folder / "whole" / "model.safetensors").unlink()
    for part in (folder / "whole" / "parts").glob("model*"):
        part.rename(folder / "whole" / part.name)
    assert len(list((folder / "whole").glob("*.safetensors"))) > 3
    return ModelConfig(name=str(folder / "whole"))


def with_adapters(folder: Path) -> ModelConfig:
    """Adapters that were trained, with dropout."""
    policy = load_policy(ModelConfig(name=saved_model(folder / "model", "gemma2"), lora_rank=2), seed=0)
    with torch.no_grad():
        for name, weight in policy.model.named_parameters():
            weight.normal_() if ".lora_" in name else None
    save_policy(policy, folder / "adapter")
    return ModelConfig(name=str(folder / "adapter"), lora_rank=2, lora_dropout=0.5)


def masked(folder: Path) -> ModelConfig:
    name = save_random(folder / "model", AutoModelForMaskedLM, masked_config("roberta", 300), seed=2)
    nano_masked_tokenizer().save_pretrained(name)
    return ModelConfig(name=name, kind="masked")


def shown(policy: Policy) -> tuple[Any, ...]:
    """What was found out of a policy, and what computes it."""
    model = policy.causal_lm
    generation = model.generation_config.to_dict() if model.can_generate() else None
    kinds = [type(module).__name__.removeprefix("FSDP") for module in policy.model.modules()]
    found = (policy.head_is_linear, policy.first_position, policy.attention, policy.heads, policy.model.training)
    return (*found, generation, model.config.to_dict(), model.name_or_path, kinds)


@pytest.mark.parametrize("saved", [tied, in_parts, with_adapters, masked])
def test_rows_that_ranks_read_for_themselves_are_the_policy_that_is_loaded_whole(
    saved: Callable[[Path], ModelConfig], tmp_path: Path
) -> None:
    settings = saved(tmp_path)

    def work() -> dict[str, Any]:
        whole, empty = load_policy(settings, seed=0), load_policy(settings, seed=0, on_host=True)
        own = [weight.is_meta for name, weight in empty.model.named_parameters() if ".lora_" not in name]
        policy, _ = shard_policy(empty, None, "fsdp", CPU)
        mine = dict(policy.model.named_parameters(remove_duplicate=False)) | dict(policy.model.named_buffers())
        wanted = dict(whole.model.named_parameters(remove_duplicate=False)) | dict(whole.model.named_buffers())
        alike = [
            torch.equal(sharding.whole(mine[name]), tensor)
            and (mine[name].dtype, mine[name].requires_grad) == (tensor.dtype, tensor.requires_grad)
            for name, tensor in wanted.items()
        ]
        same = shown(policy) == shown(whole)
        result = {"empty": all(own), "names": mine.keys() == wanted.keys(), "alike": all(alike), "same": same}
        if settings.kind == "causal":
            groups = random_groups(vocabulary=250)
            other, _ = shard_policy(whole, None, "fsdp")
            for each in (policy, other):  # without dropout
                each.model.eval()
            scored = [logprobs(p, make(groups).micro_batches, Scoring(Sampling(), 0)) for p in (policy, other)]
            result["scores"] = torch.equal(*scored)
        return result

    for found in on_two_ranks(work, tmp_path):
        assert all(found.values()), found


def test_no_rank_ever_holds_the_policy_whole(tmp_path: Path) -> None:
    settings = ModelConfig(name=saved_model(tmp_path / "model", "llama", num_hidden_layers=LAYERS, hidden_size=64))

    def work() -> dict[str, int]:
        with StorageBytes() as live:
            policy, _ = shard_policy(load_policy(settings, seed=0, on_host=True), None, "fsdp", CPU)
        layer = sum(weight.numel() for weight in policy.causal_lm.model.layers[0].parameters())
        return {"peak": live.peak, "layer": layer * 4, "all": sum(p.numel() for p in policy.model.parameters()) * 4}

    for found in on_two_ranks(work, tmp_path):
        embeddings = found["all"] - LAYERS * found["layer"]
        # Its half, and what a pass that looks at it gathers at a time, with the buffers that comes through
        assert found["peak"] < found["all"] / 2 + 2 * embeddings + 3 * found["layer"] < 0.8 * found["all"]


def another_form(folder: Path) -> None:
    """It is one already where transformers puts experts together."""


def one_too_many(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.extra.weight": torch.zeros(2)}, folder / "model.safetensors", {"format": "pt"})


def tied_and_saved_twice(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"] + 1
    save_file({**tensors, "lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})


def by_pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("architecture", "change"),
    [("mixtral", another_form), ("llama", one_too_many), ("qwen2", tied_and_saved_twice), ("llama", by_pickle)],
)
def test_files_that_are_not_simply_the_weights_are_left_to_transformers(
    architecture: str, change: Callable[[Path], None], tmp_path: Path
) -> None:
    is_tied = change is tied_and_saved_twice
    settings = ModelConfig(name=saved_model(tmp_path, architecture, tie_word_embeddings=is_tied))
    change(tmp_path)
    policy = load_policy(settings, seed=0, on_host=True)
    assert not any(weight.is_meta for weight in policy.model.parameters())
    expected = weights(load_policy(settings, seed=0))
    assert all(torch.equal(expected[name], weight) for name, weight in weights(policy).items())


@pytest.mark.parametrize("wrong", ["shape", "missing", "config"])
def test_what_cannot_be_loaded_whole_is_refused_in_the_same_words(wrong: str, tmp_path: Path) -> None:
    settings = ModelConfig(name=saved_model(tmp_path, "llama"))
    tensors = load_file(tmp_path / "model.safetensors")
    if wrong == "shape":
        tensors["model.norm.weight"] = torch.zeros(3)
    elif wrong == "missing":
        tensors = {}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    if wrong == "config":
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "no_such_type"}))

    def said(on_host: bool) -> str:
        try:
            load_policy(settings, seed=0, on_host=on_host)
        except Exception as error:  # whatever it is, it must be the same
            return repr(error)
        return ""

    assert said(on_host=True) == said(on_host=False)
