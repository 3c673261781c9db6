"""Check `model.name` and `model.device` before anything is loaded."""

import importlib.util
import re
from pathlib import Path

from covey.policy.settings import FOLDER, NANO
from covey.system.jsonl import read_object


def check_name(name: str, code: str | None = None) -> None:
    """Refuse a missing path, a file, or a folder without policy. ValueError.

    A function `code` may read anything.
    """
    if name in NANO:  # even if a file or folder has that name
        return
    if name.startswith(IN_MEMORY):
        raise ValueError(
            f"model.name={name}: the model was an object of a program, which alone has it; "
            "covey.train(model, ..., resume=FOLDER) resumes the run"
        )
    path = Path(name)
    if code not in (None, FOLDER):
        return
    if not path.exists():
        if name.startswith(("/", ".", "~")) or name.count("/") > 1:  # the hub's names have one "/" at most
            meant = name.removeprefix("https://huggingface.co/")
            hint = f"; a hub name is model.name={meant}" if meant != name else ""
            raise ValueError(f"model.name={name}: there is no such folder{hint}")
        return
    if any((path / file).is_file() for file in OF_MODELS):
        return
    newest, kind = newest_policy(path), _kind(path)
    if newest is not None:
        raise ValueError(f"model.name={name} is {kind}, not a policy; its newest policy is model.name={newest}")
    if kind == RUN:
        raise ValueError(f"model.name={name} is {kind} without a policy")
    kind = "a folder without a model: it has no config.json" if path.is_dir() else "a file; name the model's folder"
    gguf = path if path.suffix == ".gguf" else next(path.glob("*.gguf"), None)
    hint = MADE if path.suffix in WEIGHTS else "" if gguf is None else OF_GGUF.format(gguf)
    raise ValueError(f"model.name={name} is {kind}{hint}")


def saved_step(name: str) -> int:
    """Return the training step of a checkpoint's policy, else 0.

    >>> saved_step("run/checkpoints/step-000030/policy"), saved_step("Qwen/Qwen2.5-0.5B")
    (30, 0)
    """
    found = re.search(r"(?:^|/)checkpoints/step-(\d{6,})/policy/?$", name)
    return int(found[1]) if found else 0


def newest_policy(folder: Path) -> Path | None:
    """Return the last policy of a run, or a cold start's."""
    if (folder / "manifest.json").is_file() and (folder / "policy").is_dir():
        return folder / "policy"
    saved = [path.parent for path in folder.glob("**/checkpoints/step-*/manifest.json")]
    if saved:
        return max(saved, key=lambda path: (path.parents[1].stat().st_mtime_ns, path.name)) / "policy"
    warmed = read_object(folder / "cold_start.json").get("path")
    return Path(warmed) if isinstance(warmed, str) and Path(warmed).is_dir() else None


def _kind(folder: Path) -> str:
    if (folder / "manifest.json").is_file():
        return "a checkpoint"
    return RUN if (folder / "config.yaml").is_file() else "a folder of runs"


OF_MODELS = ("config.json", "adapter_config.json")
"""Files of which a folder with a model has one."""
WEIGHTS = (".pth", ".pt", ".bin", ".ckpt")
MADE = ", or model.code=module:function, which makes a model of it"
OF_GGUF = "; covey export --from-gguf {} --to FOLDER makes a folder for model.name of it"
RUN = "a run folder"
IN_MEMORY = "<in memory"
"""Beginning of model.name where a program gave the model itself."""
OWN_MODULE = f"{IN_MEMORY} module"
"""Its beginning where that is no model of transformers."""


def check_device(name: str) -> None:
    """Refuse unknown devices, and GPUs without a CUDA build of torch. ValueError."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise ValueError(f"model.device must be auto, cpu, cuda or cuda:N, got {name}")
    if name.startswith("cuda") and _is_torch_without_gpus():
        raise ValueError(f"model.device={name} needs a CUDA device and there is none; use model.device=cpu")


ONE_DEVICE = "one process has one device (model.device), and parallel.strategy=fsdp shares a model out over GPUs"


def _is_torch_without_gpus() -> bool:
    """Read torch's version file; importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    places = spec.submodule_search_locations if spec is not None else None
    file = Path(next(iter(places)), "version.py") if places else None
    if file is None or not file.is_file():
        return False
    text = file.read_text(encoding="utf-8")
    return all(re.search(rf"^{kind}\b[^=\n]*= None$", text, re.MULTILINE) for kind in ("cuda", "hip", "xpu"))


COLD_START = "cold-start-"
"""Beginning of the names of cold starts' folders, before their key."""
COLD_START_REPORT = "cold_start.json"
"""Marks a cold-start policy, which lies in a cache that may be emptied."""


def beginning(model: str, seed: int) -> str:
    """Return a fingerprint of the initial policy, "" where its name suffices.

    >>> beginning("nano", seed=3)
    'nano of seed=3'
    """
    if model in NANO:
        return f"{model} of seed={seed}"
    return Path(model).name if Path(model).name.startswith(COLD_START) else ""
