"""Environments of `reset` and `step`: each attempt has an object of its own, made by a factory.

A step's reward belongs to its turn; that of the last step is the verdict on the episode.
"""

import random
import re
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from covey.environments.base import Environment, Split, are_words, conversation, own_containers
from covey.environments.custom import check_arguments
from covey.environments.data.rows import load_rows, make_prompts, row_settings
from covey.environments.episode import Answer, Episode, Observation
from covey.environments.settings import BuildSettings
from covey.system.lookup import resolve
from covey.types import Failure, Message, Prompt, Reward, StopReason
from covey_graders.tags import without_thoughts
from covey_integrations.settings import OpenEnvConfig, StepsConfig
from covey_integrations.tools.calling import in_thread

GLOBAL_RANDOM = threading.Lock()
"""Lock for games that draw from Python's own generator."""


@dataclass(frozen=True, slots=True)
class Move:
    """Result of an action.

    >>> Move("higher", reward=0.0)
    """

    said: str | tuple[Message, ...] = ()
    reward: float = 0.0
    done: bool = False
    stop_reason: StopReason | None = None
    is_invalid: bool = False
    """Whether the action was none, and nothing happened."""


class Game(Protocol):
    """One attempt. Its methods are called one after the other, in a thread."""

    def begin(self, seed: int, messages: Sequence[Message]) -> str | tuple[Message, ...]:
        """Return the first observation, after the prompt's messages."""

    def move(self, action: str) -> Move: ...

    def end(self) -> None:
        """Release the game's resources."""


class GymnasiumGame:
    """Gymnasium, GEM, and whatever has their `reset` and `step`, with four or five values."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self._space: Any = getattr(env, "action_space", None)
        self._is_number = type(self._space).__name__ == "Discrete"

    def begin(self, seed: int, messages: Sequence[Message]) -> str:
        found = self._env.reset(seed=seed)
        # Old environments return the observation alone.
        return str(found[0] if isinstance(found, tuple) and len(found) == 2 else found)

    def move(self, action: str) -> Move:
        chosen: Any = action
        if self._is_number:
            numbers = re.findall(r"-?\d+", without_thoughts(action))
            chosen = int(numbers[-1]) if numbers and len(numbers[-1]) < 19 else None
            if chosen is None or not self._space.contains(chosen):
                return Move(f"The action must be a number of {self._space}.", is_invalid=True)
        observation, reward, terminated, *rest = self._env.step(chosen)
        truncated = bool(rest[0]) if len(rest) == 2 else False
        reason: StopReason | None = "max_turns" if truncated and not terminated else None
        return Move(str(observation), float(reward), bool(terminated or truncated), reason)

    def end(self) -> None:
        with suppress(AttributeError):
            self._env.close()


class TextArenaGame:
    """TextArena, one player.

    Its games draw from Python's own generator, which is put back as this game left it before each call: what happens
    in one game depends on no other. Observations repeat all that was said before, of which the new part is taken.
    """

    def __init__(self, env: Any) -> None:
        self._env = env
        self._heard = ""
        self._random: Any = None
        self._is_over = False

    def begin(self, seed: int, messages: Sequence[Message]) -> str:
        self._random = random.Random(seed).getstate()

        def reset() -> str:
            self._env.reset(num_players=1, seed=seed)
            return self._new("")

        return str(self._playing(reset))

    def move(self, action: str) -> Move:
        action = without_thoughts(action)  # it takes the first move of a text

        def step() -> Move:
            done, _ = self._env.step(action)
            if not done:
                return Move(self._new(action))
            self._is_over = True
            rewards, infos = self._env.close()
            info = infos.get(0, {}) if isinstance(infos, Mapping) else {}
            return Move(str(info.get("reason", "")), float(rewards[0]), done=True)

        return self._playing(step)

    def end(self) -> None:
        if not self._is_over:
            self._playing(self._env.close)

    def _playing(self, call: Callable[[], Any]) -> Any:
        with GLOBAL_RANDOM:
            before = random.getstate()
            random.setstate(self._random)
            try:
                return call()
            finally:
                self._random = random.getstate()
                random.setstate(before)

    def _new(self, action: str) -> str:
        """Return the text since the last observation, without the player's own words."""
        _, observation = self._env.get_observation()
        if not isinstance(observation, str):  # messages as (from whom, text, kind), of which -1 is the game
            return "\n".join(str(text) for player, text, *_ in observation if player != 0)
        new = observation.removeprefix(self._heard).strip()
        self._heard = observation
        return new.removeprefix(f"[Player] {action}").strip() if action else new


class SkyRLGame:
    """SkyRL-Gym. Its rows bring the prompt."""

    def __init__(self, env: Any) -> None:
        self._env = env

    def begin(self, seed: int, messages: Sequence[Message]) -> tuple[Message, ...]:
        given = [dict(message) for message in messages]
        found, _ = self._env.init([dict(message) for message in given])
        if [dict(message) for message in found[: len(given)]] != given:
            raise ValueError("this environment rewrites its prompt, which is sampled as the rows have it")
        return tuple(found[len(given) :])

    def move(self, action: str) -> Move:
        found = self._env.step(action)
        messages = tuple(dict(message) for message in found["observations"])
        return Move(messages, float(found["reward"]), bool(found["done"]))

    def end(self) -> None:
        with suppress(AttributeError):
            self._env.close()


PROTOCOLS: Mapping[str, Callable[[Any], Game]] = {
    "gymnasium": GymnasiumGame,
    "textarena": TextArenaGame,
    "skyrl": SkyRLGame,
}
"""Protocols of environments by name.

Gymnasium and GEM:  obs, info = env.reset(seed=s); obs, reward, terminated, truncated, info = env.step(action)
TextArena:          env.reset(num_players=1, seed=s); _, obs = env.get_observation(); done, _ = env.step(action);
                    rewards, info = env.close()
SkyRL-Gym:          messages, _ = env.init(messages); env.step(action) -> {"observations", "reward", "done"}"""


