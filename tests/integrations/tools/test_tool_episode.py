"""An episode with tools: what they say, in the order of the calls, and what happens where they break."""

import asyncio
import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from covey.environments.episode import Observation
from covey.types import Failure, Prompt, Reward, RunStopped
from covey_integrations.tools.calling import MAX_HUNG, EpisodeOver, ToolServerLost
from covey_integrations.tools.check import check_tools
from covey_integrations.tools.environment import ToolEnvironment, WithTools
from covey_integrations.tools.episode import Talk, ToolRules

from ...support.models.chat_templates import qwen3
from ...support.tools import Sums, answer, call, multiply, play, run, say

PROMPT = Sums().prompts("train")[0]


def with_tools(*functions: Callable[..., Any], **settings: Any) -> Sums:
    environment = Sums()
    environment.functions = functions
    for name, value in settings.items():
        setattr(environment, name, value)
    return environment


def said(environment: ToolEnvironment, *texts: str) -> list[Observation]:
    return run(play(environment.episode(PROMPT, 0), texts))[1:]


def contents(observation: Observation) -> list[str]:
    assert not isinstance(observation.messages, str)
    return [message["content"] for message in observation.messages]


def test_a_call_is_answered_and_an_answer_ends_it() -> None:
    first, second = said(Sums(), call("multiply", a=6, b=7), "It is 42.")
    (message,) = first.messages
    assert message == {"role": "tool", "name": "multiply", "content": "42", "tool_call_id": "call00100"}
    assert (first.done, first.is_void) == (False, False)
    assert first.info == {"tool_calls": 1.0, "tool_errors": 0.0, "parse_errors": 0.0}
    assert (second.done, second.is_void, second.messages) == (True, False, ())


def test_a_turn_with_neither_call_nor_answer_is_void() -> None:
    (only,) = said(Sums(), "  \n")
    assert (only.done, only.is_void) == (True, True)


def test_a_call_that_cannot_be_read_is_answered_and_void() -> None:
    (only,) = said(Sums(), "<tool_call>{</tool_call>")
    assert (only.done, only.is_void) == (False, True)
    assert "no valid JSON" in contents(only)[0]
    assert only.info == {"tool_calls": 1.0, "tool_errors": 1.0, "parse_errors": 1.0}
    (mixed,) = said(Sums(), "<tool_call>{</tool_call>" + call("multiply", a=6, b=7))
    assert (mixed.is_void, contents(mixed)[1]) == (False, "42")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (call("divide", a=1), "there is no tool divide; there is multiply"),
        (call("multiply", a=1), "the argument b is missing"),
        (call("multiply", a=1, b="2"), "b must be of type integer, got '2'"),
    ],
)
def test_unknown_tools_and_wrong_arguments_are_told(text: str, problem: str) -> None:
    (only,) = said(Sums(), text)
    assert contents(only) == ['{"error": "' + problem + '"}']
    assert not only.is_void
    assert only.info["tool_errors"] == 1.0


def breaks(reason: str) -> str:
    """
    Break.

    Args:
        reason: Why.
    """
    if reason == "exit":
        raise SystemExit(3)
    if reason == "stop":
        raise StopIteration
    if reason == "lost":
        raise ToolServerLost("the server is gone")
    if reason == "run":
        raise RunStopped("enough")
    if reason == "over":
        raise EpisodeOver("thank you")
    raise ValueError(f"no {reason}")


async def leaves(status: int) -> str:
    """
    Leave.

    Args:
        status: Of the process.
    """
    raise SystemExit(status)


def test_an_async_tool_that_leaves_ends_no_event_loop() -> None:
    (only,) = said(with_tools(leaves), call("leaves", status=3))
    assert contents(only) == ['{"error": "RuntimeError: SystemExit: 3"}']


