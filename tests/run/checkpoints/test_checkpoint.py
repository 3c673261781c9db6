"""Saved policies: whole or not there, and loaded by anybody's `from_pretrained`."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.checks.architectures import save
from covey.algorithm.settings import AlgorithmConfig
from covey.policy.attention.base import DENSE
from covey.policy.models.loading import load_policy
from covey.policy.models.nano import ARCHITECTURES
from covey.policy.policy import Policy
from covey.policy.reference import make_reference
from covey.policy.settings import ModelConfig
from covey.run.checkpoints import checkpoint
from covey.run.checkpoints.checkpoint import (
    complete_checkpoints,
    load_weights,
    prune_checkpoints,
    save_checkpoint,
    save_policy,
)

from ...support.builders import ADVANTAGES, make, make_trainer, nano, random_groups, same, weights

PROBE = torch.arange(1, 12)[None]


@torch.no_grad()
def logits(policy: Policy) -> Tensor:
    return policy.logits(PROBE, PROBE - 1, DENSE)


def trained(policy: Policy) -> Policy:
    trainer = make_trainer(policy, AlgorithmConfig())
    for step in range(2):
        trainer.step(make(random_groups(vocabulary=250), "shared", 20, ADVANTAGES), step)
    return policy


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_saved_policy_gives_the_same_logits_in_plain_transformers(architecture: str, tmp_path: Path) -> None:
    policy = trained(nano(nano_architecture=architecture))
    save_policy(policy, tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert float((plain(input_ids=PROBE).logits[0] - logits(policy)).abs().max()) < 1e-5
    assert plain.generation_config.eos_token_id == policy.tokenizer.eos_token_id
    assert (tmp_path / "model.safetensors").is_file()


def test_plain_transformers_loads_it_in_a_process_that_never_heard_of_covey(tmp_path: Path) -> None:
    save_policy(nano(), tmp_path)
    code = (
        "import sys; from transformers import AutoModelForCausalLM as M, AutoTokenizer as T\n"
        f"m, t = M.from_pretrained({str(tmp_path)!r}), T.from_pretrained({str(tmp_path)!r})\n"
        "out = m.generate(**t('1+1=', return_tensors='pt'), max_new_tokens=2, do_sample=False)\n"
        "assert 'covey' not in sys.modules; print(out.shape[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr


def test_a_saved_policy_comes_back_bit_for_bit(tmp_path: Path) -> None:
    policy = trained(nano())
    save_policy(policy, tmp_path)
    again = load_policy(ModelConfig(name=str(tmp_path)), seed=5)
    assert same(weights(again), weights(policy))
    assert again.stop_ids == policy.stop_ids


def test_the_tokenizer_comes_back_with_its_template(tmp_path: Path) -> None:
    policy = nano()
    save_policy(policy, tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = "12+7= äöü <turn> \n"
    assert again(text)["input_ids"] == policy.tokenizer(text)["input_ids"]
    messages = [{"role": "user", "content": "hello"}]
    rendered = (
        t.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) for t in (again, policy.tokenizer)
    )
    assert len(set(rendered)) == 1


@pytest.mark.parametrize("refreshed", [False, True])
def test_a_lora_policy_is_saved_as_an_adapter_that_peft_loads(refreshed: bool, tmp_path: Path) -> None:
    save_policy(nano(), tmp_path / "base")
    policy = load_policy(ModelConfig(name=str(tmp_path / "base"), lora_rank=4), seed=0)
    make_reference(policy, refreshed=refreshed)
    trained(policy)
    save_policy(policy, tmp_path / "adapter")
    found = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= found
    assert not found & {"model.safetensors", "reference", "README.md"}
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    plain = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    with torch.no_grad():
        assert float((plain(input_ids=PROBE).logits[0] - logits(policy)).abs().max()) < 1e-5
        with plain.disable_adapter():
            assert float((plain(input_ids=PROBE).logits[0] - logits(policy)).abs().max()) > 1e-3


@pytest.mark.parametrize("rank", [0, 4], ids=["weights", "adapter"])
@pytest.mark.parametrize("is_missing", [True, False], ids=["missing", "foreign"])
def test_weights_that_are_not_all_of_the_policys_and_only_these_are_refused(
    rank: int, is_missing: bool, tmp_path: Path
) -> None:
    policy = nano(lora_rank=rank)
    save_policy(policy, tmp_path / "policy")
    (file,) = (tmp_path / "policy").glob("*.safetensors")
    tensors = load_file(file)
    last = tensors.pop(max(tensors)) if is_missing else tensors[max(tensors)]
    save_file(tensors if is_missing else {**tensors, "foreign": last.clone()}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"does not fit the policy: \["):
        load_weights(policy, tmp_path)


STATE = {"step": 0}


def test_adapters_are_loaded_under_the_names_that_the_policy_gives_them(tmp_path: Path) -> None:
    save("laguna", str(tmp_path / "base"))  # peft would look for mlp.shared_experts..down_proj
    first, second = (load_policy(ModelConfig(name=str(tmp_path / "base"), lora_rank=2), seed=seed) for seed in (0, 1))
    save_policy(first, tmp_path / checkpoint.POLICY)
    assert not same(weights(first), weights(second))
    load_weights(second, tmp_path)
    assert same(weights(first), weights(second))


def test_a_checkpoint_lists_every_file_with_its_size_and_hash(tmp_path: Path) -> None:
    found = save_checkpoint(tmp_path, 12, nano(), STATE, {"covey": "1.2.3"})
    assert found == tmp_path / "step-000012"
    manifest = json.loads((found / "manifest.json").read_text())
    assert (manifest["step"], manifest["covey"]) == (12, "1.2.3")
    files = {str(p.relative_to(found)): p for p in found.rglob("*") if p.is_file() and p.name != "manifest.json"}
    assert manifest["files"].keys() == files.keys()
    assert "policy/model.safetensors" in files
    for name, entry in manifest["files"].items():
        assert entry["bytes"] == files[name].stat().st_size
        assert entry["sha256"] == hashlib.sha256(files[name].read_bytes()).hexdigest()


def test_old_checkpoints_go_only_after_the_new_one_is_there(tmp_path: Path) -> None:
    policy = nano()
    for step in (1, 2, 3, 10):
        save_checkpoint(tmp_path, step, policy, STATE, {})
        prune_checkpoints(tmp_path, keep_last=2, keep_best=False)
        assert (tmp_path / f"step-{step:06d}" / "manifest.json").is_file()
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-000003", "step-000010"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000003", "step-000010"]


def test_saving_that_fails_leaves_the_checkpoints_there_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = nano()
    save_checkpoint(tmp_path, 1, policy, STATE, {})

    def full_disk(policy: Policy, folder: Path, weights: object) -> None:
        folder.mkdir(parents=True)
        (folder / "half").write_text("of a model")
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint, "save_policy", full_disk)
    with pytest.raises(OSError, match="no space left"):
        save_checkpoint(tmp_path, 2, policy, STATE, {})
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-000001"]
    assert not (tmp_path / "step-000002").exists()
    monkeypatch.undo()
    save_checkpoint(tmp_path, 2, policy, STATE, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, nano(seed=1), STATE, {})
    policy = nano(seed=2)
    found = save_checkpoint(tmp_path, 1, policy, STATE, {})
    assert same(weights(load_policy(ModelConfig(name=str(found / "policy")), seed=0)), weights(policy))


def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "step-000004" / "policy").mkdir(parents=True)
    (tmp_path / "step-000005.tmp-abc").mkdir()
    (tmp_path / "step-000005.tmp-abc" / "manifest.json").write_text("{}")
    assert complete_checkpoints(tmp_path) == []
    assert complete_checkpoints(tmp_path / "nowhere") == []


def test_an_unloadable_state_is_not_saved_and_the_old_one_stays(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "checkpoints", 1, nano(), {"source": {"levels": [0.5]}}, {})
    state = {"source": {"levels": [np.float64(0.5)]}, "trainer": torch.zeros(3)}
    with pytest.raises(ValueError, match=r"numpy.*a curriculum's, keeps numbers, strings, lists, dicts and tensors$"):
        save_checkpoint(tmp_path / "checkpoints", 2, nano(), state, {})
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]
