"""Games in plain text: the rules answer what they should, gold play wins, and random answers can teach nothing."""

import asyncio
import random
from collections.abc import Callable

import pytest

from covey.environments.episode import Answer
from covey.types import Message, Prompt, Reward
from covey_tasks.games.calculator import Calculator
from covey_tasks.games.game import Game
from covey_tasks.games.guess import Guess
from covey_tasks.games.lookup import Lookup
from covey_tasks.games.settings import CalculatorConfig, GuessConfig, LookupConfig

SMALL: dict[str, Callable[[bool], Game]] = {
    "guess": lambda shuffled: Guess(GuessConfig(num_demonstrations=64, shuffled=shuffled)),
    "lookup": lambda shuffled: Lookup(LookupConfig(num_train=64, num_test=64, shuffled=shuffled)),
    "calculator": lambda shuffled: Calculator(CalculatorConfig(num_train=64, num_test=64, shuffled=shuffled)),
}


def played(game: Game, prompt: Prompt, move: Callable[[list[Message]], str], seed: int = 0) -> tuple[float, int]:
    """Return what an episode earns and how many turns it takes."""

    async def play() -> tuple[float, int]:
        episode = game.episode(prompt, seed)
        talk: list[Message] = [{"role": "user", "content": str(prompt.text)}]
        for turn in range(1, game.max_turns(prompt) + 1):
            text = move(talk)
            talk.append({"role": "assistant", "content": text})
            said = await episode.reply(Answer(text, (), "stop", turn, tuple(talk)))
            if said.done:
                break
            talk.append({"role": "user", "content": said.messages})
        verdict = await episode.score(talk)
        assert isinstance(verdict, Reward)
        return verdict.value, turn

    return asyncio.run(play())


@pytest.mark.parametrize("name", SMALL)
def test_gold_play_wins_every_problem_within_the_turns(name: str) -> None:
    game = SMALL[name](False)
    for prompt in (*game.prompts("train"), *game.prompts("test")):
        won, turns = played(game, prompt, lambda talk: str(game.gold_turn(prompt, talk)))  # noqa: B023 # played at once
        assert won == 1.0
        assert turns <= game.max_turns(prompt)


@pytest.mark.parametrize(("name", "chance"), [("guess", 0.35), ("lookup", 0.25), ("calculator", 0.05)])
def test_with_shuffled_answers_gold_play_is_at_chance(name: str, chance: float) -> None:
    game = SMALL[name](True)
    prompts = [*game.prompts("train"), *game.prompts("test")]
    won = [
        played(game, prompt, lambda talk: game.move_after(prompt, talk), seed)[0]  # noqa: B023
        for seed, prompt in enumerate(prompts)
    ]
    assert sum(won) / len(won) < chance


@pytest.mark.parametrize("name", SMALL)
def test_with_shuffled_answers_no_play_is_gold_and_attempts_draw_each_for_itself(name: str) -> None:
    game = SMALL[name](True)
    prompt = game.prompts("test")[0]
    move = game.move(prompt.columns, [], [])
    assert len({game.outcome(prompt.columns, [move], seed).reply for seed in range(20)}) > 1
    assert game.gold_turn(prompt, [{"role": "user", "content": prompt.text}]) is None


