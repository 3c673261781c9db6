"""Chat templates that behave as those of well-known models do, each with a tokenizer that has their marks."""

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from .saved_models import byte_level, fast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN25 = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nHelp.' }}"
    "{% if tools %}{{ '\n' + tools | tojson }}{% endif %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Tool messages in a row become one message of the user; the first rendering says a system message of its own."""
QWEN3 = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' and not "
    "(m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set said = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') if '</think>' in m.content "
    "else '' %}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{ '<|im_start|>assistant\n<think>\n' + thought + '\n</think>\n\n' + said + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>assistant\n' + said + '<|im_end|>\n' }}{% endif %}"
    "{% elif m.role == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Drops the reasoning of turns before the user's last message."""
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\n\n' }}"
    "{{ (m.content | tojson if m.role == 'tool' else m.content | trim) + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
"""Trims what is said, writes what tools say as JSON, and puts nothing between two messages."""
MISTRAL = (
    "{% set ns = namespace(count=0) %}{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'tool' %}{% if m.tool_call_id is defined and m.tool_call_id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "{{ '[TOOL_RESULTS] {\"content\": ' + m.content | tojson + ', \"name\": \"' + m.name + '\"}[/TOOL_RESULTS]' }}"
    "{% else %}{% if (m.role == 'user') != (ns.count % 2 == 0) %}"
    "{{ raise_exception('After the optional system message, roles must alternate user/assistant') }}{% endif %}"
    "{% set ns.count = ns.count + 1 %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endif %}{% endfor %}"
)
"""Insists on alternating roles, writes a blank before the stop token, and opens no turn of the assistant."""
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + "
    "'<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
"""Knows no tools."""


def build(template: str, special: list[str], brackets: tuple[str, ...] = (), **named: Any) -> PreTrainedTokenizerFast:
    tokenizer = byte_level(special)
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in brackets])
    return fast(tokenizer, template, **named)


def chatml() -> PreTrainedTokenizerFast:
    return build(CHATML, ["<|im_start|>", "<|im_end|>"], eos_token="<|im_end|>")


QWEN_BRACKETS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


def qwen25() -> PreTrainedTokenizerFast:
    return build(QWEN25, ["<|im_start|>", "<|im_end|>"], QWEN_BRACKETS, eos_token="<|im_end|>")


def qwen3() -> PreTrainedTokenizerFast:
    return build(QWEN3, ["<|im_start|>", "<|im_end|>"], QWEN_BRACKETS, eos_token="<|im_end|>")


def llama3() -> PreTrainedTokenizerFast:
    special = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    return build(LLAMA3, special, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>")


def mistral() -> PreTrainedTokenizerFast:
    special = ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]
    return build(MISTRAL, special, bos_token="<s>", eos_token="</s>")


def gemma() -> PreTrainedTokenizerFast:
    special = ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]
    return build(GEMMA, special, bos_token="<bos>", eos_token="<end_of_turn>")


FAMILIES: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "chatml": chatml,
    "qwen25": qwen25,
    "qwen3": qwen3,
    "llama3": llama3,
    "mistral": mistral,
    "gemma": gemma,
}
