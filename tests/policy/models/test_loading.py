"""From settings to a policy: weights, precision, quantisation; and what is refused in one line."""

import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from covey.algorithm.settings import AlgorithmConfig
from covey.policy.models import loading
from covey.policy.models.loading import choose_device, load_policy, load_tokenizer
from covey.policy.models.nano import ARCHITECTURES, nano_tokenizer
from covey.policy.policy import Policy, inference, is_adapted
from covey.policy.settings import ModelConfig
from covey.run.checkpoints.checkpoint import save_policy
from covey.run.memory.model_shapes import shape_of
from covey.trainer.settings import OptimizerConfig
from covey.types import RunStopped
from covey_tasks.scorer import load_scorer

from ...support.builders import (
    ADVANTAGES,
    SGD,
    SHAPE,
    byte_batch,
    gradient,
    make,
    make_trainer,
    nano,
    normal,
    probe_logits,
    random_groups,
    relative_error,
    same,
    saved_model,
    weights,
)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_nano_policy_is_built_for_every_architecture_without_touching_the_random_state(architecture: str) -> None:
    state = torch.random.get_rng_state()
    policy = nano(nano_architecture=architecture, lora_rank=2)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert policy.causal_lm.config.model_type == architecture
    assert policy.head_is_linear
    assert policy.max_length == 4096
    assert policy.stop_ids == {policy.tokenizer.eos_token_id}


def test_the_stop_tokens_are_those_of_the_generation_config_and_of_the_tokenizer() -> None:
    policy = nano()
    own = policy.tokenizer.eos_token_id
    for given, expected in (([7, 9], {7, 9, own}), (7, {7, own}), (None, {own})):
        policy.causal_lm.generation_config.eos_token_id = given
        assert policy.stop_ids == expected


def test_a_nano_shape_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="nano_architecture must be one of qwen2, qwen3, llama, mistral, got gpt5"):
        nano(nano_architecture="gpt5")
    with pytest.raises(ValueError, match="nano_hidden_size must be a multiple of 2 x nano_num_heads, got 33"):
        nano(nano_hidden_size=33)


def test_a_saved_directory_is_loaded_by_its_path(tmp_path: Path) -> None:
    policy = load_policy(Path(saved_model(tmp_path, "llama")))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        expected = plain(input_ids=torch.arange(1, 9)[None]).logits[0]
    assert float((probe_logits(policy) - expected).abs().max()) < 1e-5
    assert {p.dtype for p in policy.model.parameters()} == {torch.float32}
    assert policy.tokenizer.pad_token_id is not None


def test_weights_saved_in_bfloat16_are_trained_in_float32(tmp_path: Path) -> None:
    name = saved_model(tmp_path, "llama")
    AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16).save_pretrained(name)
    policy = load_policy(ModelConfig(name=name, precision="bfloat16"), seed=0)
    assert {p.dtype for p in policy.model.parameters()} == {torch.float32}


def test_a_path_that_is_not_there_is_not_asked_of_the_hub() -> None:
    with pytest.raises(ValueError, match=r"^model\.name=/no/such/directory: there is no such folder$"):
        load_policy(ModelConfig(name="/no/such/directory"), seed=0)


@pytest.mark.parametrize("name", ["nobody/nothing-at-all"])
def test_an_unknown_name_is_one_line_that_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=f"model.name={name} is no directory or reachable hub model") as caught:
        load_policy(ModelConfig(name=name), seed=0)
    assert "\n" not in str(caught.value)


