"""Settings of the doctor during training. Standard library only."""

from dataclasses import dataclass

from covey.system.section import Section
from covey.system.setting import Requires, setting

AFTERWARDS = ("D18", "D20", "D31", "D32")
"""Findings that need the files of a run, or its end."""
IDS = tuple(f"D{number}" for number in range(1, 38))
STOPPERS = ("sick", *(name for name in IDS if name not in AFTERWARDS))
ENABLED = Requires("doctor.enabled = true", ("doctor.enabled",), bool)


@dataclass
class DoctorConfig(Section):
    """What `covey doctor` says of a finished run, said while it trains."""

    enabled: bool = True
    """Look at the numbers while the run trains, and warn once of each finding."""
    stop_on: list[str] = setting([], choices=STOPPERS, needs=ENABLED)
    """Findings that end the run, by their number, such as D4; "sick" stands for any of that level."""
