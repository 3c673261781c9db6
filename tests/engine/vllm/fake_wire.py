"""A vLLM without a model: it has two weights, and every token has minus their sum as its log-prob."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from covey.engine.base import EngineLost, Probe, UpdateMode, WeightSet, digest_of
from covey.engine.vllm.files import read_shapes
from covey.engine.vllm.wire import Sample
from covey.engine.weights import difference
from covey.types import Span

START = {"body": torch.tensor([0.5]), "head": torch.tensor([0.25])}


def pushed(version: int, body: float, head: float) -> WeightSet:
    """A set for the fake, with the probe that it must agree with."""
    tensors = {"body": torch.tensor([body]), "head": torch.tensor([head])}
    return set_of(version, tensors, -(body + head))


def set_of(version: int, tensors: Mapping[str, Tensor], logprob: float) -> WeightSet:
    probe = Probe((1, 2, 3), (logprob, logprob), tolerance=1e-4)
    return WeightSet(version, tensors, digest_of(tensors), probe)


@dataclass
class FakeWire:
    """See `Wire`. A completion is `length` tokens long, and each takes a turn of the event loop."""

    length: int = 8
    weights: dict[str, Tensor] = field(default_factory=lambda: dict(START))
    keeps_old_head: bool = False
    """A load leaves the head as it was, and says nothing."""
    fails_in: str = ""
    """The call that ends in an error."""
    hangs_in: str | tuple[str, ...] = ""
    """The calls that never end."""
    cached_tokens: int | None = None
    """What each completion says of its prompt."""
    version: int = -1
    closed: bool = False
    calls: list[str] = field(default_factory=list)
    adapters: list[Path] = field(default_factory=list)
    sampled: list[tuple[tuple[int, ...], dict[str, Any]]] = field(default_factory=list)
    """What each `sample` was asked."""
    _running: int = 0
    _paused: bool = False
    _aborting: bool = False
    _draining: bool = False

    async def sample(self, prompt_ids: Sequence[int], params: Mapping[str, Any]) -> Sample:
        self.sampled.append((tuple(prompt_ids), dict(params)))
        await self._said("sample")
        while self._paused:
            await asyncio.sleep(0)
        self._running += 1
        try:
            return await self._tokens(min(self.length, params["max_tokens"]))
        finally:
            self._running -= 1

    async def _tokens(self, length: int) -> Sample:
        logprobs: list[float] = []
        versions: list[int] = []
        while len(logprobs) < length:
            await asyncio.sleep(0.001)
            if self._aborting:
                return Sample((9,) * len(logprobs), tuple(logprobs), "abort", _spans(versions))
            if "sample" in self.fails_in and logprobs:
                raise EngineLost("vLLM failed: EngineDeadError: gone")
            if not self._paused or self._draining:
                logprobs.append(self._logprob())
                versions.append(self.version)
        return Sample((9,) * length, tuple(logprobs), "stop", _spans(versions), self.cached_tokens)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        await self._said("score")
        return [self._logprob()] * (len(token_ids) - 1)

    async def pause(self, how: UpdateMode) -> None:
        await self._said(f"pause {how}")
        self._paused, self._draining, self._aborting = True, how == "wait", how == "abort"
        while how != "keep" and self._running:
            await asyncio.sleep(0)
        self._draining = self._aborting = False

    async def resume(self) -> None:
        await self._said("resume")
        self._paused = False

    async def sleep(self, level: int) -> None:
        await self._said(f"sleep {level}")
        self.weights = self.weights if level == 1 else {}

    async def wake(self, tag: str) -> None:
        await self._said(f"wake {tag}")

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        await self._said(method)
        folder = Path(arguments[0])
        if method == "covey_refusal":
            return [difference(read_shapes(folder), {name: tuple(t.shape) for name, t in START.items()})]
        loaded = load_file(folder / "model.safetensors")
        self.weights = loaded | ({"head": self.weights["head"]} if self.keeps_old_head else {})
        return [None]

    async def load_adapter(self, folder: Path) -> None:
        await self._said("load_adapter")
        self.adapters.append(folder)
        self.weights = {
            "adapter": sum(tensor.sum() for tensor in load_file(folder / "adapter_model.safetensors").values())
        }

    async def label(self, version: int) -> None:
        await self._said(f"label {version}")
        self.version = version

    async def ping(self) -> None:
        await self._said("ping")

    async def close(self) -> None:
        self.closed = True

    def _logprob(self) -> float:
        return -float(sum(tensor.sum() for tensor in self.weights.values()))

    async def _said(self, call: str) -> None:
        self.calls.append(call)
        if call == self.fails_in:
            raise EngineLost(f"vLLM failed: RuntimeError: {call}")
        while call in ((self.hangs_in,) if isinstance(self.hangs_in, str) else self.hangs_in):
            await asyncio.sleep(0.01)


def _spans(versions: Sequence[int]) -> tuple[Span, ...]:
    starts = [i for i, version in enumerate(versions) if i == 0 or version != versions[i - 1]]
    ends = [*starts[1:], len(versions)]
    return tuple(Span(versions[start], start, end) for start, end in zip(starts, ends, strict=True))
