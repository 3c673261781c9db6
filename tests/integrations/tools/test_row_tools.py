"""TRL's tools and environment classes: rows, pooled instances, rewards of both kinds."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from covey.environments.base import Split
from covey.environments.episode import Observation
from covey.environments.reward_functions.build import no_reward
from covey.environments.reward_functions.environment import RewardFunctions, RewardSettings, reward_functions
from covey.types import Failure, Reward, RunStopped
from covey_integrations.tools.calling import MAX_HUNG, ToolServerLost
from covey_integrations.tools.rows import Factory, RowTools, with_prompt

from ...support.tools import answer, call, multiply, play, run

ROWS = [
    {"prompt": [{"role": "user", "content": "Buy a cow."}], "thing": "cow", "environment": "shop"},
    {"prompt": [{"role": "user", "content": "Buy a hen."}], "thing": "hen", "environment": "shop"},
]


class Shop:
    """A shop with what a row orders."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.resets = 0

    def reset(self, **row: Any) -> str | None:
        self.resets += 1
        self.row = row
        self.bought: list[str] = []
        return f" There are {row['thing']}s."

    def buy(self, thing: str) -> str:
        """
        Buy a thing.

        Args:
            thing: Which one.
        """
        if thing != self.row["thing"]:
            raise ValueError(f"no {thing} here")
        self.bought.append(thing)
        return "sold"

    def get_reward(self) -> float:
        return float(len(self.bought))


@pytest.fixture(autouse=True)
def _begin() -> None:
    Shop.made = 0


def row_tools(
    *functions: Callable[..., Any],
    factories: Factory | Mapping[str, Factory] | None = Shop,
    tools: Sequence[Callable[..., Any]] = (),
    rows: Sequence[Mapping[str, Any]] = ROWS,
) -> RowTools:
    splits: dict[Split, Any] = {"train": [with_prompt(row) for row in rows], "test": []}
    settings = RewardSettings(in_process=True)
    judged = RewardFunctions(splits, reward_functions(functions or [no_reward]), settings)
    return RowTools(judged, tools, factories, has_rewards=bool(functions))


def played(environment: RowTools, *texts: str, index: int = 0) -> tuple[list[Observation], Any]:
    async def whole() -> tuple[list[Observation], Any]:
        prompt = environment.prompts("train")[index]
        episode = environment.episode(prompt, 0)
        said = await play(episode, texts)
        return said, await episode.score(())

    return run(whole())


def test_reset_gets_the_row_and_its_text_is_appended_to_the_prompt() -> None:
    environment = row_tools()
    said, _ = played(environment, "done")
    assert said[0].messages == " There are cows."
    (shop,) = environment._pool[""]
    assert shop.row == ROWS[0]


def test_public_methods_and_functions_are_tools() -> None:
    environment = row_tools(tools=[multiply])
    names = [schema["function"]["name"] for schema in environment.tool_schemas(environment.prompts("train")[0])]
    assert names == ["multiply", "buy"]


def test_tools_play_and_the_object_rewards() -> None:
    said, verdict = played(row_tools(), call("buy", thing="cow") + call("buy", thing="ox"), "Thanks.")
    assert [message["content"] for message in said[1].messages if isinstance(message, Mapping)] == [
        "sold",
        '{"error": "ValueError: no ox here"}',
    ]
    assert verdict == Reward(1.0, {"Shop": 1.0})


def test_reward_functions_see_all_messages_the_object_and_the_row_and_are_added() -> None:
    seen: dict[str, Any] = {}

    def polite(prompts, completions, completion_ids, environments, thing, **columns):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN003, ANN202
        seen.update(prompts=prompts, completions=completions, ids=completion_ids, shops=environments, thing=thing)
        return [0.5 for _ in completions]

    environment = row_tools(polite)
    _, verdict = played(environment, call("buy", thing="cow"), "Thanks.")
    assert verdict == Reward(1.5, {"polite": 0.5, "Shop": 1.0})
    assert environment.part_weights == {"polite": 1.0, "Shop": 1.0}
    assert seen["prompts"] == [[{"role": "user", "content": "Buy a cow. There are cows."}]]
    assert [message["role"] for message in seen["completions"][0]] == ["assistant", "tool", "assistant"]
    assert seen["completions"][0][0]["tool_calls"][0]["function"] == {"name": "buy", "arguments": {"thing": "cow"}}
    assert (seen["thing"], seen["ids"], len(seen["shops"])) == (["cow"], [[7, 7]], 1)
    # Where no user has spoken, what reset says is a message of its own
    system = {"role": "system", "content": "Sell."}
    played(row_tools(polite, rows=[{**ROWS[0], "prompt": [system]}]), "Thanks.")
    assert seen["prompts"] == [[system, {"role": "user", "content": " There are cows."}]]


def test_functions_may_change_what_they_are_given() -> None:
    def spoils(completions, **columns):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN003, ANN202
        completions[0].clear()
        return [0.0]

    def counts(completions, **columns):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN003, ANN202
        return [float(len(completions[0]))]

    _, verdict = played(row_tools(spoils, counts, factories=None, tools=[multiply]), call("multiply", a=1, b=2), "2")
    assert verdict == Reward(3.0, {"spoils": 0.0, "counts": 3.0})


