"""One prompt becomes one group: what is encoded, where tokens are shifted, and what becomes of a broken environment."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from covey.engine.fake import FakeEngine
from covey.environments.base import Environment, Split, adapt
from covey.policy.models.nano import nano_tokenizer
from covey.rollouts.encoding import encode_prompt
from covey.rollouts.rollout import causal_rollout, roll_out
from covey.rollouts.sampler import Sampler
from covey.types import Completion, CutText, Failure, Group, Prompt, Reward, RunStopped, Sampling
from tests.support.scripted import Scripted

from ..support.models.chat_templates import llama3
from ..support.small import TOKENIZER

PROMPT = Prompt("p", "scripted", "1+1=", {})
END = TOKENIZER.eos_token_id
TWO = TOKENIZER("2")["input_ids"][0]
Verdict = Callable[[Prompt, str], Any]


@dataclass(frozen=True)
class Foreign:
    """An environment whose `score` is whatever a test says."""

    verdicts: Callable[[Sequence[str]], Any]

    def prompts(self, split: Split) -> list[Prompt]:
        return [PROMPT]

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        return self.verdicts(completions)  # type: ignore[no-any-return]


@dataclass
class Reader:
    """An environment that is given the tokens."""

    seen: list[Sequence[Sequence[int]]] = field(default_factory=list)

    def prompts(self, split: Split) -> list[Prompt]:
        return [PROMPT]

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        raise AssertionError("score_tokens comes first")

    async def score_tokens(
        self, prompt: Prompt, completions: Sequence[str], completion_ids: Sequence[Sequence[int]]
    ) -> list[Reward | Failure]:
        self.seen.append(completion_ids)
        return [Reward(1.0, {}) for _ in completions]


def rolled_out(environment: Environment, n: int = 2) -> Group:
    """A group whose sample i writes i twos and the stop token."""
    engine = FakeEngine(lambda prompt_ids, index: (TWO,) * (index + 1) + (END,), vocab_size=len(TOKENIZER), version=3)
    return asyncio.run(roll_out(Sampler(engine, environment, TOKENIZER), PROMPT, n, Sampling(max_tokens=8)))


# ------------------------------------------------------------------------------------------------ the shift


def test_position_t_reads_token_t_and_predicts_token_t_plus_1() -> None:
    completion = Completion((8, 9, 2), (-0.1, -0.2, -0.3), "stop", policy_version=4)
    made = causal_rollout((5, 6, 7), completion, Reward(0.5, {}), "8 9")
    assert made.input_ids == (5, 6, 7, 8, 9)
    assert made.target_ids == (6, 7, 8, 9, 2)
    assert made.loss_mask == (False, False, True, True, True)
    assert made.sampler_logprobs == (0.0, 0.0, -0.1, -0.2, -0.3)
    assert (made.finish_reason, made.policy_version, made.num_loss_tokens) == ("stop", 4, 3)


def test_a_prompt_of_one_token_leaves_no_context_position() -> None:
    made = causal_rollout((5,), Completion((2,), (-0.1,), "stop", 0), Reward(0.0, {}), "")
    assert (made.input_ids, made.target_ids, made.loss_mask) == ((5,), (2,), (True,))


def test_a_completion_without_tokens_has_no_loss_token() -> None:
    made = causal_rollout((5, 6), Completion((), (), "stop", 0), Reward(0.0, {}), "")
    assert (made.input_ids, made.target_ids, made.num_loss_tokens) == ((5,), (6,), 0)


# ------------------------------------------------------------------------------------------------ a group


def test_the_environment_is_told_which_completions_were_cut_and_the_record_is_plain_text() -> None:
    told: list[type] = []

    def score(prompt: Prompt, text: str) -> float:
        told.append(type(text))
        return 0.0

    made = rolled_out(Scripted({}, score), n=8).rollouts
    assert told == [str] * 7 + [CutText]
    assert made[-1].finish_reason == "length"
    assert {type(rollout.text) for rollout in made} == {str}


def test_the_stop_token_is_in_the_loss_but_not_in_the_text() -> None:
    first, second = rolled_out(Scripted({}, lambda prompt, text: float(text == "2"))).rollouts
    assert (first.text, second.text) == ("2", "22")
    assert (first.reward.value, second.reward.value) == (1.0, 0.0)
    assert first.target_ids[-2:] == (TWO, END)
    assert first.loss_mask[-3:] == (False, True, True)
    assert second.num_loss_tokens == 3
    assert first.sampler_logprobs[-1] == -math.log(len(TOKENIZER))
    assert first.policy_version == 3


def test_an_environment_that_reads_tokens_gets_those_that_were_sampled() -> None:
    reader = Reader()
    assert rolled_out(reader).rewards == (1.0, 1.0)
    assert reader.seen == [[(TWO, END), (TWO, TWO, END)]]


# ------------------------------------------------------------------------------------------------ failures


def test_a_completion_the_system_cannot_score_is_a_failure_and_no_reward_of_0() -> None:
    def verdict(prompt: Prompt, text: str) -> Any:
        return Failure("judge timed out") if text == "2" else 1.0

    made = rolled_out(Scripted({}, verdict), n=3)
    assert made.rewards == (1.0, 1.0)
    assert made.failures == (Failure("judge timed out"),)
    assert made.failures[0].num_tokens == 2  # the answer and its end


@pytest.mark.parametrize("kind", [ConnectionError, SystemExit, asyncio.CancelledError])
def test_what_an_environment_raises_becomes_failures_with_the_reason(kind: type[BaseException]) -> None:
    def broken(completions: Sequence[str]) -> Any:
        raise kind("no route to the judge")

    made = rolled_out(Foreign(broken))
    assert made.rollouts == ()
    assert made.failures == (Failure(f"scripted.score raised {kind.__name__}: no route to the judge"),) * 2


@pytest.mark.parametrize(
    ("verdicts", "reason"),
    [
        ([Reward(1.0, {})], "scripted.score returned 1 verdicts for 2 completions"),
        ([Reward(1.0, {})] * 3, "scripted.score returned 3 verdicts for 2 completions"),
        ([], "scripted.score returned 0 verdicts for 2 completions"),
        (None, "scripted.score raised TypeError: 'NoneType' object is not iterable"),
    ],
)
def test_a_wrong_number_of_verdicts_fails_the_whole_group(verdicts: Any, reason: str) -> None:
    made = rolled_out(Foreign(lambda completions: verdicts))
    assert (made.rollouts, made.failures) == ((), (Failure(reason),) * 2)


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [
        (Reward(math.nan, {}), "scripted gave the reward nan"),
        (Reward(-math.inf, {}), "scripted gave the reward -inf"),
        (Reward(1e308, {}), "scripted gave the reward 1e+308"),
        (Reward(1.0, {"speed": math.inf}), "scripted gave the part speed of the reward inf"),
        (Reward(1.0, [0.5]), "scripted gave a reward whose parts are no mapping but [0.5]"),  # type: ignore[arg-type]
        (Reward(1.0, {"speed": "fast"}), "scripted gave the part speed of the reward fast"),  # type: ignore[dict-item]
        (Reward(None, {}), "scripted gave the reward None"),  # type: ignore[arg-type]
        (0.5, "scripted.score returned a float where a Reward or Failure is due"),
    ],
)
def test_a_reward_that_is_no_finite_number_is_a_failure_of_its_completion_alone(verdict: Any, reason: str) -> None:
    made = rolled_out(Foreign(lambda completions: [verdict, Reward(1.0, {})]))
    assert made.failures == (Failure(reason),)
    assert [rollout.text for rollout in made.rollouts] == ["22"]


def test_an_environment_that_changes_what_it_is_given_changes_no_rollout() -> None:
    def emptied(completions: Sequence[str]) -> Any:
        assert isinstance(completions, list)
        found = [Reward(float(len(text)), {}) for text in completions]
        completions.clear()
        return found

    made = rolled_out(adapt(Foreign(emptied))).rollouts
    assert [(rollout.text, rollout.reward.value) for rollout in made] == [("2", 1.0), ("22", 2.0)]


def test_an_environment_that_stops_the_run_is_obeyed() -> None:
    def stop(completions: Sequence[str]) -> Any:
        raise RunStopped("the judge is gone")

    with pytest.raises(RunStopped, match=r"^the judge is gone$"):
        rolled_out(Foreign(stop))


# ------------------------------------------------------------------------------------------------ prompts


def test_plain_text_is_encoded_as_it_is() -> None:
    assert TOKENIZER.decode(encode_prompt(TOKENIZER, PROMPT)) == "1+1="


def test_messages_go_through_the_chat_template_and_end_where_the_answer_begins() -> None:
    prompt = Prompt("p", "e", ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}), {})
    text = TOKENIZER.decode(encode_prompt(TOKENIZER, prompt), skip_special_tokens=False)
    assert text == "<turn>system\nBe brief.</turn><turn>user\n1+1?</turn><turn>assistant\n"


def test_messages_without_a_chat_template_are_one_line() -> None:
    plain = nano_tokenizer()
    plain.chat_template = None
    prompt = Prompt("train-7", "e", ({"role": "user", "content": "1+1?"},), {})
    with pytest.raises(
        ValueError, match=r"^prompt train-7 holds messages, but the model's tokenizer has no chat templ"
    ):
        encode_prompt(plain, prompt)


def test_an_empty_prompt_is_one_line() -> None:
    with pytest.raises(ValueError, match=r"^prompt p is empty; a policy needs at least one token to continue$"):
        encode_prompt(TOKENIZER, Prompt("p", "e", "", {}))


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("1+1=", "<|begin_of_text|>1+1="),
        ("<|begin_of_text|>1+1=", "<|begin_of_text|>1+1="),
        ("<|begin_of_text|>1+1=<|eot_id|>", "<|begin_of_text|>1+1=<|eot_id|>"),
    ],
)
def test_a_text_begins_once_and_stays_open_where_a_tokenizer_ends_each(text: str, read: str) -> None:
    tokenizer = llama3()
    marks = [(mark, tokenizer.convert_tokens_to_ids(mark)) for mark in ("<|begin_of_text|>", "<|eot_id|>")]
    both = TemplateProcessing(single="<|begin_of_text|> $A <|eot_id|>", special_tokens=marks)
    tokenizer._tokenizer.post_processor = both
    assert tokenizer.decode(tokenizer("1")["input_ids"]) == "<|begin_of_text|>1<|eot_id|>"
    assert tokenizer.decode(encode_prompt(tokenizer, Prompt("p", "e", text, {}))) == read
