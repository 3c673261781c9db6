"""What the preflight refuses of texts: tokenizers and templates that lose words, gold answers short of the maximum."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from tokenizers import normalizers

from covey.environments.arithmetic import Arithmetic
from covey.policy.models.nano import CHAT_TEMPLATE
from covey.types import Failure, Prompt, Reward
from covey_preflight.preflight import run_checks
from covey_preflight.subject import PreflightContext
from covey_tasks.math.gsm8k import GSM8K, INSTRUCTIONS
from covey_tasks.math.settings import Gsm8kConfig
from tests.support.scripted import Scripted

from ..support.small import scripted
from .looked_at import Build, Golden, finding, refusal, subjects, use_engine


@pytest.fixture(name="build")
def _build() -> Iterator[Build]:
    with subjects() as build:
        yield build


# ------------------------------------------------------------------------------------------------ gold answers


def test_a_wrong_answer_that_is_paid_is_quoted_with_both_ends(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    environment = Golden(lambda prompt, text: float(len(text) > 60), lambda prompt: "7" * 80)
    assert finding(build(environment), "wrong answers").values["num_paid"] > 0
    quoted = "7" * 30 + " … (20 characters) … " + "7" * 29 + "8"
    assert f"first: prompt train-0, '{quoted}' (near miss)" in caplog.text


@pytest.mark.long
def test_a_gold_answer_without_full_marks_is_refused_by_its_prompt(build: Build) -> None:
    wrong = {"train-1", "train-4", "train-7"}
    environment = Golden(lambda prompt, text: float(text == "right"), lambda p: "rigth" if p.id in wrong else "right")
    subject = build(environment)
    first = next(prompt.id for prompt in subject.prompts if prompt.id in wrong)
    line = refusal(subject)
    assert f"3 of 8 gold answers score below 0.999, first: prompt {first}, reward 0, allowed: >= 0.999; fix" in line


def test_full_marks_are_what_the_evaluation_calls_correct(build: Build) -> None:
    environment = Golden(lambda prompt, text: 0.8, lambda prompt: "x")
    assert not finding(build(environment), "gold answers").passed
    assert finding(build(environment, evaluation__correct_above=0.8), "gold answers").passed


def test_a_gold_answer_that_cannot_be_scored_is_refused_with_the_reason(build: Build) -> None:
    environment = Golden(lambda prompt, text: Failure("no judge"), lambda prompt: "x")
    assert "8 of 8 gold answers" in finding(build(environment), "gold answers").figure
    assert "no judge" in finding(build(environment), "gold answers").figure


def test_an_environment_that_knows_no_answer_to_some_or_any_prompts_passes(build: Build) -> None:
    environment = Golden(lambda prompt, text: 1.0, lambda prompt: None if prompt.id == "train-2" else "x")
    assert finding(build(environment), "gold answers").values == {"num_gold": 7.0, "num_low": 0.0}
    assert finding(build(scripted()), "gold answers").figure == "environment=arithmetic has no gold answers"


@pytest.mark.long
def test_nothing_that_is_sampled_is_scored_and_nothing_of_it_is_logged(build: Build) -> None:
    environment = Golden(lambda prompt, text: 1.0, lambda prompt: "x")
    run_checks(build(environment))
    assert environment.num_scored == 8 + 2 * 2  # and, of two prompts, nothing beside the right answer
    assert environment.unlogged == []


@pytest.mark.parametrize("scheme", INSTRUCTIONS)
def test_the_gold_answers_of_gsm8k_get_full_marks_in_every_scheme(build: Build, scheme: str) -> None:
    answers = [
        {"question": "6 * 7?", "answer": "6 * 7 = <<6*7=42>>42\n#### 42"},
        {"question": "How many?", "answer": "Many of them.\nIn all 1,200.\n#### 1,200"},
    ]
    environment = GSM8K({"train": answers, "test": answers[:1]}, Gsm8kConfig(scheme=scheme))
    found = finding(build(environment), "gold answers")
    assert found.figure == "2 gold answers get the maximum reward"
    assert found.passed


def test_the_gold_answers_of_arithmetic_get_full_marks(build: Build) -> None:
    assert finding(build(Arithmetic(levels=[3, 4])), "gold answers").values == {"num_gold": 8.0, "num_low": 0.0}


# ------------------------------------------------------------------------------------------------ tokenizer


CHAT = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 6 * 7?"})


@dataclass
class Talk:
    """Prompts that are conversations."""

    text: Any = CHAT

    def prompts(self, split: Any) -> list[Prompt]:
        return [Prompt(f"{split}-{i}", "talk", self.text, {}) for i in range(2)]

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        return [Reward(0.0, {}) for _ in completions]


def with_template(subject: PreflightContext, template: str) -> PreflightContext:
    subject.run.policy.tokenizer.chat_template = template
    return subject


def test_a_conversation_comes_back_from_its_tokens(build: Build) -> None:
    assert finding(build(Talk()), "tokenizer").passed
    assert finding(build(Talk("ä µ 漢字 🙂 é e\u0301  two\n blanks ")), "tokenizer").passed


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        (CHAT_TEMPLATE.replace("messages %}", "messages[1:] %}"), "the chat template drops what the system says"),
        (CHAT_TEMPLATE.replace("message['content']", "message['content'] | upper"), "drops what the system says"),
        ("{% if add_generation_prompt %}go {% endif %}" + CHAT_TEMPLATE, "its tokens change before the end"),
        ("{{ raise_exception('no system role') }}", "refuses a conversation of the roles system, user: no system role"),
        ("{{ messages[2]['content'] }}", "system, user: list object has no element 2"),
    ],
)
def test_a_chat_template_that_loses_or_moves_words_is_refused(build: Build, template: str, fault: str) -> None:
    found = finding(with_template(build(Talk()), template), "tokenizer")
    assert fault in found.figure
    assert "train-" in found.figure
    assert not found.passed


def test_messages_without_a_chat_template_are_refused(build: Build) -> None:
    subject = build(Talk())
    subject.run.policy.tokenizer.chat_template = None
    assert "holds messages, but the model's tokenizer has no chat template" in refusal(subject)


CHANGED = "its tokenizer changes blanks, case or marks, and rewards see what is written"
LOST = "its tokenizer has no token for these letters, so it is trained without seeing them"


@pytest.mark.parametrize("is_chat", [True, False])
@pytest.mark.parametrize(
    ("normalizer", "written", "read", "said"),
    [
        (normalizers.Lowercase(), "Capital letters", "capital letters", CHANGED),
        (normalizers.Replace("  ", " "), "two  blanks", "two blanks", CHANGED),
        (normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]), "très", "tres", CHANGED),
        (normalizers.NFKC(), "ten\u00a0\ufb01ngers", "ten fingers", CHANGED),
        (normalizers.Prepend("\u2581"), "a mark", "\u2581a mark", CHANGED),
        (normalizers.Replace("2", ""), "1 + 2 = 3", "1 +  = 3", LOST),
        (normalizers.Replace("+", "<|unknown|>"), "1 + 2", "1 <|unknown|> 2", LOST),
    ],
)
def test_a_lossy_tokenizer_passes_with_one_line(
    normalizer: Any, written: str, read: str, said: str, is_chat: bool, build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    text = ({"role": "user", "content": written},) if is_chat else written
    subject = build(Talk(text))
    subject.run.policy.tokenizer.backend_tokenizer.normalizer = normalizer
    found = finding(subject, "tokenizer")
    assert found.passed
    assert found.figure.endswith(said)
    if not is_chat:
        assert f"the policy reads {read!r} where {written!r} is written" in found.figure
    assert [record.getMessage() for record in caplog.records] == [found.figure]


def test_a_blank_in_front_or_another_composition_is_no_other_text(
    build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    for normalizer in (normalizers.Prepend(" "), normalizers.NFD()):
        subject = build(Talk("caf\u00e9 au lait"))
        subject.run.policy.tokenizer.backend_tokenizer.normalizer = normalizer
        assert finding(subject, "tokenizer").figure == "2 prompts come back unchanged"
    assert not caplog.records


def test_a_policy_that_cannot_stop_or_has_too_few_embeddings_is_refused(build: Build) -> None:
    subject = build()
    subject.run.policy.causal_lm.resize_token_embeddings(100)
    assert "has no embedding, there are 100" in finding(subject, "tokenizer").figure
    subject = build()
    subject.run.policy.tokenizer.eos_token = None
    subject.run.policy.causal_lm.generation_config.eos_token_id = None
    assert "knows no stop token" in finding(subject, "tokenizer").figure


def test_a_token_without_a_row_that_any_prompt_spells_is_refused(build: Build) -> None:
    subject = build(Scripted({"train": ["one"] * 30 + ["three <pic>"], "test": ["a"]}, lambda p, t: 0.0))
    subject.run.policy.tokenizer.add_special_tokens({"additional_special_tokens": ["<pic>", "<vid>"]})
    found = finding(subject, "tokenizer")
    assert "holds <pic>, a token without an embedding: there are 260 rows for 262 tokens" in found.figure
    subject = build()
    subject.run.policy.tokenizer.add_special_tokens({"additional_special_tokens": ["<pic>"]})
    assert finding(subject, "tokenizer").passed


def test_rows_without_a_token_are_said(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    subject = build()
    subject.run.policy.causal_lm.resize_token_embeddings(261)
    assert finding(subject, "tokenizer").figure.endswith(
        "1 of 261 rows of the embedding stand for no token, and are drawn as others are"
    )
    assert "rows of the embedding" not in caplog.text
    subject.run.policy.causal_lm.resize_token_embeddings(505)
    assert finding(subject, "tokenizer").values["num_unnamed_rows"] == 245
    assert "245 of 505 rows of the embedding stand for no token" in caplog.text


def test_a_stop_token_that_would_stay_in_the_judged_text_is_refused(build: Build) -> None:
    subject = build()
    subject.run.policy.causal_lm.generation_config.eos_token_id = [1, 70]
    assert "stop token 70 is not marked as special, so 'c' stays in the text" in finding(subject, "tokenizer").figure


@pytest.mark.long
def test_a_completion_with_tokens_after_its_end_is_refused(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    end = 1
    use_engine(monkeypatch, spoil=lambda c: replace(c, token_ids=(end, *c.token_ids[1:])))
    assert "goes on after a stop token" in refusal(build())


def test_a_stop_without_a_stop_token_is_refused(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    use_engine(monkeypatch, spoil=lambda c: replace(c, token_ids=(60,) * len(c.token_ids), finish_reason="stop"))
    assert "ended without a stop token" in refusal(build())


# ------------------------------------------------------------------------------------------------ lengths


def test_any_prompt_without_room_for_a_completion_is_named(build: Build) -> None:
    texts = [*["short:"] * 30, "x" * 4000, *["short:"] * 30]
    environment = Scripted({"train": texts, "test": ["t"]}, lambda prompt, text: 0.0)
    subject = build(environment, sampling__max_tokens=100, shuffle=False)
    assert refusal(subject) == (
        "preflight: lengths: prompt train-30 has 4,000 tokens, 4,100 with sampling.max_tokens=100, allowed: 4,096 "
        "positions of the policy; lower sampling.max_tokens, or leave long prompts out of the data "
        "(preflight.enabled=false trains unchecked)"
    )
    assert finding(build(environment, sampling__max_tokens=96), "lengths").passed
    of_rows = build(environment, sampling__max_tokens=100, data__path="rows.jsonl")
    assert finding(of_rows, "lengths").remedy.endswith("or leave long prompts out of the data: data.bad_rows=skip does")


def test_a_cache_that_cannot_hold_one_completion_is_refused(build: Build) -> None:
    line = refusal(build(engine__cache_bytes=512))
    assert line.startswith("preflight: lengths: prompt t")
    assert "raise engine.cache_bytes" in line
