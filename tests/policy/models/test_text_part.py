"""Folders of models of text and pictures: text trains, the rest stays, and what is saved is what came."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, PreTrainedModel

from benchmarks.checks.architectures import save
from covey.policy.models.loading import load_policy
from covey.policy.models.nano import nano_tokenizer
from covey.policy.models.text_part import beside_text, hear_text
from covey.policy.policy import Policy
from covey.policy.settings import ModelConfig
from covey.run.checkpoints.checkpoint import save_policy
from covey.run.memory.model_shapes import shape_of

from ...support.builders import same, weights
from ...support.models.composite_models import PROCESSOR, TOWERS, composite_folder, composite_model

FAST = ("gemma3", "gemma4", "smolvlm", "mistral3", "qwen3_vl", "internvl")
LISTENS_TO_PARTS = (
    "{% for message in messages %}{{ message['role'] }}: {% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}. {% endfor %}"
)


def trained(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: weight for name, weight in policy.causal_lm.named_parameters() if weight.requires_grad}


def read_back(folder: Path) -> PreTrainedModel:
    model, told = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


@pytest.mark.parametrize("name", sorted(TOWERS))
def test_a_folder_of_text_and_pictures_trains_its_text_and_keeps_its_class(name: str, tmp_path: Path) -> None:
    policy = load_policy(ModelConfig(name=str(composite_folder(name, tmp_path / "given")), device="cpu"))
    kind, own = type(policy.causal_lm).__name__, trained(policy)
    assert policy.path == ("fast" if name in FAST else policy.path)
    assert kind.endswith("ForConditionalGeneration")
    assert all(".visual" not in known and "vision" not in known and "projector" not in known for known in own)
    assert any("embed_tokens" in known for known in own)
    with torch.no_grad():
        for weight in own.values():
            weight.add_(0.5)
    save_policy(policy, tmp_path / "saved")
    given, saved = read_back(tmp_path / "given"), read_back(tmp_path / "saved")
    assert type(saved).__name__ == kind
    beside = beside_text(given)
    assert len(beside) > 10
    for known, weight in saved.named_parameters():
        gap = weight.detach() - given.get_parameter(known).detach()
        assert torch.allclose(gap, torch.full_like(gap, 0.0 if known in beside else 0.5), atol=1e-6), known
    assert (tmp_path / "saved" / "preprocessor_config.json").read_text(encoding="utf-8") == PROCESSOR


def test_a_text_model_has_nothing_beside_its_text() -> None:
    policy = load_policy(ModelConfig(name="nano", device="cpu"))
    assert beside_text(policy.causal_lm) == frozenset()
    assert len(trained(policy)) == len(list(policy.causal_lm.parameters()))


@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj", "k_proj"]])
@pytest.mark.parametrize("name", ["gemma3", "llama4", "qwen3_5_moe"])
def test_adapters_are_those_of_the_text_alone(name: str, targets: list[str], tmp_path: Path) -> None:
    folder = composite_folder(name, tmp_path)
    policy = load_policy(ModelConfig(name=str(folder), lora_rank=2, lora_targets=targets, device="cpu"))
    adapted = [known for known in trained(policy) if ".lora_A." in known]
    assert adapted
    assert all("language_model" in known for known in adapted)


def test_the_text_part_of_a_composite_configuration_stays_a_text_model(tmp_path: Path) -> None:
    folder = composite_folder("qwen3_5", tmp_path)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3_5ForCausalLM"]}))
    policy = load_policy(ModelConfig(name=str(folder), device="cpu"))
    assert type(policy.causal_lm).__name__ == "Qwen3_5ForCausalLM"
    assert policy.causal_lm.num_parameters() == policy.causal_lm.num_parameters(only_trainable=True)


def test_weights_beside_the_text_are_counted_apart(tmp_path: Path) -> None:
    shape = shape_of(ModelConfig(name=str(composite_folder("smolvlm", tmp_path))))
    model = composite_model("smolvlm")
    beside = sum(model.get_parameter(name).numel() for name in beside_text(model))
    assert shape is not None
    assert (shape.weights, shape.beside) == (model.num_parameters() - beside, beside)
    assert beside == 40224
    assert all("vision" not in layer.name and "connector" not in layer.name for layer in shape.layers)


def test_a_template_that_reads_parts_alone_hears_strings() -> None:
    tokenizer, messages = nano_tokenizer(), [{"role": "user", "content": "6 * 7?"}]
    tokenizer.chat_template = LISTENS_TO_PARTS
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "user: . "
    hear_text(tokenizer)
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "user: 6 * 7?. "
    parts = [{"role": "user", "content": [{"type": "text", "text": "6 * 7?"}]}]
    assert tokenizer.apply_chat_template(parts, tokenize=False) == "user: 6 * 7?. "
    before = tokenizer.chat_template
    hear_text(tokenizer)
    assert tokenizer.chat_template == before


def test_named_templates_that_read_parts_alone_hear_strings() -> None:
    tokenizer, messages = nano_tokenizer(), [{"role": "user", "content": "6 * 7?"}]
    plain = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.chat_template = {"default": LISTENS_TO_PARTS, "plain": plain}
    hear_text(tokenizer)
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "user: 6 * 7?. "
    assert tokenizer.chat_template["plain"] == plain


def test_a_template_beside_the_tokenizer_is_read(tmp_path: Path) -> None:
    folder = composite_folder("smolvlm", tmp_path)
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": LISTENS_TO_PARTS}), encoding="utf-8")
    policy = load_policy(ModelConfig(name=str(folder), device="cpu"))
    messages = [{"role": "user", "content": "6 * 7?"}]
    assert policy.tokenizer.apply_chat_template(messages, tokenize=False) == "user: 6 * 7?. "


@pytest.mark.parametrize("name", ["emu3", "mllama"])
def test_a_text_part_that_was_saved_alone_is_loaded_again(name: str, tmp_path: Path) -> None:
    save(name, str(tmp_path / "whole"))
    policy = load_policy(ModelConfig(name=str(tmp_path / "whole")), seed=0)
    save_policy(policy, tmp_path / "saved")
    again = load_policy(ModelConfig(name=str(tmp_path / "saved")), seed=0)
    assert type(again.causal_lm) is type(policy.causal_lm)
    assert same(weights(again), weights(policy))
