"""Calls are read as chat templates write them: of models that are known, and of any that writes them otherwise."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

import trl
from covey_integrations.tools.calls import BadCall, Call, InStyle, hermes, reader_for, reader_name
from covey_integrations.tools.styles import turn_of, turns

from ...support.models.chat_templates import chatml
from ...support.tools import answer


class Template:
    """A tokenizer, as far as its chat template goes."""

    response_template = None

    def __init__(self, template: str) -> None:
        self.template = template

    def apply_chat_template(self, messages: Any, tools: Any = None, tokenize: bool = False, **how: Any) -> str:
        named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<p>"}
        return str(render_jinja_template([messages], tools, chat_template=self.template, **named, **how)[0][0])


def writes(call: str, before: str = "", after: str = "", between: str = "") -> Template:
    """A template that writes the calls `f` of a turn so."""
    parting = "{% if not loop.last %}" + between + "{% endif %}"
    calls = f"{before}{{% for c in m.tool_calls %}}{{% set f = c.function %}}{call}{parting}{{% endfor %}}{after}"
    said = f"{{{{ m.content }}}}{{% if m.tool_calls %}}{calls}{{% endif %}}"
    turns = f"{{% for m in messages %}}<|{{{{ m.role }}}}|>{said}</s>{{% endfor %}}"
    return Template(turns + "{% if add_generation_prompt %}<|assistant|>{% endif %}")


JSON = '"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}'
EACH = "{% for k, v in f.arguments.items() %}"
OWN = {
    "mistral": writes(f'{{{JSON}, "id": "{{{{ c.id }}}}"}}', "[TOOL_CALLS] [", "]", ", "),
    "mistral of 2025": writes("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}"),
    "deepseek r1": writes(
        "<｜tool▁call▁begin｜>{{ c.type }}<｜tool▁sep｜>{{ f.name }}\n```json\n{{ f.arguments | tojson }}\n"
        "```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "\n",
    ),
    "kimi": writes(
        "<|tool_call_begin|>functions.{{ f.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
        "{{ f.arguments | tojson }}<|tool_call_end|>",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
    ),
    "command r": writes(
        '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}',
        "<|START_ACTION|>[\n    ",
        "\n]<|END_ACTION|>",
        ",\n    ",
    ),
    "minimax": writes(
        f'<invoke name="{{{{ f.name }}}}">\n{EACH}<parameter name="{{{{ k }}}}">{{{{ v }}}}</parameter>\n'
        "{% endfor %}</invoke>\n",
        "<minimax:tool_call>\n",
        "</minimax:tool_call>",
    ),
    "python": writes(
        f"{{{{ f.name }}}}({EACH}{{{{ k }}}}={{{{ v | tojson }}}}{{{{ ', ' if not loop.last }}}}{{% endfor %}})",
        "[",
        "]",
        ", ",
    ),
    "openai": writes(f'{{"type": "function", "function": {{{JSON}}}}}', "<tool_call>", "</tool_call>"),
    "text": writes('{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson | tojson }}}', "<functioncall> "),
    "llama 3.2": writes("<function={{ f.name }}>{{ f.arguments | tojson }}</function>"),
    "react": writes("Action: {{ f.name }}\nAction Input: {{ f.arguments | tojson }}"),
    "granite": writes(f"{{{JSON}}}", "<|tool_call|>[", "]", ", "),
    "a list alone": writes(f"{{{JSON}}}", "[", "]", ", "),
}
FOLDER = Path(trl.__file__).parent / "chat_templates"
NAMES = "llama3_1 llama3_2 glm4moe qwen2_5 qwen3 qwen3_5_think qwen3_5_nothink qwen3_6 nemotron_3_nano lfm2_v2 gemma4"
TRLS = {name: Template((FOLDER / f"{name}.jinja").read_text()) for name in NAMES.split()}


def schema_of(name: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    kinds = {str: "string", int: "integer", bool: "boolean", float: "number"}
    properties = {
        key: {"type": kinds[type(value)], "description": "Any."}
        for key, value in arguments.items()
        if type(value) in kinds
    }
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": "Any.",
            "parameters": {"type": "object", "properties": properties, "required": []},
        },
    }


@pytest.mark.parametrize("name", [*OWN, *TRLS])
@pytest.mark.parametrize(
    "arguments",
    [
        {"a": 6, "b": 7},
        {},
        {"text": 'a "word", b\\c <d> & } ) ] e=f', "n": -1},
        {"flag": True, "share": 1.5, "none": 0},
    ],
    ids=["numbers", "none", "marks", "kinds"],
)
def test_a_call_is_read_as_the_template_writes_it(name: str, arguments: dict[str, Any]) -> None:
    template, schema = (OWN | TRLS)[name], schema_of("multi-ply", arguments)
    turn, read = turn_of(template, schema, [arguments]), reader_for(template)
    assert "multi-ply" in turn
    assert read(answer(turn), [schema]).calls == (Call("multi-ply", arguments),)
    begun = turn.rpartition("</think>")[2].rstrip("</s>\n")
    assert read(answer(f"<think>I could {begun}</think>It is 42."), [schema]).calls == ()


@pytest.mark.parametrize("name", [*OWN, *TRLS])
def test_an_answer_is_no_call(name: str) -> None:
    read = reader_for((OWN | TRLS)[name])
    for text in ("It is 42.", '{"answer": 42}', "[1, 2, 3]", "(a) 3", '{"name": "Bob", "age": 5}', "multi-ply 6 by 7"):
        said = read(answer(text), [])
        assert (said.text, said.calls) == (text, ())


@pytest.mark.parametrize("name", [*OWN, "glm4moe", "qwen3", "qwen3_6", "lfm2_v2", "gemma4"])
def test_several_calls_of_a_turn_are_all_read(name: str) -> None:
    template, schema = (OWN | TRLS)[name], schema_of("f", {"a": 1})
    turn = turn_of(template, schema, [{"a": 1}, {"a": 2}, {"a": 3}])
    assert reader_for(template)(answer(turn), [schema]).calls == tuple(Call("f", {"a": number}) for number in (1, 2, 3))


def test_llamas_calls_may_follow_each_other() -> None:
    call = '{"name": "multiply", "parameters": {"a": 6, "b": 7}}'
    read = reader_for(TRLS["llama3_1"])
    for parting in ("; ", "\n", ", "):
        assert read(answer(call + parting + call), []).calls == (Call("multiply", {"a": 6, "b": 7}),) * 2


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("llama3_1", '{"name": "f", "parameters": {"a": 1}', "no valid JSON"),
        ("glm4moe", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>6", "not closed"),
        ("glm4moe", '<tool_call>{"name": "f", "arguments": {}}</tool_call>', "names no tool"),
        ("qwen3_5_nothink", "<tool_call>\n<function=f>\n<parameter=a>\n6\n</parameter>", "not closed"),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a"}}]', "no valid JSON"),
        ("lfm2_v2", "<|tool_call_start|>[f(a=g(1))]<|tool_call_end|>", "no valid Python"),
        ("lfm2_v2", "<|tool_call_start|>[f(1)]<|tool_call_end|>", "no valid Python"),
        ("lfm2_v2", "<|tool_call_start|>[f(a='", "no valid Python"),
        ("gemma4", "<|tool_call>call:f{a:{b:1}}<tool_call|>", "no value that can be read"),
    ],
)
def test_what_is_no_call_of_a_style_is_said(name: str, text: str, problem: str) -> None:
    (bad,) = reader_for((OWN | TRLS)[name])(answer(text), []).calls
    assert isinstance(bad, BadCall)
    assert problem in bad.problem


def test_a_value_keeps_its_lines_and_indentation() -> None:
    code = "def f():\n    return {'a': [1]}\n"
    for name in ("glm4moe", "qwen3_5_nothink", "minimax"):
        template, schema = (OWN | TRLS)[name], schema_of("run", {"code": code})
        turn = turn_of(template, schema, [{"code": f"    {code}"}])
        assert reader_for(template)(answer(turn), [schema]).calls == (Call("run", {"code": f"    {code}"}),)


def test_the_style_is_named() -> None:
    assert reader_for(TRLS["qwen3"]) is hermes
    assert reader_name(TRLS["llama3_1"]) == "the chat template's style (JSON)"
    assert reader_name(OWN["kimi"]) == "the chat template's style (<|tool_call_begin|>functions.)"
    assert reader_for(chatml()) is hermes
    assert turns(chatml()) == ["", "", ""]


@pytest.mark.parametrize(
    "template",
    [
        writes("name: {{ f.name }} ({{ f.arguments | length }} arguments)"),
        writes(f"yaml\nname: {{{{ f.name }}}}\n{EACH}  {{{{ k }}}}: {{{{ v }}}}\n{{% endfor %}}"),
        writes("{{ f.name }} {{ f.arguments.values() | list }}"),
    ],
    ids=["no arguments", "no end", "no names"],
)
def test_a_style_that_is_not_read_back_is_refused(template: Template) -> None:
    with pytest.raises(ValueError, match="must write calls of tools so that they can be read back"):
        reader_for(template)


@pytest.mark.parametrize("name", ["python", "glm4moe", "qwen3_5_nothink", "kimi", "gemma4", "llama3_1"])
def test_megabytes_of_half_a_call_take_no_time(name: str) -> None:
    read = reader_for((OWN | TRLS)[name])
    assert isinstance(read, InStyle)
    turn: Sequence[str] = turns((OWN | TRLS)[name])[0].rpartition("</think>")[2]
    for cut in range(1, len(turn), 7):
        read(answer(str(turn[:cut]) * 2000 + "</think>"), [])
