"""Which causal language models of the installed transformers are sampled and trained as transformers computes them?

    python -m benchmarks.checks.architectures             # all of them; writes docs/develop/architectures.md
    python -m benchmarks.checks.architectures gemma2 doge # some, to the terminal
    python -m benchmarks.checks.architectures "gemma3, whole" # ... with their towers for pictures
    python -m benchmarks.checks.architectures --part 2/6  # every sixth, kept; the page is written once all are there

A tiny random model of each architecture is saved as a hub would have it and loaded by covey, as a run loads one. What
the engine of its path says of the tokens it samples, what each layout of the trainer says of the same texts, the
gradient, and adapters on all linear layers, are held against transformers alone: its eager attention, one text at a
time, plain autograd. Every model has a process of its own, so that one that crashes or hangs is a row like others. Exit
code 1 where one of them comes out otherwise without a word.
"""

import argparse
import asyncio
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

from benchmarks.checks.architecture_configs import NEWEST, VOCABULARY, architectures, tiny_config
from covey.engine.base import Engine
from covey.engine.build import build_native
from covey.engine.settings import EngineConfig
from covey.policy.logprobs import Scoring, score_tokens
from covey.policy.models.loading import load_policy
from covey.policy.models.nano import nano_tokenizer
from covey.policy.models.text_part import auto_class
from covey.policy.plain import Exact, plain_model, rollout_logprobs
from covey.policy.policy import Policy, inference
from covey.policy.settings import ModelConfig
from covey.rollouts.rollout import finished_rollout
from covey.trainer.batch import count, make_batch, make_rows
from covey.types import Completion, Group, Prompt, Reward, Rollout, Sampling

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "develop" / "architectures.md"
RESULTS = ROOT / "benchmarks" / "results" / "architectures.json"
WHOLE = ", whole"
"""End of the name of an architecture that is built with what it has for pictures and sound."""
SECONDS = 300.0
"""Until a model is given up."""
LAYOUTS = ("padded", "packed", "shared")
SAME = 1e-3
"""Largest difference of a log-prob, in nats, and of a gradient, relative, that rounding in float32 may make."""
EXACT = 1e-5
"""Beyond it, a model is compared in float64 as well."""
ORDER = ("different", "failed", "fast", "general", "refused", "not built")

Row = dict[str, Any]


def examined(name: str) -> Row:
    """What became of one architecture: `status` and, by that, figures or the reason."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            kind = save(name, folder)
        except Exception as error:
            return {"status": "not built", "reason": line(f"{type(error).__name__}: {error}")}
        try:
            policy = load_policy(ModelConfig(name=folder, device="cpu"), seed=0)
            engine = engine_of(policy)
        except ValueError as error:
            return {"status": "refused", "class": kind, "reason": str(error).replace(f"={folder}", "")}
        found = {**differences(policy, engine, folder), **of_adapters(folder, "float32")}
        if largest_of(found) > EXACT:
            with suppress(Exception):  # some mix their types in float64
                found["float64"] = in_float64(folder)
    is_same = largest_of(found) <= SAME or found.get("float64", SAME) <= EXACT
    layouts = {} if policy.path == "fast" else {"layouts": policy.attention}
    return {"status": policy.path if is_same else "different", "class": kind, **layouts, **found}


def largest_of(found: Row) -> float:
    return max(value for value in found.values() if isinstance(value, float))


def in_float64(folder: str) -> float:
    """The largest of all differences in float64: whether those in float32 are rounding."""
    with Exact():
        policy = load_policy(ModelConfig(name=folder, device="cpu", precision="float64"), seed=0)
        found = {**differences(policy, engine_of(policy), folder), **of_adapters(folder, "float64")}
    return largest_of(found)


def engine_of(policy: Policy) -> Engine:
    """The engine of the policy's path."""
    return build_native(policy, EngineConfig(cache_bytes=1 << 26, max_rows=4), "auto")


def save(name: str, folder: str) -> str:
    """Save a tiny model of this architecture, after a pass that shows that transformers can run it; its class."""
    config = tiny_config(name.removesuffix(WHOLE))
    loader: Any = AutoModelForMultimodalLM if name.endswith(WHOLE) else AutoModelForCausalLM
    torch.manual_seed(0)
    model = loader.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # What a model starts from is nearly uniform.
            parameter.mul_(4.0) if parameter.dim() > 1 else None
    model.save_pretrained(folder)
    if AutoConfig.from_pretrained(folder).model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        config.save_pretrained(folder)  # of text and pictures, as a hub has it: the class takes its text part
    nano_tokenizer().save_pretrained(folder)
    logits = plain(folder)(input_ids=torch.arange(4, 16)[None]).logits
    logits.sum().backward()  # some cannot, in evaluation mode: there is nothing to compare with
    if not bool(torch.isfinite(logits).all()):
        raise ValueError("transformers' own logits are not finite")
    return type(model).__name__


