"""`covey export`: a policy as others load it, and its card."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

import covey
from covey.cli.flags import split_flags
from covey.policy.models.adapters import base_of
from covey.policy.models.naming import newest_policy
from covey.run.checkpoints.checkpoint import CARD
from covey.run.checkpoints.manifest import digest_of_file
from covey.run.folder import CONFIG, read_summary, run_of
from covey.system.disk import atomic_folder, catch_write_errors
from covey.system.lookup import one_of
from covey.system.text.console import CleanConsole
from covey_report.runs.folders import refuse_flags
from covey_report.runs.outcome import is_number, prompts_in_words, spell

WITH_VALUE = {"--to": "a folder", "--dtype": "float32, bfloat16 or float16"}
DTYPES = ("float32", "bfloat16", "float16")
ADAPTERS = "adapter_config.json"
AGAIN = (
    "`covey evaluate model.name=FOLDER --config config.yaml` measures it again, on the held-out prompts of the run's "
    "`config.yaml`. SHA-256 of the weights:"
)
MEASURES = {"accuracy": "accuracy", "reward_mean": "mean reward"}


def run_export(words: Sequence[str]) -> None:
    """Copy a run's policy, with a model card. ValueError."""
    given, flags = read_words(words)
    folder, dtype = Path(flags["--to"]), flags.get("--dtype", "")
    source = given if (given / "config.json").is_file() or (given / ADAPTERS).is_file() else newest_policy(given)
    run = None if source is None else run_of(str(source.resolve()))
    if source is None or run is None:
        raise ValueError(f"covey export needs a run with a checkpoint, or a policy in one, got {given}")
    if folder.exists():
        raise ValueError(f"--to must be a new folder, {folder} is there already")
    if (source / ADAPTERS).is_file() and dtype and "--merge" not in flags:
        raise ValueError("--dtype needs a whole model, and this policy is an adapter: add --merge")
    with catch_write_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
    with atomic_folder(folder) as aside:
        if "--merge" in flags and (source / ADAPTERS).is_file():
            merge(source, aside)
        else:
            shutil.copytree(source, aside, dirs_exist_ok=True)
        if dtype:
            narrow(aside, dtype)
        (aside / CARD).write_text(card(run, source, aside), encoding="utf-8")
    CleanConsole().print(f"{source} is in {folder}, and {CARD} says what it is: read it before you publish it")


def read_words(words: Sequence[str]) -> tuple[Path, dict[str, str]]:
    """Return the run, or policy, and the flags. ValueError."""
    others, flags = split_flags(words, WITH_VALUE, ("--merge",))
    refuse_flags(others, (*WITH_VALUE, "--merge"))
    if len(others) != 1 or "--to" not in flags:
        raise ValueError("covey export needs a run and a folder: covey export outputs/DATE/TIME --to FOLDER")
    if "--dtype" in flags:
        one_of("--dtype", flags["--dtype"], DTYPES)
    return Path(others[0]), flags


def merge(source: Path, folder: Path) -> None:
    """Save an adapter's base model with the adapter added."""
    from peft import PeftModel
    from torch import nn
    from transformers import AutoTokenizer

    from covey.policy.models.saved import NO_CODE, read_weights
    from covey.policy.models.text_part import read_processor

    recorded = json.loads((source / ADAPTERS).read_text(encoding="utf-8"))["base_model_name_or_path"]
    base, _ = read_weights("causal", str(base_of(source, recorded)), dtype="auto", **NO_CODE)
    stored = base.dtype
    model = PeftModel.from_pretrained(base.float(), str(source))
    head = base.get_output_embeddings()
    if hasattr(head, "base_layer"):  # a head with adapters, which the embedding tied to it must not get
        head.base_layer.weight = nn.Parameter(head.base_layer.weight.detach().clone())
        base.config.tie_word_embeddings = False
    model.merge_and_unload().to(stored).save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(source)).save_pretrained(folder)
    for name, content in read_processor(str(source), None).items():
        (folder / name).write_bytes(content)


