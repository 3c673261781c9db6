"""Before a run of several turns its gold turns are played: they must win, and come back token for token."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from covey.environments.base import Split
from covey.environments.episode import Episode
from covey.types import Message, Prompt, Reward
from covey_integrations.tools.environment import ToolEnvironment
from covey_integrations.tools.tool import Tool, tool_of
from covey_preflight.episodes import check_episodes, has_episodes
from covey_tasks.games.guess import Guess
from covey_tasks.games.lookup import Lookup
from covey_tasks.games.settings import GuessConfig, LookupConfig

from ..support.small import scripted
from .looked_at import Build, subjects

TURNS: dict[str, Any] = {"sampling__stop": [";"], "sampling__max_tokens": 4}


@pytest.fixture(name="build")
def _build() -> Iterator[Build]:
    with subjects() as build:
        yield build


def test_gold_turns_that_win_pass(build: Build) -> None:
    subject = build(Guess(GuessConfig()), **TURNS)
    assert has_episodes(subject)
    check = check_episodes(subject)
    assert check.passed
    assert check.figure.endswith("turns get the maximum reward, token for token")
    assert check.values["num_gold"] == len(subject.prompts)


def test_an_environment_of_one_answer_has_no_such_check(build: Build) -> None:
    assert not has_episodes(build(scripted()))


class Counted(Guess):
    """Counts its episodes, and knows no gold turns."""

    begun = ended = 0

    def episode(self, prompt: Prompt, seed: int) -> Episode:
        self.begun += 1
        made = super().episode(prompt, seed)

        async def close() -> None:
            self.ended += 1

        made.close = close  # type: ignore[method-assign]
        return made

    def gold_turn(self, prompt: Prompt, conversation: Sequence[Message]) -> None:
        return None


def test_without_gold_turns_preflight_leaves_no_episode_open(build: Build) -> None:
    environment = Counted(GuessConfig())
    subject = build(environment, **TURNS)
    assert has_episodes(subject)
    assert check_episodes(subject).figure == "no gold turns are known"
    assert environment.begun == environment.ended > 0


@pytest.mark.parametrize(
    ("settings", "changes", "line"),
    [
        ({"max_turns": 2}, {}, "reward 0"),
        ({}, {"sampling__max_tokens": 2}, "came back as 'Qa'"),
    ],
)
def test_settings_under_which_gold_turns_cannot_win_are_refused(
    build: Build, settings: dict[str, Any], changes: dict[str, Any], line: str
) -> None:
    made = Lookup(LookupConfig(num_train=16, num_test=4, **settings))
    check = check_episodes(build(made, **(TURNS | changes)))
    assert not check.passed
    assert "gold episodes fail, first: prompt train-" in check.figure
    assert check.figure.endswith(line)


class Broken(Guess):
    """Raises where it is opened, or closed."""

    where = "opened"

    def episode(self, prompt: Prompt, seed: int) -> Episode:
        if self.where == "opened":
            raise ConnectionError("no server at port 1")
        made = super().episode(prompt, seed)

        async def close() -> None:
            raise ConnectionError("no server at port 1")

        made.close = close  # type: ignore[method-assign]
        return made


@pytest.mark.parametrize(("where", "method"), [("opened", "episode"), ("closed", "close")])
def test_an_episode_that_cannot_open_or_close_fails_its_check(build: Build, where: str, method: str) -> None:
    environment = Broken(GuessConfig())
    environment.where = where
    subject = build(environment, **TURNS)
    assert has_episodes(subject)
    check = check_episodes(subject)
    assert not check.passed
    assert check.figure == f"guess.{method} raised ConnectionError: no server at port 1"


def double(number: int) -> int:
    """Double a number.

    Args:
        number: any
    """
    return 2 * number


class Doubling(ToolEnvironment):
    """Has a tool, and a score that is no async method."""

    functions = (double,)

    def prompts(self, split: Split) -> list[Prompt]:
        return [replace(prompt, text=self.said(str(prompt.text))) for prompt in scripted().prompts(split)]

    def said(self, text: str) -> Any:
        return ({"role": "user", "content": text},)

    def score(self, prompt: Prompt, completions: Sequence[str]) -> Any:
        return [Reward(1.0, {}) for _ in completions]


PLAIN = "{% for m in messages %}<turn>{{ m.role }}\n{{ m.content }}</turn>{% endfor %}<turn>assistant\n"


@pytest.mark.parametrize(
    ("said", "template", "passes"),
    [
        ("double {} please", None, True),
        ("double {} please", PLAIN, False),
        ('Call double as <tool_call>{{"name": "double", "arguments": {{"number": 3}}}}</tool_call>: {}', PLAIN, True),
        ("Call it as <tool_call>...</tool_call>: {}", PLAIN, False),
    ],
    ids=["shown", "a word of the prompt", "taught", "not named"],
)
@pytest.mark.parametrize("as_text", [False, True])
def test_tools_that_no_prompt_shows_are_refused(
    build: Build, said: str, template: str | None, passes: bool, as_text: bool
) -> None:
    environment = Doubling()
    environment.said = (  # type: ignore[method-assign]
        lambda text: said.format(text) if as_text else ({"role": "user", "content": said.format(text)},)
    )
    subject = build(environment, **TURNS)
    if template is not None:
        subject.run.policy.tokenizer.chat_template = template
    found = check_episodes(subject)
    if passes and (template or not as_text):
        assert "1 tools answer, and calls are read by Hermes style" in found.figure
    else:
        assert not found.passed
        assert "no prompt shows the tool double, as in prompt train-" in found.figure


def test_tools_are_tried_where_the_score_beside_them_is_a_plain_method(build: Build) -> None:
    assert "1 tools answer, and" in check_episodes(build(Doubling(), **TURNS)).figure


class Served:
    """A server of one tool."""

    def tools(self) -> tuple[Sequence[Tool], Callable[[], None]]:
        return [replace(tool_of(double), name="served")], lambda: None


def test_tools_of_servers_are_said_to_be_listed(build: Build) -> None:
    environment = Doubling()
    environment.servers = (Served(),)
    assert "1 tools answer, 1 of servers are listed, and" in check_episodes(build(environment, **TURNS)).figure
