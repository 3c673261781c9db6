"""Settings of environment=steps, openenv, verifiers, reasoning_gym and agent."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from covey.environments.reward_functions.settings import RewardFunctionsConfig
from covey.environments.settings import WITHOUT_ROWS, BuildSettings, EnvironmentConfig, EpisodesConfig, Say
from covey.system.lookup import is_function_path
from covey.system.setting import Requires, setting

if TYPE_CHECKING:
    from covey.environments.base import EnvironmentLike, Split

MADE_OF_SEEDS = Requires(
    "environment.protocol other than skyrl", ("environment.protocol",), lambda protocol: protocol != "skyrl"
)


@dataclass
class StepsConfig(EpisodesConfig):
    """Environments of `reset` and `step` that others wrote: Gymnasium, GEM, TextArena, SkyRL-Gym."""

    name: str = "steps"
    max_turns: int | None = setting(16, ge=1)
    """Steps of an episode at most."""
    factory: str = ""
    """Function that makes the object of an attempt, as module:function, such as textarena:make, or a class."""
    options: dict[str, Any] = field(default_factory=dict)
    """Its arguments, by name."""
    protocol: str = setting("gymnasium", choices=("gymnasium", "textarena", "skyrl"))
    """Protocol: gymnasium (GEM too), textarena (one player) or skyrl (`data` brings prompts and extras)."""
    instruction: str = setting("Play.", needs=MADE_OF_SEEDS)
    """User message before the first observation."""
    num_train: int = setting(4096, ge=1, needs=MADE_OF_SEEDS)
    """Training prompts, each a seed."""
    num_test: int = setting(512, ge=1, needs=MADE_OF_SEEDS)
    """Held-out prompts, none with a seed of a training prompt."""
    problem_seed: int = setting(0, ge=0, needs=MADE_OF_SEEDS)
    """The first of the seeds."""

    reads_rows: ClassVar[str] = "maybe"

    def build(self, run: BuildSettings, say: Say) -> "EnvironmentLike":
        from covey_integrations.steps import make_steps

        return make_steps(self, run)

    def check(self, run: BuildSettings) -> None:
        if not is_function_path(self.factory):
            raise ValueError(
                f"environment=steps needs environment.factory=module:function, got {self.factory or 'none'}"
            )
        path, is_skyrl = run.data.path, self.protocol == "skyrl"
        if is_skyrl and path is None:
            raise ValueError("environment.protocol=skyrl needs data.path (rows with a prompt), got data.path=null")
        if path is not None and not is_skyrl:
            raise ValueError(f"data.path={path} needs environment.protocol=skyrl, got {self.protocol}")


@dataclass
class OpenEnvConfig(EpisodesConfig):
    """Environments that a server of OpenEnv has, each attempt with one of its own."""

    name: str = "openenv"
    max_turns: int | None = setting(16, ge=1)
    """Steps of an episode at most; turns, where actions are calls of tools."""
    url: str = ""
    """Address of the server, such as http://127.0.0.1:8000."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of every `reset`, besides the seed or the columns of the row."""
    instruction: str = "Play."
    """User message before the first observation, where a row has no `prompt`."""
    observation_field: str | None = None
    """The field of an observation that the policy reads; null takes the only one, or all of them as JSON."""
    describe_actions: bool = True
    """Whether the policy is told the JSON schema of actions, where these are more than one text."""
    server_timeout: float = setting(60.0, gt=0)
    """Seconds that the server may take for each answer; an attempt that waits longer is a failure."""
    num_train: int = setting(4096, ge=1, needs=WITHOUT_ROWS)
    """Training prompts, each a seed; with `data`, prompts are rows of arguments of `reset`."""
    num_test: int = setting(512, ge=1, needs=WITHOUT_ROWS)
    """Held-out prompts, none with a seed of a training prompt."""
    problem_seed: int = setting(0, ge=0, needs=WITHOUT_ROWS)
    """The first of the seeds."""

    reads_rows: ClassVar[str] = "maybe"
    slow_to_build: ClassVar[bool] = True

    def build(self, run: BuildSettings, say: Say) -> "EnvironmentLike":
        from covey.environments.data.rows import load_rows, row_settings
        from covey_integrations.openenv.environment import OpenEnv, actions_of, reset_prompts, with_words
        from covey_integrations.steps import seed_prompts

        actions = actions_of(self)
        if run.data.path is None:
            return OpenEnv(self, actions, seed_prompts(self))
        rows = load_rows(run.data.path, row_settings(run.data, (), make=with_words))
        return OpenEnv(self, actions, reset_prompts(rows.splits, self.instruction))

    def check(self, run: BuildSettings) -> None:
        if not self.url.startswith(("http://", "https://", "ws://", "wss://")):
            got = self.url or "none"
            raise ValueError(f"environment=openenv needs environment.url=http://HOST:PORT of its server, got {got}")


