"""A second turn: what the environment says is read and not learnt, and what was sampled stays as it was sampled."""

import asyncio
import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from covey.engine.fake import FakeEngine
from covey.engine.native.engine import NativeEngine
from covey.environments.base import Split, adapt, is_message
from covey.environments.episode import Answer, Episode, Observation
from covey.loop import train
from covey.policy.models.nano import CHAT_TEMPLATE
from covey.rollouts.attempt import Segment, build_rollout, to_segment
from covey.rollouts.encoding import encode_prompt
from covey.rollouts.rollout import roll_out
from covey.rollouts.sampler import EpisodeLimits, Sampler
from covey.rollouts.turns import observed_tokens, rendered_tokens, turn_seed
from covey.run.build_stream import check_prompts
from covey.types import Completion, Failure, Group, Message, Prompt, Reward, Rollout, RunStopped, Sampling, Span

from ..support.builders import nano
from ..support.small import TOKENIZER, rows, small_config, use, varied

END = TOKENIZER.eos_token_id
TALK = Prompt("p", "talks", ({"role": "user", "content": "1+1"},), {})
PLAIN = Prompt("p", "talks", "1+1=", {})


def tokens(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER(text)["input_ids"])


def text(ids: Sequence[int]) -> str:
    return str(TOKENIZER.decode(list(ids)))


@dataclass
class Talks:
    """Says "no" to all answers but 2, and rewards a 2."""

    heard: list[Sequence[Message]] = field(default_factory=list)
    scored: list[str] = field(default_factory=list)
    says: Any = "no"

    def prompts(self, split: Split) -> list[Prompt]:
        return [TALK]

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        self.scored += completions
        return [Reward(float(completion == "2"), {}) for completion in completions]

    async def reply(self, prompt: Prompt, messages: Sequence[Message]) -> Message | None:
        self.heard.append(messages)
        if isinstance(self.says, Exception):
            raise self.says
        return None if messages[-1]["content"] == "2" else {"role": "user", "content": self.says}


def answers(prompt_ids: tuple[int, ...], index: int) -> tuple[int, ...]:
    """First 2 and then 3; in a second turn 2."""
    return (*tokens("2" if index == 0 or "no" in text(prompt_ids) else "3"), END)


def rolled_out(environment: Talks, prompt: Prompt = TALK, engine: FakeEngine | None = None, **sampling: Any) -> Group:
    engine = engine or FakeEngine(answers, vocab_size=len(TOKENIZER))
    settings = Sampling(**{"max_tokens": 8, **sampling})
    return asyncio.run(roll_out(Sampler(engine, environment, TOKENIZER), prompt, 2, settings))


def test_only_what_was_sampled_is_learnt() -> None:
    first, second = rolled_out(Talks()).rollouts
    assert text(first.input_ids + first.target_ids[-1:]).endswith("assistant\n2<|endoftext|>")
    learnt = [token for token, mine in zip(second.target_ids, second.loss_mask, strict=True) if mine]
    assert tuple(learnt) == (*tokens("3"), END, *tokens("2"), END)
    told = text([token for token, mine in zip(second.target_ids, second.loss_mask, strict=True) if not mine])
    assert told.endswith("assistant\n</turn><turn>user\nno</turn><turn>assistant\n")
    assert [p == 0.0 for p in second.sampler_logprobs] == [not mine for mine in second.loss_mask]


def test_the_second_prompt_is_the_tokens_so_far_as_they_were_sampled() -> None:
    odd = (*tokens("3"), *tokens("3"), END)  # a tokenizer with merges would write this as one token
    engine = FakeEngine(lambda ids, index: answers(ids, index) if "no" in text(ids) else odd, len(TOKENIZER))
    rolled_out(Talks(), engine=engine)
    (first_ids, n, _), (second_ids, m, _), *_ = engine.calls
    assert (n, m) == (2, 1)
    assert second_ids[: len(first_ids)] == first_ids
    assert second_ids[len(first_ids) : len(first_ids) + 3] == odd


def test_the_last_answer_is_scored_and_the_text_is_the_whole_conversation() -> None:
    environment = Talks()
    first, second = rolled_out(environment).rollouts
    assert environment.scored == ["2", "2"]
    assert (first.reward.value, second.reward.value) == (1.0, 1.0)
    assert (first.text, second.text) == ("2", "3user\nnoassistant\n2")
    assert first.messages == ()
    assert second.messages == (
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "no"},
        {"role": "assistant", "content": "2"},
    )


