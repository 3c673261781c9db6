"""Values for the chat template reach everything that is rendered, and are refused where the template reads them not."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import covey
from covey.api.answers import sample
from covey.environments.reward_functions.settings import RewardFunctionsConfig
from covey.loop import train
from covey.policy.models.chat_template import PLAIN_TEMPLATE, set_template_defaults
from covey.policy.models.loading import load_policy
from covey.policy.settings import ModelConfig
from covey.rollouts.encoding import encode_prompt
from covey.rollouts.turns import observed_tokens
from covey.run.build import build_run
from covey.run.build_stream import warn_of_text
from covey.system.waits.timer import PhaseTimer
from covey.types import Prompt, Sampling
from tests.support.scripted import Scripted

from ...support.models.saved_models import CHATML, gpt2, qwen, save_model
from ...support.small import small_config

TALK = Prompt("p", "asks", ({"role": "user", "content": "12 + 30 = ?"},), {})
NO_THOUGHT = "<|im_start|>assistant\n<think>\n\n</think>\n\n"


def with_template(template: Any, **values: Any) -> Any:
    tokenizer = qwen()
    tokenizer.chat_template = template
    set_template_defaults(tokenizer, values, "mine")
    return tokenizer


def rendered(tokenizer: Any, **given: Any) -> str:
    return str(
        tokenizer.apply_chat_template([dict(m) for m in TALK.text], add_generation_prompt=True, tokenize=False, **given)
    )


def test_prompts_and_later_turns_are_rendered_with_the_values() -> None:
    tokenizer = with_template(CHATML, enable_thinking=False)
    assert tokenizer.decode(encode_prompt(tokenizer, TALK)).endswith(f"= ?<|im_end|>\n{NO_THOUGHT}")
    talk = (*TALK.text, {"role": "assistant", "content": "42"})
    said = observed_tokens(tokenizer, talk, "no", tokenizer("42")["input_ids"])
    assert tokenizer.decode(list(said)).endswith(f"no<|im_end|>\n{NO_THOUGHT}")
    assert rendered(with_template(CHATML, enable_thinking=True)) == rendered(with_template(CHATML))


def test_who_renders_with_a_value_of_his_own_gets_that() -> None:
    tokenizer = with_template(CHATML, enable_thinking=False)
    assert rendered(tokenizer, enable_thinking=True) == rendered(with_template(CHATML))


def test_a_template_that_has_the_values_is_left_as_it_is() -> None:
    once = with_template(CHATML, enable_thinking=False).chat_template
    assert with_template(once, enable_thinking=False).chat_template == once
    other = with_template(once, enable_thinking=True)
    assert rendered(other) == rendered(with_template(CHATML, enable_thinking=True))


@pytest.mark.parametrize("value", [True, False, None, 0.5, -3, 'it\'s "ä" \\ %} \n {{ 1 }}', ["a", {"b": [1]}], {}])
def test_values_of_every_kind_arrive(value: Any) -> None:
    template = "\n{{ said | tojson }}"
    assert rendered(with_template(template, said=value)) == f"\n{json.dumps(value, ensure_ascii=False)}"


TEMPLATES = {
    "assigned": "{% if style is not defined %}{% set style = 'plain' %}{% endif %}{{ style }}",
    "own default": "{%- set style = style if style is defined else 'plain' %}{{ style }}",
    "in a loop": "{% for m in messages %}{% if style == 'short' %}short{% else %}long{% endif %}{% endfor %}",
    "in a macro": "{% macro say() %}{{ style }}{% endmacro %}{{ say() }}",
    "with tags of transformers": "{%- generation -%}{{ style }}{% endgeneration %}{% for m in [1] %}{% break %}{% endfor %}",  # noqa: E501
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_value_is_read_wherever_the_template_reads_it(template: str) -> None:
    assert rendered(with_template(template, style="short")) == "short"


@pytest.mark.parametrize(
    ("template", "name", "end"),
    [
        (CHATML, "enable_thinkin", "did you mean enable_thinking?; it reads enable_thinking"),
        (CHATML, "messages", "; it reads enable_thinking"),
        ("{{ messages }}{{ bos_token }}", "enable_thinking", "; it reads none"),
        ("{% set style = 1 %}{{ style }}", "style", "; it reads none"),
        ("{% for style in messages %}{{ style }}{% endfor %}", "style", "; it reads none"),
    ],
)
def test_a_value_that_nothing_would_read_is_refused(template: str, name: str, end: str) -> None:
    with pytest.raises(ValueError) as refusal:
        with_template(template, **{name: False})
    line = str(refusal.value)
    assert line.startswith(f"model.chat_template_kwargs.{name} is set, but the chat template of mine never reads it")
    assert line.endswith(end)


def test_a_template_that_is_none_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"^the chat template of mine cannot be read: .*$") as refusal:
        with_template("{% if enable_thinking %}", enable_thinking=False)
    assert "\n" not in str(refusal.value)


def test_a_tokenizer_without_a_template_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a chat template, the tokenizer of mine has none"):
        with_template(None, enable_thinking=False)


def test_each_of_several_templates_gets_what_it_reads() -> None:
    tokenizer = with_template({"default": CHATML, "tool_use": "{{ messages }}"}, enable_thinking=False)
    assert rendered(tokenizer).endswith(NO_THOUGHT)
    assert tokenizer.chat_template["tool_use"] == "{{ messages }}"


def test_prompts_of_text_have_no_use_for_the_values(tmp_path: Path) -> None:
    values = {"enable_thinking": False}
    config = small_config(model__name=save_model(tmp_path, qwen()), model__chat_template_kwargs=values)
    text = Scripted({"train": ["1+1="], "test": ["1+2="]}, lambda prompt, said: 0.0)
    with pytest.raises(ValueError, match=r"enable_thinking.* needs prompts that are conversations, got text only"):
        build_run(config, text, PhaseTimer())


def test_text_for_a_chat_model_is_a_warning_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = Scripted({"train": ["1+1="], "test": ["1+2="]}, lambda prompt, said: 0.0)
    folder = save_model(tmp_path, qwen())
    build_run(small_config(), text, PhaseTimer()).close()
    assert caplog.messages == []
    config = small_config(model__name=folder)
    run = build_run(config, text, PhaseTimer())
    run.close()
    sample(run.policy, config, [[{"role": "user", "content": "1+1="}]], 1, Sampling(max_tokens=1))
    sample(run.policy, config, ["1+1="], 1, Sampling(max_tokens=1))
    line = (
        f"prompts that are text go to {folder} without its chat template; "
        "a prompt that is a list of messages (role, content) goes through it"
    )
    warn_of_text("a base model", PLAIN_TEMPLATE)
    assert caplog.messages == [line, line]


@pytest.mark.long
def test_a_run_trains_with_the_values_and_its_policy_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    asked = [{"prompt": [{"role": "user", "content": f"{n} + 1 = ?"}]} for n in range(6)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    Path("kwargs_rewards.py").write_text(
        "def size(completions, **columns):\n    return [len(str(c)) for c in completions]\n"
    )
    config = small_config(
        environment=RewardFunctionsConfig(in_process=True),
        data__path="rows.jsonl",
        rewards=["kwargs_rewards:size"],
        model=ModelConfig(name=save_model(tmp_path / "model", qwen()), chat_template_kwargs={"enable_thinking": False}),
        num_steps=1,
    )
    train(config, "run")
    saved = "run/checkpoints/step-000001/policy"
    assert rendered(AutoTokenizer.from_pretrained(saved)).endswith(NO_THOUGHT)
    for values in ({}, {"enable_thinking": False}):
        policy = load_policy(ModelConfig(name=saved, chat_template_kwargs=values), seed=0)
        assert policy.tokenizer.decode(encode_prompt(policy.tokenizer, TALK)).endswith(NO_THOUGHT)
    config.resume, config.num_steps, config.resume_changes = "run", 2, ["num_steps"]
    train(config, "run")
    assert Path("run/checkpoints/step-000002").is_dir()


# ------------------------------------------------------------------------------------------------ base models

ASKED = ({"role": "system", "content": "One word."}, {"role": "user", "content": "12 + 30 = ?"})


def test_messages_go_to_a_base_model_as_plain_text_and_that_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_model(tmp_path, gpt2())
    talk = Scripted({"train": [ASKED, ASKED], "test": [ASKED]}, lambda prompt, said: 0.0)
    run = build_run(small_config(model__name=folder), talk, PhaseTimer())
    run.close()
    tokenizer = run.policy.tokenizer
    assert tokenizer.decode(encode_prompt(tokenizer, Prompt("p", "?", ASKED, {}))) == "One word.\n\n12 + 30 = ?\n\n"
    assert caplog.messages == [
        f"{folder} has no chat template: messages go to it as plain text, a blank line after each; a base model "
        "continues text, so prompts must show what an answer looks like"
    ]
    run.policy.save_tokenizer(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template == tokenizer.chat_template


def test_later_turns_and_begun_answers_reach_a_base_model_as_plain_text() -> None:
    tokenizer = gpt2()
    set_template_defaults(tokenizer, {}, "mine")
    end, answer = [tokenizer.eos_token_id], tokenizer("42")["input_ids"]
    talk = (*ASKED, {"role": "assistant", "content": "42"})
    for sampled in (answer, [*answer, *end]):
        assert tokenizer.decode(list(observed_tokens(tokenizer, talk, "see", sampled))) == "\n\nsee\n\n"
    begun = Prompt("p", "?", (ASKED[1], {"role": "assistant", "content": "It is "}), {})
    assert tokenizer.decode(encode_prompt(tokenizer, begun)) == "12 + 30 = ?\n\nIt is "


def test_a_base_model_of_text_prompts_keeps_no_chat_template(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = Scripted({"train": ["1+1="], "test": ["1+2="]}, lambda prompt, said: 0.0)
    run = build_run(small_config(model__name=save_model(tmp_path, gpt2())), text, PhaseTimer())
    run.close()
    assert run.policy.tokenizer.chat_template is None
    assert caplog.messages == []


@pytest.mark.long
def test_a_base_model_passes_the_preflight_and_trains_on_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = [{"prompt": [{"role": "user", "content": f"{n} + 1 = ?"}]} for n in range(6)]
    covey.train(save_model(tmp_path / "base", gpt2()), sizes, asked, folder=tmp_path / "run", **LITTLE)
    (policy,) = tmp_path.glob("run/checkpoints/step-000001/policy")
    assert rendered(AutoTokenizer.from_pretrained(policy)) == "12 + 30 = ?\n\n"
    checks = json.loads((tmp_path / "run" / "preflight.json").read_text())
    assert "tokenizer" in str(checks)


LITTLE: dict[str, Any] = {"num_steps": 1, "groups_per_step": 2, "group_size": 4, "max_tokens": 4, "progress": False}
LITTLE |= {"evaluation": {"num_prompts": 1}, "num_samples": 1, "k": [1], "environment": {"in_process": True}}


def sizes(completions: Any, **_: Any) -> list[float]:
    return [len(messages[-1]["content"]) / 100 for messages in completions]
