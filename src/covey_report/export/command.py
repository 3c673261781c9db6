"""`covey export`: a policy as others load it, and its card."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

from covey.policy.models.adapters import base_of
from covey.policy.models.made import ORIGIN
from covey.policy.models.naming import newest_policy
from covey.policy.own import WEIGHTS, OwnConfig
from covey.run.checkpoints.checkpoint import CARD, WRAPPED, problem
from covey.run.folder import last_settings, run_of
from covey.system.disk import atomic_folder, catch_write_errors
from covey.system.hub import silence
from covey.system.lookup import one_of
from covey.system.text.console import CleanConsole
from covey.system.text.format import one_line
from covey_report.export.card import ADAPTERS, card, model_type, write_settings
from covey_report.runs.folders import read_flags

WITH_VALUE = {
    "--to": "a folder",
    "--dtype": "float32, bfloat16 or float16",
    "--gguf": "a type of weights",
    "--push": "a repository: OWNER/NAME",
    "--from-gguf": "a file",
}
DTYPES = ("float32", "bfloat16", "float16")
GGUF_TYPES = ("f16", "bf16", "f32", "q8_0", "q5_1", "q4_0")
"""Types of weights in GGUF files, the one that `--gguf` alone means first."""


def run_export(words: Sequence[str]) -> None:
    """Copy a run's policy with a card, or convert a GGUF file."""
    given, flags = read_words(words)
    folder = Path(flags["--to"])
    if flags.keys() & {"--gguf", "--from-gguf"} and find_spec("gguf") is None:
        raise ValueError("GGUF files need the package gguf: pip install 'covey[gguf]'")
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise ValueError(f"--to must be a new folder, {folder} is there already")
    if given is None:
        _convert(Path(flags["--from-gguf"]), folder, flags.get("--dtype", DTYPES[0]))
        return
    source, run = policy_of(given)
    if folder.resolve().is_relative_to(source.resolve().parents[1]):
        raise ValueError(f"--to must lie outside of the run's checkpoints, got {folder}")
    _check_adapters(source, flags)
    if repository := flags.get("--push"):
        check_push(repository)
    with _new(folder) as aside:
        _fill(aside, source, flags, str(last_settings(run)["model.kind"]))
        write_settings(run, aside)
        (aside / CARD).write_text(card(run, source, aside), encoding="utf-8")
    console = CleanConsole()
    console.print(f"{source} is in {folder}, and {CARD} says what it is: read it before you publish it")
    if repository:
        console.print(push_folder(folder, repository))


def read_words(words: Sequence[str]) -> tuple[Path | None, dict[str, str]]:
    """Return the run, or policy, and the flags. ValueError."""
    spelled = list(words)
    if "--gguf" in spelled:  # its value may be left out
        place = spelled.index("--gguf")
        after = spelled[place + 1 : place + 2]
        has_type = bool(after) and not after[0].startswith("-") and not Path(after[0]).exists()
        spelled[place : place + 1 + has_type] = [f"--gguf={after[0] if has_type else GGUF_TYPES[0]}"]
    others, flags = read_flags(spelled, WITH_VALUE, ("--merge",))
    if "--to" not in flags or len(others) != ("--from-gguf" not in flags):
        ways = "covey export outputs/DATE/TIME --to FOLDER, or covey export --from-gguf FILE --to FOLDER"
        raise ValueError(f"covey export needs a run and a folder: {ways}")
    for flag, known in (("--dtype", DTYPES), ("--gguf", GGUF_TYPES)):
        if flag in flags:
            one_of(flag, flags[flag], known)
    if not others and (more := flags.keys() - {"--from-gguf", "--to", "--dtype"}):
        raise ValueError(f"--from-gguf takes --to and --dtype, got {more.pop()}")
    return Path(others[0]) if others else None, flags


def policy_of(given: Path) -> tuple[Path, Path]:
    """Return the policy that is meant, and its run. ValueError."""
    source = given if run_of(str(given.resolve())) else newest_policy(given)
    run = None if source is None else run_of(str(source.resolve()))
    if source is None or run is None:
        raise ValueError(f"covey export needs a run with a checkpoint, or a policy in one, got {given}")
    if (fault := problem(source.parent)) is not None:
        raise ValueError(f"{source.parent} is damaged ({fault}): name an earlier checkpoint")
    return source, run


def _check_adapters(source: Path, flags: Mapping[str, str]) -> None:
    """Refuse for adapters what needs a whole model, and the reverse. ValueError."""
    if "--merge" in flags and not (source / ADAPTERS).is_file():
        raise ValueError(f"--merge needs adapters, and {source} is a whole model: leave it out")
    if not (source / ADAPTERS).is_file() or _is_merged(source, flags):
        return
    for flag in ("--dtype", "--gguf"):
        if flag in flags:
            raise ValueError(f"{flag} needs a whole model, and this policy is an adapter: add --merge")
    if "--push" in flags and Path(base := _base(source)).exists():
        raise ValueError(f"--push needs a base model that others have, got adapters of {base}: add --merge")


