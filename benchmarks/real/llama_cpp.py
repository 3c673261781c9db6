"""Compare llama.cpp on an exported GGUF file with transformers on its folder: greedy text and log-probs.

    pip install xllamacpp
    python -m benchmarks.real.llama_cpp FOLDER f32 f16 q8_0

Prints, for each type: prompts that both cut into the same tokens, greedy tokens until the first that differs, and the
largest difference of a log-prob, of the five likeliest tokens at each of these. Keys and values are kept in float32.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from covey_report.export.to_gguf import write_gguf

TEXTS = ("The capital of France is", "x  = 3 + 1234;  don't 12.5\n\n  café\t世界 I'LL")
QUESTION = "Write one sentence about the sea."
NUM_TOKENS = 24


class Answer(NamedTuple):
    """What transformers writes, with the likeliest tokens of each step."""

    prompt: str
    num_tokens: int
    token_ids: list[int]
    likeliest: list[dict[int, float]]


def answers(folder: Path) -> list[Answer]:
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        AutoTokenizer.from_pretrained(folder),
    )
    talk = [{"role": "user", "content": QUESTION}]
    chat = (
        [tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)]
        if tokenizer.chat_template
        else []
    )
    return [_answer(model, tokenizer, prompt) for prompt in (*TEXTS, *chat)]


def _answer(model: Any, tokenizer: Any, prompt: str) -> Answer:
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    how = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    found = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
    tops = [logits[0].log_softmax(-1).topk(5) for logits in found.logits]
    likeliest = [dict(zip(top.indices.tolist(), top.values.tolist(), strict=True)) for top in tops]
    return Answer(prompt, ids.shape[1], found.sequences[0, ids.shape[1] :].tolist(), likeliest)


def compare(file: Path, wanted: Sequence[Answer]) -> str:
    """Describe how llama.cpp's answers differ."""
    import xllamacpp

    asked = xllamacpp.CommonParams()
    asked.model.path, asked.n_ctx, asked.n_gpu_layers, asked.cpuparams.n_threads = str(file), 1024, 0, 1
    asked.cache_type_k = asked.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    asked.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(asked)
    how = {"max_tokens": NUM_TOKENS, "temperature": 0, "logprobs": 5, "cache_prompt": False}
    num_prompts, num_alike, largest = 0, 0, 0.0
    for one in wanted:
        found = server.handle_completions({"prompt": one.prompt, **how})
        num_prompts += found["usage"]["prompt_tokens"] == one.num_tokens
        steps = (found["choices"][0]["logprobs"] or {"content": []})["content"]
        for step, token, likeliest in zip(steps, one.token_ids, one.likeliest, strict=False):
            if step["id"] != token:
                break
            num_alike += 1
            own = {each["id"]: each["logprob"] for each in step["top_logprobs"]}
            largest = max([largest, *(abs(own[each] - value) for each, value in likeliest.items() if each in own)])
    num_tokens = sum(len(one.token_ids) for one in wanted)
    return (
        f"prompts {num_prompts}/{len(wanted)}, greedy tokens {num_alike}/{num_tokens}, log-probs within {largest:.2g}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("types", nargs="+")
    asked = parser.parse_args()
    wanted = answers(asked.folder)
    for kind in asked.types:
        with tempfile.TemporaryDirectory() as scratch:
            for file in asked.folder.iterdir():
                (Path(scratch) / file.name).symlink_to(file.resolve())
            print(f"{asked.folder.name} {kind}: {compare(write_gguf(Path(scratch), kind), wanted)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