def test_a_directory_without_a_model_is_one_line_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=f"model.name={tmp_path} is a folder without a model: it has no config.json"
    ) as caught:
        load_policy(ModelConfig(name=str(tmp_path)), seed=0)
    assert "\n" not in str(caught.value)


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^model\.device must be auto, cpu, cuda or cuda:N, got gpu$"):
        choose_device("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"^model\.device=cuda needs a CUDA device and there is none"):
            choose_device("cuda")
        assert choose_device("auto") == torch.device("cpu")


def test_a_policy_that_is_not_trained_has_neither_adapters_nor_gradients() -> None:
    policy = load_policy(ModelConfig(nano_hidden_size=32, nano_num_heads=2, lora_rank=4), seed=0, trainable=False)
    assert not is_adapted(policy.model)
    assert not any(p.requires_grad for p in policy.model.parameters())


@pytest.mark.parametrize("lora_rank", [0, 4])
@pytest.mark.parametrize(("precision", "tolerance"), [("bfloat16", 0.05), ("float16", 0.01)])
def test_training_steps_in_half_precision_stay_near_float32(precision: str, tolerance: float, lora_rank: int) -> None:
    def step(chosen: str) -> tuple[dict[str, float], Tensor]:
        policy = nano(precision=chosen, lora_rank=lora_rank)
        trainer = make_trainer(policy, AlgorithmConfig(), SGD)
        metrics = trainer.step(byte_batch(), 0)
        while metrics["skipped"]:  # float16 looks for its loss scale
            metrics = trainer.step(byte_batch(), 0)
        return metrics, gradient(policy)

    exact, expected = step("float32")
    metrics, got = step(precision)
    assert metrics["entropy"] == pytest.approx(exact["entropy"], rel=tolerance)
    assert 0 < relative_error(got, expected) < tolerance


@pytest.mark.long
def test_one_loss_scale_lives_through_the_run_and_falls_when_float16_overflows() -> None:
    policy = nano(precision="float16")
    trainer = make_trainer(policy, AlgorithmConfig(), OptimizerConfig(lr=1e-3, max_nonfinite_steps=2))
    for step in range(3):
        assert trainer.step(byte_batch(), step)["skipped"] == 0
    scaler = trainer.state_dict()["scaler"]
    assert (scaler["scale"], scaler["_growth_tracker"]) == (65536.0, 3)
    huge = make(random_groups(vocabulary=250), "shared", 20, [[4000.0 * a for a in row] for row in ADVANTAGES])
    before = weights(policy)
    seen = [trainer.step(huge, step)["skipped"] for step in range(3, 7)]
    assert seen[0] == 1
    assert trainer.state_dict()["scaler"]["scale"] <= 65536.0 / 2 ** sum(seen)
    assert sum(seen) > 2 or not same(weights(policy), before)


@pytest.mark.long
def test_a_searching_loss_scale_continues_and_a_lasting_overflow_stops() -> None:
    trainer = make_trainer(nano(precision="float16"), AlgorithmConfig(), OptimizerConfig(max_nonfinite_steps=2))
    hopeless = make(random_groups(vocabulary=250), "shared", 20, [[1e9 * a for a in row] for row in ADVANTAGES])
    for step in range(16):  # from 2^16 down to 1
        assert trainer.step(hopeless, step)["skipped"] == 1
    assert trainer.state_dict()["nonfinite_in_a_row"] == 0
    trainer.step(hopeless, 16)
    with pytest.raises(RunStopped, match="not finite 2 times in a row"):
        trainer.step(hopeless, 17)


@pytest.mark.long
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_gradient_checkpointing_gives_the_same_gradient(lora_rank: int) -> None:
    def step(checkpointing: bool) -> tuple[Tensor, bool]:
        policy = nano(precision="float64", lora_rank=lora_rank, gradient_checkpointing=checkpointing)
        make_trainer(policy, AlgorithmConfig(kl_coef=0.0), SGD).step(byte_batch(), 0)
        return gradient(policy), policy.causal_lm.model.layers[0].gradient_checkpointing

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        (expected, off), (got, on) = step(False), step(True)
    assert (off, on) == (False, True)
    assert relative_error(got, expected) < 1e-12


def _dequantised(policy: Policy, name: str) -> Policy:
    """The same policy, adapters included, over plain layers that hold what the 4-bit layers stand for."""
    from bitsandbytes.functional import dequantize_4bit

    plain = load_policy(ModelConfig(name=name, lora_rank=4), seed=0)
    quantised = dict(policy.model.named_parameters())
    with torch.no_grad():
        for key, weight in plain.model.named_parameters():
            held = quantised[key]
            is_packed = type(held).__name__ == "Params4bit"
            weight.copy_(dequantize_4bit(held.data, held.quant_state).view_as(weight) if is_packed else held)
    return plain


@pytest.mark.parametrize("precision", ["bfloat16", "float16", "float64"])
def test_positions_are_turned_by_the_angles_of_transformers_in_every_precision(precision: str) -> None:
    settings = ModelConfig(precision=precision, lora_rank=2)
    buffers = dict(load_policy(settings, seed=0).causal_lm.named_buffers())
    (frequencies,) = (buffer for name, buffer in buffers.items() if name.endswith("rotary_emb.inv_freq"))
    exact = [10_000 ** (-place / len(frequencies)) for place in range(len(frequencies))]
    assert frequencies.dtype == torch.float32
    assert frequencies.tolist() == pytest.approx(exact, rel=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_the_gradient_over_4_bit_weights_is_that_of_the_dequantised_weights(architecture: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    name = saved_model(tmp_path, architecture, hidden_size=64, intermediate_size=112, num_hidden_layers=3)
    policy = load_policy(ModelConfig(name=name, load_in_4bit=True, lora_rank=4), seed=0)
    with torch.no_grad():
        for key, weight in policy.model.named_parameters():
            if "lora_B" in key:
                weight.copy_(0.05 * normal(*weight.shape))
    with inference(policy.model):  # bitsandbytes may pack weights in a pass without gradient
        sampled = probe_logits(policy)
    plain = _dequantised(policy, name)
    assert relative_error(sampled, probe_logits(plain)) < 1e-5
    for each in (policy, plain):
        make_trainer(each, AlgorithmConfig(), SGD).step(byte_batch(), 0)
    assert relative_error(gradient(policy), gradient(plain)) < 1e-5


def test_the_nano_policy_is_quantised_at_its_own_width(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    nano_folder = str(tmp_path / "policy")
    plain = load_policy(ModelConfig(nano_num_layers=1), seed=0)  # the feed-forward part is 336 wide
    save_policy(plain, Path(nano_folder))
    policy = load_policy(ModelConfig(name=nano_folder, load_in_4bit=True, lora_rank=2), seed=0)
    assert relative_error(probe_logits(policy), probe_logits(plain)) < 0.3
    assert make_trainer(policy).step(byte_batch(), 0)["grad_norm"] > 0


def test_weights_that_were_never_saved_are_not_quantised() -> None:
    with pytest.raises(ValueError, match=r"^model.load_in_4bit=true needs saved weights, got model.name=nano$"):
        load_policy(ModelConfig(name="nano", load_in_4bit=True, lora_rank=4), seed=0)


@pytest.mark.long
def test_weights_in_4_bits_are_trained_through_adapters(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    name = saved_model(tmp_path, "llama", hidden_size=64, head_dim=16)
    policy = load_policy(ModelConfig(name=name, load_in_4bit=True, lora_rank=4), seed=0)
    quantised = sum(p.numel() for p in policy.model.parameters() if type(p).__name__ == "Params4bit")
    full = load_policy(ModelConfig(name=name), seed=0)
    assert quantised * 2 == sum(p.numel() for n, p in full.model.named_parameters() if "_proj." in n)
    before = weights(policy)
    trainer = make_trainer(policy, AlgorithmConfig(), OptimizerConfig(name="adamw8bit", lr=1e-2))
    for step in range(2):
        metrics = trainer.step(byte_batch(), step)
    moved = {key for key, tensor in weights(policy).items() if not torch.equal(tensor, before[key])}
    assert moved == {key for key in before if "lora_" in key}
    assert metrics["skipped"] == 0
    assert metrics["ratio"] == 1.0


@pytest.mark.long
def test_8_bit_adamw_trains_the_policy_as_adamw_does() -> None:
    pytest.importorskip("bitsandbytes")

    def losses(name: str) -> list[float]:
        trainer = make_trainer(
            nano(nano_hidden_size=64), AlgorithmConfig(loss="nll"), OptimizerConfig(name=name, lr=1e-2)
        )
        return [trainer.step(byte_batch(), step)["loss"] for step in range(4)]

    exact, rounded = losses("adamw"), losses("adamw8bit")
    assert exact != rounded
    assert rounded == pytest.approx(exact, rel=0.02)
    assert rounded[-1] < 0.8 * rounded[0]


def test_4_bits_without_bitsandbytes_names_the_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = saved_model(tmp_path, "llama")
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    with pytest.raises(ValueError, match=r"load_in_4bit=true needs bitsandbytes: pip install 'covey\[quantization\]'"):
        load_policy(ModelConfig(name=name, load_in_4bit=True, lora_rank=4), seed=0)


def test_loading_is_silent_about_unused_kernels() -> None:
    nano()
    assert not logging.getLogger("bitsandbytes.backends.cpu.ops").isEnabledFor(logging.WARNING)


def test_code_beside_the_weights_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = nano()
    save_policy(policy, tmp_path)
    (tmp_path / "own.py").write_text("from pathlib import Path\n\nPath('PWNED').touch()\n\nclass Own:\n    pass\n")
    own = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own", "AutoTokenizer": ["own.Own", None]}
    changed = {"auto_map": own, "model_type": "own", "tokenizer_class": "Own"}
    for name in ("config.json", "tokenizer_config.json"):
        content = json.loads((tmp_path / name).read_text())
        (tmp_path / name).write_text(json.dumps(content | changed))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.input", lambda *asked: "y")
    with pytest.raises(ValueError, match="it needs code of its own, which runs by your word alone"):
        load_policy(ModelConfig(name=str(tmp_path)), seed=0)
    with pytest.raises(ValueError, match="has no tokenizer"):
        load_tokenizer(ModelConfig(name=str(tmp_path)))
    with pytest.raises(ValueError, match="is no directory or reachable hub reward model"):
        load_scorer(str(tmp_path), None, "float32", "cpu")
    assert not Path("PWNED").exists()


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])  # transformers makes Qwen2's of special tokens alone
def test_a_folder_without_a_tokenizer_is_refused(architecture: str, tmp_path: Path) -> None:
    nano(nano_architecture=architecture).causal_lm.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has no tokenizer.*tokenizer\.save_pretrained\(FOLDER\) writes one"):
        load_policy(ModelConfig(name=str(tmp_path)), seed=0)


def test_code_of_a_type_that_transformers_knows_does_not_run_and_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_policy(nano(), tmp_path)
    with pytest.raises(ValueError, match=r"model\.code=folder runs code beside the weights, .* names none"):
        load_policy(ModelConfig(name=str(tmp_path), code="folder"), seed=0)
    (tmp_path / "own.py").write_text("raise AssertionError('it was run')\n")
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"auto_map": {"AutoModelForCausalLM": "own.Own"}}))
    assert type(load_policy(ModelConfig(name=str(tmp_path)), seed=0).causal_lm).__name__ == "Qwen2ForCausalLM"
    (said,) = [record.message for record in caplog.records if "code of its own" in record.message]
    assert said.endswith("does not run: transformers knows Qwen2ForCausalLM; model.code=folder runs it")


