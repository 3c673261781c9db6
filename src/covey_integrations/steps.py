"""Environments of `reset` and `step`: each attempt has an object of its own, made by a factory.

A step's reward belongs to its turn; that of the last step is the verdict on the episode.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from covey.environments.base import Environment, Split, are_words, conversation, own_containers
from covey.environments.custom import check_arguments
from covey.environments.data.rows import load_rows, make_prompts, row_settings
from covey.environments.episode import Answer, Episode, Observation
from covey.environments.settings import BuildSettings
from covey.system.lookup import one_of, resolve
from covey.types import Failure, Message, Prompt, Reward
from covey_integrations.games import PROTOCOLS, Game, Move
from covey_integrations.settings import OpenEnvConfig, StepsConfig
from covey_integrations.tools.calling import in_thread

MAX_TURNS = 16
"""Turns of an episode, where environment.max_turns is not set."""


@dataclass(frozen=True)
class StepSettings:
    """Construction and calls of such an environment; `StepsConfig` explains the fields."""

    factory: Callable[..., Any]
    protocol: str = "gymnasium"

    def __post_init__(self) -> None:
        one_of("environment.protocol", self.protocol, tuple(PROTOCOLS))

    def game(self, columns: Mapping[str, Any]) -> Game:
        """Make the object of one attempt. Columns of the row besides the prompt are SkyRL's `extras`."""
        if self.protocol != "skyrl":
            return PROTOCOLS[self.protocol](self.factory())
        return PROTOCOLS[self.protocol](self.factory(extras=own_containers(dict(columns.get("extras") or {}))))


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
        """Judge answers without an episode, as the first move of one: the reward of that step."""
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

    def __init__(self, settings: StepSettings, prompts: Mapping[Split, Sequence[Prompt]]) -> None:
        super().__init__(prompts)
        self.settings = settings

    def episode(self, prompt: Prompt, seed: int) -> "StepEpisode":
        return StepEpisode(self.settings, prompt)


class StepEpisode(PlayedEpisode):
    """One game."""

    def __init__(self, settings: StepSettings, prompt: Prompt) -> None:
        self._settings = settings
        self._prompt = prompt
        self._game: Game | None = None

    async def reset(self) -> Observation:
        messages = [] if isinstance(self._prompt.text, str) else list(self._prompt.text)
        seed = int(self._prompt.columns.get("seed", 0))

        def begin() -> str | tuple[Message, ...]:
            self._game = self._settings.game(self._prompt.columns)
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
    how = StepSettings(partial(function, **settings.options), settings.protocol)
    if is_skyrl:
        rows = load_rows(run.data.path, row_settings(run.data, ("prompt",), make=with_messages))
        return Steps(how, row_prompts("steps", rows.splits))
    return Steps(how, seed_prompts(settings))


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