def plain(folder: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """As transformers alone runs it."""
    how: dict[str, Any] = {"attn_implementation": "eager", "dtype": dtype}
    how |= {"experts_implementation": "eager"} if dtype == torch.float64 else {}  # their grouped product has none
    loader = auto_class("causal", AutoConfig.from_pretrained(folder))
    model: PreTrainedModel = loader.from_pretrained(folder, **how)
    model.config.get_text_config(decoder=True).use_cache = False  # some write over what a backward pass needs
    return model.eval()


def differences(policy: Policy, engine: Engine, folder: str) -> dict[str, float]:
    """Largest difference of a log-prob in nats, of the engine and of each layout; of gradients, relative."""
    model = plain(folder, policy.precision)
    sampled = asyncio.run(sample(engine))
    groups = [group_of(index, prompt, completions) for index, (prompt, completions) in enumerate(sampled)]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    expected_L = torch.cat([plain_logprobs(model, rollout) for rollout in rollouts])
    own = [p for _, completions in sampled for completion in completions for p in completion.logprobs]
    found = {"engine": largest(torch.tensor(own, dtype=expected_L.dtype), expected_L)}
    weight_L = torch.linspace(-1.0, 2.0, len(expected_L), dtype=expected_L.dtype)
    expected = gradient(model, (weight_L * expected_L).sum())
    for layout in LAYOUTS:
        policy.model.train()
        logprob_L = layout_logprobs(policy, groups, layout)
        found[layout] = largest(logprob_L, expected_L)
        found[f"{layout} gradient"] = relative(gradient(policy.causal_lm, (weight_L * logprob_L).sum()), expected)
    return found


def of_adapters(folder: str, precision: str) -> Row:
    """Of adapters that are not 0: the largest difference of a log-prob in nats, and how many layers have one."""
    try:
        policy = load_policy(ModelConfig(name=folder, device="cpu", precision=precision, lora_rank=2), seed=0)
    except Exception as error:
        return {"no LoRA": line(f"{type(error).__name__}: {error}")}
    draw = torch.Generator().manual_seed(1)
    groups = [group_of(index, prompt, completions) for index, (prompt, completions) in enumerate(made_up())]
    adapters = {name: weight for name, weight in policy.model.named_parameters() if ".lora_B." in name}
    with inference(policy.model):
        called = layers_called(policy, {name.partition(".lora_B.")[0] for name in adapters}, groups)
        trained = [weight for name, weight in adapters.items() if name.partition(".lora_B.")[0] in called]
        for weight in trained:  # a layer that is read past its adapter leaves it at 0, in training as well
            weight.normal_(0, 0.05, generator=draw)
        alone = plain_model(policy)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        expected_L = torch.cat([rollout_logprobs(alone, rollout, Sampling()) for rollout in rollouts])
        error = largest(layout_logprobs(policy, groups, "shared"), expected_L)
    return {"LoRA": error, "adapted": len(trained), "linear": num_linear(policy)}


def layers_called(policy: Policy, names: Iterable[str], groups: Sequence[Group]) -> set[str]:
    """Names of the layers that a pass calls."""
    called: set[str] = set()
    hooks = [
        policy.model.get_submodule(name).register_forward_pre_hook(lambda module, given, name=name: called.add(name))
        for name in names
    ]
    layout_logprobs(policy, groups, "shared")
    for hook in hooks:
        hook.remove()
    return called


def num_linear(policy: Policy) -> int:
    """Linear layers but the head, and weights that experts hold together."""
    model, head = policy.causal_lm, policy.causal_lm.get_output_embeddings()
    own = [(name, module) for name, module in model.named_modules() if ".lora_" not in name and module is not head]
    layers = sum(isinstance(module, torch.nn.Linear | Conv1D) for _, module in own)
    held = [(f"{name} {type(module).__name__}".lower(), module._parameters.values()) for name, module in own]
    return layers + sum(w is not None and w.dim() == 3 and "experts" in name for name, ws in held for w in ws)


def made_up() -> list[tuple[list[int], list[Completion]]]:
    """Prompts as `sample` takes them, with completions that nobody sampled."""
    draw = torch.Generator().manual_seed(0)

    def ids(length: int) -> list[int]:
        return torch.randint(4, VOCABULARY, (length,), generator=draw).tolist()

    lengths = ((7, 9), (2, 5), (11, 14))
    return [
        (ids(prompt), [Completion(tuple(ids(n)), (0.0,) * n, "length", 0) for n in (end, end - 1, end - 3)])
        for prompt, end in lengths
    ]


async def sample(engine: Engine) -> list[tuple[list[int], list[Completion]]]:
    """Three prompts, shorter and longer than the windows; three completions each."""
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(4, VOCABULARY, (length,), generator=draw).tolist() for length in (7, 2, 11)]
    lengths = (9, 5, 14)
    made = [engine.generate(p, 3, Sampling(max_tokens=n)) for p, n in zip(prompts, lengths, strict=True)]
    return list(zip(prompts, await asyncio.gather(*made), strict=True))