def test_the_environment_hears_the_conversation_and_is_asked_once() -> None:
    environment = Talks()
    rolled_out(environment, engine=FakeEngine(lambda ids, index: (*tokens("3"), END), len(TOKENIZER)))
    assert [list(messages) for messages in environment.heard] == [
        [*TALK.text, {"role": "assistant", "content": "3"}]  # type: ignore[list-item]
    ] * 2


def test_the_environments_reply_is_appended_to_plain_text() -> None:
    _, second = rolled_out(Talks(says=" no, but "), PLAIN).rollouts
    assert second.text == "3 no, but 2"
    assert text(second.input_ids).startswith("1+1=3<|endoftext|> no, but 2")


def test_an_answer_that_was_cut_gets_no_reply() -> None:
    environment = Talks()
    group = rolled_out(environment, max_tokens=1)
    assert environment.heard == []
    assert [rollout.finish_reason for rollout in group.rollouts] == ["length", "length"]


def test_samples_draw_their_second_turns_from_seeds_of_their_own() -> None:
    engine = FakeEngine(lambda ids, index: (*tokens("3"), END), len(TOKENIZER))
    rolled_out(Talks(), engine=engine, seed=7)
    seeds = [sampling.seed for _, _, sampling in engine.calls]
    assert seeds == [7, turn_seed(7, 0, turn=2), turn_seed(7, 1, turn=2)]
    assert len(set(seeds)) == 3


def test_sampled_second_turns_of_equal_first_answers_differ() -> None:
    """The engine draws by seed and index, and each second turn is the first sample of a call of its own."""
    native = NativeEngine(nano(), cache_bytes=10**7, max_rows=8)

    class FirstSaysThree(FakeEngine):
        async def generate(self, prompt_ids: Sequence[int], n: int, sampling: Sampling) -> list[Completion]:
            scripted = "no" not in text(prompt_ids)
            return await (super() if scripted else native).generate(prompt_ids, n, sampling)

    engine = FirstSaysThree(lambda ids, index: (*tokens("3"), END), len(TOKENIZER))
    first, second = rolled_out(Talks(), engine=engine).rollouts
    assert first.text.startswith("3user\nnoassistant\n")
    assert first.text != second.text


def test_where_there_is_no_room_the_first_answer_stands() -> None:
    class Narrow(FakeEngine):
        async def generate(self, prompt_ids: Sequence[int], n: int, sampling: Sampling) -> list[Completion]:
            if "no" in text(prompt_ids):
                raise ValueError("60 tokens do not fit")
            return await super().generate(prompt_ids, n, sampling)

    environment = Talks()
    group = rolled_out(environment, engine=Narrow(answers, len(TOKENIZER)))
    assert environment.scored == ["2", "3"]
    assert [rollout.reward.value for rollout in group.rollouts] == [1.0, 0.0]


def test_an_environment_that_breaks_while_replying_scores_the_first_answer() -> None:
    environment = Talks(says=OSError("gone"))
    assert [rollout.reward.value for rollout in rolled_out(environment).rollouts] == [1.0, 0.0]


def test_an_environment_may_stop_the_run_while_replying() -> None:
    with pytest.raises(RunStopped, match="enough"):
        rolled_out(Talks(says=RunStopped("enough")))


def test_a_stop_token_that_the_template_writes_too_is_there_once() -> None:
    (stop,) = TOKENIZER("</turn>")["input_ids"]
    no: Message = {"role": "user", "content": "no"}
    talk = (*TALK.text, {"role": "assistant", "content": "3"})
    with_stop = observed_tokens(TOKENIZER, talk, (no,), (*tokens("3"), stop))
    without = observed_tokens(TOKENIZER, talk, (no,), tokens("3"))
    assert without == (stop, *with_stop)
    assert text(with_stop) == "<turn>user\nno</turn><turn>assistant\n"
    whole = [*TALK.text, {"role": "assistant", "content": "3"}, {"role": "user", "content": "no"}]
    assert (*encode_prompt(TOKENIZER, TALK), *tokens("3"), *without) == tuple(
        encode_prompt(TOKENIZER, Prompt("q", "talks", tuple(whole), {}))  # type: ignore[arg-type]
    )


