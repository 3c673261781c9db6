"""Settings of environment=agent."""

from dataclasses import dataclass, field

from covey.environments.reward_functions.settings import RewardFunctionsConfig
from covey.environments.settings import EpisodesConfig
from covey.system.setting import setting


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
    """What becomes of sampling settings of a call that differ from the run's: refuse (the call fails and names them)
    or override (the run's are taken)."""