def narrow(folder: Path, dtype: str) -> None:
    """Convert the floating weights of a folder's files."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as held:
            said = held.metadata()
            weights = {name: held.get_tensor(name) for name in held.keys()}  # noqa: SIM118
        cast = {n: w.to(getattr(torch, dtype)) if w.is_floating_point() else w for n, w in weights.items()}
        save_file(cast, file, metadata=said)
    config = folder / "config.json"
    if config.is_file():
        config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": dtype}, indent=2) + "\n")


def card(run: Path, source: Path, folder: Path) -> str:
    """Return the model card of an exported policy."""
    settings, summary = yaml.safe_load((run / CONFIG).read_text(encoding="utf-8")), read_summary(run) or {}
    base = str(settings["model"]["name"])
    is_local = Path(base).is_absolute() or base.startswith((".", "~"))
    shown = Path(base).name if is_local else base
    head = {
        "library_name": "peft" if (folder / ADAPTERS).is_file() else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["covey", "grpo", "reinforcement-learning"],
        **({} if is_local or base.count("/") != 1 else {"base_model": base}),
    }
    parts = [f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n", f"# {shown}, trained by GRPO\n"]
    parts += [_training(settings, summary, source), _result(summary), _proof(folder)]
    return "\n".join(part for part in parts if part)


def _training(settings: Mapping[str, Any], summary: Mapping[str, Any], source: Path) -> str:
    model, algorithm = settings["model"], settings["algorithm"]
    rewards = [one if isinstance(one, str) else one.get("function", "") for one in settings.get("rewards") or ()]
    data = settings.get("data", {}).get("path")
    adapters = f"LoRA of rank {model['lora_rank']}" if model["lora_rank"] else "all weights"
    rows = {
        "trained": f"{adapters}, {model['precision']}, learning rate {settings['optimizer']['lr']:g}",
        "steps": f"{summary.get('steps', 'unknown')} ({source.parent.name} is here), seed {settings['seed']}",
        "each step": f"{settings['groups_per_step']} prompts x {settings['group_size']} completions of at most "
        f"{settings['sampling']['max_tokens']} tokens",
        "algorithm": f"advantage {algorithm['advantage']}, loss {algorithm['loss']}, KL {algorithm['kl_coef']:g}",
        "environment": settings["environment"]["name"],
        "data": Path(str(data)).name if data and str(data).startswith(("/", "~")) else data,
        "rewards": ", ".join(rewards),
        "versions": ", ".join(f"{n} {summary['versions'][n]}" for n in ("torch", "transformers")) if summary else "",
    }
    lines = "\n".join(f"| {name} | {value} |" for name, value in rows.items() if value)
    return f"## Trained\n\n| | by covey {covey.__version__} |\n|---|---|\n{lines}\n"


def _result(summary: Mapping[str, Any]) -> str:
    sides = [summary.get(side) or {} for side in ("before", "after", "gain")]
    lines = [
        f"| {word} | {' | '.join(_estimate(side[name]) for side in sides)} |"
        for name, word in MEASURES.items()
        if all(is_number((side.get(name) or {}).get("value")) for side in sides)
    ]
    if not lines:
        return "## Measured\n\nNothing was measured before and after.\n"
    level = f"{100 * (summary.get('confidence') or 0.95):.4g} %"
    said = f"On {prompts_in_words(summary)}, with {level} intervals, the gain paired over prompts."
    table = "\n".join(["| | before | after | gain |", "|---|---|---|---|", *lines])
    return f"## Measured\n\n{said} One run: another seed gives another number.\n\n{table}\n"


def _estimate(found: Mapping[str, Any]) -> str:
    ends = f" {spell(found, 1, '.3f')}" if is_number(found.get("low")) else ""
    return f"{found['value']:.3f}{ends}"


def _proof(folder: Path) -> str:
    files = sorted(folder.glob("*.safetensors"))
    digests = "\n".join(f"{digest_of_file(file)}  {file.name}" for file in files)
    return f"## Verify\n\n{AGAIN}\n\n```text\n{digests}\n```\n"
