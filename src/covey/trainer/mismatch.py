"""Whether sampler and trainer come apart: log-probs of the same tokens that differ by more than rounding."""

import logging
from dataclasses import dataclass

from covey.types import RunStopped

LOGGER = logging.getLogger(__name__)
ALARM = 0.1
"""Mean gap of sampler and trainer, in nats, that is no rounding in any precision."""
NOT_TRAINED = "what is sampled is not what is trained (covey check finds where they come apart)"
MOVED_ON = (
    "the policy changes much from version to version, or what is sampled is not what is trained (covey check tells)"
)


@dataclass
class MismatchWatch:
    """Looks at the gap of each step."""

    limit: float | None
    """Nats above which the run stops."""
    is_stale: bool
    """Whether tokens may be of older versions than the one that is trained."""
    _is_alarmed: bool = False

    def look(self, found: float) -> None:
        """Warn once where sampler and trainer come apart, and stop where they are further apart than is allowed."""
        said = f"log-probs of sampler and trainer differ by {found:.3g} nats per token"
        why = MOVED_ON if self.is_stale else NOT_TRAINED
        if self.limit is not None and found > self.limit:
            raise RunStopped(f"{said}, algorithm.max_mismatch={self.limit:g}: {why}")
        if found > ALARM and not self._is_alarmed:
            LOGGER.warning("%s, more than rounding: %s; algorithm.max_mismatch stops the run", said, why)
        self._is_alarmed = found > ALARM
