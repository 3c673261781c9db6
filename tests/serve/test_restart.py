"""A service that ends anywhere goes on where it was, to the same bits."""

import asyncio
import json
import multiprocessing
import os
import random
import sys
import time
import urllib.error
import urllib.request
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from covey.policy.settings import ModelConfig
from covey_serve import command
from covey_serve import service as service_module
from covey_serve.limits import RequestRefused, ServiceLimits
from covey_serve.model.models import TrainedModel
from covey_serve.store.checkpoints import FACTS
from covey_serve.wire.protobuf import decode

from .served import ADAM, NAME, SIZES, Client, cross_entropy, read_output, serving, training_body

TEXTS = [cross_entropy([5, 9, 11, 3, 8]), cross_entropy([7, 2, 30])]
PROMPT = [5, 9, 11, 3]
STEPS = 4


async def script(client: Client, begin: int, end: int, model: str = "") -> tuple[str, list[Any]]:
    """Train, sample and save: steps [begin, end) of a run, with all that a client sees."""
    if not model:
        await client.begin()
        model = await client.make()
    seen: list[Any] = []
    for step in range(begin, end):
        metrics, (first, *_) = await client.train(model, TEXTS)
        await client.step(model)
        sampler = await client.sampler(model, step)
        found = await client.sample(sampler, 0, PROMPT, num_samples=2)
        seen.append((metrics["loss:sum"], first.tolist(), [each["tokens"] for each in found["sequences"]]))
    return model, seen


async def whole(root: Path) -> list[Any]:
    async with serving(root) as client:
        return (await script(client, 0, STEPS))[1]


def go_on(root: Path, before: Client) -> Any:
    """Return a context of a new service on the folder, whose client continues."""

    async def inner(model: str, begin: int, end: int) -> list[Any]:
        async with serving(root) as client:
            client.seq, client.session = before.seq, before.session
            return (await script(client, begin, end, model))[1]

    return inner


