"""Training through the service: order, repetition, refusals, adapters beside one another."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from covey_serve.limits import RequestRefused, ServiceLimits
from covey_serve.wire.messages import read_training

from .served import ADAM, NAME, Client, bases, cross_entropy, datum, serving, training_body

TEXTS = [cross_entropy([5, 9, 11, 3, 8]), cross_entropy([7, 2, 30])]


async def losses(client: Client, model: str, steps: int = 3) -> list[float]:
    found = []
    for _ in range(steps):
        metrics, _ = await client.train(model, TEXTS)
        await client.step(model)
        found.append(metrics["loss:sum"])
    return found


async def from_new(root: Path, steps: int = 3) -> list[float]:
    async with serving(root) as client:
        await client.begin()
        return await losses(client, await client.make(), steps)


def test_training_lowers_the_loss_and_repeats_to_the_bit(tmp_path: Path) -> None:
    first = asyncio.run(from_new(tmp_path / "a"))
    assert first[0] > first[1] > first[2]
    assert asyncio.run(from_new(tmp_path / "b")) == first


def test_two_sessions_of_one_server_get_the_same_losses(tmp_path: Path) -> None:
    async def run() -> tuple[list[float], list[float]]:
        async with serving(tmp_path) as client:
            found = []
            for _ in range(2):
                await client.begin()
                client.seq = 0
                found.append(await losses(client, await client.make()))
            return found[0], found[1]

    first, second = asyncio.run(run())
    assert first == second


def test_requests_run_by_number_not_by_arrival(tmp_path: Path) -> None:
    async def run(order: list[int]) -> float:
        async with serving(tmp_path / str(order[0])) as client:
            await client.begin()
            model = await client.make()
            step = {"model_id": model, "adam_params": ADAM}
            sent = {
                1: lambda: client.call("forward_backward", training_body(model, 1, TEXTS)),
                2: lambda: client.call("optim_step", {**step, "seq_id": 2}),
                3: lambda: client.call("forward_backward", training_body(model, 3, TEXTS)),
            }
            promises = {seq: (await sent[seq]())["request_id"] for seq in order}
            return (await client.result(promises[3]))[0]["loss:sum"]

    assert asyncio.run(run([1, 2, 3])) == asyncio.run(run([3, 2, 1]))


def test_a_repeated_request_trains_once(tmp_path: Path) -> None:
    async def run(times: int) -> float:
        async with serving(tmp_path / str(times)) as client:
            await client.begin()
            model = await client.make()
            raw = training_body(model, 1, TEXTS)
            promises = {(await client.call("forward_backward", raw))["request_id"] for _ in range(times)}
            (promise,) = promises
            client.seq = 1
            await client.result(promise)
            return (await client.step(model))["metrics"]["grad_norm"]

    assert asyncio.run(run(1)) == asyncio.run(run(3))


def test_gradients_add_up_until_a_step_and_are_cleared_by_it(tmp_path: Path) -> None:
    async def run() -> list[dict[str, float]]:
        async with serving(tmp_path) as client:
            await client.begin()
            one, two = await client.make(0, seed=3), await client.make(1, seed=3)
            client.seq = 0
            await client.train(one, TEXTS)
            await client.train(one, TEXTS)
            twice = await client.step(one, learning_rate=0.0)
            after = await client.step(one)
            client.seq = 0
            await client.train(two, TEXTS)
            once = await client.step(two)
            return [each["metrics"] for each in (twice, once, after)]

    twice, once, after = asyncio.run(run())
    assert twice["grad_norm"] == pytest.approx(2 * once["grad_norm"], rel=1e-5)
    assert (after["grad_norm"], after["skipped"]) == (0.0, 1.0)
    assert [each["step"] for each in (twice, once, after)] == [1.0, 1.0, 1.0]


BAD = {
    "no target": ({"weights": [1.0] * 4}, "target_tokens"),
    "short weights": ({"weights": [1.0] * 3}, "must have the length of model_input, 4"),
    "infinite weights": ({"weights": [1.0, float("inf"), 0.0, 1.0]}, "weights must be finite"),
    "foreign token": ({"weights": [1.0] * 4}, "target_tokens must be token ids in"),
    "sparse floods": ({"weights": [1.0] * 4}, "must be a matrix of at most"),
    "a flood of axes": ({"weights": [1.0] * 4}, "field shape must have at most 8 numbers"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_datum_is_the_users_error_and_leaves_gradients(tmp_path: Path, case: str) -> None:
    inputs, message = BAD[case]
    ids = [5, 9, 11, 3, 10**6] if case == "foreign token" else [5, 9, 11, 3, 8]
    bad = datum(ids, **inputs)
    if case == "no target":
        bad["loss_fn_inputs"] = bad["loss_fn_inputs"][1:]
    if case == "sparse floods":  # 40 bytes each, 16 MiB of zeros
        csr = {"values": b"", "rows": bytes(16), "columns": b""}
        zeros = {"sparse": [csr], "dtype": 2, "shape": (1, 2**21)}
        bad["loss_fn_inputs"] += [{"key": str(number), "value": zeros} for number in range(9)]
    if case == "a flood of axes":
        bad["loss_fn_inputs"][1]["value"] |= {"shape": (1,) * 1000}

    async def run(with_bad: bool) -> float:
        async with serving(tmp_path / str(with_bad)) as client:
            await client.begin()
            model = await client.make()
            await client.train(model, TEXTS)
            if with_bad:
                found = await client.train(model, [TEXTS[0], bad])
                assert found["category"] == "user"
                assert message in found["error"]
                assert "\n" not in found["error"]
            return (await client.step(model))["metrics"]["grad_norm"]

    assert asyncio.run(run(True)) == asyncio.run(run(False))


def test_tokens_and_values_of_inputs_have_one_limit() -> None:
    body = training_body("m", 1, [cross_entropy([5, 9, 11, 3, 8, 2])])  # 5 tokens, 5 targets, 5 weights
    assert len(read_training(body, ServiceLimits(request_values=15)).data) == 1
    with pytest.raises(ValueError, match="too many tokens and values of inputs: send its datums in several"):
        read_training(body, ServiceLimits(request_values=14))


def test_a_ratio_that_overflows_adds_nothing(tmp_path: Path) -> None:
    far = datum([5, 9, 11], logprobs=[-1e4, -1e4], advantages=[1.0, 1.0])

    async def run() -> float:
        async with serving(tmp_path) as client:
            await client.begin()
            model = await client.make()
            found = await client.train(model, [far], "importance_sampling")
            assert "not finite" in found["error"]
            return (await client.step(model))["metrics"]["grad_norm"]

    assert asyncio.run(run()) == 0.0


def test_stable_reinforce_is_refused_with_the_loss_to_take(tmp_path: Path) -> None:
    async def run() -> str:
        async with serving(tmp_path) as client:
            await client.begin()
            return (await client.train(await client.make(), TEXTS, "stable_reinforce"))["error"]

    assert "take importance_sampling in its place" in asyncio.run(run())


def test_a_refused_request_does_not_hold_up_later_ones(tmp_path: Path) -> None:
    async def run() -> tuple[str, str]:
        async with serving(tmp_path) as client:
            await client.begin()
            model = await client.make()
            refused = await client.ordered("save_weights", model, path="../../etc")
            return refused["error"], (await client.ordered("save_weights", model, path="fine"))["path"]

    error, path = asyncio.run(run())
    assert "path must be a name" in error
    assert path.endswith("/weights/fine")


def test_adapters_of_several_models_share_one_base_and_do_not_mix(tmp_path: Path) -> None:
    shared = bases()

    async def run() -> tuple[list[float], list[float]]:
        async with serving(tmp_path, shared) as client:
            await client.begin()
            one, two = await client.make(0, seed=1), await client.make(1, rank=8, seed=2)
            alone, beside = [], []
            for seq in range(1, 7, 2):
                for model, found in ((one, alone), (two, beside)):
                    client.seq = seq - 1
                    metrics, _ = await client.train(model, TEXTS)
                    await client.step(model)
                    found.append(metrics["loss:sum"])
            loaded = client.service.compute._loaded
            weights = [next(iter(each.model.policy.causal_lm.base_model.parameters())) for each in loaded.values()]
            assert weights[0].data_ptr() == weights[1].data_ptr()
            return alone, beside

    async def single() -> list[float]:
        async with serving(tmp_path / "single") as client:
            await client.begin()
            return await losses(client, await client.make(0, seed=1))

    alone, beside = asyncio.run(run())
    assert alone == asyncio.run(single())
    assert beside[0] == alone[0]
    assert beside[1:] != alone[1:]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"train_mlp": False, "train_unembed": False}, {"self_attn"}),
        ({"train_attn": False, "train_unembed": False}, {"mlp"}),
        ({"train_attn": False, "train_mlp": False}, {"lm_head"}),
        ({}, {"self_attn", "mlp", "lm_head"}),
    ],
)
def test_the_flags_of_a_model_choose_its_layers(flags: dict[str, bool], expected: set[str]) -> None:
    from covey_serve.model.models import ModelShape

    policy = bases().make(ModelShape(NAME, 2, **flags), seed=0)
    names = [name for name, each in policy.model.named_parameters() if each.requires_grad]
    assert {part for part in ("self_attn", "mlp", "lm_head") if any(part in name for name in names)} == expected
    assert all(".lora_" in name for name in names)


def test_a_full_model_trains_all_weights_of_its_own(tmp_path: Path) -> None:
    shared = bases(full=True)
    before = [each.clone() for each in shared.policy(NAME).model.parameters()]

    async def run() -> list[float]:
        async with serving(tmp_path, shared) as client:
            await client.begin()
            return await losses(client, await client.make())

    found = asyncio.run(run())
    assert found[0] > found[1] > found[2]
    assert all(map(torch.equal, before, shared.policy(NAME).model.parameters()))


def test_several_targets_of_a_position_weigh_as_single_ones(tmp_path: Path) -> None:
    """Two targets with half the weight each are the mean of two data."""
    ids, others = [5, 9, 11, 3], [6, 2, 8]
    double = datum(ids)
    pairs = np.stack([ids[1:], others], 1)
    double["loss_fn_inputs"] = [
        {"key": "target_tokens", "value": {"dense": pairs.astype("<i8").tobytes(), "dtype": 2, "shape": (3, 2)}},
        {"key": "weights", "value": {"dense": np.full((3, 2), 0.5, "<f4").tobytes(), "dtype": 1, "shape": (3, 2)}},
    ]
    single = [datum(ids, weights=[0.5] * 3), datum(ids, weights=[0.5] * 3)]
    single[1]["loss_fn_inputs"][0]["value"]["dense"] = np.array(others, "<i8").tobytes()

    async def run() -> tuple[float, float]:
        async with serving(tmp_path) as client:
            await client.begin()
            model = await client.make()
            found = [(await client.train(model, data))[0]["loss:sum"] for data in ([double], single)]
            return found[0], found[1]

    together, apart = asyncio.run(run())
    assert together == pytest.approx(apart, rel=1e-6)


def test_a_number_far_ahead_is_refused(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path, limits=ServiceLimits(ahead=3)) as client:
            await client.begin()
            model = await client.make()
            await client.call("forward_backward", training_body(model, 3, TEXTS))
            with pytest.raises(RequestRefused, match=r"request 4 of .* is too far ahead of 0"):
                await client.call("forward_backward", training_body(model, 4, TEXTS))

    asyncio.run(run())


def test_too_many_waiting_requests_are_asked_to_come_again(tmp_path: Path) -> None:
    async def run() -> int:
        async with serving(tmp_path, limits=ServiceLimits(waiting=3)) as client:
            await client.begin()
            model = await client.make()
            for seq in (3, 4, 5):  # 1 and 2 never come
                await client.call("forward_backward", training_body(model, seq, TEXTS))
            with pytest.raises(RequestRefused) as refused:
                await client.call("forward_backward", training_body(model, 6, TEXTS))
            return refused.value.status

    assert asyncio.run(run()) == 429
