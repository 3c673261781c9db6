"""What every test of the preflight has."""

import pytest


@pytest.fixture(autouse=True)
def _no_clock_in_the_checks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let checks look at all tokens however slow this machine is just now; what they leave out has tests of its own."""
    if request.path.name != "test_preflight_budget.py":
        monkeypatch.setattr("covey_preflight.budget.SECONDS", 1e6)
        monkeypatch.setattr("covey_preflight.subject.SAMPLING_SECONDS", 1e6)
