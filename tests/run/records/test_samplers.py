"""What samplers did: a line for each step, totals at the end, nothing where groups are sampled in process."""

import pytest

from covey.run.records.samplers import SamplersTotals, samplers_line
from covey_report.runs.tables import samplers_note

ROW = {
    "seconds": 2.0,
    "staleness/mean": 0.75,
    "staleness/max": 1.0,
    "buffer/finished": 3.0,
    "buffer/pending": 8.0,
    "trainer_waited_seconds": 0.25,
    "samplers/alive": 2.0,
    "samplers/waited_seconds": 0.06,
    "samplers/tokens": 6824.0,
}
LATER = {**ROW, "seconds": 3.0, "staleness/mean": 1.25, "staleness/max": 2.0, "samplers/tokens": 176.0}


def test_the_line_says_age_buffer_waits_and_speed_in_80_columns() -> None:
    line = samplers_line(ROW)
    assert line == "age 0.8 max 1  buffer 3/8  waited 0.2 s, samplers 0.1 s, 3,412 tokens/s"
    assert len(samplers_line({**ROW, "buffer/finished": 128.0, "buffer/pending": 256.0})) <= 80


def test_a_run_in_process_says_nothing_of_samplers() -> None:
    row = {"seconds": 2.0, "kl": 0.1}
    totals = SamplersTotals()
    totals.add(row)
    assert samplers_line(row) == ""
    assert totals.described() is None


def test_totals_are_means_over_steps_and_sums_of_waits() -> None:
    totals = SamplersTotals()
    for row in (LATER, ROW):
        totals.add(row)
    found = totals.described()
    assert found is not None
    assert found["tokens_per_second"] == pytest.approx(1400.0)
    assert (found["age_mean"], found["age_max"], found["trainer_waited_seconds"]) == (1.0, 2.0, 0.5)
    note = "trained on groups 1.0 versions old, 2 at most · trainer waited 0.50 s, samplers 0.12 s each · they drew"
    assert samplers_note(found) == f"{note} 1,400 tokens/s"
