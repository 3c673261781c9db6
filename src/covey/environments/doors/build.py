"""Build environments of other people's programs. The module of each is imported when it is built."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from covey.environments.base import Environment, Split
    from covey.environments.doors.settings import OpenEnvConfig, ReasoningGymConfig, VerifiersConfig
    from covey.environments.settings import BuildSettings


def build_openenv(settings: "OpenEnvConfig", config: "BuildSettings") -> "Environment":
    from covey.environments.data.rows import load_rows, row_settings
    from covey.environments.doors.openenv.environment import OpenEnv, actions_of, reset_prompts, with_words
    from covey.environments.doors.steps import seed_prompts

    actions = actions_of(settings)
    # Prompts of rows, else seeds under one instruction
    if config.data.path is not None:
        rows = load_rows(config.data.path, row_settings(config.data, (), make=with_words))
        return OpenEnv(settings, actions, reset_prompts(rows.splits, settings.instruction))
    counts: dict[Split, int] = {"train": settings.num_train, "test": settings.num_test}
    return OpenEnv(settings, actions, seed_prompts("openenv", settings.instruction, counts, settings.problem_seed))


def build_verifiers(settings: "VerifiersConfig", config: "BuildSettings") -> "Environment":
    from covey.environments.doors.gateway.environment import run_sampling
    from covey.environments.doors.verifiers.environment import Verifiers
    from covey.environments.doors.verifiers.process import WorkerProgram

    run = run_sampling(config.sampling, settings.max_context, settings.program_sampling)
    return Verifiers(WorkerProgram(settings), run)


def build_reasoning_gym(settings: "ReasoningGymConfig", config: "BuildSettings") -> "Environment":
    from covey.environments.doors.reasoning_gym import ReasoningGym, make_dataset

    counts: dict[Split, int] = {"train": settings.num_train, "test": settings.num_test}
    dataset = make_dataset(settings.dataset, sum(counts.values()), settings.problem_seed, settings.options)
    return ReasoningGym(dataset, settings.dataset, counts, settings.instruction)
