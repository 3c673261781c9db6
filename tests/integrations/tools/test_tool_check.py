"""What the preflight finds of tools."""

import threading
from dataclasses import replace

import pytest

from covey.environments.base import EnvironmentFault
from covey.environments.episode import Observation
from covey.types import Prompt
from covey_integrations.tools.calls import reader_for
from covey_integrations.tools.check import check_tools, example
from covey_integrations.tools.tool import tool_of

from ...support.models.chat_templates import qwen3
from ...support.tools import Sums, multiply, run, say
from .test_styles import TRLS


def breaks(word: str) -> str:
    """
    Break.

    Args:
        word: Why.
    """
    raise ValueError(f"no {word}")


def test_the_preflight_calls_every_tool_once() -> None:
    gate = threading.Event()

    def hang(times: int) -> None:
        """
        Hang.

        Args:
            times: How often.
        """
        gate.wait(60)

    environment = Sums()
    environment.functions = (multiply, hang, breaks)
    environment.tool_timeout = 0.1
    found = run(check_tools(environment, environment.prompts("train")[0], qwen3()))
    gate.set()
    assert found.read_by == "Hermes style (<tool_call>)"
    assert found.answers["multiply"] == "1"
    assert found.answers["breaks"] == '{"error": "ValueError: no a"}'
    assert found.silent == ("hang",)


def test_an_attempt_that_cannot_begin_is_named() -> None:
    class Closed(Sums):
        def opening(self, prompt: Prompt, state: object) -> Observation:  # type: ignore[override]
            raise OSError("closed")

    environment = Closed()
    with pytest.raises(EnvironmentFault, match=r"^Closed.opening raised OSError: closed"):
        run(check_tools(environment, environment.prompts("train")[0], qwen3()))


def count(words: list[str], limit: int | None = None, strict: bool = False, share: float = 0.5) -> int:
    """
    Count.

    Args:
        words: What.
        limit: At most.
        strict: Whether.
        share: How many.
    """
    return len(words)


@pytest.mark.parametrize("name", ["qwen3_5_nothink", "glm4moe", "llama3_1", "qwen3", "lfm2_v2"])
def test_a_call_of_every_tool_is_read_as_the_template_writes_it(name: str) -> None:
    environment = Sums()
    environment.functions = (multiply, say, count)
    environment.read_with(TRLS[name])
    assert run(check_tools(environment, environment.prompts("train")[0], TRLS[name])).answers["say"] == "a"
    environment.rules = replace(environment.rules, read=reader_for(TRLS["glm4moe" if name != "glm4moe" else "qwen3"]))
    with pytest.raises(ValueError, match="a call of the tool multiply is not read as the chat template writes it: "):
        run(check_tools(environment, environment.prompts("train")[0], TRLS[name]))


def test_an_example_obeys_its_schema() -> None:
    assert example(tool_of(say).parameters) == {"word": "a"}
    schema = {"properties": {"x": {"enum": ["q"]}, "y": {"minimum": 4, "type": "number"}}, "required": ["x", "y"]}
    assert example(schema) == {"x": "q", "y": 4}
