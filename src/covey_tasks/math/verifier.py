"""Run math-verify in processes that can be killed.

`9^{9^{9^9}}` needs more digits than there are atoms, and a loop in C hears no signal. So every call runs in a worker
process with a deadline and a limit of memory. An answer that algebra does not survive is wrong, which is counted; it
is never a failure of the system.
"""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from covey.system.workers.pool import NO_WORKER, TOO_LONG, WorkerPool, WorkerSettings
from covey.types import Failure, Reward
from covey_graders.math.symbolic import math_verify_accuracy, torchrl_equal, trl_accuracy


class MathVerifier:
    """Runs math-verify in worker processes, started by the first comparison.

    >>> asyncio.run(MathVerifier().torchrl_equal("$x+1$", "$1+x$"))
    True
    """

    def __init__(self, timeout: float = 10.0, num_workers: int = 2) -> None:
        """Bound the seconds of one comparison."""
        self._workers = WorkerSettings(num_workers, timeout, address_bytes=ADDRESS_BYTES, preload=MODULES)
        self._pool: WorkerPool | None = None
        self._counts = dict.fromkeys(COUNTS, 0.0)

    async def trl(self, completion: str, gold: str) -> Reward | Failure:
        """Compute TRL's accuracy reward, a Failure for an unparsable gold answer."""
        value = await self._call(trl_accuracy, {"completion": completion, "gold": gold})
        return Failure(f"math-verify cannot read the gold answer {gold!r}") if value is None else _reward(value)

    async def math_verify(self, completion: str, gold: str) -> Reward | Failure:
        return _reward(await self._call(math_verify_accuracy, {"completion": completion, "gold": gold}))

    async def torchrl_equal(self, answer: str, gold: str) -> bool | Failure:
        result = await self._call(torchrl_equal, {"answer": answer, "gold": gold})
        return result if isinstance(result, Failure) else bool(result)

    def metrics(self) -> dict[str, float]:
        counts, self._counts = self._counts, dict.fromkeys(COUNTS, 0.0)
        return counts

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()

    async def _call(self, function: Callable[..., Any], texts: Mapping[str, str]) -> Any:
        """Call in a worker: 0.0 if killed, a Failure without a worker."""
        if self._pool is None:
            self._pool = WorkerPool(FUNCTIONS, self._workers)
        result = await self._pool.call(FUNCTIONS.index(function), texts)
        if isinstance(result, Failure) and result.reason.startswith(NO_WORKER):
            return result
        self._counts["math_calls"] += 1
        if not isinstance(result, Failure):
            return result
        self._counts["math_timeouts" if result.reason.startswith(TOO_LONG) else "math_crashes"] += 1
        return 0.0


def check_installed(scheme: str) -> None:
    if find_spec("math_verify") is None:
        raise ValueError(f"scheme={scheme} needs math_verify: pip install 'math-verify[antlr4_9_3]'")


def _reward(value: float | Failure) -> Reward | Failure:
    return value if isinstance(value, Failure) else Reward(value, {"correct": value})


MODULES = ("math_verify", "sympy")
ADDRESS_BYTES = 2 << 30
"""Address space of a worker; sympy starts in less than a tenth of it."""
FUNCTIONS: list[Callable[..., Any]] = [trl_accuracy, math_verify_accuracy, torchrl_equal]
COUNTS = ("math_calls", "math_timeouts", "math_crashes")
