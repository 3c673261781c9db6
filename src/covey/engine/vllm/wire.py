"""The calls to vLLM, in this process or at an address."""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from covey.engine.base import EngineLost, UpdateMode
from covey.policy.sampling import row_key
from covey.types import Sampling, Span

RECEIVER = "covey.engine.vllm.worker.Receiver"
"""The worker extension of vLLM whose methods `Wire.call` names."""
ADAPTER = "covey"
"""The name of the LoRA adapter that requests are sampled on."""
POSITIVE = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Sample:
    """A completion as vLLM returned it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probs under the distribution drawn from: filtered and renormalised."""
    ended: str
    """End by `stop`, `length` or `abort`; vLLM has other words where it failed."""
    spans: tuple[Span, ...]
    cached_tokens: int | None = None
    """Tokens of the prompt that vLLM found in its prefix cache, whole blocks of 16; None where it does not say."""


class Labels:
    """Labels of versions, unique to the pusher, which tell foreign weights apart."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._mark = secrets.token_hex(4)

    def of(self, version: int) -> str:
        return f"{self._mark}-{version}"

    def version(self, label: object) -> int:
        """Return the version of a label. EngineLost for a foreign label."""
        mark, _, version = str(label).partition("-")
        if mark != self._mark:
            raise EngineLost(
                f"{self._who} answers from weights {label!r}, which this run did not push: it was started anew, or "
                "somebody else pushes to it too"
            )
        return int(version)


class Wire(Protocol):
    """The calls to one vLLM; each raises EngineLost on failure."""

    async def sample(self, prompt_ids: Sequence[int], params: Mapping[str, Any]) -> Sample:
        """Draw one completion with `sampling_params`."""

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probs of token_ids[1:] at temperature 1, unfiltered."""

    async def pause(self, how: UpdateMode) -> None:
        """Stop sampling and drop the cache; requests wait until `resume`."""

    async def resume(self) -> None: ...

    async def sleep(self, level: int) -> None:
        """Release the cache and weights: kept by the host (1), dropped (2)."""

    async def wake(self, tag: Literal["weights", "kv_cache"]) -> None:
        """Take memory for `tag` again; dropped weights are undefined until loaded."""

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a worker extension's method on every worker; return all answers."""

    async def load_adapter(self, folder: Path) -> None:
        """Replace the active LoRA adapter by the one in `folder`."""

    async def label(self, version: int) -> None:
        """Set the version of tokens sampled from now on."""

    async def ping(self) -> None:
        """Wait for vLLM's engine loop. EngineLost where its weights are foreign."""

    async def close(self) -> None:
        """Release vLLM, ending processes that were started for it."""


def sampling_params(sampling: Sampling, index: int, stop_ids: Iterable[int]) -> dict[str, Any]:
    """Return the keywords of vLLM's SamplingParams for sample `index`.

    The stop tokens are the policy's alone, not those of the model's folder.
    """
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "max_tokens": sampling.max_tokens,
        "seed": row_key(sampling.seed, sampling.first_sample + index) & POSITIVE,
        "stop": list(sampling.stop),
        "stop_token_ids": sorted(stop_ids),
        # Else vLLM would add the end tokens of the model's folder
        "ignore_eos": True,
        "logprobs": 0,
        # Text is needed for stop strings alone
        "detokenize": bool(sampling.stop),
        "skip_special_tokens": False,
    }


PROBE_PARAMS: Mapping[str, Any] = {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0, "detokenize": False}
"""Keywords of SamplingParams that score a text."""