def refusal(load: Callable[[], object]) -> str:
    """Return why it is refused, nothing where it is not."""
    try:
        load()
    except ValueError as error:
        return str(error)
    return ""


ODD = ("[]", "null", "3", '"x"', "[" * 100_000, '{"model_type": 3}')


@pytest.mark.parametrize("text", ODD)
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "adapter_config.json"])
def test_missing_model_files_are_one_line(tmp_path: Path, name: str, text: str) -> None:
    save_policy(nano(), tmp_path)
    (tmp_path / name).write_text(text)
    settings = ModelConfig(name=str(tmp_path))
    said = refusal(lambda: load_policy(settings, seed=0))
    assert said.startswith(("model.name=", str(tmp_path))) or (text, name) == (ODD[-1], "tokenizer_config.json")
    assert "\n" not in said
    assert refusal(lambda: shape_of(settings)) == ""


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": 0},
        {"tie_word_embeddings": []},
        {"layer_types": ["other"]},
        {"pad_token_id": 10**30},
        {"rope_scaling": {"rope_type": "own"}},
        {"hidden_size": "x"},
    ],
)
def test_a_configuration_that_cannot_be_is_one_line(tmp_path: Path, change: dict[str, Any]) -> None:
    save_policy(nano(), tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | change))
    with pytest.raises(ValueError, match="is no directory of a causal language model") as found:
        load_policy(ModelConfig(name=str(tmp_path)), seed=0)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    "change",
    [
        {"peft_type": "PROMPT_TUNING"},
        {"megatron_config": {"x": 1}, "megatron_core": "own"},
        {"peft_type": None},
        {"r": []},
        {"lora_bias": True},
        {"use_dora": True},
        {"modules_to_save": ["lm_head"]},
    ],
)
def test_adapters_that_are_not_plain_lora_are_refused_in_one_line(change: dict[str, Any], tmp_path: Path) -> None:
    save_policy(nano(), tmp_path / "base")
    policy = load_policy(ModelConfig(name=str(tmp_path / "base"), lora_rank=2), seed=0)
    save_policy(policy, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=r"adapters|cannot be read"):
        load_policy(ModelConfig(name=str(tmp_path / "adapter"), lora_rank=2), seed=0)