def test_a_two_turn_rollout_has_the_older_version_and_last_finish_reason() -> None:
    first = Completion((8, 9), (-0.1, -0.2), "stop", policy_version=3)
    second = Completion((7,), (-0.3,), "length", policy_version=4)
    branch = [
        Segment((1, 2), "prompt", 0),
        to_segment(first, 1),
        Segment((5, 6), "user", 1),
        to_segment(second, 2),
    ]
    made = build_rollout([branch], Reward(0.5, {}), "text")
    assert made.input_ids == (1, 2, 8, 9, 5, 6)
    assert made.target_ids == (2, 8, 9, 5, 6, 7)
    assert made.loss_mask == (False, True, True, False, False, True)
    assert made.sampler_logprobs == (0.0, -0.1, -0.2, 0.0, 0.0, -0.3)
    assert (made.policy_version, made.finish_reason) == (3, "length")
    assert made.spans == (Span(3, 0, 2), Span(4, 2, 3))


def talk(engine: FakeEngine, max_turns: int, environment: Talks | None = None, **sampling: Any) -> Group:
    """Roll one sample out in up to `max_turns` turns."""
    limits = EpisodeLimits(max_turns=max_turns)
    sampler = Sampler(engine, environment or Talks(), TOKENIZER, limits=limits)
    return asyncio.run(roll_out(sampler, TALK, 1, Sampling(**{"max_tokens": 8, **sampling})))


def counting(*endings: bool) -> FakeEngine:
    """Answer 3, 4, 5 in the turns one, two, three; where an ending is False the stop token is left out."""

    def answer(prompt_ids: tuple[int, ...], index: int) -> tuple[int, ...]:
        turn = text(prompt_ids).count("no")
        whole = turn >= len(endings) or endings[turn]
        return (*tokens(str(3 + turn)), END) if whole else tokens("9" * 20)

    return FakeEngine(answer, vocab_size=len(TOKENIZER))


def learnt(rollout: Rollout) -> tuple[int, ...]:
    return tuple(token for token, mine in zip(rollout.target_ids, rollout.loss_mask, strict=True) if mine)


def test_of_three_turns_only_the_policys_tokens_are_learnt() -> None:
    (rollout,) = talk(counting(), max_turns=3).rollouts
    assert learnt(rollout) == (*tokens("3"), END, *tokens("4"), END, *tokens("5"), END)
    told = [token for token, mine in zip(rollout.target_ids, rollout.loss_mask, strict=True) if not mine]
    assert text(told).count("</turn><turn>user\nno</turn><turn>assistant\n") == 2
    assert [logprob == 0.0 for logprob in rollout.sampler_logprobs] == [not mine for mine in rollout.loss_mask]
    assert [message["content"] for message in rollout.messages] == ["3", "no", "4", "no", "5"]


def test_each_turn_reads_all_tokens_before_it_as_they_were_sampled() -> None:
    engine = counting()
    (rollout,) = talk(engine, max_turns=3).rollouts
    first, second, third = [ids for ids, _, _ in engine.calls]
    whole = (*rollout.input_ids, rollout.target_ids[-1])
    assert second[: len(first)] == first == tuple(encode_prompt(TOKENIZER, TALK))
    assert third[: len(second)] == second == whole[: len(second)]
    assert whole[: len(third)] == third


def test_the_environment_hears_the_whole_conversation_before_each_turn() -> None:
    environment = Talks()
    talk(counting(), 3, environment)
    heard = [[message["content"] for message in messages] for messages in environment.heard]
    assert heard == [["1+1", "3"], ["1+1", "3", "no", "4"]]
    assert environment.scored == ["5"]


@pytest.mark.parametrize("limit", [1, 2, 3, 4])
def test_there_are_no_more_turns_than_the_limit(limit: int) -> None:
    engine = counting()
    talk(engine, limit)
    assert len(engine.calls) == limit


def test_an_environment_that_is_content_ends_the_conversation() -> None:
    engine = FakeEngine(lambda ids, index: (*tokens("2" if "no" in text(ids) else "3"), END), len(TOKENIZER))
    (rollout,) = talk(engine, max_turns=5).rollouts
    assert len(engine.calls) == 2
    assert rollout.reward.value == 1.0


def test_every_turn_has_a_seed_of_its_own_and_the_first_two_never_change() -> None:
    engine = counting()
    talk(engine, max_turns=4, seed=7)
    seeds = [sampling.seed for _, _, sampling in engine.calls]
    assert seeds == [7, turn_seed(7, 0, 2), turn_seed(7, 0, 3), turn_seed(7, 0, 4)]
    assert len(set(seeds)) == 4
    assert turn_seed(7, 0, turn=2) == 1995529165374643252