def test_an_async_tool_behind_a_wrapper_that_is_none_is_awaited() -> None:
    async def later(a: int) -> int:
        """
        Wait.

        Args:
            a: For what.
        """
        return a

    @functools.wraps(later)
    def wrapper(**arguments: int) -> Any:
        return later(**arguments)

    (only,) = said(with_tools(wrapper), call("later", a=3))
    assert contents(only) == ["3"]


def test_the_last_turn_calls_nothing_where_the_rules_say_so() -> None:
    for calls_last, shelved in ((True, ["a"]), (False, [])):
        environment = Shelves()
        environment.rules = ToolRules(calls_last=calls_last)
        episode = environment.episode(PROMPT, 0)
        only = run(episode.reply(replace(answer(call("put", thing="a")), is_last=True)))
        assert (only.done, episode.talk.state.things) == (not calls_last, shelved)


def test_an_exception_of_a_tool_is_what_it_says() -> None:
    environment = with_tools(breaks)
    (only,) = said(environment, call("breaks", reason="rain") + call("breaks", reason="exit"))
    assert contents(only) == ['{"error": "ValueError: no rain"}', '{"error": "SystemExit: 3"}']
    assert contents(said(environment, call("breaks", reason="stop"))[0])[0].startswith('{"error": "RuntimeError')


def test_a_server_that_is_gone_and_a_run_that_stops_are_raised() -> None:
    with pytest.raises(ToolServerLost, match="the server is gone"):
        said(with_tools(breaks), call("breaks", reason="lost"))
    with pytest.raises(RunStopped, match="enough"):
        said(with_tools(breaks), call("breaks", reason="run"))


def test_a_tool_may_end_the_episode_with_last_words() -> None:
    (only,) = said(with_tools(breaks), call("breaks", reason="over"))
    assert (only.done, only.stop_reason, contents(only)) == (True, "tool_stopped", ["thank you"])


def test_tool_answers_come_in_the_order_of_the_calls() -> None:
    async def both_orders(reverse: bool) -> list[str]:
        gates = {name: asyncio.Event() for name in "abc"}

        async def wait(name: str) -> str:
            """
            Wait.

            Args:
                name: For whom.
            """
            await gates[name].wait()
            following = {"a": "b", "b": "c", "c": "a"} if not reverse else {"c": "b", "b": "a", "a": "c"}
            gates[following[name]].set()
            return name

        gates["c" if reverse else "a"].set()
        episode = with_tools(wait).episode(PROMPT, 0)
        (_, observation) = await play(episode, ["".join(call("wait", name=name) for name in "abc")])
        return contents(observation)

    assert run(both_orders(False)) == run(both_orders(True)) == ["a", "b", "c"]


def test_sync_tools_wait_beside_one_another() -> None:
    meeting = threading.Barrier(3, timeout=20)

    def meet(place: int) -> int:
        """
        Meet.

        Args:
            place: Where.
        """
        meeting.wait()
        return place

    (only,) = said(with_tools(meet), "".join(call("meet", place=place) for place in range(3)))
    assert contents(only) == ["0", "1", "2"]