def test_float16_on_a_cpu_falls_back_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_model(tmp_path, "llama")
    for has_half, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda has_half=has_half: has_half)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda has_half=has_half: has_half)
        loading.tell.cache_clear()
        caplog.clear()
        policies = [load_policy(ModelConfig(name=str(tmp_path), precision="float16"), seed=0) for _ in range(2)]
        assert {policy.precision for policy in policies} == {expected}
        name = str(expected).removeprefix("torch.")
        assert [line for line in caplog.messages if "float16 is computed" in line] == [
            f"model.precision=float16 is computed in {name}: this device is a CPU, which is slow in float16"
        ]


# ------------------------------------------------------------------------------------------------ what is not there


def _without(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> str:
    """A saved model whose file holds what `change` leaves of its weights."""
    name = saved_model(folder, "llama", tie_word_embeddings=True)
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})
    return name


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda found: {k: v for k, v in found.items() if "1.mlp.up_proj" not in k},
            "1 are missing (model.layers.1.mlp.up_proj.weight)",
        ),
        (lambda found: {k: v for k, v in found.items() if "norm" not in k}, "5 are missing"),
        (lambda found: {}, "are missing (lm_head.weight, model.embed_tokens.weight"),
        (
            lambda found: {f"other.{k}": v for k, v in found.items()},
            "are missing (lm_head.weight, model.embed_tokens.weight",
        ),
    ],
    ids=["one matrix", "all norms", "nothing", "other names"],
)
@pytest.mark.parametrize("on_host", [False, True])
def test_weights_that_the_files_lack_are_never_drawn(tmp_path: Path, change: Any, said: str, on_host: bool) -> None:
    with pytest.raises(ValueError, match="must hold all 21 weights of LlamaForCausalLM") as caught:
        load_policy(_without(tmp_path, change), on_host=on_host)
    assert said in str(caught.value)


