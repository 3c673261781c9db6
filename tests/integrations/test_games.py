"""Fakes of each protocol of reset and step, spoken to in one way."""

import asyncio
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from covey.environments.episode import Observation
from covey.types import Message, Prompt, Reward
from covey_integrations.openenv.environment import with_words
from covey_integrations.settings import StepsConfig
from covey_integrations.steps import (
    GymnasiumGame,
    Move,
    SkyRLGame,
    Steps,
    TextArenaGame,
    row_prompts,
    seed_prompts,
    with_messages,
)

from ..support.tools import answer, play, run


@dataclass
class Discrete:
    """As gymnasium.spaces.Discrete."""

    n: int

    def contains(self, value: int) -> bool:
        return 0 <= value < self.n

    def __str__(self) -> str:
        return f"Discrete({self.n})"


@dataclass
class Hidden:
    """A number to be guessed, in Gymnasium's words: closer guesses earn something, and five are all there are."""

    seeds: list[int | None] = field(default_factory=list)
    guesses: int = 0
    closed: int = 0

    def reset(self, seed: int | None = None) -> tuple[str, Mapping[str, Any]]:
        self.seeds.append(seed)
        self.number = random.Random(seed).randrange(10)
        self.guesses = 0
        return "guess", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        self.guesses += 1
        found = int(action) == self.number
        said = "right" if found else "higher" if int(action) < self.number else "lower"
        return said, 1.0 if found else 0.25, found, self.guesses == 5, {}

    def close(self) -> None:
        self.closed += 1


def steps(factory: Callable[..., Any] = Hidden, **settings: Any) -> Steps:
    prompts = seed_prompts(StepsConfig(num_train=3, num_test=2, problem_seed=7))
    return Steps(prompts, factory, **settings)


def played(environment: Steps, texts: Sequence[str], prompt: Prompt | None = None) -> tuple[list[Observation], Reward]:
    async def whole() -> tuple[list[Observation], Any]:
        episode = environment.episode(prompt or environment.prompts("train")[0], 0)
        return await play(episode, texts), await episode.score(())

    return run(whole())


def test_the_prompts_are_seeds_that_no_two_share() -> None:
    environment = steps()
    seeds = [prompt.columns["seed"] for split in ("train", "test") for prompt in environment.prompts(split)]
    assert seeds == [7, 8, 9, 10, 11]
    assert environment.prompts("train")[0].text == ({"role": "user", "content": "Play."},)


def test_attempts_of_a_prompt_begin_alike_and_each_in_an_object_of_its_own() -> None:
    made: list[Hidden] = []

    def factory() -> Hidden:
        made.append(Hidden())
        return made[-1]

    environment = steps(factory)
    played(environment, ["1"])
    played(environment, ["1"])
    assert [(game.seeds, game.closed) for game in made] == [([7], 1), ([7], 1)]


def test_a_steps_reward_is_its_turns_and_the_last_is_the_verdict() -> None:
    number = random.Random(7).randrange(10)
    first, *said = played(steps(), [str((number + 1) % 10), str(number)])[0]
    assert first.messages == "guess"
    assert [turn.reward for turn in said] == [0.25, None]
    assert [turn.done for turn in said] == [False, True]
    assert said[-1].messages == "right"
    assert played(steps(), [str(number)])[1] == Reward(1.0, {"last_step": 1.0})
    assert played(steps(), [str((number + 1) % 10)])[1] == Reward(0.0, {"last_step": 0.0})


def test_a_step_that_is_truncated_ends_it_as_out_of_turns() -> None:
    wrong = str((random.Random(7).randrange(10) + 1) % 10)
    said, verdict = played(steps(), [wrong] * 5)
    assert (said[-1].done, said[-1].stop_reason, verdict.value) == (True, "max_turns", 0.25)


def test_answers_without_an_episode_are_its_first_step() -> None:
    environment = steps()
    number = random.Random(7).randrange(10)
    verdicts = run(environment.score(environment.prompts("train")[0], [str(number), str((number + 1) % 10)]))
    assert [verdict.value for verdict in verdicts if isinstance(verdict, Reward)] == [1.0, 0.25]


def test_what_breaks_or_hangs_is_raised() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        played(steps(), ["north"])
    gate = threading.Event()

    class Hangs(Hidden):
        def step(self, action: str) -> Any:
            gate.wait(30)

    async def waited() -> None:
        environment = steps(Hangs)
        episode = environment.episode(environment.prompts("train")[0], 0)
        await episode.reset()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(episode.reply(answer("1")), 0.02)
        await episode.close()

    run(waited())
    gate.set()


class Doors(Hidden):
    action_space = Discrete(4)

    def reset(self, seed: int | None = None) -> Any:  # as in old Gym
        return [seed, 0]

    def step(self, action: Any) -> Any:
        assert isinstance(action, int)
        return [action, 1], 1.0, True, {}


def test_numbers_are_read_where_the_actions_are_numbers() -> None:
    game = GymnasiumGame(Doors())
    assert game.begin(3, ()) == "[3, 0]"
    for wrong in ("north", "I choose 7", "-1", "9" * 5000, "<think>2", "<think>2</think> north"):
        assert game.move(wrong) == Move("The action must be a number of Discrete(4).", is_invalid=True)
    assert game.move("I take endpoint 1, no, 2") == Move("[2, 1]", 1.0, True)
    assert played(steps(Doors), ["north"])[0][-1].is_void