def grouped(environment: RowTools, *talks: Sequence[str]) -> list[Any]:
    """The verdicts on attempts at one prompt that are judged together."""

    async def whole() -> list[Any]:
        prompt = environment.prompts("train")[0]
        episodes = [environment.episode(prompt, seed) for seed in range(len(talks))]
        for episode, texts in zip(episodes, talks, strict=True):
            await episode.reset()
            for turn, text in enumerate(texts, start=1):
                await episode.reply(answer(text, turn))
        found = await environment.score_group(prompt, episodes, [()] * len(episodes))
        for episode in episodes:
            await episode.close()
        return found

    return run(whole())


def test_functions_compare_the_attempts_of_a_group_with_their_objects() -> None:
    calls: list[int] = []

    def rank(completions: Any, environments: Any, completion_ids: Any, **columns: Any) -> list[float]:
        calls.append(len(completions))
        lengths = [len(messages[-1]["content"]) for messages in completions]
        assert [len(shop.bought) for shop in environments] == [1, 0, 1]
        assert [len(ids) for ids in completion_ids] == [2, 1, 2]
        return [float(sorted(lengths).index(length)) for length in lengths]

    environment = row_tools(rank)
    assert environment.judges_groups(environment.prompts("train")[0])
    cow = call("buy", thing="cow")
    found = grouped(environment, [cow, "Thanks a lot."], ["No."], [cow, "Thanks."])
    assert found == [
        Reward(3.0, {"rank": 2.0, "Shop": 1.0}),
        Reward(0.0, {"rank": 0.0, "Shop": 0.0}),
        Reward(2.0, {"rank": 1.0, "Shop": 1.0}),
    ]
    assert calls == [3]


@pytest.mark.parametrize("kind", [OSError, SystemExit])
def test_an_object_that_breaks_fails_its_own_attempt_and_is_used_no_more(kind: type[BaseException]) -> None:
    class Fragile(Shop):
        def get_reward(self) -> float:
            if not self.bought:
                raise kind("the till is gone")
            return 1.0

    def even(completions: Any, **columns: Any) -> list[float]:
        return [0.5] * len(completions)

    environment = row_tools(even, factories=Fragile)
    good, bad = grouped(environment, [call("buy", thing="cow"), "Thanks."], ["No."])
    assert good == Reward(1.5, {"even": 0.5, "Fragile": 1.0})
    assert bad == Failure(f"Fragile.get_reward raised {kind.__name__}: the till is gone")
    assert len(environment._pool[""]) == 1


def test_without_functions_each_attempt_is_judged_as_it_ends() -> None:
    environment = row_tools()
    assert not environment.judges_groups(environment.prompts("train")[0])


def test_instances_are_made_once_and_reset_often() -> None:
    environment = row_tools()
    for index in (0, 1, 0):
        played(environment, "done", index=index)
    assert Shop.made == 1
    (shop,) = environment._pool[""]
    assert shop.resets == 3


def test_attempts_at_one_time_have_instances_of_their_own() -> None:
    environment = row_tools()
    prompt = environment.prompts("train")[0]
    states = [environment.episode(prompt, seed).talk.state for seed in range(3)]
    assert len(set(map(id, states))) == 3


def test_an_instance_that_a_thread_still_holds_is_used_no_more() -> None:
    gate = threading.Event()

    class Slow(Shop):
        def buy(self, thing: str) -> str:
            """
            Buy.

            Args:
                thing: Which one.
            """
            gate.wait(30)
            return "sold"

    environment = row_tools(factories=Slow)
    environment.tool_timeout = 0.02
    prompt = environment.prompts("train")[0]

    async def broken() -> None:
        episode = environment.episode(prompt, 0)
        await episode.reset()
        with pytest.raises(ToolServerLost, match="the tool buy"):
            await play(episode, [call("buy", thing="cow")])
        await episode.close()

    run(broken())
    gate.set()
    assert environment._pool[""] == []


@pytest.mark.parametrize("method", ["reset", "get_reward"])
def test_what_an_instance_leaves_hanging_counts_among_calls_that_were_given_up(method: str) -> None:
    gate = threading.Event()
    slow = type("Slow", (Shop,), {method: lambda self, **row: gate.wait(30)})
    environment = row_tools(factories=slow)
    environment.tool_timeout = 0.02
    with pytest.raises(ToolServerLost, match=f"Slow.{method} took longer than"):
        played(environment, "x")
    environment.ledger.left_behind *= MAX_HUNG - 1
    with pytest.raises(RunStopped, match=f"Slow.{method} took longer .* and 64 calls of tools that were given up"):
        played(environment, "x")
    gate.set()