def group_of(index: int, prompt: Sequence[int], completions: Iterable[Completion]) -> Group:
    rollouts = tuple(finished_rollout(None, prompt, each, Reward(0.0, {}), "") for each in completions)
    return Group(Prompt(str(index), "", "", {}), rollouts, ())


def layout_logprobs(policy: Policy, groups: Sequence[Group], layout: str) -> Tensor:
    """Of all loss tokens, through micro-batches that hold one or two groups."""
    rows = make_rows(groups, [[1.0] * len(group.rollouts) for group in groups])
    tokens, sequences = count(rows)
    totals = (tokens, sequences, sequences)
    how: dict[str, Any] = {"packing": layout, "micro_batch_tokens": 80, "attention": policy.attention}
    batch = make_batch(rows, totals=totals, device=policy.device, **how)
    return torch.cat([score_tokens(policy, m, Scoring(Sampling(), 0)).logprob_L for m in batch.micro_batches])


def plain_logprobs(model: PreTrainedModel, rollout: Rollout) -> Tensor:
    logprobs_TV = model(input_ids=torch.tensor([rollout.input_ids])).logits[0].log_softmax(dim=-1)
    chosen_T = logprobs_TV.gather(1, torch.tensor(rollout.target_ids)[:, None])[:, 0]
    return chosen_T[torch.tensor(rollout.loss_mask)]


def gradient(model: PreTrainedModel, loss: Tensor) -> Tensor:
    """Of all weights, as one vector."""
    model.zero_grad()
    loss.backward()
    weights = dict(model.named_parameters())
    parts = [torch.zeros_like(w) if w.grad is None else w.grad for _, w in sorted(weights.items())]
    return torch.cat([part.flatten() for part in parts]).double()


def largest(found_L: Tensor, expected_L: Tensor) -> float:
    return float((found_L.detach() - expected_L.detach()).abs().max())


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


# ------------------------------------------------------------------------------------------------ processes


def examined_apart(name: str, seconds: float = SECONDS) -> Row:
    """The same in a process of its own, which may crash or hang."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    started = time.monotonic()
    process = context.Process(target=_work, args=(name, sender))
    process.start()
    sender.close()
    row: Row = {"status": "failed", "reason": f"no answer in {seconds:.0f} seconds"}
    if receiver.poll(seconds):
        try:
            row = receiver.recv()
        except EOFError:
            process.join()
            row = {"status": "failed", "reason": f"the process ended with {process.exitcode}"}
    process.kill()
    process.join()
    return {"name": name, **row, "seconds": round(time.monotonic() - started, 1)}


def _work(name: str, sender: Any) -> None:
    quiet()
    try:
        row = examined(name)
    except BaseException as error:
        row = {"status": "failed", "reason": line(f"{type(error).__name__}: {error}")}
    sender.send(row)


def quiet() -> None:
    """Foreign code warns of sizes that only tiny models have."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def line(text: str) -> str:
    return " ".join(text.split())[:300]


# ------------------------------------------------------------------------------------------------ the page


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """docs/develop/architectures.md."""
    by_status = {status: [row for row in rows if row["status"] == status] for status in ORDER}
    counts = ", ".join(f"{len(found)} {status}" for status, found in by_status.items() if found)
    sections = [HEAD.format(version=transformers.__version__, torch=torch.__version__, counts=counts)]
    for status in ORDER:
        if by_status[status]:
            make = _figures if status in ("fast", "general", "different") else _reasons
            sections.append(f"## {TITLES[status]}\n\n{make(by_status[status])}")
    sections.append(FOOT)
    return "\n".join(sections)


def _figures(rows: Sequence[Mapping[str, Any]]) -> str:
    head = (
        "| architecture | class | layouts | engine | padded | packed | shared | gradient | LoRA | adapted | float64 |\n"
    )
    head += f"{'|---' * 11}|\n"
    cells = []
    for row in rows:
        gradients = max(row[f"{layout} gradient"] for layout in LAYOUTS)
        numbers = [f"{number:.0e}" for number in (row["engine"], *(row[layout] for layout in LAYOUTS), gradients)]
        numbers.append(f"{row['LoRA']:.0e}" if "LoRA" in row else "none")
        numbers.append(f"{row['adapted']} of {row['linear']}" if "LoRA" in row else "")
        numbers.append(f"{row['float64']:.0e}" if "float64" in row else "")
        cells.append([_named(row), f"`{row['class']}`", row.get("layouts", "all"), *numbers])
    return head + _table(cells)


