"""The model card of an exported policy."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from covey.algorithm.intervals import Estimate, bounds_of, mean_interval, wilson
from covey.api.objects import HOME, OF_THIS_PROGRAM
from covey.policy.models.naming import IN_MEMORY, saved_step
from covey.policy.models.text_part import PROCESSOR_FILES
from covey.policy.own import OwnConfig
from covey.run.checkpoints.manifest import digest_of_file
from covey.run.checkpoints.saved_settings import settings_to_measure
from covey.run.folder import last_settings
from covey.run.records.summary import HELD_OUT, paired_gain
from covey.run.trust import find_risks, named_code
from covey.system.hub import HUB_NAME
from covey.system.jsonl import map_leaves
from covey.system.text.format import number_of
from covey_doctor.verdicts import of_each, pair
from covey_report.logs.read import Row, RunFiles, read_run
from covey_report.page.origins import command_of

ADAPTERS = "adapter_config.json"
LOADING = {
    "transformers": "from transformers import {0}\n\nmodel = {0}.from_pretrained(FOLDER)",
    "peft": "from peft import PeftModel\nfrom transformers import {0}\n\n"
    "model = PeftModel.from_pretrained({0}.from_pretrained(BASE), FOLDER)",
    "pytorch": 'from safetensors.torch import load_file\n\nmodule.load_state_dict(load_file("model.safetensors"))',
}
"""Lines that load a folder, by library."""
AGAIN = "`covey evaluate model.name=FOLDER --config FOLDER/{0}{1}` measures it again, on the run's held-out prompts"
OBJECTS = "Its model, rows or rewards were objects of a program, which alone can measure it again"
LOCAL = ("/", ".", "~")
"""Beginnings of the names of files of this machine."""
MEASURES = {"accuracy": "accuracy", "reward_mean": "mean reward"}
VERSIONS = ("covey", "torch", "transformers", "peft", "git_commit")
OF_PROGRAMS = f"{HOME}:"
"""Beginning of the names of what was an object of a program."""
SETTINGS = "measured_by.yaml"
"""The settings of a run that say how it is measured."""
MEASURING = ("environment", "data", "rewards", "sampling", "evaluation", "seed", "model")
"""Settings that say how a policy is measured."""
WHOLE = {"lora_rank": 0, "load_in_4bit": False, "load_in_8bit": False}
"""Settings of a model without adapters."""


def card(run: Path, source: Path, folder: Path) -> str:
    """Return the model card of an exported policy."""
    files, step = read_run(run), saved_step(str(source.resolve()))
    base = str(files.settings["model.name"])
    is_own = model_type(folder) == OwnConfig.model_type
    library = "peft" if (folder / ADAPTERS).is_file() else "pytorch" if is_own else "transformers"
    data, is_masked = str(files.settings.get("data.path")), files.settings["model.kind"] == "masked"
    pictures = any((folder / name).is_file() for name in PROCESSOR_FILES)
    loader = f"AutoModelFor{'Masked' if is_masked else 'Multimodal' if pictures else 'Causal'}LM"
    head = {
        "library_name": library,
        "pipeline_tag": "fill-mask" if is_masked else "text-generation",
        "tags": ["covey", "grpo", "reinforcement-learning"],
        **({"base_model": base} if _is_public(base) else {}),
        **({"datasets": [data]} if _is_public(data) else {}),
    }
    return "\n".join(
        (
            f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n",
            f"# {_name_of(base)}, trained by GRPO\n",
            f"```python\n{LOADING[library].format(loader)}\n```\n",
            *(f"`llama-cli -m {file.name}` runs it in llama.cpp.\n" for file in folder.glob("*.gguf")),
            _training(files, step),
            _result(files, step),
            _proof(folder),
        )
    )


def model_type(folder: Path) -> str:
    """Return the type in a folder's config.json, "" without one."""
    file = folder / "config.json"
    return str(json.loads(file.read_text(encoding="utf-8")).get("model_type")) if file.is_file() else ""


def _is_public(name: str) -> bool:
    """Return True for OWNER/NAME of the hub."""
    return name.count("/") == 1 and HUB_NAME.fullmatch(name) is not None and not Path(name).exists()


def _name_of(name: str) -> str:
    """Return a name without the paths of this machine."""
    if name.startswith(IN_MEMORY):
        return name.strip("<>").rpartition(": ")[2]
    return Path(name).name if name.startswith(LOCAL) else name.removeprefix(OF_PROGRAMS)