def test_a_turn_that_is_cut_ends_the_conversation_and_is_scored_and_learnt() -> None:
    engine, environment = counting(True, False), Talks()
    (rollout,) = talk(engine, 3, environment, max_tokens=4).rollouts
    assert rollout.finish_reason == "length"
    assert len(engine.calls) == 2
    assert environment.scored == ["9999"]
    assert learnt(rollout) == (*tokens("3"), END, *tokens("9999"))


def test_where_a_later_turn_has_no_room_the_answer_before_stands() -> None:
    class Narrow(FakeEngine):
        async def generate(self, prompt_ids: Sequence[int], n: int, sampling: Sampling) -> list[Completion]:
            if text(prompt_ids).count("no") == 2:
                raise ValueError("90 tokens do not fit")
            return await super().generate(prompt_ids, n, sampling)

    environment = Talks()
    (rollout,) = talk(Narrow(counting().script, len(TOKENIZER)), 3, environment).rollouts
    assert environment.scored == ["4"]
    assert [message["content"] for message in rollout.messages] == ["3", "no", "4"]


@pytest.mark.long
def test_a_run_with_second_turns_passes_its_checks_and_trains_what_was_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Teacher(Talks):
        def prompts(self, split: Split) -> list[Prompt]:
            return [Prompt(f"{split}-{n}", "talks", ({"role": "user", "content": f"{n}+1"},), {}) for n in range(4)]

        async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
            self.scored += completions
            return [Reward(varied(prompt, text), {}) for text in completions]

    teacher = Teacher()
    use(monkeypatch, teacher)
    stop = [chr(code) for code in range(32, 127)]
    train(small_config(sampling__stop=stop, sampling__max_tokens=40, preflight__max_tokens=40), tmp_path)
    checks = json.loads((tmp_path / "preflight.json").read_text())
    assert [check["name"] for check in checks if not check["passed"]] == []
    assert len(teacher.heard) > 16
    written = rows(tmp_path / "rollouts.jsonl")
    talks = [row["completion"] for row in written if not isinstance(row["completion"], str)]
    assert talks
    assert [[message["role"] for message in talk] for talk in talks] == [["assistant", "user", "assistant"]] * len(
        talks
    )
    assert {talk[1]["content"] for talk in talks} == {"no"}
    steps = rows(tmp_path / "metrics.jsonl", "train")
    assert all(step["mismatch_max"] < 1e-4 for step in steps)
    assert max(step["completion_length_mean"] for step in steps) > 2


CALLS = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
WRITTEN = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.mark.parametrize("said", [{}, {"content": None}, {"content": ""}], ids=["absent", "null", "empty"])
def test_a_tool_call_message_needs_no_content(
    said: dict[str, Any],
) -> None:
    past: tuple[Message, ...] = (
        {"role": "user", "content": "1+1"},
        {"role": "assistant", **said, "tool_calls": CALLS},
        {"role": "tool", "content": "2"},
    )
    read = f"<turn>user\n1+1</turn><turn>assistant\n{WRITTEN}</turn><turn>tool\n2</turn><turn>assistant\n"
    prompt = Prompt("p", "talks", past, {})

    class Rewrites(Episode):
        async def reply(self, answer: Answer) -> Observation:
            return Observation(conversation=past)

    class Given(Talks):
        def prompts(self, split: Split) -> list[Prompt]:
            return [replace(prompt, id=split)]

        def episode(self, prompt: Prompt, seed: int) -> Episode:
            return Rewrites()

    check_prompts("talks", adapt(Given()))
    assert text(encode_prompt(TOKENIZER, prompt)) == read
    for rollout in rolled_out(Given(), prompt).rollouts:
        assert text(rollout.input_ids[rollout.branches[0] :]).startswith(read)


def test_templates_that_add_to_a_content_render_a_call_of_tools_that_has_none() -> None:
    strict = copy.deepcopy(TOKENIZER)
    strict.chat_template = CHAT_TEMPLATE.replace("message['content']", "message['content'] + '.'")
    past: tuple[Message, ...] = ({"role": "assistant", "tool_calls": CALLS}, {"role": "tool", "content": "2"})
    read = f"<turn>assistant\n.{WRITTEN}</turn><turn>tool\n2.</turn><turn>assistant\n"
    assert text(encode_prompt(strict, Prompt("p", "talks", past, {}))) == read
    assert text(rendered_tokens(strict, past, num_given=0)) == read


@pytest.mark.parametrize("wrong", [{"role": "assistant"}, {"role": "user", "content": None, "tool_calls": CALLS}])
def test_other_messages_need_content(wrong: Message) -> None:
    assert not is_message(wrong)
