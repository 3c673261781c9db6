"""Several environments as one: names, dispatch, rewards by environment, and what the parts need of each other."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from covey.algorithm.credit.scores import scores
from covey.config.schema import Config
from covey.config.validate import validate
from covey.environments.arithmetic import Arithmetic
from covey.environments.base import Environment, Split
from covey.environments.data.settings import DataConfig
from covey.environments.mixture import Mixture
from covey.environments.settings import ArithmeticConfig, MixtureConfig
from covey.run.build import build_environment, training_stream
from covey.run.build_stream import spread
from covey.system.waits.watchdog import Watchdog
from covey.types import UNREWARDED, Failure, Message, Prompt, Reward
from covey_tasks.math.settings import Gsm8kConfig

from ..support.small import scripted


class Everything:
    """An environment that can do what others can, and says what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def prompts(self, split: Split) -> list[Prompt]:
        return [Prompt(f"{split}-{index}", "everything", f"{index}?", {"index": index}) for index in range(3)]

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        raise AssertionError("score_tokens is called instead")

    async def score_tokens(
        self, prompt: Prompt, completions: Sequence[str], completion_ids: Sequence[Sequence[int]]
    ) -> list[Reward | Failure]:
        self.asked.append((prompt.id, prompt.environment, list(completions), [list(ids) for ids in completion_ids]))
        return [Failure("lost"), Reward(0.5, {"half": 0.5, "more": 2.0})]

    async def reply(self, prompt: Prompt, messages: Sequence[Message]) -> Message | None:
        return {"role": "user", "content": f"{prompt.id}: {len(messages)}"}

    def metrics(self) -> Mapping[str, float]:
        return {"asked": float(len(self.asked))}

    @property
    def part_weights(self) -> Mapping[str, float]:
        return {"half": 3.0}

    def watched_by(self, watchdog: Watchdog) -> None:
        self.asked.append(watchdog)

    def follow(self, step: int, max_steps: int, epoch: float) -> None:
        self.asked.append((step, max_steps, epoch))

    def read_with(self, tokenizer: Any) -> None:
        self.asked.append(tokenizer)

    def close(self) -> None:
        self.asked.append("closed")


def mixture(**parts: Environment) -> Mixture:
    own = parts or {"sums": Arithmetic([1, 2], 8, 4), "all": Everything(), "plain": scripted()}
    return Mixture(own, {"sums": 2.0})


def first(environment: Environment, name: str, split: Split = "train") -> Prompt:
    return next(prompt for prompt in environment.prompts(split) if prompt.environment == name)


def settings(**parts: Any) -> Config:
    return Config(environment=MixtureConfig(parts=parts))


# ------------------------------------------------------------------------------------------------ prompts


def test_prompts_take_on_the_name_of_their_part_and_stay_different() -> None:
    made = mixture(a=scripted(num_prompts=2), b=scripted(num_prompts=2))
    assert [(p.id, p.environment) for p in made.prompts("train")] == [
        ("a/train-0", "a"),
        ("a/train-1", "a"),
        ("b/train-0", "b"),
        ("b/train-1", "b"),
    ]
    every = [prompt for split in ("train", "test") for prompt in made.prompts(split)]
    assert len({prompt.id for prompt in every}) == len(every)


def test_a_mixture_forwards_every_optional_method() -> None:
    inherited = {name for name in vars(Environment) if not name.startswith("_")} - vars(Mixture).keys()
    assert inherited == {"judge_summary"}


def test_it_may_reply_where_one_part_does() -> None:
    assert mixture(sums=Arithmetic([1], 8, 4), all=Everything()).can_reply
    assert not mixture(sums=Arithmetic([1], 8, 4)).can_reply


def test_a_part_without_a_weight_weighs_one() -> None:
    assert mixture().sampling_weights == {"sums": 2.0, "all": 1.0, "plain": 1.0}


# ------------------------------------------------------------------------------------------------ judging