def test_a_weight_of_another_shape_and_a_file_that_was_cut_are_one_line(tmp_path: Path) -> None:
    name = _without(tmp_path, lambda found: {k: v[:1] if "0.mlp.up_proj" in k else v for k, v in found.items()})
    with pytest.raises(ValueError, match=r"1 are missing or of another shape \(model.layers.0.mlp.up_proj.weight\)"):
        load_policy(name)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"is no directory of a causal language model \(.*not fully covered"):
        load_policy(name)


def test_a_tied_head_is_not_missing(tmp_path: Path) -> None:
    assert load_policy(_without(tmp_path, lambda found: found)).causal_lm.config.tie_word_embeddings


def test_an_empty_pickle_and_a_missing_part_are_refused(tmp_path: Path) -> None:
    name = saved_model(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="must hold all 21 weights of LlamaForCausalLM, 21 are missing"):
        load_policy(name)
    (tmp_path / "pytorch_model.bin").unlink()
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name)).save_pretrained(name, max_shard_size="20KB")
    next(tmp_path.glob("model-00002-*")).unlink()
    with pytest.raises(ValueError, match="model-00002-"):
        load_policy(name)


def test_adapters_that_the_files_lack_are_refused(tmp_path: Path) -> None:
    based = ModelConfig(name=saved_model(tmp_path / "base", "llama"), lora_rank=2)
    save_policy(load_policy(based), tmp_path / "adapters")
    file = tmp_path / "adapters" / "adapter_model.safetensors"
    kept = {k: v for k, v in load_file(file).items() if "q_proj" not in k}
    save_file(kept, file, {"format": "pt"})
    with pytest.raises(ValueError, match="must hold all adapters that adapter_config"):
        load_policy(ModelConfig(name=str(tmp_path / "adapters"), lora_rank=2))


@pytest.mark.parametrize("architecture", ["bert", "roberta", "electra", "modernbert", "distilbert"])
def test_an_encoder_is_no_causal_policy(tmp_path: Path, architecture: str) -> None:
    config = AutoConfig.for_model(architecture, **{**SHAPE, "vocab_size": 260})
    model = AutoModelForMaskedLM.from_config(config)
    model.save_pretrained(tmp_path)
    nano_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="must be a causal language model, got one that sees what follows") as caught:
        load_policy(tmp_path)
    assert f"({type(model).__name__}); model.kind=masked" in str(caught.value)


@pytest.mark.parametrize("head", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
def test_a_model_that_judges_text_is_no_causal_policy(tmp_path: Path, head: Any) -> None:
    config = AutoConfig.for_model("qwen2", **{**SHAPE, "vocab_size": 260, "tie_word_embeddings": True})
    head.from_config(config).save_pretrained(tmp_path)
    nano_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="got one that judges text"):
        load_policy(tmp_path)


def test_a_model_of_an_unknown_type_is_said_to_be_unknown(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mine", "architectures": ["MyLM"]}')
    with pytest.raises(ValueError, match=r"\(transformers [\d.]+ knows no model of type mine\)"):
        load_policy(tmp_path)


def test_tokens_added_without_rows_are_refused(tmp_path: Path) -> None:
    name = saved_model(tmp_path, "llama", vocab_size=260)
    tokenizer = AutoTokenizer.from_pretrained(name)
    tokenizer.add_tokens(["<a>", "<b>"])
    tokenizer.save_pretrained(name)
    with pytest.raises(ValueError, match=r"got 262 tokens and 260 rows \(none for '<a>'\): model.resize_token_embed"):
        load_policy(name)
