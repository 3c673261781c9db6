"""The end of a run whose Ray cluster is lost while its own processes live on, as where the trainer's ranks sample.

Ray ends every process without a word that has not reached the cluster for 60 s, whether it still needs it or not. So
the run is stopped before, as by a signal: its last finished step is saved, and one line says why.
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
"""A cluster that answers nobody for so long is lost."""
GRACE_SECONDS = 25.0
"""For what is under way to end, and its step to be saved, at most: both together are less than the 60 s of Ray."""
OF_SIGNALS = 0.8
"""Of output.shutdown_timeout, which would end the run with another exit code."""

LOOK_SECONDS = 5.0
"""For the cluster to answer where a process of it was lost."""
EXIT_LOST = 2
"""As every run that ends in one line."""


@contextmanager
def ended_with_cluster(devices: DevicesConfig, stopper: Stopper) -> Iterator[None]:
    """Stop the run inside where its cluster is lost, and raise ClusterLost once its last step is saved.

    Where the run is not over within GRACE_SECONDS its process ends, with the line and the code that it would have had.
    Rank 0 alone watches. Nothing happens where the run needs no cluster, and where there are samplers: who waits for
    them watches.
    """
    if not _is_watched(devices) or not collectives.is_main_process():
        yield
        return
    is_own = connect(devices, 0)
    watch = _Watch(stopper)
    try:
        yield
    except ClusterLost:
        raise
    except StopRequested as stopped:
        if watch.lost is None:  # somebody else has stopped it
            raise
        raise watch.lost from stopped
    except RunStopped as stopped:
        if (lost := watch.lost or loss_of_cluster(LOOK_SECONDS)) is None:
            raise
        raise lost from stopped
    finally:
        watch.end()
        disconnect(is_own)


def _is_watched(devices: DevicesConfig) -> bool:
    """Tell whether processes of Ray or its devices take part, and no sampler does."""
    is_used = devices.trainer > 1 or devices.gpus_per_trainer > 0 or devices.reference + devices.judge > 0
    return is_used and devices.sampler == 0


class _Watch:
    """Looks at the cluster in a thread, and stops the run once it is lost."""

    def __init__(self, stopper: Stopper) -> None:
        self.lost: ClusterLost | None = None
        """Why the run was stopped."""
        self._stopper = stopper
        self._is_over = threading.Event()
        self._telling = threading.Lock()
        watch_cluster(SILENCE_SECONDS, self._stop, self._is_over)

    def end(self) -> None:
        """Return once no stop is on its way any more: nobody may handle its signal soon."""
        self._is_over.set()
        with self._telling:
            pass

    def _stop(self, lost: ClusterLost) -> None:
        limit = self._stopper.shutdown_timeout
        grace = GRACE_SECONDS if limit is None else min(GRACE_SECONDS, OF_SIGNALS * limit)
        with self._telling:
            if self._is_over.is_set() or self._stopper.is_asked:  # who was told to stop before has a deadline
                return
            self.lost = lost
            self._stopper.ask()
        LOGGER.info("%s: the run is stopped, and its last finished step saved", lost)
        if not self._is_over.wait(grace):
            _end_now(f"{lost}, and what was under way did not end within {grace:g} s")


def _end_now(line: str) -> None:
    kill_agents(agents_of(import_ray()))
    end_now(line, EXIT_LOST)
