"""What FSDP holds whole, and when: on two ranks of gloo."""

from pathlib import Path
from typing import Any

import pytest
import torch

from covey.cluster.wire import pack, unpack
from covey.engine.native.decode_weights import weights_of
from covey.engine.weights import make_weight_set
from covey.policy import sharding
from covey.policy.logprobs import Scoring
from covey.policy.models.loading import load_policy
from covey.policy.reference import make_reference
from covey.policy.settings import ModelConfig
from covey.run.build import shard_policy
from covey.system import collectives
from covey.types import Sampling
from covey_preflight.passes import LiveBytes

from ..support.builders import (
    ADAMW,
    ADVANTAGES,
    logprobs,
    make,
    make_trainer,
    nano,
    random_groups,
    relative_error,
    saved_model,
)
from ..support.models.storage_bytes import StorageBytes
from ..support.pretend_gpu import PretendGpu
from ..support.processes import on_two_ranks

LAYERS = 6


def state_bytes(state: dict[str, Any]) -> int:
    return sum(tensor.nbytes for moments in state["state"].values() for tensor in moments.values())


@pytest.mark.long
def test_moments_are_saved_one_tensor_at_a_time_and_rank_0_alone_keeps_them(tmp_path: Path) -> None:
    def work() -> dict[str, Any]:
        policy, _ = shard_policy(nano(nano_num_layers=LAYERS), None, "fsdp")
        trainer = make_trainer(policy, optimizer=ADAMW)
        trainer.step(make(random_groups(vocabulary=250), advantages=ADVANTAGES), 0)
        with LiveBytes() as live:
            state = trainer.state_dict()["optimizer"]
        largest = max(parameter.numel() for parameter in policy.model.parameters()) * 4
        return {"kept": state_bytes(state), "peak": live.peak, "largest": largest}

    policy = nano(nano_num_layers=LAYERS)
    trainer = make_trainer(policy, optimizer=ADAMW)
    trainer.step(make(random_groups(vocabulary=250), advantages=ADVANTAGES), 0)
    everything = state_bytes(trainer.state_dict()["optimizer"])
    first, second = on_two_ranks(work, tmp_path)
    assert first["kept"] == everything
    assert second["kept"] == 0
    assert second["peak"] <= 3 * second["largest"] < everything / 3


@pytest.mark.long
def test_weights_that_were_gathered_to_be_pushed_are_put_away_again(tmp_path: Path) -> None:
    def work() -> bool:
        policy, _ = shard_policy(nano(), None, "fsdp")
        with sharding.gather_weights(policy):
            packed = pack(make_weight_set(policy, 1, copy=False))
        pushed = unpack(packed).tensors
        return all(torch.equal(sharding.whole(own), pushed[name]) for name, own in policy.model.named_parameters())

    assert on_two_ranks(work, tmp_path) == [True, True]


@pytest.mark.long
def test_a_reference_is_made_of_the_policy_s_shards(tmp_path: Path) -> None:
    def work() -> dict[str, Any]:
        policy = nano(nano_num_layers=LAYERS)
        number = sum(parameter.numel() for parameter in policy.model.parameters())
        empty = make_reference(policy, refreshed=False, is_empty=True)
        stored = sum(not parameter.is_meta for parameter in empty.policy.model.parameters())
        sharded, reference = shard_policy(policy, empty, "fsdp")
        assert reference is not None
        local = sum(parameter.to_local().numel() for parameter in reference.policy.model.parameters())  # type: ignore[operator]
        same = all(
            torch.equal(sharding.whole(mine), sharding.whole(theirs)) and not mine.requires_grad
            for mine, theirs in zip(reference.policy.model.parameters(), sharded.model.parameters(), strict=True)
        )
        batch = make(random_groups(vocabulary=250)).micro_batches[0]
        place = (batch.input_ids_BT, batch.position_ids_BT, batch.layout)
        logits = [p.run_forward(lambda p=p: p.logits(*place)) for p in (sharded, reference.policy)]
        return {"stored": stored, "share": local / number, "same": same, "alike": torch.equal(*logits)}

    for found in on_two_ranks(work, tmp_path):
        assert found["stored"] == 0
        assert 0.4 < found["share"] < 0.6
        assert found["same"]
        assert found["alike"]


def test_a_policy_that_will_be_shared_out_is_loaded_without_the_device() -> None:
    with PretendGpu() as gpu:
        policy = load_policy(
            ModelConfig(nano_hidden_size=32, nano_num_layers=1, nano_num_heads=2), seed=0, on_host=True
        )
        assert not gpu.kernels
        assert str(policy.device) == "cpu"
        assert policy.attention != "compiled", "it is chosen for the device"
    assert not collectives.is_distributed()