def _training(files: RunFiles, step: int) -> str:
    settings = files.settings
    rewards = [one if isinstance(one, str) else _reward(one) for one in settings.get("rewards") or ()]
    data, bits = settings.get("data.path"), next((b for b in (4, 8) if settings.get(f"model.load_in_{b}bit")), None)
    rank = settings["model.lora_rank"]
    adapters = f"LoRA of rank {rank}" + (f" over weights of {bits} bits" if bits else "") if rank else "all weights"
    last = (files.summary or {}).get("steps") or (files.steps[-1]["step"] if files.steps else step)
    rows = {
        "base model": _name_of(str(settings["model.name"])),
        "recipe": command_of(files.versions).recipe,
        "trained": f"{adapters}, {settings['model.precision']}, learning rate {settings['optimizer.lr']:g}",
        "steps": f"{step} of {last}, seed {settings['seed']}",
        "each step": f"{settings['groups_per_step']} prompts x {settings['group_size']} completions of at most "
        f"{settings['sampling.max_tokens']} tokens, temperature {settings['sampling.temperature']:g}",
        "algorithm": f"advantage {settings['algorithm.advantage']}, loss {settings['algorithm.loss']}, "
        f"KL {settings['algorithm.kl_coef']:g}",
        "environment": settings["environment.name"],
        "data": data and _name_of(str(data)),
        "rewards": ", ".join(rewards),
        "versions": ", ".join(f"{name} {files.versions[name]}" for name in VERSIONS if name in files.versions),
    }
    lines = "\n".join(f"| {name} | {value} |" for name, value in rows.items() if value)
    return f"## Trained\n\n| | |\n|---|---|\n{lines}\n"


def _reward(entry: Mapping[str, Any]) -> str:
    """Return a reward's name; a function of a program has its own."""
    name = str(entry.get("function", ""))
    return str(entry["args"]["name"]) if name.startswith(OF_PROGRAMS) else name


def _result(files: RunFiles, step: int) -> str:
    """Compare the evaluations before training and at the saved step."""
    looks = {row["step"]: row for row in files.verdicts}
    sides = {word: looks[at] for word, at in {"before": 0, "after": step}.items() if at in looks}
    level = float(files.settings.get("evaluation.confidence") or 0.95)
    lines = [
        f"| {word} | {' | '.join(_estimate(one) for one in found)} |"
        for name, word in MEASURES.items()
        if (found := _estimates([*sides.values()], name, level))
    ]
    if not lines:
        return "## Measured\n\nNothing was measured.\n"
    columns = [*sides, "gain"] if len(sides) > 1 else [*sides]
    number = len(next(iter(sides.values()))["prompts"])
    said = (
        f"On {number_of(number, (files.summary or {}).get('looked_at', HELD_OUT))}, with {100 * level:.4g} % intervals"
    )
    said += ", the gain paired over prompts" if len(sides) > 1 else ""
    table = "\n".join([f"| | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|", *lines])
    return f"## Measured\n\n{said}. One run: another seed gives another number.\n\n{table}\n"


def _estimates(looks: Sequence[Row], name: str, level: float) -> list[Estimate]:
    """Return a measure of each evaluation, and of two their difference."""
    values = [[value for value in of_each(row, name) if not math.isnan(value)] for row in looks]
    if not all(values) or (name == "accuracy" and not any(any(of_each(row, "reward_mean")) for row in looks)):
        return []
    if name == "accuracy":
        alone = [wilson(sum(each), len(each), level) for each in values]
    else:
        alone = [mean_interval(each, level, bounds_of(each)) for each in values]
    return alone if len(looks) < 2 else [*alone, paired_gain(*pair(looks[0], looks[1], name), level)]


def _estimate(found: Estimate) -> str:
    ends = "" if math.isnan(found.low) else f" [{found.low:.3f}, {found.high:.3f}]"
    return f"{found.value:.3f}{ends}"


def write_settings(run: Path, folder: Path) -> None:
    """Write the settings to measure by, without paths of this machine. None where they name objects of a program."""
    wanted = OmegaConf.to_container(settings_to_measure(run, "FOLDER"))
    assert isinstance(wanted, dict)
    if not (folder / ADAPTERS).is_file():
        wanted["model"] |= WHOLE
    base = str(last_settings(run)["model.name"])
    text = yaml.safe_dump(map_leaves({name: wanted[name] for name in MEASURING}, _cut), sort_keys=False)
    if not any(mark in text + base for mark in (HOME, OF_THIS_PROGRAM, IN_MEMORY)):
        (folder / SETTINGS).write_text(text, encoding="utf-8")


def _cut(value: Any) -> Any:
    """Cut a path of this machine to its name."""
    return Path(value).name if isinstance(value, str) and value.startswith(LOCAL) else value


def _proof(folder: Path) -> str:
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("*.gguf")])
    digests = "\n".join(f"{digest_of_file(file)}  {file.name}" for file in files)
    return f"## Verify\n\n{_again(folder)}. SHA-256 of the weights:\n\n```text\n{digests}\n```\n"


def _again(folder: Path) -> str:
    """Return the line that measures a policy again."""
    if not (folder / SETTINGS).is_file():
        return OBJECTS
    own = yaml.safe_load((folder / SETTINGS).read_text(encoding="utf-8"))
    code = dict.fromkeys(value for _, value in named_code(own))
    trust = " trust_run=true" if code or any(find_risks(own)) else ""
    read = f"; it runs {', '.join(code)}, which must lie where covey is started, as files of rows must" if code else ""
    return AGAIN.format(SETTINGS, trust) + read