def test_each_part_judges_its_own_prompts_as_it_made_them() -> None:
    part = Everything()
    made = mixture(all=part, sums=Arithmetic([1], 8, 4))
    verdicts = asyncio.run(made.score_tokens(first(made, "all"), ["x", "y"], [[1, 2], [3]]))
    assert part.asked == [("train-0", "everything", ["x", "y"], [[1, 2], [3]])]
    assert verdicts == [Failure("lost"), Reward(0.5, {"all": 0.5, "all/half": 0.5, "all/more": 2.0})]


ABOUT_A_PROMPT: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("dry_run", "judges_groups", "max_turns", "tool_schemas", "gold", "difficulty"), ()),
    **{"episode": (7,), "score_group": ((), ()), "gold_turn": ((),)},
}


@pytest.mark.parametrize("method", ABOUT_A_PROMPT)
def test_a_mixture_passes_each_prompt_to_the_part_that_made_it(method: str) -> None:
    def answer(self: Everything, prompt: Prompt, *given: Any) -> list[Any]:
        return [prompt.id, prompt.environment, *given]

    part, given = type("Asked", (Everything,), {method: answer})(), ABOUT_A_PROMPT[method]
    made = mixture(plain=scripted(), all=part)
    found = getattr(made, method)(first(made, "all"), *given)
    found = asyncio.run(found) if asyncio.iscoroutine(found) else found
    assert found == ["train-0", "everything", *given]


def test_a_demonstration_that_is_called_like_a_prompt_leaves_its_verdict_alone() -> None:
    class Shown(Arithmetic):
        def demonstrations(self, split: Split) -> list[tuple[Prompt, str]]:
            return [(replace(prompt, columns={"answer": 0}), "0") for prompt in self.prompts(split)]

    made = mixture(sums=Shown([1], 8, 4))
    prompt = first(made, "sums")
    right = str(prompt.columns["answer"])
    assert right != "0"
    assert made.demonstrations("train")[0] == (replace(prompt, columns={"answer": 0}), "0")
    verdicts = asyncio.run(made.score(prompt, [right, "0"]))
    assert [isinstance(found, Reward) and found.value for found in verdicts] == [1.0, 0.0]


def test_a_part_that_does_not_read_tokens_gets_the_text() -> None:
    made = mixture()
    prompt = first(made, "sums")
    right = str(prompt.columns["answer"])
    expected = [Reward(value, {"sums": value, "sums/correct": value}) for value in (1.0, 0.0)]
    assert asyncio.run(made.score_tokens(prompt, [right, "x"], [[1], [2]])) == expected
    assert asyncio.run(made.score(prompt, [right, "x"])) == expected


def test_a_reply_comes_from_the_part_that_has_something_to_say() -> None:
    made = mixture()
    said: Message = {"role": "assistant", "content": "x"}
    assert asyncio.run(made.reply(first(made, "all"), [said])) == {"role": "user", "content": "train-0: 1"}
    assert asyncio.run(made.reply(first(made, "sums"), [said])) is None


def test_a_reward_without_parts_gets_one() -> None:
    made = mixture(plain=scripted(lambda prompt, text: Reward(0.5, {})))
    verdict = asyncio.run(made.score(first(made, "plain"), ["x"]))
    assert verdict == [Reward(0.5, {"plain": 0.5, "plain/value": 0.5})]


def test_what_a_teacher_trains_alone_earns_nothing_in_a_mixture_either() -> None:
    unrewarded = Reward(0.0, {UNREWARDED: 0.0})
    made = mixture(plain=scripted(lambda prompt, text: unrewarded))
    assert asyncio.run(made.score(first(made, "plain"), ["x"])) == [unrewarded]


def test_what_is_no_verdict_is_left_for_the_gate() -> None:
    made = mixture(plain=scripted(lambda prompt, text: "good"))  # type: ignore[arg-type,return-value]
    assert asyncio.run(made.score(first(made, "plain"), ["x"])) == ["good"]  # type: ignore[comparison-overlap]


