"""Sound tokenizers of known families pass the preflight, whatever they sample; unsound ones are told what is wrong."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from covey.rollouts.encoding import encode_prompt
from covey.rollouts.turns import observed_tokens
from covey.types import Completion, Failure, Prompt, Reward
from covey_preflight.preflight import raise_on_failure, run_checks

from ..support.models.saved_models import CHATML, SOUND, STOPS, llama3, qwen, save_model, without_eos, wordpiece
from .looked_at import Build, finding, refusal, subjects, use_engine

TALK = ({"role": "user", "content": "12 + 30 = ?"},)


@pytest.fixture(name="build")
def _build() -> Iterator[Build]:
    with subjects() as build:
        yield build


@dataclass
class Asks:
    """Prompts that are all the same, of a conversation or of text."""

    text: Any

    def prompts(self, split: Any) -> list[Prompt]:
        return [Prompt(f"{split}-{i}", "asks", self.text, {}) for i in range(2)]

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        return [Reward(0.0, {}) for _ in completions]


def special_tokens(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Every token that tokenizer.json marks as special, named or not."""
    return [number for number, token in tokenizer.added_tokens_decoder.items() if token.special]


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_tokenizer_passes_with_any_special_tokens(
    name: str, build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = SOUND[name]()
    folder = save_model(tmp_path, tokenizer, STOPS.get(name))
    stops = {tokenizer.eos_token_id, *(tokenizer.convert_tokens_to_ids(token) for token in STOPS.get(name, []))}
    unlikely = [number for number in special_tokens(tokenizer) if number not in stops]

    def spoil(completion: Completion) -> Completion:
        placed = (unlikely * 12)[: len(completion.token_ids) // 2]
        return replace(completion, token_ids=(*placed, *completion.token_ids[len(placed) :]))

    use_engine(monkeypatch, spoil=spoil)
    prompts = "12 + 30 = " if tokenizer.chat_template is None else TALK
    subject = build(Asks(prompts), model__name=folder, sampling__max_tokens=12)
    for check in ("tokenizer", "lengths", "completions"):
        found = finding(subject, check)
        assert found.passed, found.figure


@pytest.mark.long
@pytest.mark.parametrize("name", SOUND)
def test_a_sound_tokenizer_passes_all_checks_with_text_and_with_messages(
    name: str, build: Build, tmp_path: Path
) -> None:
    tokenizer = SOUND[name]()
    folder = save_model(tmp_path, tokenizer, STOPS.get(name))
    subject = build(Asks("12 + 30 = "), model__name=folder)
    raise_on_failure(run_checks(subject))
    if tokenizer.chat_template is not None:
        assert finding(build(Asks(TALK), model__name=folder), "tokenizer").passed


def test_letters_that_a_tokenizer_does_not_know_are_told_and_its_blanks_are_too(
    build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_model(tmp_path, wordpiece())
    found = finding(build(Asks("So 1+2 = \u6f22?"), model__name=folder), "tokenizer")
    assert found.passed
    assert found.figure.endswith("no token for these letters, so it is trained without seeing them")
    found = finding(build(Asks("SO 1+2"), model__name=folder), "tokenizer")
    assert found.passed
    assert found.figure.startswith("prompt train-0: the policy reads 'so 1 + 2' where 'SO 1+2' is written; ")
    assert len(caplog.records) == 2


def test_a_prompt_of_text_may_have_special_tokens_around_it_that_are_not_named(build: Build, tmp_path: Path) -> None:
    tokenizer = llama3()
    tokenizer.bos_token = None
    found = finding(build(Asks("12 + 30 = "), model__name=save_model(tmp_path, tokenizer)), "tokenizer")
    assert found.passed, found.figure


def test_a_tokenizer_without_an_end_is_refused(build: Build, tmp_path: Path) -> None:
    line = refusal(build(Asks(TALK), model__name=save_model(tmp_path, without_eos())))
    assert line == (
        "preflight: tokenizer: the policy knows no stop token (eos_token of the tokenizer or of the generation "
        "config), allowed: no difference; name one: eos_token in tokenizer_config.json, or eos_token_id in "
        "generation_config.json of model.name (preflight.enabled=false trains unchecked)"
    )


def test_a_tokenizer_that_drops_words_of_a_completion_is_refused_in_words(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = build(Asks(TALK), model__name=save_model(tmp_path, qwen()))
    tokenizer = subject.run.policy.tokenizer
    decode = tokenizer.decode

    def lossy(ids: Any, skip_special_tokens: bool = False, **how: Any) -> str:
        text = str(decode(ids, skip_special_tokens=skip_special_tokens, **how))
        return text[1:] if skip_special_tokens else text

    monkeypatch.setattr(tokenizer, "decode", lossy)
    found = finding(subject, "completions")
    assert not found.passed
    assert "is judged as " in found.figure
    assert "its tokens that are not special read " in found.figure
    assert found.remedy.startswith("take another tokenizer: its decode(skip_special_tokens=True)")


CONVERSATIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "prefill": (*TALK, {"role": "assistant", "content": "It is 4"}),
    "parts": ({"role": "user", "content": [{"type": "text", "text": "12 + 30"}, {"type": "text", "text": " = ?"}]},),
    "tool": (
        *TALK,
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 12}}}]},
        {"role": "tool", "content": 'the "sum"\nis 42'},
    ),
    "system": ({"role": "system", "content": "Say a number."},),
}
TOOLS = CHATML.replace(
    "message['content'] }}", "(message['content'] if message['role'] != 'tool' else message['content'] | tojson) }}"
)
PARTS = CHATML.replace("message['content'] }}", "message['content'] | map(attribute='text') | join('') }}")


@pytest.mark.long
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_conversation_of_every_kind_passes_where_the_template_keeps_its_words(
    name: str, build: Build, tmp_path: Path
) -> None:
    tokenizer = qwen()
    tokenizer.chat_template = {"parts": PARTS, "tool": TOOLS}.get(name, CHATML)
    subject = build(Asks(CONVERSATIONS[name]), model__name=save_model(tmp_path, tokenizer))
    raise_on_failure(run_checks(subject))
    assert finding(subject, "tokenizer").passed


def test_a_prefill_is_the_end_of_the_prompt(tmp_path: Path) -> None:
    prompt = Prompt("p", "asks", CONVERSATIONS["prefill"], {})
    text = qwen().decode(encode_prompt(qwen(), prompt))
    assert text == "<|im_start|>user\n12 + 30 = ?<|im_end|>\n<|im_start|>assistant\nIt is 4"
    answered = (prompt.text[0], {"role": "assistant", "content": "It is 42"})
    said = observed_tokens(qwen(), answered, "no", qwen()("2")["input_ids"])
    assert qwen().decode(list(said)) == "<|im_end|>\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n"