@pytest.mark.long
def test_half_precision_is_gathered_in_two_bytes_a_weight_and_trained_in_four(tmp_path: Path) -> None:
    """What is sampled is what is trained, and both are near what one process computes under autocast."""

    def work() -> dict[str, Any]:
        policy, _ = shard_policy(nano(nano_num_layers=LAYERS, precision="bfloat16"), None, "fsdp")
        groups = random_groups(vocabulary=250)
        with sharding.gather_weights(policy):
            gathered = {str(parameter.dtype) for parameter in policy.model.parameters()}
            scored = logprobs(policy, make(groups).micro_batches, Scoring(Sampling(), 0))
        trainer = make_trainer(policy, optimizer=ADAMW)
        metrics = trainer.step(make(groups, advantages=ADVANTAGES), 0)
        sharding.reshard(policy)
        kept = {str(parameter.dtype) for parameter in policy.model.parameters()}
        return {"gathered": gathered, "kept": kept, "scored": scored, "skipped": metrics["skipped"]}

    alone = nano(nano_num_layers=LAYERS, precision="bfloat16")
    expected = logprobs(alone, make(random_groups(vocabulary=250)).micro_batches, Scoring(Sampling(), 0))
    for found in on_two_ranks(work, tmp_path):
        assert found["gathered"] == {"torch.bfloat16"}
        assert found["kept"] == {"torch.float32"}
        assert found["skipped"] == 0.0
        assert float((found["scored"] - expected).abs().max()) < 0.1


@pytest.mark.long
def test_sampling_gathers_layer_by_layer_into_one_copy_in_half_precision(tmp_path: Path) -> None:
    def work() -> dict[str, int]:
        policy, _ = shard_policy(nano(nano_num_layers=LAYERS, precision="bfloat16"), None, "fsdp")
        number = sum(parameter.numel() for parameter in policy.model.parameters())
        layer = sum(parameter.numel() for parameter in policy.causal_lm.model.layers[0].parameters())
        with StorageBytes() as live, sharding.gather_weights(policy):
            pass
        half, full = live.peak_by_type[torch.bfloat16], live.peak_by_type[torch.float32]
        return {"number": number, "unit": max(layer, number - LAYERS * layer), "half": half, "full": full}

    for found in on_two_ranks(work, tmp_path):
        # One copy, and what one unit comes through: the shard that is cast, and the buffer it is gathered in
        assert 2 * found["number"] <= found["half"] <= 2 * (found["number"] + 2 * found["unit"])
        assert 1.9 * found["number"] < found["full"] < 2.2 * found["number"], "shards of two ranks, 4 bytes a weight"


@pytest.mark.long
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_weights_in_4_bits_are_shared_out_and_train_as_whole_ones_do(precision: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    name = saved_model(tmp_path / "model", "qwen2", hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    settings = ModelConfig(name=name, load_in_4bit=True, lora_rank=4, precision=precision)

    def work(strategy: str = "fsdp") -> dict[str, Any]:
        policy, _ = shard_policy(load_policy(settings, seed=0), None, strategy)
        packed = [p for p in policy.model.parameters() if p.dtype == torch.uint8]
        held = sum(p.to_local().numel() if sharding.is_shard(p) else p.numel() for p in packed)
        own = slice(collectives.rank(), None, collectives.world_size())
        batch = make(random_groups(vocabulary=250), advantages=ADVANTAGES, keep=lambda rows: rows[own])
        layers = {key: module for key, module in policy.model.named_modules() if key.endswith("base_layer")}
        with sharding.gather_weights(policy):
            sampled = {key: weights_of(module, policy.precision).make() for key, module in layers.items()}
        make_trainer(policy).step(batch, 0)
        trained = {n: sharding.whole(p.detach()) for n, p in policy.model.named_parameters() if p.requires_grad}
        return {"held": held, "sampled": sampled, "trained": trained}

    alone = work("ddp")
    first, second = on_two_ranks(work, tmp_path)
    assert first["held"] == second["held"] == alone["held"] / 2
    assert len(alone["sampled"]) == 14
    assert all(torch.equal(first["sampled"][key], numbers) for key, numbers in alone["sampled"].items())
    for key, weight in alone["trained"].items():
        assert relative_error(first["trained"][key], weight) < (1e-6 if precision == "float32" else 1e-2), key