def _is_merged(source: Path, flags: Mapping[str, str]) -> bool:
    """Return True for adapters to add to their base."""
    return (source / ADAPTERS).is_file() and ("--merge" in flags or _is_own(Path(_base(source))))


def _is_own(base: Path) -> bool:
    return (base / WEIGHTS).is_file() and model_type(base) == OwnConfig.model_type


def _base(source: Path) -> str:
    recorded = json.loads((source / ADAPTERS).read_text(encoding="utf-8"))["base_model_name_or_path"]
    return str(base_of(source, recorded))


@contextmanager
def _new(folder: Path) -> Iterator[Path]:
    """Make a folder whole or not at all, without words of transformers."""
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()
    with catch_write_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
    with atomic_folder(folder) as aside:
        yield aside


def _convert(file: Path, folder: Path, dtype: str) -> None:
    from covey_report.export.from_gguf import read_gguf

    with _new(folder) as aside, redirect_stderr(StringIO()):  # a bar that transformers always draws
        said = read_gguf(file, aside, dtype)
    CleanConsole().print(f"{file} is in {folder}, for model.name={folder}: {said}")


def _fill(aside: Path, source: Path, flags: Mapping[str, str], kind: str) -> None:
    if _is_merged(source, flags):
        merge(source, aside, kind)
    else:
        shutil.copytree(source, aside, dirs_exist_ok=True, ignore=shutil.ignore_patterns(CARD))
    _cut_origin(aside / "config.json")
    if dtype := flags.get("--dtype"):
        narrow(aside, dtype)
    if gguf_type := flags.get("--gguf"):
        from covey_report.export.to_gguf import write_gguf

        write_gguf(aside, gguf_type)


def _cut_origin(config: Path) -> None:
    """Name the file that a module was made of without its path."""
    said = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    if ORIGIN in said:
        said |= {ORIGIN: Path(said[ORIGIN]).name} | ({"_name_or_path": ""} if "_name_or_path" in said else {})
        config.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")


def merge(source: Path, folder: Path, kind: str = "causal") -> None:
    """Save an adapter's base model with the adapter added."""
    from peft import PeftModel
    from torch import nn

    from covey.policy.models.saved import NO_CODE, UNREADABLE, read_weights

    name = _base(source)
    shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("adapter_*", CARD))
    if _is_own(Path(name)):
        _add_adapters(Path(name), source, folder)
        return
    try:
        base, lacking = read_weights(kind, name, dtype="auto", **NO_CODE)
    except UNREADABLE as error:
        raise ValueError(f"the adapters' base model {name} cannot be loaded ({one_line(str(error))[:160]})") from error
    if lacking:
        raise ValueError(f"the adapters' base model {name} {lacking}")
    is_quantized = "quantization_config" in base.config.to_dict()
    base = base.dequantize() if is_quantized else base
    stored = base.dtype
    model = PeftModel.from_pretrained(base.float(), str(source))
    head = base.get_output_embeddings()
    if hasattr(head, "base_layer"):  # a head with adapters, which the embedding tied to it must not get
        head.base_layer.weight = nn.Parameter(head.base_layer.weight.detach().clone())
        base.config.tie_word_embeddings = False
    # Weights read as quantised would be written so
    model.merge_and_unload().to(stored).save_pretrained(folder, save_original_format=not is_quantized)


def _add_adapters(base: Path, source: Path, folder: Path) -> None:
    """Add adapters to the weights of a user's own module."""
    from safetensors.torch import load_file, save_file

    said = json.loads((source / ADAPTERS).read_text(encoding="utf-8"))
    weights, added = load_file(base / WEIGHTS), load_file(source / "adapter_model.safetensors")
    for name, down_RI in added.items():
        if ".lora_A." in name:
            up_OR = added[name.replace(".lora_A.", ".lora_B.")]
            own = name.removeprefix(WRAPPED).replace(".lora_A.", ".")
            weights[own] = weights[own] + said["lora_alpha"] / said["r"] * (up_OR @ down_RI)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    shutil.copyfile(base / "config.json", folder / "config.json")


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


def check_push(repository: str) -> None:
    """Refuse a push that cannot succeed, before any work. ValueError."""
    from huggingface_hub import get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ValueError(f"--push must be OWNER/NAME, got {repository}") from error
    if problem := silence():
        raise ValueError(f"--push {repository} needs the hub: {problem}")
    if get_token() is None:
        raise ValueError(f"--push {repository} needs a token of the hub: hf auth login, or HF_TOKEN")


def push_folder(folder: Path, repository: str) -> str:
    """Upload a folder, a new repository being private; return where."""
    from huggingface_hub import HfApi

    try:
        made = HfApi().create_repo(repository, private=True, exist_ok=True)
        HfApi().upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message="A policy trained by covey")
    except Exception as error:  # the hub's own errors, those of its client and of the network
        said = one_line(str(error) or type(error).__name__)[:200]
        raise ValueError(
            f"--push {repository} was refused ({said}); try again: hf upload {repository} {folder}"
        ) from error
    return f"it is at {made}, private if it is new"
