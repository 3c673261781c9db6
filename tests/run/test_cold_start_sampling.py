"""What a cold start samples for its accuracy: with the tools of the environment, and without a trace of its own."""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from covey.system.waits.signals import StopRequested
from covey.types import Prompt
from tests.support.scripted import Scripted

from ..support.small import TOKENIZER
from .test_cold_start import ALWAYS_SEVEN, config_for, warmed


@dataclass(frozen=True)
class Tooled(Scripted):
    """Shows tools, whose calls it reads by the tokenizer it was given."""

    tools: Sequence[str] = ()
    tokenizers: list[Any] = field(default_factory=list)

    def tool_schemas(self, prompt: Prompt) -> Sequence[Mapping[str, Any]]:
        return [{"type": "function", "function": {"name": name, "parameters": {}}} for name in self.tools]

    def read_with(self, tokenizer: Any) -> None:
        self.tokenizers.append(tokenizer)


@pytest.mark.long
def test_other_tools_make_another_cold_start_with_the_models_call_format(tmp_path: Path) -> None:
    environment = Tooled(ALWAYS_SEVEN.texts, ALWAYS_SEVEN.verdict, ALWAYS_SEVEN.answer)
    first, _ = warmed(config_for(tmp_path), environment)
    second, _ = warmed(config_for(tmp_path), replace(environment, tools=("multiply",)))
    assert second.path != first.path
    assert [tokenizer.eos_token for tokenizer in environment.tokenizers] == [TOKENIZER.eos_token] * 2


@pytest.mark.long
def test_one_that_is_stopped_while_it_samples_leaves_no_task_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def stops(prompt: Prompt, text: str) -> float:
        raise StopRequested

    with pytest.raises(StopRequested):
        warmed(config_for(tmp_path), replace(ALWAYS_SEVEN, verdict=stops))
    gc.collect()
    assert caplog.messages == []
