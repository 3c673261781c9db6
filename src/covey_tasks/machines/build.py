"""Build environment=machines: its problems, its demonstrations and what simulates."""

import logging
import random
from functools import partial

from covey.environments.base import Environment, Split
from covey.environments.data.rows import load_rows, row_settings
from covey.environments.settings import BuildSettings
from covey_tasks.machines.design.demonstrations import DemonstrationSpec
from covey_tasks.machines.design.stages import stage_problems
from covey_tasks.machines.environment import Machines
from covey_tasks.machines.physics.simulators import CachedSimulators, Simulators
from covey_tasks.machines.rows import problem_of, read_examples
from covey_tasks.machines.settings import MachinesConfig

LOGGER = logging.getLogger(__name__)


def build_machines(settings: MachinesConfig, config: BuildSettings) -> Environment:
    # Read the problems of both splits, or generate them.
    most, seed = settings.max_blocks, settings.problem_seed
    if config.data.path is not None:
        how_to_read = row_settings(config.data, ("prompt",), make=partial(problem_of, settings=settings))
        problems = load_rows(config.data.path, how_to_read).splits
    else:
        counts: dict[Split, int] = {"train": settings.num_train, "test": settings.num_test}
        problems = {
            split: stage_problems(settings.stages, count, most, random.Random(f"machines {split} {seed}"))
            for split, count in counts.items()
        }
    # Read the demonstrations, or say which there can be.
    examples = [] if settings.demonstrations is None else read_examples(settings.demonstrations, settings)
    if examples:
        LOGGER.info("%s: %d designs, all of them machines", settings.demonstrations, len(examples))
    own = () if config.data.path is None else tuple(problems["train"])
    wanted = DemonstrationSpec(
        tuple(settings.stages), settings.num_demonstrations, most, settings.family_share, seed, own
    )
    # Start what simulates.
    simulators = CachedSimulators(Simulators(settings.num_workers, settings.timeout), settings.cache_size)
    return Machines(problems, wanted, simulators, settings, examples)