@dataclass
class VerifiersConfig(EpisodesConfig):
    """An environment of verifiers: a taskset of v1, or an environment of v0's load_environment."""

    name: str = "verifiers"
    max_turns: int | None = setting(16, ge=1)
    """Calls of the policy in an episode at most, besides the environment's own limit."""
    id: str = ""
    """Its name, as verifiers takes it: an installed package, or a module of the current folder."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of the taskset (v1), or arguments of load_environment (v0), by name."""
    python: str | None = None
    """The interpreter that has verifiers and the environment; null takes covey's own."""
    num_train: int = setting(4096, ge=1)
    """Training tasks at most."""
    num_test: int = setting(512, ge=1)
    """Held-out tasks at most; a tenth of the tasks where the environment has none of its own for tests."""
    load_timeout: float = setting(300.0, gt=0)
    """Seconds that loading it may take."""
    program_sampling: str = setting("refuse", choices=("refuse", "override"))
    """Treatment of its calls' sampling settings that differ from the run's: refuse or override."""

    slow_to_build: ClassVar[bool] = True

    def build(self, run: BuildSettings, say: Say) -> "EnvironmentLike":
        from covey_integrations.gateway.environment import run_sampling
        from covey_integrations.verifiers.environment import Verifiers
        from covey_integrations.verifiers.process import WorkerProgram

        return Verifiers(WorkerProgram(self), run_sampling(run.sampling, self.max_context, self.program_sampling))

    def check(self, run: BuildSettings) -> None:
        if not self.id:
            raise ValueError("environment=verifiers needs environment.id=NAME of an installed environment, got none")


@dataclass
class ReasoningGymConfig(EnvironmentConfig):
    """A data set of reasoning_gym by name: generated questions with one answer each."""

    name: str = "reasoning_gym"
    dataset: str = "chain_sum"
    """Its name in reasoning_gym."""
    options: dict[str, Any] = field(default_factory=dict)
    """Its own settings, by name."""
    instruction: str = "Give the answer between <answer> and </answer>."
    """The system message; empty says none."""
    num_train: int = setting(4096, ge=1)
    """Training problems."""
    num_test: int = setting(512, ge=1)
    """Held-out problems, fewer where a question is among the training problems."""
    problem_seed: int = 0
    """Seed of the drawn problems."""

    knows_right: ClassVar[bool] = True

    def build(self, run: BuildSettings, say: Say) -> "EnvironmentLike":
        from covey_integrations.reasoning_gym import ReasoningGym, make_dataset

        counts: dict[Split, int] = {"train": self.num_train, "test": self.num_test}
        dataset = make_dataset(self.dataset, sum(counts.values()), self.problem_seed, self.options)
        return ReasoningGym(dataset, self.dataset, counts, self.instruction)


@dataclass
class AgentConfig(EpisodesConfig, RewardFunctionsConfig):
    """Your own agent program, which calls the policy by the OpenAI chat API at a URL that covey gives it."""

    name: str = "agent"
    max_turns: int | None = setting(16, ge=1)
    """Calls of the program in an episode at most."""
    program: str | None = None
    """A function (base_url, api_key, row) as module:function, plain or async, that plays one attempt and returns its
    reward, messages to judge, or None."""
    command: list[str] = field(default_factory=list)
    """A command line in its stead, run for each attempt with OPENAI_BASE_URL, OPENAI_API_KEY and COVEY_ROW set."""
    program_sampling: str = setting("refuse", choices=("refuse", "override"))
    """Treatment of a call's sampling settings that differ from the run's: refuse (the call fails and names them)
    or override (the run's are taken)."""

    masked_prompts: ClassVar[str] = "never"

    def build(self, run: BuildSettings, say: Say) -> "EnvironmentLike":
        from covey.environments.reward_functions.build import build_judged
        from covey_integrations.gateway.environment import agent_environment

        return agent_environment(self, build_judged(self, run), run.sampling, has_rewards=bool(run.rewards))

    def check(self, run: BuildSettings) -> None:
        super().check(run)
        if (self.program is None) == (not self.command):
            got = "none" if self.program is None else "both"
            raise ValueError(f"environment=agent needs environment.program=module:function or command=[...], got {got}")
        if self.program is not None and not is_function_path(self.program):
            raise ValueError(f"environment.program must be module:function, got {self.program}")
