"""Stop a run whose Ray cluster is lost.

Ray silently ends every process that has not reached the cluster for 60 s. So the run is stopped earlier, as by a
signal: its last finished step is saved, and one line gives the reason.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from covey.cluster.settings import DevicesConfig
from covey.cluster.start import (
    ClusterLost,
    agents_of,
    connect,
    disconnect,
    import_ray,
    kill_agents,
    loss_of_cluster,
    watch_cluster,
)
from covey.system import collectives
from covey.system.waits.signals import Stopper, StopRequested
from covey.system.waits.watchdog import end_now
from covey.types import RunStopped

LOGGER = logging.getLogger(__name__)

SILENCE_SECONDS = 10.0
"""Silence after which the cluster is lost."""
GRACE_SECONDS = 25.0
"""Most seconds for running work to end and its step to be saved; together with the silence, less than Ray's 60 s."""
ITSELF_SECONDS = 1.0
"""Seconds for the sampler loop to find the loss itself; only a running update has to be stopped."""
OF_SIGNALS = 0.8
"""Share of output.shutdown_timeout, which would end the run with another exit code."""

LOOK_SECONDS = 5.0
"""Seconds for the cluster to answer where a process of it was lost."""
EXIT_LOST = 2
"""Exit code of every run that ends in one line."""


@contextmanager
def ended_with_cluster(devices: DevicesConfig, stopper: Stopper) -> Iterator["Ending"]:
    """Stop the run inside when its cluster is lost, then raise ClusterLost.

    A run that is not over within GRACE_SECONDS is ended with the same line and exit code. Rank 0 alone watches; where
    there are samplers, their pool watches and reports to the yielded ending. Nothing happens without a cluster.
    """
    ending = Ending(stopper)
    is_watched = _is_watched(devices) and collectives.is_main_process()
    is_own = is_watched and connect(devices, 0)
    if is_watched:
        watch_cluster(SILENCE_SECONDS, ending.stop, ending.is_over)
    try:
        yield ending
    except ClusterLost:
        raise
    except StopRequested as stopped:
        if ending.lost is None:  # somebody else has stopped it
            raise
        raise ending.lost from stopped
    except RunStopped as stopped:
        lost = ending.lost or (loss_of_cluster(LOOK_SECONDS) if is_watched else None)
        if lost is None:
            raise
        raise lost from stopped
    finally:
        ending.end()
        disconnect(is_own)


def _is_watched(devices: DevicesConfig) -> bool:
    """Return True if Ray's processes or devices take part, but no sampler."""
    is_used = devices.trainer > 1 or devices.gpus_per_trainer > 0 or devices.reference + devices.judge > 0
    return is_used and devices.sampler == 0


class Ending:
    """Stops a run whose cluster is lost."""

    def __init__(self, stopper: Stopper) -> None:
        self.lost: ClusterLost | None = None
        """Reason why the run was stopped."""
        self.is_over = threading.Event()
        """Set once the run is over."""
        self._stopper = stopper
        self._telling = threading.Lock()

    def end(self) -> None:
        """Wait until no stop is pending: its signal could find no handler."""
        self.is_over.set()
        with self._telling:
            pass

    def stop_later(self, lost: ClusterLost) -> None:
        """Stop the run from another thread, unless it ends before."""

        def stop() -> None:
            if not self.is_over.wait(ITSELF_SECONDS):
                self.stop(lost)

        threading.Thread(target=stop, name="covey-ending", daemon=True).start()

    def stop(self, lost: ClusterLost) -> None:
        """Stop the run as by a signal; end a lingering process."""
        limit = self._stopper.shutdown_timeout
        grace = GRACE_SECONDS if limit is None else min(GRACE_SECONDS, OF_SIGNALS * limit)
        with self._telling:
            if self.is_over.is_set() or self._stopper.is_asked:  # who was told to stop before has a deadline
                return
            self.lost = lost
            self._stopper.ask()
        LOGGER.info("%s: the run is stopped, and its last finished step saved", lost)
        if not self.is_over.wait(grace):
            kill_agents(agents_of(import_ray()))
            end_now(f"{lost}, and what was under way did not end within {grace:g} s", EXIT_LOST)
