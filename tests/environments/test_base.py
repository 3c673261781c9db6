"""The base class of environments: two methods are enough, and the others are found where an object has them."""

import asyncio
import pickle
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from covey.environments.arithmetic import Arithmetic
from covey.environments.base import Environment, Replies, Split, adapt, metrics_of, own_containers
from covey.environments.episode import Answer, Observation
from covey.environments.mixture import Mixture
from covey.loop import train
from covey.system.waits.watchdog import Watchdog
from covey.types import Failure, Message, Prompt, Reward
from covey_trl.judges import for_trl, trl_rows

from ..support.small import rows, small_config, use, varied


class TwoMethods:
    """Inherits nothing and knows nothing of covey but its types."""

    def prompts(self, split: Split) -> list[Prompt]:
        return [Prompt(f"{split}-{index}", "two", f"{index}+1=", {}) for index in range(4)]

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        return [Reward(varied(prompt, text), {"value": 1.0}) for text in completions]


class Inheriting(TwoMethods, Environment):
    """The same with the base class."""


class Gifted(TwoMethods):
    """Has some of the other methods, a property among them."""

    closed = False

    def gold(self, prompt: Prompt) -> str | None:
        return prompt.id

    @property
    def part_weights(self) -> Mapping[str, float]:
        return {"value": 2.0}

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("environment", [adapt(TwoMethods()), Inheriting()], ids=["duck", "subclass"])
def test_every_other_method_has_a_default_that_does_nothing(environment: Environment) -> None:
    (prompt, *_) = environment.prompts("train")
    judged = asyncio.run(environment.score_tokens(prompt, ["a"], [[1]]))
    assert judged == asyncio.run(environment.score(prompt, ["a"]))
    assert asyncio.run(environment.reply(prompt, [])) is None
    assert [environment.gold(prompt), environment.difficulty(prompt), environment.dry_run(prompt)] == [None] * 3
    assert [environment.judge_summary(), environment.demonstrations("train")] == [None, ()]
    assert environment.metrics() == environment.facts() == {}
    assert environment.part_weights == environment.sampling_weights == {}
    environment.follow(1, 2, 0.5)
    environment.watched_by(Watchdog())
    environment.close()


def test_an_object_keeps_the_methods_that_it_has() -> None:
    gifted = Gifted()
    adapted = adapt(gifted)
    assert adapted.gold(adapted.prompts("train")[0]) == "train-0"
    assert adapted.part_weights == {"value": 2.0}
    adapted.close()
    assert gifted.closed


class Plain(TwoMethods):
    """Has no async method."""

    def score(self, prompt: Prompt, completions: Sequence[str]) -> Any:
        return [Reward(varied(prompt, text), {}) for text in completions]

    def reply(self, prompt: Prompt, messages: Sequence[Message]) -> Any:
        return {"role": "user", "content": "sure?"}


class PlainHeir(Plain, Environment):
    """The same with the base class."""


class Thread(TwoMethods):
    """Returns what is to be awaited, from a plain method."""

    def score(self, prompt: Prompt, completions: Sequence[str]) -> Any:
        return asyncio.to_thread(lambda: [Reward(varied(prompt, text), {}) for text in completions])


@pytest.mark.parametrize("environment", [Plain(), PlainHeir(), Thread()])
def test_a_plain_method_does_where_an_async_one_is_due(environment: Any) -> None:
    adapted = adapt(environment)
    (prompt, *_) = adapted.prompts("train")
    (judged,) = asyncio.run(adapted.score_tokens(prompt, ["a"], [[1]]))
    assert judged == Reward(varied(prompt, "a"), {})
    assert adapt(adapted) is adapted
    assert adapted.can_reply == isinstance(environment, Plain)
    if isinstance(episode := adapted.episode(prompt, 0), Replies):
        said = asyncio.run(episode.reply(Answer("a", (), "stop", 1, ())))
        assert said == Observation(({"role": "user", "content": "sure?"},))


def test_an_adapted_environment_keeps_its_type_in_mixtures_and_other_trainers() -> None:
    environment = PlainHeir()
    assert adapt(environment) is environment
    mixed = Mixture({"one": environment}, {})
    (prompt, *_) = mixed.prompts("train")
    (judged,) = asyncio.run(mixed.score(prompt, ["a"]))
    assert judged == asyncio.run(mixed.score_tokens(prompt, ["a"], [[1]]))[0]
    assert isinstance(judged, Reward)
    assert asyncio.run(mixed.reply(prompt, [])) == {"role": "user", "content": "sure?"}
    (row, *_) = trl_rows(environment)
    assert for_trl(environment)([row["prompt"]], ["a"], prompt_id=[row["prompt_id"]]) == [judged.value]