def test_a_whole_reward_is_not_counted_again_beside_its_parts() -> None:
    made = mixture()
    assert made.part_weights == {"sums": 0.0, "all": 0.0, "plain": 0.0, "all/half": 3.0}
    reward = asyncio.run(made.score(first(made, "sums"), [str(first(made, "sums").columns["answer"])]))[0]
    assert isinstance(reward, Reward)
    weights = [made.part_weights.get(name, 1.0) for name in reward.parts]
    given = scores([reward.value], ["g"], parts=[list(reward.parts.values())], weights=weights)
    assert float((given.parts_NK * given.weights_K).sum()) == reward.value == 1.0


# ------------------------------------------------------------------------------------------------ the rest


def test_demonstrations_gold_and_difficulty_come_from_the_part() -> None:
    made = mixture()
    sum_, plain = first(made, "sums"), first(made, "plain")
    assert made.gold(sum_) == str(sum_.columns["answer"])
    assert made.gold(plain) is None
    assert made.difficulty(sum_) == sum_.columns["level"]
    assert made.difficulty(plain) is None
    shown = made.demonstrations("train")
    assert {prompt.environment for prompt, _ in shown} == {"sums", "plain"}
    assert all(made.gold(prompt) == text for prompt, text in shown if prompt.environment == "sums")


def test_a_cold_start_that_nothing_demonstrates_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^cold_start\.enabled=true needs a part with demonstrations, got all$"):
        mixture(all=Everything()).demonstrations("train")


def test_what_parts_log_has_their_name_in_front() -> None:
    made = mixture(one=Everything(), two=Everything())
    assert made.metrics() == {"one/asked": 0.0, "two/asked": 0.0}


def test_every_part_is_watched_told_and_closed_also_where_one_breaks(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Everything):
        def close(self) -> None:
            raise RuntimeError("broken")

    before, after = Everything(), Everything()
    made = mixture(before=before, broken=Broken(), after=after)
    watchdog = Watchdog()
    made.watched_by(watchdog)
    made.follow(3, 12, 0.5)
    made.read_with("a tokenizer")
    made.close()
    assert "Broken.close raised RuntimeError: broken (test_mixture.py:" in caplog.text
    assert before.asked == after.asked == [watchdog, (3, 12, 0.5), "a tokenizer", "closed"]


# ------------------------------------------------------------------------------------------------ from settings


def test_a_mixture_is_built_from_the_settings_of_its_parts() -> None:
    config = settings(one=ArithmeticConfig(levels=[1], num_train=8, num_test=4), two=ArithmeticConfig(levels=[4]))
    config.environment.weights = {"two": 3.0}
    validate(config)
    made = build_environment(config)
    prompts = made.prompts("train")
    stream = training_stream(config, made, prompts)
    assert [prompt.environment for prompt, _ in stream.draw(8)] == ["two", "one", "two", "two"] * 2
    assert {prompt.columns["level"] for prompt in prompts if prompt.environment == "one"} == {1}


def test_an_evaluation_looks_at_as_many_prompts_of_each_part() -> None:
    made = mixture(many=Arithmetic([1, 2, 3], 8, 60), few=scripted())
    counts = [prompt.environment for prompt in spread(made.prompts("test"), 9)]
    assert counts == ["many"] * 5 + ["few"] * 3


def test_a_part_without_training_prompts_is_named() -> None:
    made = mixture(none=scripted(num_prompts=0), sums=Arithmetic([1], 8, 4))
    with pytest.raises(ValueError, match=r"^environment=none has no training prompts$"):
        training_stream(Config(), made, made.prompts("train"))


def test_parts_have_rows_of_their_own_or_share_those_of_the_run(tmp_path: Path) -> None:
    for name in ("mine", "shared"):
        rows = "".join(f'{{"question": "{name} {index}?", "answer": "#### {index}"}}\n' for index in range(4))
        (tmp_path / f"{name}.jsonl").write_text(rows)
    config = settings(own=Gsm8kConfig(), other=Gsm8kConfig(), sums=ArithmeticConfig())
    config.environment.data = {"own": DataConfig(path=str(tmp_path / "mine.jsonl"))}
    config.data.path = str(tmp_path / "shared.jsonl")
    validate(config)
    texts = {p.environment: str(p.text) for p in build_environment(config).prompts("train")}
    assert "mine" in texts["own"]
    assert "shared" in texts["other"]
    assert texts["sums"].endswith("=")
