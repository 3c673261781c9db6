"""`covey replay RUN`."""

from collections.abc import Sequence

from covey.config import compose as settings
from covey.run.checkpoints.saved_settings import settings_of
from covey.system.text.console import CleanConsole
from covey.system.text.format import number_of
from covey_report.runs.folders import run_folder_of

TRUST = "trust_run=true"


def run_replay(words: Sequence[str]) -> None:
    """Replay a run and compare its weights. ValueError where it differs."""
    # Settings are the run's; a trusted run may import code
    folder = run_folder_of("replay", [word for word in words if word != TRUST])
    settings.register()
    config = settings.to_config(settings_of(folder, [word for word in words if word == TRUST]))

    from covey_report.runs.replay import read_schedule, replay_on_ranks

    steps = read_schedule(folder)
    digest = replay_on_ranks(config, folder)
    CleanConsole().print(f"the same weights after each of {number_of(len(steps), 'step')}; after the last one {digest}")
