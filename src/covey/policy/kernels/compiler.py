"""Compile C sources on first use.

A library is kept in `__pycache__` beside its source or, where that is read-only, in $COVEY_CACHE. Another source,
header, compiler or processor makes another library.
"""

import ctypes
import hashlib
import logging
import platform
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from covey.system.disk import cache_folder

LOGGER = logging.getLogger(__name__)
KERNELS = Path(__file__).parent / "c"
"""The folder of sources that several packages compile."""

COMPILERS = ("gcc", "cc", "clang")
# Not -ffast-math: a library linked with it lets the whole process round tiny numbers to 0. Nor -fassociative-math: sums
# are in the order that is written, wherever they are inlined.
FLAGS = (
    *("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"),
    *("-fno-trapping-math", "-fno-math-errno", "-Wno-psabi"),
)
COMPILE_SECONDS = 600.0
"""The largest source takes 20 on an idle core, and minutes on a busy one: other kernels would round otherwise."""


class NoCompilerError(Exception):
    """Nothing can be compiled here; the text gives the reason."""


@cache
def compiler_version() -> str:
    """Return the first line of the compiler's version, "" without a compiler."""
    compiler = _compiler()
    return _run([compiler, "--version"]).partition("\n")[0] if compiler else ""


def library(source: Path) -> ctypes.CDLL:
    """Return a source's library, compiled if missing (at most 20 seconds). NoCompilerError."""
    found = load(source)
    if isinstance(found, str):
        raise NoCompilerError(found)
    return found


@cache
def load(source: Path) -> ctypes.CDLL | str:
    """Return a source's library, or the reason for none, logged once."""
    compiler = _compiler()
    if compiler is None:
        return _without(f"none of {', '.join(COMPILERS)} is on the PATH")
    try:
        return ctypes.CDLL(str(_build(source, compiler)))
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or ["no message"]
        first = next((line for line in lines if "error" in line), lines[0])
        return _without(f"{compiler} ended with {error.returncode}: {first}")
    except (OSError, subprocess.SubprocessError) as error:
        return _without(f"{compiler}: {error}")


@cache
def _without(reason: str) -> str:
    """Log a reason once."""
    LOGGER.warning("torch computes in place of the C kernels, slower: %s", reason)
    return reason


def struct_of(source: Path, name: str, **structs: type[ctypes.Structure]) -> type[ctypes.Structure]:
    """Return a source's struct for ctypes.

    `structs` are those that it holds, by their names in C.
    """
    types: dict[str, Any] = {"int64_t": ctypes.c_int64, "float": ctypes.c_float, "double": ctypes.c_double, **structs}
    before, _, _ = source.read_text(encoding="utf-8").partition(f"\n}} {name};")
    body = re.sub(r"/\*.*?\*/", "", before.rpartition("{")[2], flags=re.DOTALL)
    fields: list[tuple[str, Any]] = []
    for kind, declared in re.findall(r"(?:const )?(?:struct )?(\w+) ([^;]+);", body):
        for field in declared.split(","):
            name, _, size = field.strip(" *]").partition("[")
            own = ctypes.c_void_p if "*" in field else types[kind]
            fields.append((name, own * int(size) if size else own))
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def _compiler() -> str | None:
    return next((path for name in COMPILERS if (path := shutil.which(name))), None)


def _build(source: Path, compiler: str) -> Path:
    name = f"{source.stem}-{_key(source, compiler)}.so"
    folders = (source.parent / "__pycache__", Path(cache_folder()) / "compiled")
    for folder in folders:
        if (folder / name).exists():
            return folder / name
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Each of several processes makes its own; the last one to be renamed stays.
            with tempfile.TemporaryDirectory(dir=folder) as own:
                made = Path(own) / name
                _run([compiler, *FLAGS, "-o", str(made), str(source)])
                made.replace(folder / name)
            return folder / name
        except OSError:
            continue
    raise OSError(f"neither {folders[0]} nor {folders[1]} can be written")


def _key(source: Path, compiler: str) -> str:
    """Return a hash of source, headers, flags, compiler and processor."""
    texts = (
        path.read_text(encoding="utf-8")
        for path in (source, *sorted({*source.parent.glob("*.h"), *KERNELS.glob("*.h")}))
    )
    parts = (*texts, *FLAGS, compiler, compiler_version(), processor())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def processor() -> str:
    """Return name and features of the processor, a line each."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    told = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return "\n".join([platform.machine(), *sorted(told)])


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_SECONDS).stdout
