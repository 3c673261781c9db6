"""The policy whose weights are pushed."""

import pytest

from covey.policy.models.loading import load_policy
from covey.policy.policy import Policy

from ..support.small import small_config


@pytest.fixture(scope="session")
def policy() -> Policy:
    return load_policy(small_config().model, seed=0)