MAX_TURNS = 16
"""Turns of an episode, where environment.max_turns is not set."""


class Played(Environment):
    """Environment whose attempts are played by steps, each with its own reward."""

    def __init__(self, prompts: Mapping[Split, Sequence[Prompt]]) -> None:
        self._prompts = {split: list(found) for split, found in prompts.items()}

    def prompts(self, split: Split) -> list[Prompt]:
        return list(self._prompts[split])

    def max_turns(self, prompt: Prompt) -> int:
        return MAX_TURNS

    @abstractmethod
    def episode(self, prompt: Prompt, seed: int) -> "PlayedEpisode": ...

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        """Judge answers without an episode, as the first move of one."""
        return [await self._first_move(prompt, text) for text in completions]

    async def _first_move(self, prompt: Prompt, text: str) -> Reward:
        episode = self.episode(prompt, 0)
        try:
            await episode.reset()
            said = await episode.reply(Answer(text, (), "stop", 1, ()))
            verdict = await episode.score(())
            return Reward(verdict.value + (said.reward or 0.0), verdict.parts)
        finally:
            await episode.close()


class PlayedEpisode(Episode):
    """Judged by its last step's reward."""

    verdict = 0.0

    async def score(self, conversation: Sequence[Message]) -> Reward:
        return Reward(self.verdict, {"last_step": self.verdict})


class Steps(Played):
    """Environment whose attempts are played by `reset` and `step`.

    The prompts are seeds: attempts of a group begin in the same state. SkyRL-Gym's are rows.
    """

    def __init__(
        self, prompts: Mapping[Split, Sequence[Prompt]], factory: Callable[..., Any], protocol: str = "gymnasium"
    ) -> None:
        super().__init__(prompts)
        self._factory = factory
        self._protocol = protocol

    def episode(self, prompt: Prompt, seed: int) -> "StepEpisode":
        return StepEpisode(lambda: self._game(prompt.columns), prompt)

    def _game(self, columns: Mapping[str, Any]) -> Game:
        """Make the object of one attempt. Columns of the row besides the prompt are SkyRL's `extras`."""
        extras = {"extras": own_containers(dict(columns.get("extras") or {}))} if self._protocol == "skyrl" else {}
        return PROTOCOLS[self._protocol](self._factory(**extras))


class StepEpisode(PlayedEpisode):
    """One game."""

    def __init__(self, make: Callable[[], Game], prompt: Prompt) -> None:
        self._make = make
        self._prompt = prompt
        self._game: Game | None = None

    async def reset(self) -> Observation:
        messages = [] if isinstance(self._prompt.text, str) else list(self._prompt.text)
        seed = int(self._prompt.columns.get("seed", 0))

        def begin() -> str | tuple[Message, ...]:
            self._game = self._make()
            return self._game.begin(seed, messages)

        return Observation(await in_thread(begin))

    async def reply(self, answer: Answer) -> Observation:
        game = self._game
        assert game is not None, "reset begins an episode"
        found: Move = await in_thread(lambda: game.move(answer.text))
        self.verdict = found.reward if found.done else 0.0
        return Observation(
            found.said,
            reward=None if found.done else found.reward or None,
            done=found.done,
            stop_reason=found.stop_reason,
            is_void=found.is_invalid,
        )

    async def close(self) -> None:
        if self._game is not None:
            await in_thread(self._game.end)


def make_steps(settings: StepsConfig, run: BuildSettings) -> "Steps":
    """Build environment=steps with prompts of rows or seeds."""
    function, is_skyrl = resolve(settings.factory, {}), settings.protocol == "skyrl"
    check_arguments(function, settings.factory, settings.options, **({"extras": {}} if is_skyrl else {}))
    factory = partial(function, **settings.options)
    if is_skyrl:
        rows = load_rows(run.data.path, row_settings(run.data, ("prompt",), make=with_messages))
        return Steps(row_prompts("steps", rows.splits), factory, settings.protocol)
    return Steps(seed_prompts(settings), factory, settings.protocol)


def seed_prompts(settings: StepsConfig | OpenEnvConfig) -> dict[Split, list[Prompt]]:
    """Return prompts that are seeds. No seed is in both splits."""
    made: dict[Split, list[Prompt]] = {}
    name, instruction, seed = settings.name, settings.instruction, settings.problem_seed
    counts: dict[Split, int] = {"train": settings.num_train, "test": settings.num_test}
    for split, count in counts.items():
        made[split] = [
            Prompt(f"{split}-{index}", name, conversation(instruction, ""), {"seed": seed + index})
            for index in range(count)
        ]
        seed += count
    return made


def with_messages(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the row. Raises ValueError where its prompt is no list of messages."""
    if isinstance(row["prompt"], str) or not row["prompt"] or not are_words(row["prompt"]):
        raise ValueError(f"column 'prompt' must be a list of messages, got {row['prompt']!r:.80}")
    return row


def row_prompts(name: str, rows: Mapping[Split, Sequence[Mapping[str, Any]]]) -> dict[Split, list[Prompt]]:
    """Return a prompt for each row of SkyRL-Gym's form: `prompt` (messages), and everything else its `extras`."""

    def prompt(row: Mapping[str, Any]) -> Prompt:
        extras = {key: value for key, value in row.items() if key != "prompt"}
        return Prompt("", name, tuple(map(dict, row["prompt"])), {"extras": extras})

    return make_prompts(rows, prompt)