@pytest.mark.parametrize("seconds", [0.0, 1e9])
def test_a_run_cut_in_two_sees_what_a_whole_one_sees(
    tmp_path: Path, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a snapshot after each request, and with none."""
    monkeypatch.setattr(service_module, "SNAPSHOT_SECONDS", seconds)

    async def run() -> list[Any]:
        async with serving(tmp_path / "cut") as client:
            model, seen = await script(client, 0, 2)
        return seen + await go_on(tmp_path / "cut", client)(model, 2, STEPS)

    assert asyncio.run(run()) == asyncio.run(whole(tmp_path / "whole"))
    assert any((tmp_path / "cut" / "snapshots").glob("*")) is (seconds == 0.0)


def test_gradients_so_far_survive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "SNAPSHOT_SECONDS", 0.0)

    async def run(cut: bool) -> float:
        root = tmp_path / str(cut)
        async with serving(root) as client:
            await client.begin()
            model = await client.make()
            await client.train(model, TEXTS)
            if not cut:
                return (await client.step(model))["metrics"]["grad_norm"]
        async with serving(root) as after:
            after.seq = client.seq
            return (await after.step(model))["metrics"]["grad_norm"]

    assert asyncio.run(run(True)) == asyncio.run(run(False)) > 0


def test_results_and_dedup_outlive_the_process(tmp_path: Path) -> None:
    async def run() -> None:
        raw = b""
        async with serving(tmp_path) as client:
            await client.begin()
            model = await client.make()
            raw = training_body(model, 1, TEXTS)
            promise = (await client.call("forward_backward", raw))["request_id"]
            first = await client.service.retrieve(promise)
        async with serving(tmp_path) as after:
            assert (await after.service.retrieve(promise)).body == first.body
            assert (await after.call("forward_backward", raw))["request_id"] == promise
            assert after.service.ledger.waiting == 0

    asyncio.run(run())


def test_requests_that_never_ran_run_after_the_start(tmp_path: Path) -> None:
    async def run() -> Any:
        async with serving(tmp_path) as client:
            await client.begin()
            model = await client.make()
            later = (await client.call("forward_backward", training_body(model, 2, TEXTS)))["request_id"]
        async with serving(tmp_path) as after:
            await after.call("forward_backward", training_body(model, 1, TEXTS))
            return await after.result(later)

    metrics, _ = asyncio.run(run())
    assert metrics["loss:sum"] > 0


def test_a_compacted_journal_holds_the_same_state(tmp_path: Path) -> None:
    async def run(compacts: bool) -> list[Any]:
        root = tmp_path / str(compacts)
        async with serving(root) as client:
            model, seen = await script(client, 0, 2)
            if compacts:
                before = client.service.journal.size
                client.service.ledger.compact()
                assert client.service.journal.size < before
                client.service.tidy_now()
        async with serving(root) as after:
            after.seq, after.session = client.seq, client.session
            seen += (await script(after, 2, 3, model))[1]
            again = await after.sample(f"{client.session}:sample:1", 1, PROMPT, num_samples=2)
            return [*seen, [each["tokens"] for each in again["sequences"]]]

    assert asyncio.run(run(True)) == asyncio.run(run(False))


def test_results_that_were_fetched_are_forgotten_and_the_file_shrinks(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as client:
            model, _ = await script(client, 0, 2)
            await client.service._save(client.service.ledger.models[model])
            for promise in client.service.ledger.promises.values():
                promise.fetched = 1.0
            client.service.tidy_now()
            assert not client.service.ledger.promises
            client.service.ledger.compact()
            assert client.service.journal.size < 4000
            seq = client.seq
        async with serving(tmp_path) as after:
            after.seq, after.session = seq, client.session
            assert (await script(after, 2, 3, model))[1]
            with pytest.raises(RequestRefused, match="answered before"):
                await after.call("forward_backward", training_body(model, 1, TEXTS))

    asyncio.run(run())


def test_a_damaged_snapshot_is_named_and_never_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "SNAPSHOT_SECONDS", 0.0)

    async def run() -> Any:
        async with serving(tmp_path) as client:
            model, _ = await script(client, 0, 1)
        (weights,) = (tmp_path / "snapshots").glob("*/policy/*.safetensors")
        raw = bytearray(weights.read_bytes())
        raw[-1] ^= 1
        weights.write_bytes(raw)
        async with serving(tmp_path) as after:
            after.seq = client.seq
            return await after.train(model, TEXTS)

    assert "gone, or not those that were saved" in asyncio.run(run())["error"]


def test_more_models_than_fit_take_turns_in_memory(tmp_path: Path) -> None:
    async def run(loaded: int) -> list[float]:
        async with serving(tmp_path / str(loaded), limits=ServiceLimits(loaded=loaded)) as client:
            await client.begin()
            models = [await client.make(place) for place in range(3)]
            found = []
            for turn in range(2):
                for model in models:
                    client.seq = 2 * turn
                    metrics, _ = await client.train(model, TEXTS)
                    await client.step(model)
                    found.append(metrics["loss:sum"])
            client.seq = 4
            await client.train(models[1], TEXTS)
            assert [*client.service.compute.loaded_models()] == [models[0], models[2], models[1]][-loaded:]
            return found

    assert asyncio.run(run(1)) == asyncio.run(run(3))


def test_a_session_that_ends_leaves_its_checkpoints_alone(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as client:
            await client.begin()
            model = await client.make()
            await client.train(model, TEXTS)
            await client.sampler(model)
            path = (await client.ordered("save_weights", model, path="kept"))["path"]
            await client.call(f"sessions/{client.session}/finish", {})
            assert not client.service.ledger.promises
            assert not list((tmp_path / "samplers").iterdir())
            await client.begin()
            body = {"session_id": client.session, "model_seq_id": 0, "path": path, "optimizer": True}
            made = await client.result((await client.call("load_weights", body))["request_id"])
            client.seq = 0
            assert (await client.train(made["model_id"], TEXTS))[0]["loss:sum"] > 0

    asyncio.run(run())


def test_a_session_that_ends_while_its_request_runs_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a snapshot due after the request, and with a sampler's weights as its result."""
    monkeypatch.setattr(service_module, "SNAPSHOT_SECONDS", 0.0)

    async def run(route: str) -> None:
        async with serving(tmp_path / route) as client:
            await client.begin()
            model = await client.make()
            await client.train(model, TEXTS)
            service, begun = client.service, asyncio.Event()
            real = service._in_thread

            async def end_meanwhile(function: Any, *arguments: Any) -> Any:
                found = await real(function, *arguments)
                if function.__name__ == route:
                    service.drop_session(client.session)
                    begun.set()
                return found

            monkeypatch.setattr(service, "_in_thread", end_meanwhile)
            body = {"model_id": model, "seq_id": 2, "sampling_session_seq_id": 0}
            await client.call("save_weights_for_sampler", body)
            await begun.wait()
            await asyncio.sleep(0.05)
            assert (service.ledger.waiting, service.ledger.waiting_bytes) == (0, 0)
            assert not service.compute.loaded_models()
            assert not service.runs._open
        folders = (tmp_path / route / "samplers", tmp_path / route / "snapshots")
        assert [list(folder.glob("*")) for folder in folders] == [[], []]
        async with serving(tmp_path / route) as after:
            assert not after.service.ledger.models

    for route in ("run", "save_snapshot"):
        asyncio.run(run(route))


def test_weights_without_an_owner_go_and_half_replaced_ones_come_back(tmp_path: Path) -> None:
    async def run() -> Any:
        async with serving(tmp_path) as client:
            model, _ = await script(client, 0, 1)
            await client.service._save(client.service.ledger.models[model])
        (snapshot,) = (tmp_path / "snapshots").iterdir()
        aside = snapshot.with_name(f"{snapshot.name}.tmp-x")
        aside.mkdir()
        snapshot.rename(aside / "before")  # as a kill leaves it
        (tmp_path / "samplers" / "0-sample-9").mkdir()
        async with serving(tmp_path) as after:
            assert [each.name for each in (tmp_path / "snapshots").iterdir()] == [snapshot.name]
            assert len(list((tmp_path / "samplers").iterdir())) == 1
            after.seq, after.session = client.seq, client.session
            return (await script(after, 1, 2, model))[1]

    assert asyncio.run(run())


def test_unfetched_results_and_samplers_are_bounded(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path, limits=ServiceLimits(results=3, samplers=2, result_seconds=1e9)) as client:
            model, _ = await script(client, 0, 3)
            await client.service._save(client.service.ledger.models[model])
            promises = client.service.ledger.promises
            list(promises.values())[-1].fetched = None
            unfetched = list(promises)[-1]
            client.service.tidy_now()
            assert len(promises) == 3
            assert unfetched in promises
            assert list(client.service.ledger.samplers) == [f"{client.session}:sample:{place}" for place in (1, 2)]
            assert len(list((tmp_path / "samplers").iterdir())) == 2

    asyncio.run(run())


def test_a_disk_that_refuses_does_not_end_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    async def run() -> None:
        async with serving(tmp_path) as client:
            await client.begin()
            model = await client.make()
            with monkeypatch.context() as patch:
                patch.setattr(client.service.runs, "log", refuse)
                patch.setattr(client.service, "_folder_of", refuse)
                await client.train(model, TEXTS)
                failed = await client.sample(await client.sampler(model), 0, PROMPT)
                assert "No space left" in failed["error"]
                patch.setattr(client.service.journal, "append", refuse)
                client.service.ledger.sessions[client.session].seen = 0.0
                client.service.tidy_now()
            assert (await client.train(model, TEXTS))[0]["loss:sum"] > 0

    asyncio.run(run())


# ---- the process itself


def start(root: Path) -> tuple[BaseProcess, str]:
    """Start the command in a fork of this warm process, and return it with its address."""
    reading, writing = os.pipe()
    process = multiprocessing.get_context("fork").Process(target=_serve, args=(root, writing), daemon=True)
    process.start()
    os.close(writing)
    with open(reading) as said:
        address, _ = said.readline(), said.readline()  # both: the server must not write to a closed pipe
    return process, address.split(" at ")[1].split(",")[0]


def _serve(root: Path, writing: int) -> None:
    sys.stdout = open(writing, "w", buffering=1)  # noqa: SIM115 # open until the process is killed
    os.environ["TINKER_API_KEY"] = "tml-test"
    service_module.SNAPSHOT_SECONDS = 0.3
    command.ModelConfig = partial(ModelConfig, **SIZES)
    command.run_serve([f"{NAME}=nano", "--to", str(root), "--port", "0"])


class Remote:
    """A client over HTTP that asks again while the server is gone."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.process, self.url = start(root)

    def kill(self) -> None:
        self.end()
        self.process, self.url = start(self.root)

    def end(self) -> None:
        self.process.kill()
        self.process.join()

    def call(self, path: str, body: Any) -> Any:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/api/v1/{path}", raw, {"X-API-Key": "tml-test"})
        with urllib.request.urlopen(request, timeout=60) as found:
            content = found.read()
            return content if "protobuf" in found.headers["Content-Type"] else json.loads(content)

    def result(self, promise: str) -> Any:
        while isinstance(found := self.call("retrieve_future", {"request_id": promise}), dict):
            if found.get("type") != "try_again":
                break
        return found


def over_http(root: Path, kills: random.Random | None) -> list[Any]:
    """Run a script of twelve requests, the server killed before or after half of them."""
    remote = Remote(root)
    try:
        session = remote.call("create_session", {"sdk_version": "0.38.0"})["session_id"]
        lora = {"rank": 4}
        body = {"session_id": session, "model_seq_id": 0, "base_model": NAME, "lora_config": lora}
        model = remote.result(remote.call("create_model", body)["request_id"])["model_id"]
        seen: list[Any] = []
        for seq in range(1, 13, 3):
            sent: list[tuple[str, Any]] = [
                ("forward_backward", training_body(model, seq, TEXTS)),
                ("optim_step", {"model_id": model, "seq_id": seq + 1, "adam_params": ADAM}),
                ("save_weights_for_sampler", {"model_id": model, "seq_id": seq + 2, "sampling_session_seq_id": seq}),
            ]
            promises = []
            for path, content in sent:
                promises.append(remote.call(path, content)["request_id"])
                if kills and kills.random() < 0.3:
                    time.sleep(kills.random() * 0.2)
                    remote.kill()
                    assert remote.call(path, content)["request_id"] == promises[-1]  # as the client repeats it
            metrics, values = read_output(remote.result(promises[0]))
            sampler = remote.result(promises[2])["sampling_session_id"]
            prompt = {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]}
            ask = {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt, "sampling_params": {"max_tokens": 4}}
            asked = remote.call("asample", {**ask, "num_samples": 3})["request_id"]
            if kills and kills.random() < 0.5:
                remote.kill()
            found = decode("SampleResponse", remote.result(asked))
            seen.append((metrics["loss:sum"], values[0].tolist(), [each["tokens"] for each in found["sequences"]]))
        return seen
    finally:
        remote.end()


@pytest.mark.long
def test_a_server_killed_at_random_gives_the_same_bits(tmp_path: Path) -> None:
    expected = over_http(tmp_path / "whole", None)
    assert expected[0][0] > expected[-1][0]
    assert over_http(tmp_path / "killed", random.Random(3)) == expected


def test_no_file_of_a_checkpoint_is_trusted_after_a_change(tmp_path: Path) -> None:
    async def run() -> Any:
        async with serving(tmp_path) as client:
            await client.begin()
            model = await client.make()
            path = (await client.ordered("save_weights", model, path="a"))["path"]
            (facts,) = (tmp_path / "checkpoints").glob(f"*/weights/a/{FACTS}")
            (facts.parent / "policy" / "extra.bin").write_bytes(b"x")
            return await client.ordered("load_weights", model, path=path, optimizer=True)

    assert "not those that were saved" in asyncio.run(run())["error"]


def test_a_load_that_fails_leaves_the_weights_alone(tmp_path: Path) -> None:
    async def run(loads: bool) -> list[float]:
        async with serving(tmp_path / str(loads)) as client:
            await client.begin()
            model = await client.make()
            path = (await client.ordered("save_weights_for_sampler", model, path="a"))["path"]
            await client.train(model, TEXTS)
            await client.step(model)
            await client.train(model, TEXTS)
            if loads:
                found = await client.ordered("load_weights", model, path=path, optimizer=True)
                assert "holds no optimizer state" in found["error"]
            norm = (await client.step(model))["metrics"]["grad_norm"]
            return [norm, (await client.train(model, TEXTS))[0]["loss:sum"]]

    assert asyncio.run(run(True)) == asyncio.run(run(False))


def test_a_step_that_the_machine_breaks_off_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that runs out after some weights have moved."""
    step = TrainedModel.step

    def broken(model: TrainedModel, adam: Any) -> Any:
        monkeypatch.setattr(TrainedModel, "step", step)
        step(model, adam)
        raise MemoryError

    async def run(breaks: bool) -> list[float]:
        async with serving(tmp_path / str(breaks)) as client:
            await client.begin()
            model = await client.make()
            await client.train(model, TEXTS)
            if breaks:
                monkeypatch.setattr(TrainedModel, "step", broken)
                assert "MemoryError" in (await client.step(model))["error"]
            norm = (await client.step(model))["metrics"]["grad_norm"]
            return [norm, (await client.train(model, TEXTS))[0]["loss:sum"]]

    assert asyncio.run(run(True)) == asyncio.run(run(False))