class Shelf:
    """Holds what one attempt put there."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.things: list[str] = []

    def put(self, thing: str) -> str:
        """
        Put a thing on the shelf.

        Args:
            thing: Which.
        """
        self.things.append(thing)
        return " ".join(self.things)


class Shelves(Sums):
    released: Sequence[Any] = ()

    def state(self, prompt: Prompt, seed: int) -> Shelf:
        return Shelf(seed)

    async def opening(self, prompt: Prompt, state: Shelf) -> Observation:
        return Observation(f"shelf {state.seed}")

    async def judge(self, prompt: Prompt, talk: Talk) -> Reward:
        return Reward(float(len(talk.state.things)), {"turns": float(len(talk.messages))})

    async def release(self, prompt: Prompt, talk: Talk) -> None:
        self.released = [*self.released, talk.state]


def test_state_belongs_to_one_attempt() -> None:
    environment = Shelves()
    episodes = [environment.episode(PROMPT, seed) for seed in (3, 4)]
    first, second = (
        run(play(episode, [call("put", thing=t), "done"])) for episode, t in zip(episodes, "ab", strict=True)
    )
    assert [first[0].messages, second[0].messages] == ["shelf 3", "shelf 4"]
    assert [contents(first[1]), contents(second[1])] == [["a"], ["b"]]
    assert [state.seed for state in environment.released] == [3, 4]
    assert run(episodes[0].score(())) == Reward(1.0, {"turns": 3.0})


def test_hooks_of_an_attempt_may_be_plain_functions() -> None:
    class Plain(Shelves):
        def opening(self, prompt: Prompt, state: Shelf) -> Observation:  # type: ignore[override]
            return Observation(f"shelf {state.seed}")

        def judge(self, prompt: Prompt, talk: Talk) -> Reward:  # type: ignore[override]
            return Reward(float(len(talk.state.things)))

        def release(self, prompt: Prompt, talk: Talk) -> None:  # type: ignore[override]
            self.released = [*self.released, talk.state]

    environment = Plain()
    episode = environment.episode(PROMPT, 3)
    assert run(play(episode, [call("put", thing="a"), "done"]))[0].messages == "shelf 3"
    assert run(episode.score(())) == Reward(1.0)
    assert run(check_tools(environment, PROMPT, qwen3())).silent == ()
    assert [state.seed for state in environment.released] == [3, 0]


def test_an_opening_that_raises_breaks_its_attempt_where_it_is_plain_too() -> None:
    class Closed(Shelves):
        def opening(self, prompt: Prompt, state: Shelf) -> Observation:  # type: ignore[override]
            raise OSError("closed")

    episode = Closed().episode(PROMPT, 0)
    with pytest.raises(OSError, match="closed"):
        run(episode.reset())
    assert episode.talk.is_broken


def test_no_call_on_a_state_follows_one_that_ended_the_episode() -> None:
    class Once(Shelf):
        def put(self, thing: str) -> str:
            """
            Put the only thing on the shelf.

            Args:
                thing: Which.
            """
            super().put(thing)
            raise EpisodeOver("full")

    class Onces(Shelves):
        def state(self, prompt: Prompt, seed: int) -> Shelf:
            return Once(seed)

    environment = Onces()
    (only,) = said(environment, call("put", thing="a") + call("put", thing="b") + call("put", thing="c"))
    assert contents(only) == ["full", *['{"error": "the episode is over"}'] * 2]
    assert (only.done, environment.released[0].things) == (True, ["a"])


def test_calls_on_a_state_are_made_one_after_the_other() -> None:
    order = "".join(call("put", thing=thing) for thing in "abcdefgh")
    for _ in range(5):
        (only, *_) = said(Shelves(), order)
        assert contents(only)[-1] == "a b c d e f g h"


def test_answers_of_both_kinds_of_tools_come_in_the_order_of_the_calls() -> None:
    calls = call("multiply", a=2, b=3) + call("put", thing="a") + call("multiply", a=4, b=5) + call("put", thing="b")
    (only, *_) = said(Shelves(), calls)
    assert contents(only) == ["6", "a", "20", "a b"]


def test_any_called_tool_name_can_be_encoded() -> None:
    (only,) = said(Sums(), '<tool_call>{"name": "\\ud800"}</tool_call>')
    assert [message["name"] for message in only.messages if not isinstance(message, str)] == ["?"]


def test_more_calls_than_allowed_end_the_episode_before_they_are_made() -> None:
    environment = Shelves()
    environment.rules = ToolRules(max_calls=2)
    episode = environment.episode(PROMPT, 0)
    two = call("put", thing="a") + call("put", thing="b")
    _, first, second = run(play(episode, [two, call("put", thing="c")]))
    assert (first.done, contents(first)) == (False, ["a", "a b"])
    assert (second.done, second.stop_reason, second.messages) == (True, "max_tool_calls", ())
    assert episode.talk.state.things == ["a", "b"]


def test_a_sync_tool_that_hangs_is_given_up_by_name() -> None:
    gate = threading.Event()

    def hang() -> None:
        """Hang."""
        gate.wait(60)

    environment = with_tools(hang, tool_timeout=0.02)
    with pytest.raises(ToolServerLost, match=r"the tool hang took longer than environment.tool_timeout=0.02 s"):
        said(environment, call("hang"))
    # Too many that still run end the run
    ledger = environment.ledger
    ledger.left_behind *= MAX_HUNG - 1
    with pytest.raises(RunStopped, match=r"the tool hang took longer .* and 64 calls of tools that were given"):
        said(environment, call("hang"))
    gate.set()
    assert [left.result(20) for left in ledger.left_behind if isinstance(left, Future)] == [None] * MAX_HUNG
    gate.clear()
    with pytest.raises(ToolServerLost, match="the tool hang"):
        said(environment, call("hang"))
    assert len(ledger.left_behind) == 1
    gate.set()


def test_an_async_tool_that_takes_no_notice_of_its_end_is_given_up_too() -> None:
    async def stubborn() -> None:
        """Take no notice."""
        for _ in range(3):
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue

    with pytest.raises(ToolServerLost, match="the tool stubborn"):
        said(with_tools(stubborn, tool_timeout=0.01), call("stubborn"))


def test_metrics_count_calls_errors_and_seconds_once() -> None:
    environment = Sums()
    said(environment, call("multiply", a=1, b=2) + call("multiply", a=1), call("divide") + "<tool_call>{</tool_call>")
    found = dict(environment.metrics())
    assert found.pop("tool/multiply/seconds") >= 0
    assert found.pop("tool/unknown/seconds") >= 0
    assert found == {
        "tool/multiply/calls": 2.0,
        "tool/multiply/errors": 1.0,
        "tool/unknown/calls": 2.0,
        "tool/unknown/errors": 2.0,
    }
    assert environment.metrics() == {}


def test_answers_of_every_kind_are_text_that_can_be_encoded() -> None:
    def give(what: str) -> Any:
        """
        Give.

        Args:
            what: Which kind.
        """
        return {"none": None, "list": [1, "ä"], "surrogate": "a\ud800", "long": "x" * 200_000, "other": {1.5: object}}[
            what
        ]

    environment = with_tools(give)
    kinds = ("none", "list", "surrogate", "long", "other")
    (only,) = said(environment, "".join(call("give", what=kind) for kind in kinds))
    none, listed, surrogate, long, other = contents(only)
    assert (none, listed, surrogate) == ("", '[1, "ä"]', "a?")
    assert long.endswith("x... (100000 characters left out)")
    assert "<class 'object'>" in other


def test_a_template_that_knows_no_tools_hears_a_user_once() -> None:
    environment = with_tools(multiply, rules=ToolRules(role="user"))
    (only,) = said(environment, call("multiply", a=2, b=3) + call("multiply", a=4, b=5))
    assert only.messages == ({"role": "user", "content": "6\n20"},)


def test_tools_are_given_to_another_environment() -> None:
    given = WithTools(Sums(), [say])
    assert [schema["function"]["name"] for schema in given.tool_schemas(PROMPT)] == ["say"]
    assert given.prompts("test") == Sums().prompts("test")
    assert run(given.score(PROMPT, ["42", "41"])) == [Reward(1.0), Reward(0.0)]
    assert given.can_reply is False
    assert given.max_turns(PROMPT) == 8


def test_a_failure_of_the_judge_is_passed_on() -> None:
    class Broken(Sums):
        async def judge(self, prompt: Prompt, talk: Talk) -> Failure:
            return Failure("gone")

    episode = Broken().episode(PROMPT, 0)
    run(play(episode, ["42"]))
    assert run(episode.score(())) == Failure("gone")
    assert run(Sums().episode(PROMPT, 0).score(())) is None
