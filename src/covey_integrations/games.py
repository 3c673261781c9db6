"""Objects that others wrote and that are played by `reset` and `step`, spoken to in one way.

Gymnasium and GEM:  obs, info = env.reset(seed=s); obs, reward, terminated, truncated, info = env.step(action)
TextArena:          env.reset(num_players=1, seed=s); _, obs = env.get_observation(); done, _ = env.step(action);
                    rewards, info = env.close()
SkyRL-Gym:          messages, _ = env.init(messages); env.step(action) -> {"observations", "reward", "done"}
"""

import random
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from covey.types import Message, StopReason
from covey_graders.tags import without_thoughts

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

        found: Move = self._playing(step)
        return found

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
"""Protocols of environments by name."""
