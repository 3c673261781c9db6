"""Replay a run with its original ranks on this machine."""

import tempfile
from functools import partial
from pathlib import Path

from covey.config.schema import Config
from covey.run.folder import begin_log
from covey.run.records.record import RunRecorder
from covey.run.replay.training import check_replayable, num_ranks, read_schedule, replay
from covey.system import collectives, ranks
from covey.system.text.console import CleanConsole
from covey.system.workers.local_ranks import run_on_ranks


def replay_on_ranks(config: Config, past: Path) -> str:
    """Replay the run in `past`; return the last digest.

    Rank 0 prints each step's. ValueError as `replay`; RunStopped where a rank is lost.
    """
    steps = read_schedule(past)
    check_replayable(config, steps)
    if ranks.world_size() > 1:
        raise ValueError(
            f"covey replay starts the ranks of a run itself, and a launcher has started {ranks.world_size()} already: "
            "leave the launcher out"
        )
    with tempfile.TemporaryDirectory(prefix="covey-replay-") as aside:
        as_rank = partial(_replay_as_rank, config, past, Path(aside))
        return as_rank() if num_ranks(steps) == 1 else run_on_ranks(as_rank, list(steps[0].threads))


def _replay_as_rank(config: Config, past: Path, aside: Path) -> str:
    """Replay this rank's part in a scratch folder."""
    with collectives.process_group(config.timeouts.ranks, config.model.device), RunRecorder(config, aside) as record:
        if not collectives.is_main_process():
            begin_log(aside)  # away from the terminal, where rank 0 says the same
        say = CleanConsole().print if collectives.is_main_process() else lambda text: None
        return replay(config, past, record, say)
