"""Scripts of attempts that call slow tools, the tools, and a tiny model with a tokenizer, for `tool_latency`."""

import asyncio
import json
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl.chat_template_utils import qwen2_5_chat_template

from covey.policy.models import nano

MEAN_SECONDS = 0.2
SIZE = 8
"""Attempts at a prompt."""
MOST_CALLS = 7
"""Of an attempt, one a turn; the turn after the last is the answer."""
MAX_LENGTH = 8192
DELAYS: Mapping[str, Callable[[random.Random], float]] = {
    "uniform": lambda chance: chance.uniform(0.05, 0.35),
    "heavy": lambda chance: chance.lognormvariate(math.log(MEAN_SECONDS) - 0.5, 1.0),
}
"""Seconds of a call, MEAN_SECONDS on average: 50 to 350 ms, or log-normal with sigma 1 (median 121 ms)."""


@dataclass
class Script:
    """What attempts say in each turn, and how long each of their calls takes."""

    seconds: Sequence[Sequence[float]]
    """Of each call of each attempt."""
    made: list[tuple[int, int]] = field(default_factory=list)
    """Calls that were made: attempt and turn."""

    def text(self, attempt: int, turn: int) -> str:
        """Return what an attempt says in turn 1, 2, ...: a call, or after its last call an answer."""
        if turn > len(self.seconds[attempt]):
            return "It is done.<|im_end|>"
        call = {"name": "look_up", "arguments": {"attempt": attempt, "turn": turn}}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call><|im_end|>"

    def called(self, attempt: int, turn: int) -> float:
        """Note a call, and return how long it takes."""
        self.made.append((attempt, turn))
        return self.seconds[attempt][turn - 1]

    def check(self) -> None:
        """See that each call was made, once."""
        due = [(attempt, turn + 1) for attempt, calls in enumerate(self.seconds) for turn in range(len(calls))]
        assert sorted(self.made) == due, f"{len(self.made)} calls were made, {len(due)} are due"

    @property
    def longest(self) -> float:
        """Return the seconds of the tools of the attempt that waits longest: no step can be shorter."""
        return max(map(sum, self.seconds))

    @property
    def in_lockstep(self) -> float:
        """Return the seconds of the slowest tools of the turns together."""
        return sum(max(calls[turn] for calls in self.seconds if len(calls) > turn) for turn in range(MOST_CALLS))


def draw(num_attempts: int, delays: str, seed: int) -> Script:
    """Draw 1 to MOST_CALLS calls for each attempt, and how long they take."""
    chance = random.Random(f"{delays}/{seed}")
    numbers = [chance.randint(1, MOST_CALLS) for _ in range(num_attempts - 1)] + [MOST_CALLS]
    return Script([[DELAYS[delays](chance) for _ in range(number)] for number in numbers])


class Tools:
    """The two forms of the tool, both of which sleep as the script of the step says."""

    script = Script([])

    def sync(self) -> Callable[..., Any]:
        def look_up(attempt: int, turn: int) -> str:
            """
            Look something up.

            Args:
                attempt: Whose.
                turn: When.
            """
            time.sleep(self.script.called(attempt, turn))
            return "found"

        return look_up

    def asynchronous(self) -> Callable[..., Any]:
        async def look_up(attempt: int, turn: int) -> str:
            """
            Look something up.

            Args:
                attempt: Whose.
                turn: When.
            """
            await asyncio.sleep(self.script.called(attempt, turn))
            return "found"

        return look_up


# ---- a tiny model, and its tokenizer


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes with the marks of Qwen2.5 and its chat template as TRL has it."""
    tokenizer = nano.byte_tokenizer(())
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in ("<tool_call>", "</tool_call>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=qwen2_5_chat_template,
        model_max_length=MAX_LENGTH,
    )


def tiny_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """Return a model of 0.1 million random weights."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LENGTH,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config)


def saved_model(folder: str) -> str:
    """Return the folder of the model and its tokenizer."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    tiny_model(tokenizer).save_pretrained(folder)
    return folder


def rows(groups: int) -> list[dict[str, Any]]:
    return [{"prompt": [{"role": "user", "content": f"Task {number}"}]} for number in range(groups)]


def same_for_all(completions: Sequence[Any], **columns: Any) -> list[float]:
    return [float(index) for index, _ in enumerate(completions)]
