"""What memory a GPU will need, told from the shape of the model."""

import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from covey import settings
from covey.config import Config, ModelConfig
from covey.memory_plan import SHAPES, plan, shape_of
from covey.policy.loading import load_policy

from .builders import nano

GB80 = 80 * 10**9


def composed(*overrides: str) -> Config:
    settings.register()
    with initialize_config_dir(str(settings.CONF), version_base=None):
        return settings.to_config(compose("config", overrides=list(overrides)))


@pytest.mark.parametrize(("name", "billions"), [("Qwen2.5-0.5B", 0.49), ("Qwen2.5-7B", 7.62), ("Qwen2.5-14B", 14.77)])
def test_a_shape_has_as_many_weights_as_the_model_card_says(name: str, billions: float) -> None:
    shape = SHAPES[name]
    assert shape.linear_weights + shape.embedding_weights == pytest.approx(billions * 1e9, rel=0.01)


def test_the_weights_of_a_saved_model_are_counted(tmp_path: Path) -> None:
    policy = nano(seed=0)
    policy.model.save_pretrained(tmp_path)  # type: ignore[operator]
    shape = shape_of(ModelConfig(name=str(tmp_path)))
    assert shape is not None
    counted = shape.linear_weights + shape.embedding_weights
    assert counted == pytest.approx(sum(p.numel() for p in policy.model.parameters()), rel=0.02)


def test_adapters_are_counted_as_they_are_built() -> None:
    settings_ = ModelConfig(lora_rank=4)
    policy = load_policy(settings_, seed=0)
    built = sum(p.numel() for p in policy.model.parameters() if p.requires_grad)
    found = policy.causal_lm.config
    shape = type(SHAPES["Qwen2.5-7B"])(
        found.hidden_size, found.num_hidden_layers, 4, 4, found.intermediate_size, found.vocab_size, tied=True
    )
    assert shape.adapter_weights(4) == built


def test_the_machines_recipe_fits_eight_gpus_of_80_gb() -> None:
    found = plan(composed("recipe=machines", "model=qwen2.5-14b-instruct"), num_ranks=8)
    assert found["weights"] == pytest.approx(2 * 14.77e9 + 4 * 275e6, rel=0.01)
    assert found["gradients"] == pytest.approx(4 * 275e6, rel=0.01)
    assert found["optimizer"] == pytest.approx(2 * 275e6, rel=0.01)
    assert found["in_all"] == sum(found[name] for name in ("weights", "gradients", "optimizer")) + max(
        found["training"], found["sampling"]
    )
    assert 40e9 < found["in_all"] < 0.9 * GB80


def test_all_weights_of_it_do_not_fit_but_may_be_sharded() -> None:
    whole = ("recipe=machines", "model.lora_rank=0", "optimizer=adamw")
    assert plan(composed(*whole), num_ranks=8)["in_all"] > 2 * GB80
    assert plan(composed(*whole, "distribution.strategy=fsdp"), num_ranks=8)["in_all"] < GB80


def test_smaller_choices_need_less() -> None:
    usual = plan(composed("recipe=machines"), num_ranks=8)
    smaller = {
        "model.load_in_4bit=true": "weights",
        "model.lora_rank=8": "gradients",
        "micro_batch_tokens=4096": "training",
        "engine.cache_bytes=1073741824": "sampling",
    }
    for override, part in smaller.items():
        assert plan(composed("recipe=machines", override), num_ranks=8)[part] < 0.7 * usual[part], override
    assert plan(composed("recipe=machines", "model.gradient_checkpointing=false"), 8)["training"] > usual["training"]


def test_nothing_is_said_of_a_model_whose_shape_is_not_known(tmp_path: Path) -> None:
    assert plan(Config(), num_ranks=1) == {}
    (tmp_path / "config.json").write_text(json.dumps({"n_embd": 768}))
    assert shape_of(ModelConfig(name=str(tmp_path))) is None


def test_the_printed_configuration_ends_with_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    shown = settings.report(composed("recipe=machines", "model=qwen2.5-14b-instruct"))
    for line in ("rollouts_per_step: 512", "groups_per_rank: 1", "rollouts_per_rank: 64", "micro_batches_per_rank: 8"):
        assert f"#   {line}\n" in shown
    assert shown.count("# memory of each GPU") == 1
    assert "#   in_all: " in shown.splitlines()[-1]
