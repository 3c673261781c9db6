"""GGUF files: written, they compute what the folder computes; read, they make the folder again."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import load_file
from tokenizers import Regex, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from covey.cli.main import main
from covey.policy.models.loading import load_policy
from covey.policy.models.text import TEXT
from covey_report.export import command
from covey_report.export.from_gguf import read_gguf
from covey_report.export.to_gguf import QWEN2, _token_type, write_gguf

from ...support.models.saved_models import gpt2, llama2, llama3, qwen, wordpiece

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": None}
HARD = "12 + 17 = 29, see.  x  = 3 + 1234;  don't 12.5\n\n  café\t世界 I'LL<|im_end|><think> see"
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def save(folder: Path, kind: str, tokenizer: PreTrainedTokenizerBase, **changes: Any) -> Path:
    """Save a model of large random weights, so that no layer is without a say."""
    config = AutoConfig.for_model(kind, vocab_size=len(tokenizer) + 3, **{**SHAPE, "bos_token_id": None, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for weight in model.parameters():
            weight.data.normal_(0.5, 0.3) if weight.dim() == 1 else weight.data.normal_(0, 0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def learned(folder: Path) -> Path:
    """Teach a saved model a text, as no conversion lets chance pass."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])[:, : model.config.max_position_embeddings]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(20):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder


def logits(folder: Path, **how: Any) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how).eval()
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.arange(40)[None] * 7 % 250).logits
    return found


def fields(file: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in GGUFReader(file).fields.items()}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"tie_word_embeddings": False}),
        ("mistral", {"sliding_window": None, "head_dim": 32}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 128}),
        ("gemma3_text", {"sliding_window": 8, "num_hidden_layers": 7}),
    ],
)
def test_transformers_computes_the_same_logits_from_a_gguf_file(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    folder = save(tmp_path / "model", kind, qwen(), **changes)
    (tmp_path / "alone").mkdir()
    write_gguf(folder, "f32").rename(tmp_path / "alone" / "model.gguf")
    torch.testing.assert_close(logits(tmp_path / "alone", gguf_file="model.gguf"), logits(folder), atol=2e-5, rtol=1e-5)
    assert logits(folder).std() > 0.1


@pytest.mark.parametrize("make", [qwen, llama3, gpt2, llama2])
def test_a_gguf_file_holds_the_whole_tokenizer(make: Callable[[], PreTrainedTokenizerBase], tmp_path: Path) -> None:
    folder = save(tmp_path / "model", "llama", make())
    write_gguf(folder, "f16")
    (folder / "model-f16.gguf").rename(tmp_path / "model-f16.gguf")  # else the files beside it would be read
    own = AutoTokenizer.from_pretrained(folder)
    read = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model-f16.gguf")
    text = "12 + 3 = 15, see.  <|im_end|>"
    assert read(text, add_special_tokens=False)["input_ids"] == own(text, add_special_tokens=False)["input_ids"]
    said = fields(tmp_path / "model-f16.gguf")
    assert said.get("tokenizer.chat_template") == own.chat_template
    assert said["tokenizer.ggml.eos_token_id"] == own.eos_token_id
    assert said["tokenizer.ggml.add_bos_token"] == (make in (llama3, llama2))
    assert said["tokenizer.ggml.tokens"][-3:] == [f"[PAD{len(own) + n}]" for n in range(3)]
    assert said["tokenizer.ggml.token_type"][-3:] == [5, 5, 5]
    if make is llama2:
        scores = dict(zip(said["tokenizer.ggml.tokens"], said["tokenizer.ggml.scores"], strict=True))
        assert (scores["▁▁"], scores["a"]) == (0, -1e6), "the first merge, and none"
    if make is qwen:
        kinds = dict(zip(said["tokenizer.ggml.tokens"], said["tokenizer.ggml.token_type"], strict=True))
        assert [kinds[token] for token in ("a", "<|im_end|>", "<think>")] == [1, 3, 4]


@pytest.mark.parametrize(
    ("text", "added", "is_unknown", "kind"),
    [
        (None, None, False, 5),
        ("a", None, False, 1),
        ("<0x0A>", None, False, 6),
        ("<unk>", {"special": True}, True, 2),
        ("</s>", {"special": True}, False, 3),
        ("  ", {"special": False}, False, 4),
    ],
)
def test_each_kind_of_token_has_its_number(
    text: str | None, added: dict[str, bool] | None, is_unknown: bool, kind: int
) -> None:
    assert _token_type(text, added, is_unknown) == kind


def test_a_second_stop_token_ends_turns_in_a_gguf_file(tmp_path: Path) -> None:
    folder, tokenizer = tmp_path / "model", llama3()
    ends = [tokenizer.convert_tokens_to_ids(token) for token in ("<|eot_id|>", "<|end_of_text|>")]
    save(folder, "llama", tokenizer, eos_token_id=ends)
    said = fields(write_gguf(folder, "f32"))
    assert (said["tokenizer.ggml.eos_token_id"], said["tokenizer.ggml.eot_token_id"]) == tuple(ends)


def test_rows_are_quantised_and_vectors_stay_whole(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", "qwen2", qwen(), intermediate_size=72)
    tensors = {tensor.name: tensor for tensor in GGUFReader(write_gguf(folder, "q8_0")).tensors}
    assert tensors["blk.0.attn_norm.weight"].tensor_type.name == "F32"
    assert tensors["blk.0.ffn_down.weight"].tensor_type.name == "F16", "72 is no multiple of 32"
    up = tensors["blk.1.ffn_up.weight"]
    assert up.tensor_type.name == "Q8_0"
    wanted = load_file(folder / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
    found = torch.from_numpy(dequantize(up.data, up.tensor_type))
    steps = wanted.unflatten(1, (-1, 32)).abs().amax(dim=-1, keepdim=True) / 127
    assert float(((found - wanted).unflatten(1, (-1, 32)).abs() / steps).max()) < 0.55, (
        "half a step, and the scale in 16 bits"
    )
    assert float((found - wanted).abs().max()) > 1e-4


def test_frequencies_of_llama_3_are_divided_as_its_rope_says(tmp_path: Path) -> None:
    rope = {**LLAMA3, "original_max_position_embeddings": 64}
    file = write_gguf(save(tmp_path / "model", "llama", qwen(), rope_parameters=rope), "f32")
    (found,) = [tensor.data for tensor in GGUFReader(file).tensors if tensor.name == "rope_freqs.weight"]
    assert found.shape == (8,)
    assert found[0] == pytest.approx(1.0)
    assert found[-1] == pytest.approx(8.0)


def test_the_rope_of_llama_3_comes_back_from_a_gguf_file(tmp_path: Path) -> None:
    rope = {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192}
    folder = learned(save(tmp_path / "model", "llama", qwen(), rope_parameters=rope, max_position_embeddings=512))
    read_gguf(write_gguf(folder, "f32"), tmp_path / "again", "float32")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["rope_parameters"] == rope
    torch.testing.assert_close(logits(tmp_path / "again"), logits(folder))
    save(tmp_path / "model", "llama", qwen(), rope_parameters={**rope, "original_max_position_embeddings": 64})
    with pytest.raises(ValueError, match="its rotary factors are not those of a Llama 3"):
        read_gguf(write_gguf(folder, "f32"), tmp_path / "other", "float32")


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("llama", {"attention_bias": True}, r"does not read its biases, such as blk.0.attn_\w+.bias"),
        (
            "qwen2",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
            "rotary scaling, linear",
        ),
    ],
)
def test_parts_of_a_gguf_file_that_transformers_drops_are_refused(
    kind: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    file = write_gguf(save(tmp_path / "model", kind, qwen(), **changes), "f32")
    with pytest.raises(ValueError, match=said):
        read_gguf(file, tmp_path / "made", "float32")


def split_by(*parts: pre_tokenizers.PreTokenizer, words: bool) -> PreTrainedTokenizerBase:
    tokenizer, level = qwen(), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*parts, level])
    return tokenizer


