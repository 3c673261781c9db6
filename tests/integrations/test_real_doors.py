"""Other people's packages themselves: `make test-doors` installs them in an environment of their own.

Each trains two steps offline, and gives the reward that its own runner gives.
"""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from covey.types import Reward
from covey_integrations.reasoning_gym import WITHOUT_GOLD, ReasoningGym, make_dataset
from covey_integrations.settings import ReasoningGymConfig, StepsConfig
from covey_integrations.steps import Steps, TextArenaGame, row_prompts, seed_prompts

from ..support.doors.training import earned, trained
from ..support.tools import play, run

pytestmark = pytest.mark.doors


# ---- reasoning_gym


def names() -> list[str]:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError:
        return []
    return sorted(DATASETS)


@pytest.mark.parametrize("name", names())
def test_every_data_set_gives_its_gold_answer_the_whole_reward(name: str) -> None:
    if name == "composite":
        with pytest.raises(ValueError, match="do not fit composite"):
            make_dataset(name, 2, 0, {})
        return
    environment = ReasoningGym(make_dataset(name, 4, 0, {}), name, {"train": 3, "test": 1})
    prompt = environment.prompts("train")[0]
    gold = environment.gold(prompt)
    assert (gold is None) == (name in WITHOUT_GOLD)
    (verdict,) = run(environment.score(prompt, [gold or ""]))
    assert isinstance(verdict, Reward)
    assert gold is None or verdict.value == 1.0


def test_rewards_are_those_of_the_data_set() -> None:
    dataset = make_dataset("leg_counting", 4, 3, {})
    environment = ReasoningGym(dataset, "leg_counting", {"train": 4})
    for index, prompt in enumerate(environment.prompts("train")):
        answers = [str(dataset[index]["answer"]), "3", "many", ""]
        found = run(environment.score(prompt, answers))
        assert [v.value for v in found if isinstance(v, Reward)] == [
            dataset.score_answer(answer, dataset[index]) for answer in answers
        ]


def test_reasoning_gym_trains(tmp_path: Path) -> None:
    trained(ReasoningGymConfig(num_train=8, num_test=2), tmp_path / "run")


# ---- TextArena


@pytest.mark.parametrize("name", ["GuessTheNumber-v0", "GuessTheNumber-v0-raw", "TowerOfHanoi-v0", "Mastermind-v0"])
def test_a_game_of_textarena_earns_what_it_earns_alone(name: str) -> None:
    import textarena

    actions = [f"[{number}]" for number in range(1, 21)]

    def alone(seed: int) -> tuple[float, int]:
        env = textarena.make(name)
        env.reset(num_players=1, seed=seed)
        for taken, action in enumerate(actions, 1):
            env.get_observation()
            done, _ = env.step(action)
            if done:
                return float(env.close()[0][0]), taken
        return 0.0, len(actions)

    prompts = seed_prompts(StepsConfig(num_train=3, problem_seed=5))
    environment = Steps(prompts, lambda: textarena.make(name), "textarena")
    for prompt in environment.prompts("train"):
        random.seed(prompt.columns["seed"])  # as nobody else does between
        expected, _ = alone(prompt.columns["seed"])
        assert earned(environment, prompt, actions) == expected


def test_textarena_games_at_once_are_as_one_after_the_other() -> None:
    import textarena

    def games() -> list[TextArenaGame]:
        return [TextArenaGame(textarena.make("FrozenLake-v0")) for _ in range(3)]

    def moves(game: TextArenaGame, seed: int) -> Any:
        yield game.begin(seed, ())
        for action in ("[down]", "[right]", "[down]"):
            yield game.move(action)

    apart = [list(moves(game, seed)) for seed, game in enumerate(games())]
    playing = [moves(game, seed) for seed, game in enumerate(games())]
    together = list(zip(*[[next(game) for game in playing] for _ in range(4)], strict=True))
    assert [list(said) for said in together] == apart


def test_textarena_trains(tmp_path: Path) -> None:
    environment = StepsConfig(
        factory="textarena:make",
        options={"env_id": "GuessTheNumber-v0-raw"},
        protocol="textarena",
        num_train=4,
        num_test=2,
        max_turns=3,
    )
    trained(environment, tmp_path / "run", sampling__stop=[*"aeimostx "], sampling__max_tokens=40)


# ---- Gymnasium


def test_gymnasium_earns_what_it_earns_alone() -> None:
    import gymnasium

    prompts = seed_prompts(StepsConfig(num_train=4))
    environment = Steps(prompts, lambda: gymnasium.make("FrozenLake-v1", is_slippery=True))
    actions = ["2", "2", "1", "I go 1", "1", "2"] * 10
    for prompt in environment.prompts("train"):
        env = gymnasium.make("FrozenLake-v1", is_slippery=True)
        env.reset(seed=prompt.columns["seed"])
        gained = 0.0
        for action in actions:
            _, reward, terminated, truncated, _ = env.step(int(action[-1]))
            gained += float(reward)
            if terminated or truncated:
                break
        assert earned(environment, prompt, actions) == gained


def test_gymnasium_trains(tmp_path: Path) -> None:
    environment = StepsConfig(
        factory="gymnasium:make", options={"id": "FrozenLake-v1"}, num_train=4, num_test=2, max_turns=3
    )
    trained(environment, tmp_path / "run", sampling__stop=[*"aeimostx "], sampling__max_tokens=40)


# ---- SkyRL-Gym


def skyrl_row(truth: str = "42") -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": "What is 6 * 7?"}],
        "reward_spec": {"method": "rule", "ground_truth": truth},
        "max_turns": 3,
    }


def test_skyrl_gym_earns_what_it_earns_alone() -> None:
    import skyrl_gym

    for actions in (["#### 41", "#### 42"], ["#### 42"], ["#### 1", "#### 2", "#### 3"]):
        row = skyrl_row()
        env = skyrl_gym.make("gsm8k_multi_turn", extras={key: row[key] for key in ("reward_spec", "max_turns")})
        env.init(list(row["prompt"]))
        gained = 0.0
        for action in actions:
            step = env.step(action)
            gained += step["reward"]
            if step["done"]:
                break
        prompts = row_prompts("steps", {"train": [row]})
        environment = Steps(prompts, lambda **extras: skyrl_gym.make("gsm8k_multi_turn", **extras), "skyrl")
        assert earned(environment, environment.prompts("train")[0], actions) == pytest.approx(gained)


def test_skyrl_gym_trains(tmp_path: Path) -> None:
    import json

    rows = [{**skyrl_row(str(n)), "prompt": [{"role": "user", "content": f"Say {n}."}]} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    from covey.environments.data.settings import DataConfig

    environment = StepsConfig(
        factory="skyrl_gym:make", options={"id": "gsm8k_multi_turn"}, protocol="skyrl", max_turns=3
    )
    data = DataConfig(str(tmp_path / "rows.jsonl"))
    trained(environment, tmp_path / "run", data=data, sampling__stop=[*"aeimostx "], sampling__max_tokens=40)


def test_nothing_of_theirs_waits_in_the_event_loop() -> None:
    """Thirty-two games at once."""
    import textarena

    prompts = seed_prompts(StepsConfig(num_train=32))
    environment = Steps(prompts, lambda: textarena.make("GuessTheNumber-v0-raw"), "textarena")

    async def all_of_them() -> list[Any]:
        prompts = environment.prompts("train")
        return await asyncio.gather(*(play(environment.episode(prompt, 0), ["[1]", "[2]"]) for prompt in prompts))

    assert len(run(all_of_them())) == 32
