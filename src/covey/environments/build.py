"""Build the environment that the settings of a run name."""

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from covey.environments.base import Environment
    from covey.environments.settings import BuildSettings, Say

LOGGER = logging.getLogger(__name__)


def build(run: "BuildSettings", say: "Say" = LOGGER.info) -> "Environment":
    """Build the environment of `run.environment`. `say` hears of what takes a while."""
    from covey.environments.base import adapt

    return adapt(run.environment.build(run, say))