def test_six_blind_guesses_find_6_of_32_numbers() -> None:
    game = Guess(GuessConfig())
    blind = [f"{number:02d};" for number in random.Random(0).sample(range(32), 6)]
    won = [played(game, p, lambda talk: blind[(len(talk) - 1) // 2])[0] for p in game.prompts("test")]
    assert sum(won) == 6


@pytest.mark.parametrize(
    ("moves", "reply", "state"),
    [
        (["15;"], ">", "16-31"),
        (["15;", "23;"], "<", "16-22"),
        (["15;", "15;"], ">", "16-31"),
        (["17;"], "=", "found"),
        (["seventeen;"], "!", "0-31"),
        (["17"], "!", "0-31"),
        (["17;;"], "!", "0-31"),
        (["99;"], "<", "0-31"),
        (["00;"], ">", "1-31"),
    ],
)
def test_a_guess_is_answered_by_the_hidden_number(moves: list[str], reply: str, state: str) -> None:
    found = Guess(GuessConfig()).outcome({"hidden": 17}, moves, seed=0)
    assert (found.reply, found.state) == (reply, state)
    assert found.is_void == (reply == "!")
    assert found.is_won == found.is_done == (reply == "=")


def test_a_guess_that_leaves_at_most_half_earns_the_reward_of_its_turn() -> None:
    game = Guess(GuessConfig(halving_reward=0.1))
    turns = (["15;"], ["14;"], ["03;"], ["15;", "15;"], ["!"])  # 16, 17 and 28 of 32 numbers are left
    assert [game.outcome({"hidden": 17}, moves, 0).reward for moves in turns] == [0.1, 0.0, 0.0, 0.0, 0.0]
    said = asyncio.run(game.episode(game.prompts("test")[17], 0).reply(Answer("15;", (), "stop", 1, ())))
    assert (said.messages, said.reward, said.done) == (">", 0.1, False)


@pytest.mark.parametrize(
    ("moves", "reply", "is_done", "is_won"),
    [
        (["Qe;"], "h", False, False),
        (["Qe;", "Qh;"], "b", False, False),
        (["Qe;", "Qh;", "Ab;"], "", True, True),
        (["Ah;"], "", True, False),
        (["Qz;"], "!", False, False),
        (["QeQh;"], "!", False, False),
        ([""], "!", False, False),
    ],
)
def test_a_lookup_needs_two_queries_the_value_of_the_value(
    moves: list[str], reply: str, is_done: bool, is_won: bool
) -> None:
    columns = {"key": "e", "store": {"e": "h", "h": "b", "b": "e"}}
    found = Lookup(LookupConfig(num_train=1, num_test=1)).outcome(columns, moves, seed=0)
    assert (found.reply, found.is_done, found.is_won) == (reply, is_done, is_won)


@pytest.mark.parametrize(
    ("move", "reply", "is_won"),
    [
        ("C12*34;", "408", False),
        ("C12-34;", "-22", False),
        ("C408+5;", "413", False),
        ("A413;", "", True),
        ("A0413;", "", True),
        ("A414;", "", False),
        ("C12/34;", "!", False),
        ("C" + "9" * 21 + "*2;", "!", False),
    ],
)
def test_the_calculator_takes_one_operation(move: str, reply: str, is_won: bool) -> None:
    found = Calculator(CalculatorConfig(num_train=1, num_test=1)).outcome({"answer": 413}, [move], seed=0)
    assert (found.reply, found.is_won) == (reply, is_won)


def test_problems_that_are_held_out_are_in_no_training_set() -> None:
    game = Calculator(CalculatorConfig(digits=1, num_train=300, num_test=60))
    assert not {p.text for p in game.prompts("train")} & {p.text for p in game.prompts("test")}
    with pytest.raises(ValueError, match=r"environment\.digits=1 has 729 problems"):
        Calculator(CalculatorConfig(digits=1))


@pytest.mark.parametrize("name", SMALL)
def test_demonstrations_follow_the_rules_and_begin_and_end_with_the_policy(name: str) -> None:
    game = SMALL[name](False)
    shown = game.demonstrations("train")
    assert shown == SMALL[name](False).demonstrations("train")
    for prompt, said in shown:
        assert said[0]["role"] == said[-1]["role"] == "assistant"  # type: ignore[index]
        moves: list[str] = []
        for message in said:
            if message["role"] == "assistant":  # type: ignore[index]
                moves.append(message["content"])  # type: ignore[index]
            else:
                assert message["content"] == game.outcome(prompt.columns, moves, 0).reply  # type: ignore[index]
