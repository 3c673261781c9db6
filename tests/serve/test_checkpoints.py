"""Checkpoints by tinker path: found, dated, replaced, described and deleted."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from covey.system.jsonl import read_rows
from covey_serve.limits import RequestRefused, ServiceLimits
from covey_serve.model.models import ModelShape
from covey_serve.store.checkpoints import EXPIRES, Checkpoints, Saved, describe, facts_of

from .served import NAME, cross_entropy, serving

MODEL = "0123456789abcdef:train:0"
PATH = f"tinker://{MODEL}/weights/a"


def save(
    root: Path, path: str = PATH, seq: int = 1, content: bytes = b"12345", *, overwrite: bool = False, **asked: Any
) -> Saved:
    facts = facts_of(MODEL, ModelShape(NAME, 4), seq, asked)
    return Checkpoints(root).save(
        path, facts, lambda aside: (aside / "w").write_bytes(content) and None, overwrite=overwrite
    )


def test_a_checkpoint_is_there_until_its_time_is_over(tmp_path: Path) -> None:
    checkpoints, saved = Checkpoints(tmp_path), save(tmp_path, ttl_seconds=60)
    assert saved.facts[EXPIRES] == pytest.approx(time.time() + 60, abs=20)
    assert [one.path for one in checkpoints.all()] == [PATH]
    checkpoints.change(PATH, {EXPIRES: time.time() - 1})
    assert checkpoints.of_model(MODEL) == []
    with pytest.raises(RequestRefused, match="there is no checkpoint tinker://") as refused:
        checkpoints.find(PATH)
    assert refused.value.status == 404


def test_a_name_is_replaced_by_the_same_request_or_where_that_is_asked(tmp_path: Path) -> None:
    save(tmp_path, seq=1)
    save(tmp_path, seq=1, content=b"again")
    with pytest.raises(ValueError, match="exists: name another, or overwrite it"):
        save(tmp_path, seq=2, content=b"other")
    assert (Checkpoints(tmp_path).load(PATH).folder / "w").read_bytes() == b"again"
    save(tmp_path, seq=2, content=b"other", overwrite=True)
    assert (Checkpoints(tmp_path).load(PATH).folder / "w").read_bytes() == b"other"


def test_weights_that_have_changed_are_found_and_never_loaded(tmp_path: Path) -> None:
    (save(tmp_path).folder / "w").write_bytes(b"1234x")
    assert Checkpoints(tmp_path).find(PATH).shape == ModelShape(NAME, 4)
    with pytest.raises(ValueError, match="the weights in a are gone, or not those that were saved"):
        Checkpoints(tmp_path).load(PATH)


@pytest.mark.parametrize(
    "path",
    [
        f"{MODEL}/weights/a",
        f"tinker://{MODEL}/weights/",
        f"tinker://{MODEL}/weights/.a",
        f"tinker://{MODEL}/weights/..",
        f"tinker://{MODEL}/weights/a/b",
        f"tinker://{MODEL}/weights/a.tmp-1",
        f"tinker://{MODEL}/weights/{'a' * 129}",
        f"tinker://{MODEL}/snapshots/a",
        "tinker://../weights/a",
        "tinker://0123456789abcdef:train:x/weights/a",
    ],
)
def test_a_path_that_names_no_checkpoint_is_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(RequestRefused, match="path must be tinker://MODEL/weights/NAME of a checkpoint") as refused:
        Checkpoints(tmp_path).folder(path)
    assert refused.value.status == 404


def test_a_checkpoint_is_described_with_its_size_and_dates(tmp_path: Path) -> None:
    told = describe(save(tmp_path, user_metadata={"note": 1}))
    assert told.pop("time")[:2] == "20"
    assert told == {
        "checkpoint_id": "weights/a",
        "checkpoint_type": "training",
        "tinker_path": PATH,
        "size_bytes": 5,
        "public": False,
        "user_metadata": {"note": 1},
        "expires_at": None,
    }


def test_rest_calls_tell_of_models_and_checkpoints_and_change_them(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as client:
            await client.begin()
            model = await client.make()
            await client.ordered("save_weights", model, path="a")
            await client.ordered("save_weights_for_sampler", model, path="b")
            await client.sampler(model)
            at = f"training_runs/{model}"
            found = await client.call(at, method="GET")
            told = {name: found[name] for name in ("training_run_id", "base_model", "is_lora", "lora_rank")}
            assert told == {"training_run_id": model, "base_model": NAME, "is_lora": True, "lora_rank": 4}
            assert found["last_checkpoint"]["checkpoint_id"] == "weights/a"
            assert found["last_sampler_checkpoint"]["checkpoint_id"] == "sampler_weights/b"
            for query, ids in {
                "": ["weights/a", "sampler_weights/b"],
                "?offset=1&limit=1": ["sampler_weights/b"],
            }.items():
                page = await client.call(f"checkpoints{query}", method="GET")
                assert [one["checkpoint_id"] for one in page["checkpoints"]] == ids
                assert page["cursor"]["total_count"] == 2
            session = await client.call(f"sessions/{client.session}", method="GET")
            assert session["training_run_ids"] == [model]
            assert session["sampler_ids"] == [f"{client.session}:sample:0"]
            for method, public in (("POST", True), ("DELETE", False)):
                await client.call(f"{at}/checkpoints/weights/a/publish", method=method)
                (first, _) = (await client.call(f"{at}/checkpoints", method="GET"))["checkpoints"]
                assert first["public"] is public
            for seconds, dated in ((3600, True), (None, False)):
                await client.call(f"{at}/checkpoints/weights/a/ttl", {"ttl_seconds": seconds}, "PUT")
                (first, _) = (await client.call(f"{at}/checkpoints", method="GET"))["checkpoints"]
                assert (first["expires_at"] is not None) is dated
            await client.call(f"{at}/checkpoints/weights/a", method="DELETE")
            assert [one.path[-1] for one in client.service.checkpoints.all()] == ["b"]

    asyncio.run(run())


def test_sessions_and_their_names_are_bounded(tmp_path: Path) -> None:
    async def run() -> list[int]:
        async with serving(tmp_path, limits=ServiceLimits(sessions=1, names=1)) as client:
            await client.begin()
            await client.make()
            found = []
            for refused in (client.begin(), client.make(1)):
                with pytest.raises(RequestRefused) as error:
                    await refused
                found.append(error.value.status)
            return found

    assert asyncio.run(run()) == [429, 429]


def test_a_checkpoint_of_another_rank_is_not_loaded_into_a_model(tmp_path: Path) -> None:
    async def run() -> Any:
        async with serving(tmp_path) as client:
            await client.begin()
            path = (await client.ordered("save_weights", await client.make(), path="a"))["path"]
            client.seq = 0
            return await client.ordered("load_weights", await client.make(1, rank=2), path=path)

    found = asyncio.run(run())
    assert found["category"] == "user"
    assert "is of another base, rank or layers than the model" in found["error"]


def test_weights_of_a_base_that_is_not_served_are_no_sampler(tmp_path: Path) -> None:
    facts = facts_of(MODEL, ModelShape("gone", 4), 1, {})
    path = f"tinker://{MODEL}/sampler_weights/a"
    Checkpoints(tmp_path / "checkpoints").save(path, facts, lambda aside: None, overwrite=False)

    async def run() -> Any:
        async with serving(tmp_path) as client:
            await client.begin()
            body = {"session_id": client.session, "sampling_session_seq_id": 0, "model_path": path}
            return await client.call("create_sampling_session", body)

    with pytest.raises(RequestRefused, match=f"base model must be one of {NAME}, got gone"):
        asyncio.run(run())


def test_the_row_of_a_served_step_has_all_tokens_since_the_one_before(tmp_path: Path) -> None:
    async def run() -> list[Any]:
        async with serving(tmp_path) as client:
            await client.begin()
            model = await client.make()
            texts = [cross_entropy([5, 9, 11, 3, 8])], [cross_entropy([7, 2, 30])]
            losses = [(await client.train(model, one))[0]["loss:sum"] for one in texts]
            await client.step(model)
            return losses

    losses = asyncio.run(run())
    (row,) = read_rows(next((tmp_path / "runs").glob("*/metrics.jsonl")))
    assert row["num_tokens"] == 6
    assert row["loss"] == pytest.approx(sum(losses))
    assert row["grad_norm"] > 0
