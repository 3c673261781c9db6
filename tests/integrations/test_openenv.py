"""OpenEnv by a server that speaks its wire."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from covey.config.validate import validate
from covey.environments.data.settings import DataConfig
from covey.environments.episode import Observation
from covey.environments.registry import build
from covey.types import Prompt, Reward
from covey_integrations.openenv import wire
from covey_integrations.openenv.environment import OpenEnv, action_of, shown
from covey_integrations.openenv.wire import ActionRefused, Session, addresses
from covey_integrations.settings import OpenEnvConfig
from covey_integrations.tools.calling import ToolServerLost

from ..support.doors.openenv_server import CALLS, GUESS, PAIR, OpenEnvServer, openenv_server
from ..support.doors.training import trained
from ..support.small import small_config
from ..support.tools import call, play, run


@pytest.fixture
def server() -> Iterator[OpenEnvServer]:
    with openenv_server() as made:
        yield made


def opened(server: OpenEnvServer, **settings: Any) -> OpenEnv:
    config = small_config()
    config.environment = OpenEnvConfig(url=server.url, **{"num_train": 3, "num_test": 2, **settings})
    found = build(config)
    assert isinstance(found, OpenEnv)
    return found


def played(environment: OpenEnv, texts: Sequence[str], prompt: Prompt | None = None) -> tuple[list[Observation], float]:
    """What an episode says, and what all of it earns."""

    async def whole() -> tuple[list[Observation], float]:
        episode = environment.episode(prompt or environment.prompts("train")[0], 0)
        said = await play(episode, texts)
        verdict = await episode.score(())
        assert isinstance(verdict, Reward)
        return said, verdict.value + sum(turn.reward or 0.0 for turn in said)

    return run(whole())


# ---- text and actions


@pytest.mark.parametrize(
    ("text", "schema", "action"),
    [
        ("crane", GUESS, {"guess": "crane"}),
        (" 42\n", GUESS, {"guess": "42"}),
        ('"crane"', GUESS, {"guess": "crane"}),
        ('{"guess": "crane"}', GUESS, {"guess": "crane"}),
        ('```json\n{"row": 1, "column": 2}\n```', PAIR, {"row": 1, "column": 2}),
        ('<think>{"row": 9}</think> {"row": 1, "column": 2}', PAIR, {"row": 1, "column": 2}),
        ("crane <think>or slate", GUESS, {"guess": "crane"}),
        ("<think>so slate", GUESS, {"guess": ""}),
        ('{"guess": "\\ud800"}', GUESS, {"guess": "?"}),
        ("7", {"required": ["at"], "properties": {"at": {"type": "integer"}}}, {"at": 7}),
    ],
)
def test_an_answer_is_json_or_the_value_of_the_one_field(text: str, schema: Any, action: Any) -> None:
    assert action_of(text, schema) == action


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("left", "a JSON object with row, column"),
        ('<think>{"row": 1, "column": 2}', "a JSON object with row, column"),
        ('{"row": NaN, "column": 2}', "the fields of the action hold nan, which is no number in JSON"),
        ('{"row": 1, "column": -1e999}', "the fields of the action hold -inf"),
        ('{"row": ' + "[" * 900 + "]" * 900 + "}", "nested more than 64 deep"),
    ],
)
def test_an_answer_that_is_no_action_says_what_one_is(text: str, problem: str) -> None:
    with pytest.raises(ActionRefused, match=problem):
        action_of(text, PAIR)


def test_the_policy_reads_one_field_or_all_but_what_is_not_for_it() -> None:
    seen = {"text": "hot", "metadata": {"answer": 3}, "reward": 1}
    assert shown(seen, None) == "hot"
    assert shown(seen | {"left": 2}, None) == '{"text": "hot", "left": 2}'
    assert shown(seen | {"left": 2}, "left") == "2"
    assert shown({"metadata": {"answer": 3}}, None) == ""


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("http://h:8000", ("http://h:8000", "ws://h:8000/ws")),
        ("https://h/env/", ("https://h/env", "wss://h/env/ws")),
        ("wss://h", ("https://h", "wss://h/ws")),
    ],
)
def test_a_server_has_one_address_for_both_wires(url: str, found: tuple[str, str]) -> None:
    assert addresses(url) == found


# ---- episodes


def test_steps_earn_what_the_server_says_and_the_last_one_is_the_verdict(server: OpenEnvServer) -> None:
    environment = opened(server, options={"size": 4}, problem_seed=5)
    said, earned = played(environment, ["a", "bcd", "ef", "never heard"])
    assert [turn.messages for turn in said] == ["\n\nseed 5", "step 1", "step 2", "step 3"]
    assert [turn.reward for turn in said] == [None, 0.1, 0.3, None]
    assert [turn.done for turn in said] == [False, False, False, True]
    assert earned == pytest.approx(0.6)
    assert server.heard[0] == {"type": "reset", "data": {"size": 4, "seed": 5}}
    assert server.closed.acquire(timeout=10)
    assert server.heard[-1] == {"type": "close"}


def test_the_splits_share_no_seed(server: OpenEnvServer) -> None:
    environment = opened(server)
    seeds = [prompt.columns["seed"] for split in ("train", "test") for prompt in environment.prompts(split)]
    assert seeds == [0, 1, 2, 3, 4]


def test_a_wrong_action_is_words_for_the_policy_and_no_reward(server: OpenEnvServer) -> None:
    said, earned = played(opened(server), ['{"guess": 3}', "abc"])
    assert said[1] == Observation("This is no action: guess: Input should be a valid string", is_void=True)
    assert said[2].messages == "step 1"
    assert earned == pytest.approx(0.3)


def test_the_policy_is_told_which_actions_there_are_where_text_is_none() -> None:
    with openenv_server(schema=PAIR) as server:
        (first, second), _ = played(opened(server, num_train=1), ['{"row": 1, "column": 2}'])
        assert isinstance(first.messages, str)
        begin, schema = first.messages.split("schema: ")
        assert begin == "\n\nseed 0\n\nAnswer with a JSON object of this "
        assert list(json.loads(schema)["properties"]) == ["row", "column"]
        assert second.messages == '{"row": 1, "column": 2}'
        (first, second), _ = played(
            opened(server, describe_actions=False, observation_field="row"), ['{"row": 1, "column": 2}']
        )
        assert (first.messages, second.messages) == ("", "1")


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("break", r"broke \(EXECUTION_ERROR\): the game broke"),
        ("gone", "is gone"),
        ("noise", "speaks something else: 'no JSON'"),
        ("nan", "gave a reward that is"),
        ("hang", r"has not answered, for 0.2 s \(environment.server_timeout=0.2\)"),
    ],
)
def test_a_server_that_breaks_is_no_reward(server: OpenEnvServer, action: str, reason: str) -> None:
    environment = opened(server, server_timeout=0.2 if action == "hang" else 20.0)
    with pytest.raises(ToolServerLost, match=reason):
        played(environment, ["a", action])


def test_a_server_that_is_not_there_any_more_is_named() -> None:
    with openenv_server() as server:
        environment = opened(server)
    with pytest.raises(ToolServerLost, match=r"the server ws://127.0.0.1:\d+/ws is gone"):
        played(environment, ["a"])


def test_an_episode_that_is_over_when_it_begins_is_no_attempt(server: OpenEnvServer) -> None:
    with pytest.raises(ToolServerLost, match="over before it begins: nothing to do"):
        played(opened(server, options={"over": True}), ["a"])


def test_a_client_without_a_free_session_waits_for_one() -> None:
    with openenv_server(seats=1) as server:

        async def both() -> Any:
            first, second = Session(server.url, 20.0), Session(server.url, 20.0)
            await first.reset({"seed": 1})
            waiting = asyncio.ensure_future(second.reset({"seed": 2}))
            await asyncio.to_thread(server.full.wait, 10)
            assert not waiting.done()
            await first.close()
            seen = await waiting
            await second.close()
            return seen.observation["text"]

        assert run(both()) == "seed 2"
        assert server.most_open == 1


def test_a_server_that_stays_full_is_named_with_what_it_says() -> None:
    with openenv_server(seats=0) as server, pytest.raises(ToolServerLost, match=r"no free seat .0 of 0 sessions"):
        run(Session(server.url, 0.2).reset({}))


def test_attempts_at_once_have_environments_of_their_own(server: OpenEnvServer) -> None:
    environment = opened(server)

    async def all_of_them() -> Any:
        prompts = environment.prompts("train")
        return await asyncio.gather(*(play(environment.episode(prompt, 0), ["a", "b"]) for prompt in prompts))

    found = run(all_of_them())
    assert [[turn.messages for turn in said] for said in found] == [
        [f"\n\nseed {seed}", "step 1", "step 2"] for seed in range(3)
    ]


# ---- tools


def test_tools_of_a_server_are_called_in_order_and_earn_what_it_says() -> None:
    with openenv_server(schema=CALLS) as server:
        environment = opened(server)
        names = [schema["function"]["name"] for schema in environment.tool_schemas(environment.prompts("train")[0])]
        assert names == ["add", "stop"]
        assert environment.facts() == {"openenv_tools": ["add", "stop"]}
        said, earned = played(environment, [call("add", number=2) + call("add", number=3), call("stop")])
        assert [message["content"] for message in said[1].messages if not isinstance(message, str)] == ["2", "5"]
        assert (said[1].reward, said[1].done, said[2].reward, said[2].done) == (0.5, False, None, True)
        assert earned == pytest.approx(5.5)


def test_an_answer_without_a_call_ends_it_and_errors_are_words() -> None:
    with openenv_server(schema=CALLS) as server:
        said, earned = played(opened(server), [call("fly"), "<tool_call>{</tool_call>", "I am done"])
        told = [json.loads(turn.messages[0]["content"])["error"] for turn in said[1:3]]  # type: ignore[index,arg-type]
        assert told[0] == "no fly"
        assert told[1].startswith("the call of a tool is no valid JSON")
        assert [turn.is_void for turn in said] == [False, False, True, False]
        assert (said[3].done, earned) == (True, 0.0)


def test_a_call_that_the_servers_system_lost_is_no_word_for_the_policy() -> None:
    with openenv_server(schema=CALLS) as server, pytest.raises(ToolServerLost, match=r"the tool slow of .* failed"):
        played(opened(server), [call("slow")])


# ---- settings


def test_what_is_no_server_is_named_before_anything_is_played() -> None:
    config = small_config()
    config.environment = OpenEnvConfig(url="http://127.0.0.1:1")
    with pytest.raises(ValueError, match=r"environment.url=http://127.0.0.1:1 does not answer as a server of OpenEnv"):
        build(config)
    config.environment = OpenEnvConfig()
    with pytest.raises(ValueError, match=r"environment=openenv needs environment.url=http://HOST:PORT .*, got none"):
        validate(config)


@pytest.mark.parametrize(
    "raw",
    [
        '{"type": "observation", "data": []}',
        '{"type": "observation", "data": {"observation": "won", "reward": 1}}',
        '{"type": "error", "data": "x"}',
        "[" * 100_000,
    ],
)
def test_what_no_server_says_is_lost(raw: str) -> None:
    with pytest.raises(ToolServerLost, match="speaks something else"):
        wire._seen(raw, "ws://here")


@pytest.mark.parametrize("tools", [["f"], [{}], "f", {"f": {}}])
def test_a_server_that_lists_what_is_no_tool_is_refused(tools: Any) -> None:
    with openenv_server(schema=CALLS, tools=tools) as server, pytest.raises(ValueError, match="lists what is no tool"):
        opened(server)


def test_a_server_without_tools_that_takes_nothing_else_is_refused() -> None:
    with openenv_server(schema=CALLS, tools=[]) as server, pytest.raises(ValueError, match="has no tools"):
        opened(server)


@pytest.mark.long
def test_it_trains_and_rows_are_what_reset_gets(server: OpenEnvServer, tmp_path: Path) -> None:
    rows = [{"prompt": f"Game {n}.", "seed": n, "size": 4} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rollouts = trained(
        OpenEnvConfig(url=server.url, max_turns=3),
        tmp_path / "run",
        data=DataConfig(str(tmp_path / "rows.jsonl")),
        sampling__stop=[*"aeimostx "],
        sampling__max_tokens=40,
    )
    finished = [rollout for rollout in rollouts if rollout["stop_reason"] == "completed"]
    assert finished
    for rollout in finished:
        said = [message["content"] for message in rollout["completion"] if message["role"] == "assistant"]
        expected = sum(len(text.strip()) / 10 for text in said if text.strip())
        assert rollout["reward"] == pytest.approx(expected)
    resets = [message["data"] for message in server.heard if message["type"] == "reset"]
    assert {tuple(sorted(data)) for data in resets} == {("seed", "size")}
