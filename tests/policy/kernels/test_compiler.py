"""Libraries of C are made once, kept by what they are made of, and their absence is said in one line."""

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from covey.engine.native.cache import CacheShape, LayerShape
from covey.engine.native.compiled import is_compiled
from covey.engine.native.engine import NativeEngine
from covey.policy.kernels import compiler
from covey.policy.kernels.compiler import NoCompilerError, _without, compiler_version, library, load
from covey.policy.kernels.support import unsupported_reason

from ...engine.tiny import tiny_policy

SHAPE = CacheShape((LayerShape(2, 64, 64),), torch.float32, torch.device("cpu"))
ANSWER = "int answer(void) { return 42; }\n"


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """What was found before is looked for again, here and after."""
    for found in (load, _without, compiler_version):
        found.cache_clear()
    yield
    for found in (load, _without, compiler_version):
        found.cache_clear()


@pytest.fixture(name="source")
def _source(tmp_path: Path) -> Path:
    source = tmp_path / "code" / "answer.c"
    source.parent.mkdir()
    source.write_text(ANSWER)
    return source


def only_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A PATH with one program on it, called gcc."""
    folder.mkdir()
    (folder / "gcc").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "gcc").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def made(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_library_is_made_beside_its_source_once(source: Path) -> None:
    assert library(source).answer() == 42
    (name,) = made(source.parent / "__pycache__")
    before = (source.parent / "__pycache__" / name).stat().st_mtime_ns
    load.cache_clear()
    assert isinstance(library(source), ctypes.CDLL)
    assert (source.parent / "__pycache__" / name).stat().st_mtime_ns == before


def test_another_source_is_another_library(source: Path) -> None:
    library(source)
    source.write_text(ANSWER.replace("42", "43"))
    load.cache_clear()
    assert library(source).answer() == 43
    assert len(made(source.parent / "__pycache__")) == 2


def test_where_nothing_can_be_written_beside_the_source_the_cache_takes_it(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source.parent / "__pycache__").write_text("a file is in the way")
    monkeypatch.setenv("COVEY_CACHE", str(tmp_path / "cache"))
    assert library(source).answer() == 42
    assert len(made(tmp_path / "cache" / "compiled")) == 1


def test_code_that_does_not_compile_is_named(source: Path) -> None:
    source.write_text("int answer(void) { return }\n")
    with pytest.raises(NoCompilerError, match=r"gcc ended with 1: .*answer.c"):
        library(source)


def test_a_failure_is_logged_once_and_not_tried_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    script = f'[ "$1" = --version ] || {{ echo x >> {tmp_path}/tries; echo no licence >&2; exit 3; }}'
    only_compiler(tmp_path / "failing", monkeypatch, script)
    for name in ("answer.c", "answer.c", "other.c"):
        (source.parent / name).write_text(ANSWER)
        with pytest.raises(NoCompilerError):
            library(source.parent / name)
    assert (tmp_path / "tries").read_text() == 2 * "x\n"
    expected = f"torch computes in place of the C kernels, slower: {tmp_path}/failing/gcc ended with 3: no licence"
    assert caplog.messages == [expected]


def test_a_processor_with_narrow_vectors_is_named_and_stays_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """One as it is read by the compiler: x86 of 2009."""
    flags = ("-march=x86-64-v2" if flag == "-march=native" else flag for flag in compiler.FLAGS)
    monkeypatch.setattr(compiler, "FLAGS", tuple(flags))
    for source in sorted(compiler.KERNELS.glob("*.c")):
        with pytest.raises(NoCompilerError, match=r"gcc ended with 1: .*vectors of eight floats \(AVX2\)"):
            library(source)
    assert not is_compiled("auto", SHAPE)
    assert "vectors of eight floats" in unsupported_reason("decode", [(torch.float32, "cpu")], [(64, 64)])


def test_without_a_compiler_the_engine_attends_through_torch_and_says_why_it_cannot_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    policy = tiny_policy("llama")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiler_version() == ""
    assert NativeEngine(policy, 1 << 24, 8).kernels == "torch"
    assert unsupported_reason("decode", []) == "none of gcc, cc, clang is on the PATH"


def test_a_compiler_that_fails_or_makes_what_cannot_be_loaded_is_named(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_compiler(tmp_path / "failing", monkeypatch, "echo no licence >&2; exit 3")
    with pytest.raises(NoCompilerError, match="gcc ended with 3: no licence"):
        library(source)
    load.cache_clear()
    makes_nothing_of_use = 'while [ $# -gt 1 ]; do [ "$1" = -o ] && : > "$2"; shift; done'
    only_compiler(tmp_path / "strange", monkeypatch, makes_nothing_of_use)
    with pytest.raises(NoCompilerError, match=r"strange/gcc: .*\.so: file too short"):
        library(source)