def test_rows_choose_among_several_classes() -> None:
    class Silent:
        def reset(self, **row: Any) -> None:
            assert "environment" not in row

        def nod(self) -> str:
            """Nod."""
            return "nods"

    rows = [ROWS[0], {**ROWS[1], "environment": "silent"}]
    environment = row_tools(factories={"shop": Shop, "silent": Silent}, rows=rows)
    shop, silent = (environment.tool_schemas(prompt) for prompt in environment.prompts("train"))
    assert [schema["function"]["name"] for schema in (*shop, *silent)] == ["buy", "nod"]
    assert played(environment, call("buy", thing="cow"), "x", index=0)[1] == Reward(1.0, {"Shop": 1.0})
    verdict = played(environment, call("nod"), "x", index=1)[1]
    assert isinstance(verdict, Failure)
    assert not verdict.is_fault


def test_what_an_object_does_to_its_row_is_its_own() -> None:
    class Stocked(Shop):
        def buy(self, thing: str) -> str:
            """
            Buy from the stock of the row.

            Args:
                thing: Which one.
            """
            self.row["stock"].remove(thing)
            self.row["prompt"][0]["content"] = "Sold."
            return super().buy(thing)

    environment = row_tools(factories=Stocked, rows=[{**ROWS[0], "stock": ["cow"]}])
    worth = [played(environment, call("buy", thing="cow"), "Thanks.")[1] for _ in range(2)]
    assert worth == [Reward(1.0, {"Stocked": 1.0})] * 2
    assert environment.prompts("train")[0].text == ({"role": "user", "content": "Buy a cow."},)


def test_rows_without_a_prompt_are_asked_by_reset() -> None:
    environment = row_tools(rows=[{"thing": "cow"}])
    (prompt,) = environment.prompts("train")
    assert prompt.text == ({"role": "user", "content": ""},)
    assert played(environment, "done")[0][0].messages == " There are cows."


def test_what_cannot_be_is_refused() -> None:
    class NoReset:
        def go(self) -> None:
            """Go."""

    class NoReward:
        def reset(self, **row: Any) -> None: ...

    with pytest.raises(ValueError, match="NoReset must define reset"):
        row_tools(factories=NoReset)
    with pytest.raises(ValueError, match="nothing rewards"):
        row_tools(factories=NoReward)
    with pytest.raises(ValueError, match="nothing rewards"):
        row_tools(factories=None, tools=[multiply])
    with pytest.raises(ValueError, match="train-0 has environment='shop', which is none of inn"):
        row_tools(factories={"inn": Shop})


def test_a_reward_that_is_no_number_is_a_failure() -> None:
    class Odd(Shop):
        def get_reward(self) -> Any:
            return "much"

    verdict = played(row_tools(factories=Odd), "done")[1]
    assert isinstance(verdict, Failure)
    assert "Odd.get_reward returned str 'much'" in verdict.reason


def test_an_async_get_reward_is_awaited_and_none_says_nothing() -> None:
    class Later(Shop):
        async def get_reward(self) -> float:  # type: ignore[override]
            return 0.25

    class Never(Shop):
        def get_reward(self) -> Any:
            return None

    assert played(row_tools(factories=Later), "done")[1] == Reward(0.25, {"Later": 0.25})
    verdict = played(row_tools(factories=Never), "done")[1]
    assert isinstance(verdict, Failure)
    assert not verdict.is_fault


def test_a_turn_that_was_cut_is_judged_with_its_tokens_and_calls_nothing() -> None:
    seen: list[Any] = []
    tokens: list[Any] = []

    def notes(completions, completion_ids, **columns):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN003, ANN202
        seen.extend(completions)
        tokens.extend(completion_ids)
        return [1.0]

    environment = row_tools(notes, factories=None, tools=[multiply])
    prompt = environment.prompts("train")[0]
    once = call("multiply", a=1, b=2)

    async def whole(*texts: str) -> Any:
        episode = environment.episode(prompt, 0)
        await play(episode, texts[:-1])
        for cut in texts[-1:]:
            assert await episode.reply(answer(cut, len(texts), finish="length")) == Observation(done=True)
        return await episode.score(())

    assert run(whole(once)) == Reward(1.0, {"notes": 1.0})
    run(whole(once, "I wond"))
    run(whole())
    contents = [[message["content"] for message in talk] for talk in seen]
    assert contents == [[once], ["", "2", "I wond"], [""]]
    assert tokens == [[7], [7, 7], []]


def test_a_dry_run_judges_answers_in_an_object_of_their_own_and_counts_nothing() -> None:
    def looks(environments, log_metric, **columns):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN003, ANN202
        log_metric("looked", 1.0)
        return [float(shop.resets) for shop in environments]

    environment = row_tools(looks)
    dry, prompt = environment.dry_run(environment.prompts("train")[0])
    verdicts = run(dry.score(prompt, ["a", "b"]))
    assert verdicts == [Reward(1.0, {"looks": 1.0, "Shop": 0.0}), Reward(2.0, {"looks": 2.0, "Shop": 0.0})]
    assert environment.metrics() == {}
    played(environment, "c")
    assert environment.metrics() == {"looked": 1.0}
