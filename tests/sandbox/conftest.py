"""A sandbox of each tier, shared by the tests of this folder."""

from collections.abc import Iterator

import pytest

from covey_sandbox import Sandbox, SandboxFailed, Tier

TIERS: tuple[Tier, ...] = ("namespace", "landlock")


def opened(tier: Tier) -> Sandbox:
    """Skips where this machine does not have what the tier needs."""
    try:
        return Sandbox(2, tier)
    except SandboxFailed as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session", params=TIERS)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """Each tier in turn."""
    with opened(request.param) as sandbox:
        yield sandbox


@pytest.fixture(scope="session")
def any_sandbox() -> Iterator[Sandbox]:
    """The strongest there is, for what does not depend on the tier."""
    with opened("auto") as sandbox:
        yield sandbox
