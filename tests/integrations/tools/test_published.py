"""Rows of tool calls as others publish them, and what answers to them earn."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from covey.config.schema import Config
from covey.environments.data.settings import DataConfig
from covey.environments.episode import Answer, Episode
from covey.types import CutText, Prompt, Reward
from covey_integrations.tools.published import with_calls
from covey_integrations.tools.rows import RowTools
from covey_integrations.tools.settings import ToolsConfig
from covey_tasks.rewards.calls import tool_calls

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
SCHEMA = {"type": "function", "function": {"name": "rain", "description": "Will it rain?", "parameters": CITY}}
BARE = SCHEMA["function"]
ROME = [{"name": "rain", "arguments": {"city": "Rome"}}]
ASKED = [{"role": "user", "content": "Rain in Rome?"}]
TAGGED = '<tool_call>\n{"name": "rain", "arguments": {"city": "Rome"}}\n</tool_call>'
ROWS: dict[str, dict[str, Any]] = {
    "xLAM": {
        "prompt": "Rain in Rome?",
        "answers": json.dumps(ROME),
        "tools": json.dumps([{**BARE, "parameters": {"city": {"type": "str", "description": "Where."}}}]),
    },
    "OpenAI": {
        "prompt": [
            *ASKED,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"type": "function", "function": {"name": "rain", "arguments": '{"city": "Rome"}'}}],
            },
            {"role": "tool", "content": "No."},
            {"role": "assistant", "content": "It will not."},
        ],
        "tools": [SCHEMA],
    },
    "Hermes": {
        "prompt": [
            {"from": "system", "value": f"You call functions: <tools>{json.dumps([SCHEMA])}</tools>"},
            {"from": "human", "value": "Rain in Rome?"},
            {"from": "gpt", "value": TAGGED.replace('"', "'")},
        ],
        "tools": json.dumps([SCHEMA]),
    },
    "ToolACE": {
        "system": f"Functions that you can invoke:\n{json.dumps([BARE])}\nPut it as [f(a=1)].",
        "prompt": [{"from": "user", "value": "Rain in Rome?"}, {"from": "assistant", "value": '[rain(city="Rome")]'}],
    },
    "APIGen-MT": {
        "prompt": [
            {"from": "human", "value": "Rain in Rome?"},
            {"from": "function_call", "value": json.dumps(ROME[0])},
            {"from": "observation", "value": "No."},
        ],
        "tools": json.dumps([BARE]),
    },
    "BFCL": {
        "prompt": [ASKED],
        "function": [{**BARE, "parameters": {**CITY, "type": "dict"}}],
        "ground_truth": [{"rain": {"city": ["Rome", "Roma"]}}],
    },
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_tells_its_question_its_tools_and_the_right_calls(name: str) -> None:
    found = with_calls(ROWS[name], "prompt")
    assert found["prompt"] == ASKED
    (tool,) = found["tools"]
    assert (tool["type"], tool["function"]["name"]) == ("function", "rain")
    parameters = tool["function"]["parameters"]
    assert (parameters["type"], parameters["required"]) == ("object", ["city"])
    assert parameters["properties"]["city"]["type"] == "string"
    assert found["calls"] == (ROME if name != "BFCL" else [{"name": "rain", "any_of": {"city": ["Rome", "Roma"]}}])


def test_the_arrays_of_a_data_frame_are_lists() -> None:
    parameters = {**CITY, "required": np.array(["city"], dtype=object)}
    tools = np.array([{**SCHEMA, "function": {**BARE, "parameters": parameters}}], dtype=object)
    calls = np.array([{"name": "rain", "arguments": {"city": np.array(["Rome"], dtype=object)}}], dtype=object)
    found = with_calls({"prompt": "?", "tools": tools, "answers": calls}, "prompt")
    assert found["tools"][0]["function"]["parameters"]["required"] == ["city"]
    assert found["calls"] == [{"name": "rain", "arguments": {"city": ["Rome"]}}]


def test_types_and_defaults_are_told_in_jsons_words() -> None:
    given = {
        "n": {"type": "int, optional", "description": "N"},
        "xs": {"type": "List[float]", "default": []},
        "u": {"type": "Union[int, str]", "enum": None},
    }
    row = {"prompt": "?", "tools": [{"name": "f", "parameters": given}], "answers": "[]"}
    (tool,) = with_calls(row, "prompt")["tools"]
    assert tool["function"]["parameters"] == {
        "properties": {
            "n": {"type": "integer", "description": "N"},
            "xs": {"type": "array", "default": []},
            "u": {},
        },
        "required": ["u"],
        "type": "object",
    }


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "?", "answers": "[]"}, "has no tools (has: prompt, answers); environment=tools needs"),
        ({"prompt": "?", "tools": [BARE]}, "has no right calls in calls, answers, tool_calls"),
        ({"prompt": "?", "tools": [BARE], "answers": "[3]"}, "has a right call that cannot be read: 3"),
        ({"prompt": "?", "tools": [{}], "answers": "[]"}, "has a tool without a name: {}"),
        (
            {"prompt": [*ASKED, {"role": "assistant", "content": "[rain(city=x)]"}], "tools": [BARE]},
            "has a right call that cannot be read: '[rain(city=x)]'",
        ),
    ],
)
def test_a_row_without_tools_or_right_calls_is_refused(row: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as refused:
        with_calls(row, "prompt")
    assert str(refused.value).startswith(said)


def message(*calls: dict[str, Any], content: str = "", **more: Any) -> list[dict[str, Any]]:
    made = [{"type": "function", "function": one} for one in calls]
    return [{"role": "assistant", "content": content, **({"tool_calls": made} if made else {}), **more}]


@pytest.mark.parametrize(
    ("said", "due", "reward"),
    [
        (message(*ROME), ROME, 1.0),
        (message(*ROME, content="Let me see."), ROME, 1.0),
        (message(*ROME, *ROME), ROME, 0.0),
        (message(*ROME, unread_calls=1), ROME, 0.0),
        (message(content=TAGGED), ROME, 0.0),
        (message(content="It will rain."), ROME, 0.0),
        (message(content="It will rain."), [], 1.0),
        (message(content=" "), [], 0.0),
        (message(*ROME), [], 0.0),
        (message(content='{"name": "rain", "arguments": {}}'), [], 0.0),
        (message(content='[rain(city="Rome")]'), [], 0.0),
        (message(content=CutText("It will")), [], 0.0),
        ([], [], 0.0),
    ],
)
def test_the_reward_is_1_for_the_right_calls_alone(said: Any, due: Any, reward: float) -> None:
    assert tool_calls([said], [due], [[SCHEMA]]) == [reward]
    assert tool_calls([said], [None], [None]) == [None]


async def earned(environment: RowTools, prompt: Prompt, text: str) -> tuple[Any, str | None]:
    episode: Episode = environment.episode(prompt, 0)
    await episode.reset()
    conversation = (*prompt.text, {"role": "assistant", "content": text})
    found = await episode.reply(Answer(text, (), "stop", 1, conversation))  # type: ignore[arg-type]
    assert found.done
    (verdict,) = await environment.score_group(prompt, [episode], [conversation])  # type: ignore[list-item]
    await episode.close()
    return verdict.value if isinstance(verdict, Reward) else verdict, found.stop_reason


def test_the_first_turn_that_calls_is_judged_and_no_tool_is_run(tmp_path: Path) -> None:
    rows = [{**ROWS["xLAM"], "prompt": f"Rain in Rome? {n}", "n": n} for n in range(4)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    config = Config(data=DataConfig(path=str(tmp_path / "rows.json")), rewards=["tool_calls"])
    environment = ToolsConfig(in_process=True).build(config, print)
    assert isinstance(environment, RowTools)
    prompt = environment.prompts("train")[0]
    assert [tool["function"]["name"] for tool in environment.tool_schemas(prompt)] == ["rain"]
    said = (
        TAGGED,
        f"{TAGGED} and {TAGGED}",
        TAGGED.replace("Rome", "Oslo"),
        "No rain.",
        TAGGED + "<tool_call>{</tool_call>",
    )
    found = [asyncio.run(earned(environment, prompt, text)) for text in said]
    assert [value for value, _ in found] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert found[0][1] == "max_tool_calls"
    environment.close()