@dataclass
class Arena:
    """TextArena's words: repeats all that was said, and draws from Python's own generator."""

    log: str = ""
    turns: int = 0

    def reset(self, num_players: int, seed: int) -> None:
        random.seed(seed)
        self.log = f"\n[GAME] {random.random()}"

    def get_observation(self) -> tuple[int, str]:
        return 0, self.log

    def step(self, action: str) -> tuple[bool, Mapping[str, Any]]:
        self.turns += 1
        self.log += f"\n[Player] {action}\n[GAME] {random.random()}"
        return self.turns == 3, {}

    def close(self) -> tuple[Mapping[int, float], Mapping[int, Any]]:
        return {0: 0.5}, {0: {"reason": "over"}}


def test_textarena_says_what_is_new_and_its_reward_comes_at_the_end() -> None:
    random.seed(3)
    drawn = [random.random() for _ in range(3)]
    game = TextArenaGame(arena := Arena())
    assert game.begin(3, ()) == f"[GAME] {drawn[0]}"
    assert game.move("[7]") == Move(f"[GAME] {drawn[1]}")
    assert game.move("<think>[5]?</think>[8]") == Move(f"[GAME] {drawn[2]}")
    assert game.move("[9]") == Move("over", 0.5, True)
    assert "[Player] [8]" in arena.log
    game.end()


def test_games_that_draw_from_pythons_generator_do_not_disturb_one_another() -> None:
    def alone(seed: int) -> list[Any]:
        game = TextArenaGame(Arena())
        return [game.begin(seed, ()), game.move("a"), game.move("b")]

    apart = [alone(1), alone(2)]
    before = random.getstate()
    random.seed(9)
    others = [random.random() for _ in range(4)]
    random.seed(9)
    heard: list[float] = []
    games = [TextArenaGame(Arena()), TextArenaGame(Arena())]
    together: list[list[Any]] = [[game.begin(seed, ())] for seed, game in enumerate(games, 1)]
    for action in "ab":
        for index, game in enumerate(games):
            heard.append(random.random())
            together[index].append(game.move(action))
    assert together == apart
    assert heard == others
    random.setstate(before)


def test_textarena_without_wrappers_has_messages() -> None:
    class Raw(Arena):
        def get_observation(self) -> Any:
            return 0, [(0, "[7]", "action"), (-1, "higher", "game")]

    assert TextArenaGame(Raw()).begin(0, ()) == "higher"


@dataclass
class Search:
    """SkyRL-Gym's words."""

    extras: Mapping[str, Any]
    closed: bool = False

    def init(self, prompt: list[Message]) -> tuple[list[Message], Mapping[str, Any]]:
        return prompt, {}

    def step(self, action: str) -> Mapping[str, Any]:
        right = action == self.extras["truth"]
        said = [] if right else [{"role": "user", "content": "again"}]
        return {"observations": said, "reward": float(right), "done": right, "metadata": {}}

    def close(self) -> None:
        self.closed = True


def test_skyrl_rows_bring_prompt_and_truth() -> None:
    asked = [{"role": "user", "content": "?"}]
    prompts = row_prompts("steps", {"train": [{"prompt": asked, "truth": "42"}], "test": []})
    environment = Steps(prompts, Search, "skyrl")
    (prompt,) = environment.prompts("train")
    assert prompt.text == ({"role": "user", "content": "?"},)
    said, verdict = played(environment, ["41", "42"], prompt)
    assert said[1].messages == ({"role": "user", "content": "again"},)
    assert (said[2].done, verdict.value) == (True, 1.0)


@pytest.mark.parametrize("asked", [3, "?", [], [{"role": "user"}], [{"role": "user", "content": 3}]])
def test_a_row_whose_prompt_is_no_conversation_is_refused(asked: Any) -> None:
    with pytest.raises(ValueError, match="column 'prompt' must be a list of messages"):
        with_messages({"prompt": asked})
    if asked not in ("?", []):  # where an OpenEnv server says the first words, or hears text
        with pytest.raises(ValueError, match="column 'prompt' must be text or a list of messages"):
            with_words({"prompt": asked})


def test_skyrl_environments_that_rewrite_their_prompt_are_refused() -> None:
    class Rewrites(Search):
        def init(self, prompt: list[Message]) -> tuple[list[Message], Mapping[str, Any]]:
            return [{"role": "user", "content": "other"}], {}

    class Adds(Search):
        def init(self, prompt: list[Message]) -> tuple[list[Message], Mapping[str, Any]]:
            return [*prompt, {"role": "user", "content": "more"}], {}

    asked = ({"role": "user", "content": "?"},)
    with pytest.raises(ValueError, match="rewrites its prompt"):
        SkyRLGame(Rewrites({})).begin(0, asked)
    assert SkyRLGame(Adds({})).begin(0, asked) == ({"role": "user", "content": "more"},)


def test_two_episodes_at_once_do_not_meet() -> None:
    environment = steps()

    async def both() -> list[list[Observation]]:
        first, second = environment.prompts("train")[:2]
        return await asyncio.gather(
            play(environment.episode(first, 0), ["1", "2"]), play(environment.episode(second, 0), ["1", "2"])
        )

    assert run(both()) == [played(environment, ["1", "2"], prompt)[0] for prompt in environment.prompts("train")[:2]]
