"""Samples through the service: seeds, batches, stops, scores, snapshots."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .served import NAME, Client, bases, cross_entropy, serving

PROMPT = [5, 9, 11, 3]
TEXTS = [cross_entropy([5, 9, 11, 3, 8])]


def tokens(found: Any) -> list[list[int]]:
    return [np.frombuffer(each["tokens"], "<i4").tolist() for each in found["sequences"]]


def floats(raw: bytes) -> list[float]:
    return np.frombuffer(raw, "<f4").tolist()


async def base_sampler(client: Client, place: int = 0) -> str:
    body = {"session_id": client.session, "sampling_session_seq_id": place, "base_model": NAME}
    return str((await client.call("create_sampling_session", body))["sampling_session_id"])


def run(root: Path, act: Any, **more: Any) -> Any:
    async def inner() -> Any:
        async with serving(root, **more) as client:
            await client.begin()
            return await act(client)

    return asyncio.run(inner())


def test_requests_without_a_seed_differ_and_repeat_in_the_next_session(tmp_path: Path) -> None:
    async def act(client: Client) -> list[Any]:
        found = []
        for _ in range(2):
            await client.begin()
            sampler = await base_sampler(client)
            found.append([tokens(await client.sample(sampler, seq, PROMPT)) for seq in range(4)])
        return found

    first, second = run(tmp_path, act)
    assert first == second
    assert len({str(each) for each in first}) > 1


def test_samples_follow_from_the_numbers_of_requests_and_not_from_their_arrival(tmp_path: Path) -> None:
    async def act(client: Client) -> tuple[Any, Any]:
        alone = await base_sampler(client)
        found = await asyncio.gather(*[client.sample(alone, seq, PROMPT) for seq in (3, 0, 5, 1, 4, 2)])
        calls = client.service.compute.samplers._slots.popitem()[1].engine.take_stats()
        assert calls.prompt_tokens == 4  # their prompt is encoded once
        at_once = dict(zip((3, 0, 5, 1, 4, 2), map(tokens, found), strict=True))
        await client.begin()
        sampler = await base_sampler(client)
        return at_once, {seq: tokens(await client.sample(sampler, seq, PROMPT)) for seq in range(6)}

    at_once, in_turn = run(tmp_path, act)
    assert at_once == in_turn
    assert len({str(each) for each in in_turn.values()}) > 3


def test_copies_of_a_sampler_draw_their_own_samples_again_in_the_next_session(tmp_path: Path) -> None:
    async def act(client: Client) -> list[Any]:
        found = []
        for copy in (7, 123456):
            await client.begin()
            sampler = await base_sampler(client)
            numbers = (copy * 10**9, 0, copy * 10**9 + 1)
            found.append([tokens(await client.sample(sampler, seq, PROMPT, max_tokens=8)) for seq in numbers])
        return found

    first, second = run(tmp_path, act)
    assert first == second
    assert len({str(each) for each in first}) == 3


def test_a_seed_decides_the_samples_and_their_index_tells_them_apart(tmp_path: Path) -> None:
    async def act(client: Client) -> list[Any]:
        sampler = await base_sampler(client)
        ask = {"num_samples": 3, "params": {"seed": 7}}
        return [tokens(await client.sample(sampler, seq, PROMPT, **ask)) for seq in range(2)]

    first, second = run(tmp_path, act)
    assert first == second
    assert len({str(each) for each in first}) > 1


def test_a_repeated_request_is_the_same_promise(tmp_path: Path) -> None:
    async def act(client: Client) -> Any:
        sampler = await base_sampler(client)
        prompt = {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]}
        body = {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt, "sampling_params": {"max_tokens": 2}}
        return [await client.call("asample", {**body, "num_samples": 2}) for _ in range(2)]

    first, second = run(tmp_path, act)
    assert first == second
    assert len(first["sample_sequence_ids"]) == 2


def test_logprobs_of_samples_are_those_that_training_scores(tmp_path: Path) -> None:
    async def act(client: Client) -> tuple[list[float], list[float]]:
        model = await client.make()
        await client.train(model, TEXTS)
        await client.step(model)
        found = await client.sample(await client.sampler(model), 0, PROMPT, max_tokens=8)
        (ids,) = tokens(found)
        _, (scores,) = await client.train(model, [cross_entropy([*PROMPT, *ids])], forward_only=True)
        return floats(found["sequences"][0]["logprobs"]), scores[len(PROMPT) - 1 :].tolist()

    sampled, scored = run(tmp_path, act)
    np.testing.assert_allclose(sampled, scored, atol=1e-5)


def test_a_stop_token_of_the_request_ends_and_stays(tmp_path: Path) -> None:
    async def act(client: Client) -> Any:
        sampler = await base_sampler(client)
        free = await client.sample(sampler, 0, PROMPT, params={"seed": 1, "stop": []}, max_tokens=12)
        stop = tokens(free)[0][4]
        ended = await client.sample(sampler, 1, PROMPT, params={"seed": 1, "stop": [stop]}, max_tokens=12)
        return free, ended, stop

    free, ended, stop = run(tmp_path, act)
    (all_ids,), (ids,) = tokens(free), tokens(ended)
    assert ids == all_ids[: all_ids.index(stop) + 1]
    assert ended["sequences"][0]["stop_reason"] == 0
    assert (len(all_ids), free["sequences"][0]["stop_reason"]) == (12, 1)


def test_prompt_scores_have_the_prompts_length_and_no_first_value(tmp_path: Path) -> None:
    async def act(client: Client) -> Any:
        sampler = await base_sampler(client)
        ask = {"prompt_logprobs": True, "topk_prompt_logprobs": 2, "topk_sample_logprobs": 3}
        whole = await client.sample(sampler, 0, PROMPT, **ask)
        last = await client.sample(sampler, 1, PROMPT, prompt_logprobs=True, prompt_logprobs_last_n=1)
        model = await client.make()
        _, (scores,) = await client.train(model, [cross_entropy(PROMPT)], forward_only=True)
        return whole, last, scores

    whole, last, scores = run(tmp_path, act)
    found = floats(whole["prompt_logprobs"])
    np.testing.assert_allclose(found[1:], scores, atol=1e-5)
    assert np.isnan(found[0])
    assert np.isnan(floats(last["prompt_logprobs"])).tolist() == [True, True, True, False]
    assert floats(whole["topk_prompt"]["logprobs"])[:2] == [-99999.0, -99999.0]
    assert (whole["topk_prompt"]["k"], whole["topk_prompt"]["length"]) == (2, 4)
    best = np.array(floats(whole["topk_prompt"]["logprobs"])).reshape(4, 2)[1:]
    assert (best[:, 0] >= best[:, 1]).all()
    assert (best[:, 0] >= np.array(found[1:]) - 1e-6).all()
    assert (whole["sequences"][0]["topk"]["k"], whole["sequences"][0]["topk"]["length"]) == (3, 5)
    assert last["topk_prompt"] is None


def test_a_sampler_keeps_the_weights_of_its_place_in_the_order(tmp_path: Path) -> None:
    async def act(client: Client) -> Any:
        model = await client.make()
        await client.train(model, TEXTS)
        await client.step(model)
        early = await client.sampler(model, 0)
        ask = {"prompt_logprobs": True, "params": {"seed": 1}}
        before = await client.sample(early, 0, PROMPT, **ask)
        await client.train(model, TEXTS)
        await client.step(model)
        late = await client.sampler(model, 1)
        return before, await client.sample(late, 0, PROMPT, **ask), await client.sample(early, 1, PROMPT, **ask)

    before, late, after = run(tmp_path, act)
    assert before == after
    assert late["prompt_logprobs"] != before["prompt_logprobs"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"params": {"temperature": -1}}, "temperature must be in [0, 1e+300], got -1"),
        ({"params": {"top_p": 2}}, "top_p must be in"),
        ({"params": {"max_tokens": 0}}, "max_tokens must be in [1, "),
        ({"params": {"max_tokens": 10**9}}, "max_tokens must be in [1, "),
        ({"params": {"stop": [[1]]}}, "stop must be strings or token ids"),
        ({"params": {"stop": ["a", 3]}}, "stop must be strings or token ids"),
        ({"params": {"stop": ""}}, "stop strings must not be empty"),
        ({"prompt": {"chunks": []}}, "prompt must hold at least one token"),
        ({"prompt": {"chunks": [{"type": "image", "data": ""}]}}, "prompt must be chunks of encoded_text"),
        ({"prompt": {"chunks": [{"tokens": [10**7]}]}}, "prompt must be token ids in"),
        ({"prompt": {"chunks": [{"tokens": [1] * 5000}]}}, "positions"),
        ({"topk_prompt_logprobs": 10**6}, "topk_prompt_logprobs must be in [0, 128]"),
        ({"target_prompt_logprobs": {"data": [1], "shape": [7, 1]}}, "target_prompt_logprobs must be"),
        ({"params": {"temperature": 10**400}}, "temperature must be in [0, 1e+300], got 1000"),
        ({"params": {"temperature": 1e-300}}, "temperature must be 0, for the likeliest tokens, or >= 1e-06"),
        ({"target_prompt_logprobs": {"data": [2**63] * 3, "shape": [3, 1]}}, "must be a dense matrix of token ids"),
        ({"target_prompt_logprobs": {"data": [1] * 3, "shape": [3, None]}}, "must be a dense matrix of token ids"),
        ({"num_samples": 1024, "max_tokens": 3000}, "num_samples x max_tokens x topk_sample_logprobs must be at most"),
        ({"prompt_alt_tokens_k": 3}, "prompt_alt_tokens_k must be 0"),
        ({"record_stability_info": True}, "take loss_fn=importance_sampling"),
    ],
)
def test_a_wrong_sampling_request_fails_alone_in_one_line(tmp_path: Path, body: dict[str, Any], message: str) -> None:
    async def act(client: Client) -> Any:
        sampler = await base_sampler(client)
        return await asyncio.gather(client.sample(sampler, 0, PROMPT, **body), client.sample(sampler, 1, PROMPT))

    wrong, right = run(tmp_path, act)
    assert wrong["category"] == "user"
    assert message in wrong["error"]
    assert "\n" not in wrong["error"]
    assert len(tokens(right)[0]) == 5


def test_further_targets_of_a_prompt_are_scored(tmp_path: Path) -> None:
    async def act(client: Client) -> Any:
        sampler = await base_sampler(client)
        targets = {"data": [9, 1, 11, 2, 3, 4], "dtype": "int64", "shape": [3, 2]}
        ask = {"prompt_logprobs": True, "target_prompt_logprobs": targets}
        return await client.sample(sampler, 0, PROMPT, **ask)

    found = run(tmp_path, act)
    scores = np.array(floats(found["target_prompt_logprobs"]["dense"])).reshape(3, 2)
    np.testing.assert_allclose(scores[:, 0], floats(found["prompt_logprobs"])[1:], atol=1e-5)


def test_a_full_models_sampler_has_its_weights_and_the_base_its_own(tmp_path: Path) -> None:
    ask, told = {"prompt_logprobs": True}, []

    async def act(client: Client) -> Any:
        base = await base_sampler(client, 7)
        if not told:  # the base before the model, then after it alone
            told.append(await client.sample(base, 0, PROMPT, **ask))
        model = await client.make()
        for _ in range(2):
            await client.train(model, TEXTS)
            await client.step(model)
        found = await client.sample(await client.sampler(model), 0, PROMPT, **ask)
        told.append(await client.sample(base, 1, PROMPT, **ask))
        _, (scores,) = await client.train(model, [cross_entropy(PROMPT)], forward_only=True)
        return floats(found["prompt_logprobs"])[1:], scores

    for place in range(2):
        sampled, scored = run(tmp_path / str(place), act, of=bases(full=True))
        np.testing.assert_allclose(sampled, scored, atol=1e-5)
        assert abs(np.array(sampled) - floats(told[0]["prompt_logprobs"])[1:]).max() > 0.1
    assert len({each["prompt_logprobs"] for each in told}) == 1


def test_a_path_that_was_overwritten_samples_the_new_weights(tmp_path: Path) -> None:
    async def run() -> tuple[Any, ...]:
        async with serving(tmp_path) as client:
            await client.begin()
            model = await client.make()
            found = []
            for place, name in enumerate("aab"):
                told = await client.ordered("save_weights_for_sampler", model, path=name, overwrite=True)
                body = {"session_id": client.session, "sampling_session_seq_id": place, "model_path": told["path"]}
                sampler = (await client.call("create_sampling_session", body))["sampling_session_id"]
                answer = await client.sample(sampler, 0, PROMPT, max_tokens=16, params={"seed": 7})
                found.append(answer["sequences"][0]["logprobs"])
                if place == 0:
                    await client.train(model, TEXTS)
                    await client.step(model, learning_rate=0.1)
            return tuple(found)

    before, overwritten, other = asyncio.run(run())
    assert overwritten == other != before
