"""vLLM in this process: `AsyncLLM` with its own engine process."""

import itertools
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

from covey.engine.base import EngineLost, UpdateMode
from covey.engine.vllm.files import adapter_rank
from covey.engine.vllm.wire import ADAPTER, PROBE_PARAMS, RECEIVER, Labels, Sample
from covey.system.text.format import first_line
from covey.types import Span

P = ParamSpec("P")
T = TypeVar("T")

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM takes as the highest rank of adapters."""
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
"""Defaults of environment variables: nothing is sent to vLLM's makers, and its own log stays short."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The launch settings of vLLM."""

    folder: Path
    dtype: str
    cache_bytes: int | None
    """Bytes of keys and values; None takes the rest of `memory_share`."""
    max_rows: int
    max_length: int
    adapter: Path | None = None
    eager: bool = False
    """No compilation and no CUDA graphs: starts sooner, samples slower."""
    memory_share: float | None = None
    """Maximum share of the device's memory; None leaves vLLM's own."""
    sleeps: bool = False
    """Its memory can be given back, where the device is one that vLLM can do it on."""
    is_composite: bool = False
    """The folder's model reads pictures or sound too: vLLM leaves that part out."""

    def arguments(self) -> dict[str, Any]:
        """Return the keywords of vLLM's AsyncEngineArgs."""
        found: dict[str, Any] = {
            "model": str(self.folder),
            "dtype": self.dtype,
            "max_num_seqs": self.max_rows,
            "max_model_len": self.max_length,
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": RECEIVER,
            "generation_config": "vllm",
            "enforce_eager": self.eager,
            "disable_log_stats": True,
            "seed": 0,
            # In place of sessions: the turn before is found again in whole blocks
            "enable_prefix_caching": True,
        }
        if self.cache_bytes is not None:
            found["kv_cache_memory_bytes"] = self.cache_bytes
        if self.memory_share is not None:
            found["gpu_memory_utilization"] = self.memory_share
        if self.is_composite:
            found["language_model_only"] = True
        if self.sleeps:
            found["enable_sleep_mode"] = True
        # vLLM takes certain ranks; the next larger one serves
        if self.adapter is not None:
            rank = adapter_rank(self.adapter)
            fitting = next((known for known in RANKS if known >= rank), rank)
            found |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": fitting}
        return found


def own_errors(call: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Turn vLLM's exceptions into EngineLost: other environments cannot unpickle them."""

    @wraps(call)
    async def guarded(*arguments: P.args, **keywords: P.kwargs) -> T:
        try:
            return await call(*arguments, **keywords)
        except EngineLost:
            raise
        except Exception as error:
            cause = error.__cause__ or error
            raise EngineLost(f"vLLM failed: {type(cause).__name__}: {first_line(cause)}") from None

    return guarded


class InProcess:
    """See `Wire`."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._lora: Any = None
        self._labels = Labels("vLLM")
        self._names = itertools.count()

    @own_errors
    async def sample(self, prompt_ids: Sequence[int], params: Mapping[str, Any]) -> Sample:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        result = await self._run(prompt_ids, SamplingParams(**params, output_kind=RequestOutputKind.FINAL_ONLY))
        output = result.outputs[0]
        pairs = zip(output.token_ids, output.logprobs or (), strict=True)
        return Sample(
            token_ids=tuple(output.token_ids),
            logprobs=tuple(found[token_id].logprob for token_id, found in pairs),
            ended=output.finish_reason,
            spans=tuple(
                Span(self._labels.version(span.version), span.start, span.end) for span in output.weight_versions or ()
            ),
            cached_tokens=result.num_cached_tokens,
        )

    @own_errors
    async def score(self, token_ids: Sequence[int]) -> list[float]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(**PROBE_PARAMS, output_kind=RequestOutputKind.FINAL_ONLY)
        found = (await self._run(token_ids, params)).prompt_logprobs
        return [found[place][token_id].logprob for place, token_id in enumerate(token_ids) if place > 0]

    @own_errors
    async def pause(self, how: UpdateMode) -> None:
        await self._llm.pause_generation(mode=how, clear_cache=True)

    @own_errors
    async def resume(self) -> None:
        await self._llm.resume_generation()

    @own_errors
    async def sleep(self, level: int) -> None:
        await self._llm.sleep(level)

    @own_errors
    async def wake(self, tag: Literal["weights", "kv_cache"]) -> None:
        await self._llm.wake_up([tag])

    @own_errors
    async def call(self, method: str, *arguments: Any) -> list[Any]:
        return list(await self._llm.collective_rpc(method, args=arguments))

    @own_errors
    async def load_adapter(self, folder: Path) -> None:
        from vllm.lora.request import LoRARequest

        await self._llm.add_lora(LoRARequest(ADAPTER, 1, str(folder), load_inplace=True))
        self._lora = LoRARequest(ADAPTER, 1, str(folder))

    @own_errors
    async def label(self, version: int) -> None:
        await self._llm.update_weight_version(self._labels.of(version))

    @own_errors
    async def ping(self) -> None:
        self._labels.version(await self._llm.get_weight_version())

    async def close(self) -> None:
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.shutdown()

    async def _run(self, prompt_ids: Sequence[int], params: Any) -> Any:
        prompt, name = {"prompt_token_ids": list(prompt_ids)}, str(next(self._names))
        results = [result async for result in self._llm.generate(prompt, params, name, lora_request=self._lora)]
        return results[-1]


@own_errors
async def open_in_process(launch: Launch) -> InProcess:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from vllm import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    launch = replace(launch, sleeps=launch.sleeps and current_platform.is_sleep_mode_available())
    return InProcess(AsyncLLM.from_engine_args(AsyncEngineArgs(**launch.arguments())))