def _reasons(rows: Sequence[Mapping[str, Any]]) -> str:
    return "| architecture | what is said |\n|---|---|\n" + _table([[_named(row), row["reason"]] for row in rows])


def _named(row: Mapping[str, Any]) -> str:
    """Its name, the newest in bold."""
    return f"**{row['name']}**" if row["name"] in NEWEST else row["name"]


def _table(cells: Sequence[Sequence[str]]) -> str:
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in cells]
    return "".join(f"| {' | '.join(row)} |\n" for row in escaped)


TITLES = {
    "fast": "The fast path: covey's attention and engine",
    "general": "The general path: transformers' own passes",
    "refused": "Refused at loading",
    "not built": "Not tried: no tiny model",
    "different": "Different without a word",
    "failed": "Ended in an error that is no answer",
}
HEAD = """# Architectures

![how many agree, are refused, are not tried](../figures/develop/architectures.svg)

Every causal language model of transformers {version} (torch {torch}, CPU, float32), as a tiny random model that covey
loads as a run would: {counts}. Written by `make architectures`, which compares what the engine and the trainer say
with transformers alone: eager attention, one text at a time, plain autograd.

- *fast*: in every layer attention that transformers lets others compute, once, or a state (Gated DeltaNet, Kimi's,
  Mamba 2, short convolutions) that follows covey's streams. *general*: anything else; passes are transformers' own,
  and the engine decodes in lockstep. Which one a model takes is found by running it at loading, and said in one line.
  On a CPU the general path samples about 2 times slower: SmolLM2-135M by both engines, four prompts
  with eight completions of 32 tokens, one thread of an AMD EPYC, 2.3 times in each of three rounds
  (`python -m benchmarks.speed.paths MODEL`).
- A Qwen3.5 of 935 thousand weights learns sums, but not as a Llama of that size does: over three seeds it gained +0.352
  of accuracy (+0.290 to +0.405), the Llama +0.173 (+0.145 to +0.215):
  [hybrid.md](../../benchmarks/demo/hybrid.md), `python -m benchmarks.demo.hybrid`.
- *layouts*: what a model of the general path computes exactly, logits and gradient. *forked*: shared prompts through
  its cache, and padded rows; *rows*: padded rows, which then stand in for `packing=shared`; *alone*: single texts.
- *engine*: largest difference of a sampled token's log-prob, in nats; *padded*, *packed*, *shared*: the same of the
  trainer's layouts (`packing`); *gradient*: relative difference of the gradient, the worst of the three; *LoRA*: of a
  log-prob with adapters on all linear layers (none: peft adds none); *adapted*: how many linear layers but the head
  got one, weights that experts hold together among them. Fewer have one where a weight is read past its layer, a
  router is linear by its class alone, or parts for pictures and sound stay frozen.
- *float64*: where a number is above 1e-5, the largest of all of them in float64. What vanishes there is rounding.
- **Bold**: the newest, which transformers 5.23 has and 5.15 had not.
- What is refused is refused when the model is loaded, by the line in the table: `covey train`, `covey check`, a bare
  engine and a resumed run alike. The comparison is made there as well, with the model's own weights, for a few short
  texts and, on the fast path, at the edges of its windows; the preflight compares the longest texts of the run.
- Texts in which longrope (Phi-3.5, Phi-4-mini) would take its second table are refused: it takes it for all of a pass
  as soon as one text is long, so that numbers would depend on what else is in the batch. `max_length` ends before.
"""
FOOT = """---

Implemented in: [policy/models/probe.py](../../src/covey/policy/models/probe.py),
[policy/models/general.py](../../src/covey/policy/models/general.py),
[policy/attention/forked.py](../../src/covey/policy/attention/forked.py),
[policy/attention/packed.py](../../src/covey/policy/attention/packed.py).
"""


def main(words: Sequence[str]) -> int:
    """Exit code 1 where an architecture comes out otherwise without a word."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checks.architectures")
    parser.add_argument("names", nargs="*", help="architectures or variants; none: all, and the page is written")
    parser.add_argument("--part", help="PART/PARTS: every so many, kept beside those of other parts")
    given = parser.parse_args(words)
    part, parts = map(int, (given.part or "1/1").split("/"))
    rows = []
    for name in given.names or architectures()[part - 1 :: parts]:
        rows.append(examined_apart(name))
        print(json.dumps(rows[-1]), flush=True)
    if not given.names:
        known = {row["name"]: row for row in [*(json.loads(RESULTS.read_text()) if parts > 1 else ()), *rows]}
        kept = [known[name] for name in architectures() if name in known]
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
        PAGE.write_text(page(kept))
    return 1 if any(row["status"] in ("different", "failed") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