class Unready(TwoMethods):
    """Has properties that cannot be read before a run."""

    @property
    def sampling_weights(self) -> Mapping[str, float]:
        raise RuntimeError("no server yet")

    @cached_property
    def part_weights(self) -> Mapping[str, float]:
        raise AttributeError("server")


class UnreadyHeir(Unready, Environment):
    """The same with the base class."""


@pytest.mark.parametrize("environment", [Unready(), UnreadyHeir()])
def test_properties_of_a_user_are_not_evaluated_before_they_are_asked_for(environment: Any) -> None:
    adapted = adapt(environment)
    with pytest.raises(RuntimeError, match="no server yet"):
        _ = adapted.sampling_weights
    with pytest.raises(AttributeError, match="server"):
        _ = adapted.part_weights


class Handing(TwoMethods):
    """Hands on what it does not have itself to another environment."""

    def __getattr__(self, name: str) -> Any:
        return getattr(Gifted(), name)


def test_methods_that_an_object_hands_on_are_found() -> None:
    adapted = adapt(Handing())
    assert adapted.gold(adapted.prompts("train")[0]) == "train-0"


class AsyncClose(TwoMethods):
    async def close(self) -> None:
        raise AssertionError("nobody awaits it")


def test_an_async_method_in_place_of_a_plain_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"AsyncClose.close must be a plain def, got an async def"):
        adapt(AsyncClose())


def test_containers_are_copied_and_what_they_hold_is_not() -> None:
    held = object()
    given: dict[str, Any] = {"a": [held, {1}], "b": (held,), "c": {2}}
    copied = own_containers(given)
    assert copied == given
    assert copied["a"][0] is copied["b"][0] is held
    copied["a"][1].add(3)
    copied["c"].add(3)
    copied["a"].append(4)
    assert given == {"a": [held, {1}], "b": (held,), "c": {2}}


def test_an_environment_is_wrapped_once() -> None:
    adapted = adapt(TwoMethods())
    own = Arithmetic([1], 4, 2)
    assert adapt(adapted) is adapted
    assert adapt(own) is own


def test_a_wrapped_object_can_be_sent_to_another_process() -> None:
    sent = pickle.loads(pickle.dumps(adapt(Gifted())))
    assert sent.part_weights == {"value": 2.0}


def test_a_subclass_without_score_says_so_when_it_is_made() -> None:
    class Mute(Environment):
        def prompts(self, split: Split) -> list[Prompt]:
            return []

    with pytest.raises(TypeError, match="score"):
        Mute()  # type: ignore[abstract]


@pytest.mark.long
@pytest.mark.parametrize("environment", [TwoMethods(), Inheriting()], ids=["duck", "subclass"])
def test_two_methods_are_enough_to_train(
    environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, environment)
    train(small_config(), tmp_path)
    steps = rows(tmp_path / "metrics.jsonl", "train")
    assert len(steps) == small_config().num_steps
    assert any(step["grad_norm"] > 0 for step in steps)


class Logging(TwoMethods):
    """Has something to log."""

    def __init__(self, found: object) -> None:
        self.found = found

    def metrics(self) -> object:
        return self.found


def test_an_environment_logs_numbers_and_omits_unmeasured_ones() -> None:
    assert metrics_of(adapt(Logging({"won": True, "length": 3, "unseen": None}))) == {"won": 1.0, "length": 3.0}
    with pytest.raises(ValueError, match=r"Logging.metrics must return numbers by name, got best='a long one'"):
        metrics_of(adapt(Logging({"best": "a long one"})))
    with pytest.raises(ValueError, match=r"Logging.metrics must return numbers by name, got a NoneType"):
        metrics_of(adapt(Logging(None)))


@pytest.mark.parametrize("number", [np.float32(0.5), np.array(0.5), torch.tensor(0.5, dtype=torch.bfloat16)])
def test_an_array_or_tensor_that_is_one_number_is_logged_as_that_number(number: object) -> None:
    assert metrics_of(adapt(Logging({"won": number}))) == {"won": 0.5}
    with pytest.raises(ValueError, match=r"Logging.metrics must return numbers by name, got won=\[0.5\]"):
        metrics_of(adapt(Logging({"won": np.array([0.5])})))


@pytest.mark.long
def test_metrics_that_are_no_numbers_end_a_run_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, adapt(Logging({"won": "yes"})))
    with pytest.raises(ValueError, match=r"Logging.metrics must return numbers by name, got won='yes'"):
        train(small_config(num_steps=1), tmp_path)