SPLITS = {
    "gpt-2": lambda: split_by(words=True),
    "smollm": lambda: split_by(pre_tokenizers.Digits(individual_digits=True), words=True),
    "qwen2": lambda: split_by(pre_tokenizers.Split(Regex(QWEN2), "isolated"), words=False),
    "llama-bpe": lambda: split_by(
        pre_tokenizers.Split(Regex(QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")), "isolated"), words=False
    ),
}


@pytest.mark.parametrize("name", SPLITS)
def test_a_folder_made_of_a_gguf_file_reads_and_writes_as_its_model(name: str, tmp_path: Path) -> None:
    folder = learned(save(tmp_path / "model", "llama", SPLITS[name](), max_position_embeddings=512))
    file = write_gguf(folder, "f32")
    assert fields(file)["tokenizer.ggml.pre"] == name
    assert main(["export", "--from-gguf", str(file), "--to", str(tmp_path / "again")]) == 0
    torch.testing.assert_close(logits(tmp_path / "again"), logits(folder))
    own, read = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(tmp_path / "again")
    assert read(HARD)["input_ids"] == own(HARD)["input_ids"]
    assert (read.eos_token, read.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert read.chat_template == own.chat_template
    generation = json.loads((tmp_path / "again" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == own.eos_token_id
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert "quantization_config" not in config
    assert load_policy(str(tmp_path / "again")).stop_ids == {own.eos_token_id}


def test_embeddings_are_tied_where_a_gguf_file_holds_them_twice(tmp_path: Path) -> None:
    folder = learned(save(tmp_path / "model", "llama", qwen(), tie_word_embeddings=False, max_position_embeddings=512))
    read_gguf(write_gguf(folder, "f32"), tmp_path / "untied", "float32")
    assert json.loads((tmp_path / "untied" / "config.json").read_text())["tie_word_embeddings"] is False
    model = AutoModelForCausalLM.from_pretrained(folder)
    rounded = model.lm_head.weight.data + 0.01 * torch.randn_like(model.lm_head.weight)
    model.model.embed_tokens.weight.data.copy_(rounded)
    model.save_pretrained(folder)
    read_gguf(write_gguf(learned(folder), "f32"), tmp_path / "tied", "bfloat16")
    assert json.loads((tmp_path / "tied" / "config.json").read_text())["tie_word_embeddings"] is True
    saved = load_file(tmp_path / "tied" / "model.safetensors")
    wanted = load_file(folder / "model.safetensors")["lm_head.weight"].bfloat16()
    assert torch.equal(saved["model.embed_tokens.weight"], wanted), "the matrix with more bits"


def test_a_gguf_file_of_noise_is_refused(tmp_path: Path) -> None:
    file = write_gguf(save(tmp_path / "model", "qwen2", qwen()), "f32")
    with pytest.raises(ValueError, match="reads plain text no better than chance"):
        read_gguf(file, tmp_path / "made", "float32")
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"model-f32.gguf cannot be converted \("):
        read_gguf(file, tmp_path / "made", "float32")
    assert not (tmp_path / "made").exists()


def test_unknown_ways_to_split_texts_are_told(tmp_path: Path) -> None:
    file = write_gguf(learned(save(tmp_path / "model", "llama", gpt2(), max_position_embeddings=512)), "f32")
    file.write_bytes(file.read_bytes().replace(b"gpt-2", b"zzz-9"))
    said = read_gguf(file, tmp_path / "made", "float32")
    assert "it has no chat template; texts are split as GPT-2 does, the file says zzz-9" in said


def other_split() -> PreTrainedTokenizerBase:
    return split_by(pre_tokenizers.Split(Regex("[aeiou]"), "isolated"), words=False)


@pytest.mark.parametrize(
    ("kind", "make", "changes", "said"),
    [
        ("gpt2", gpt2, {}, "llama, mistral, qwen2, qwen3, gemma3_text, got gpt2; llama.cpp converts more"),
        ("mistral", qwen, {"sliding_window": 32}, "sliding_window=32, which a file of llama has no place for"),
        ("qwen2", qwen, {"hidden_act": "relu"}, "hidden_act='relu', which a file of qwen2 has no place for"),
        ("qwen3", qwen, {"attention_bias": True}, "attention_bias=True, which a file of qwen3 has no place for"),
        ("gemma3_text", qwen, {"head_dim": 16}, "head_dim=16, which a file of gemma3 has no place for"),
        (
            "llama",
            qwen,
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
            "rope_type='yarn', which",
        ),
        ("llama", wordpiece, {}, "writes tokenizers of byte pairs (BPE), got WordPiece"),
        ("llama", other_split, {}, "knows no name for the tokenizer's way to split texts ([aeiou])"),
    ],
)
def test_a_model_that_a_gguf_file_has_no_place_for_is_refused_by_name(
    kind: str, make: Callable[[], PreTrainedTokenizerBase], changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder = save(tmp_path / "model", kind, make(), **changes)
    with pytest.raises(ValueError) as refused:
        write_gguf(folder, "f32")
    assert said in str(refused.value)
    assert not list(folder.glob("*.gguf"))


def test_the_missing_package_for_gguf_files_is_named_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    for words in (["no such run", "--gguf"], ["--from-gguf", "no such file"]):
        assert main(["export", *words, "--to", str(tmp_path / "new")]) != 0
        assert "pip install 'covey[gguf]'" in capsys.readouterr().err


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.99])
def test_a_file_that_ends_early_is_said_to(share: float, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    whole = write_gguf(save(tmp_path / "base", "qwen2", qwen()), "f16").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: int(share * len(whole))])
    assert main(["export", "--from-gguf", str(tmp_path / "cut.gguf"), "--to", str(tmp_path / "new")]) != 0
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert f"(it ends early, after {int(share * len(whole)):,} bytes: fetch it again)" in said


def test_nothing_of_transformers_is_printed_while_a_file_is_read(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = write_gguf(learned(save(tmp_path / "base", "qwen2", qwen())), "f16")
    capfd.readouterr()
    words = ["export", "--from-gguf", str(file), "--to", str(tmp_path / "new"), "--dtype", "bfloat16"]
    assert main(words) == 0
    assert capfd.readouterr().err == ""
