"""Settings of environment=tools."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from covey.environments.reward_functions.settings import RewardFunctionsConfig
from covey.environments.settings import BuildSettings, EpisodesConfig, Say
from covey.system.lookup import is_function_path
from covey.system.setting import Requires, setting

if TYPE_CHECKING:
    from covey.environments.base import Environment, EnvironmentLike

NEEDS = "environment=tools needs environment.tools=[module:function], toolset or servers, or rows with a column tools"
HAS_SERVERS = Requires("environment.servers set", ("environment.servers",), bool)


@dataclass
class ToolsConfig(EpisodesConfig, RewardFunctionsConfig):
    """Your own rows (`data`), rewards (`rewards`), and tools that policies call."""

    name: str = "tools"
    max_turns: int | None = setting(8, ge=1)
    """Turns of the policy in an episode at most."""
    tools: list[str] = field(default_factory=list)
    """Functions with type hints and a docstring, each as module:function."""
    toolset: str | None = None
    """A class as module:Class, of which each attempt has an object of its own: its public methods are tools,
    `reset(**row)` begins an attempt, `get_reward()` may reward it, as environment_factory in TRL."""
    servers: list[str] = field(default_factory=list)
    """MCP servers whose tools the policy gets too: URLs (streamable HTTP), or command lines of programs (stdio)."""
    server_sessions: str = setting("episode", choices=("episode", "shared"), needs=HAS_SERVERS)
    """Owner of a session with a server: episode (its own, for servers with state) or shared (by all, for others)."""
    tool_timeout: float = setting(30.0, gt=0)
    """Seconds that one call of a tool may take; an attempt whose tool takes longer is a failure."""
    max_tool_calls: int | None = setting(None, ge=1)
    """Calls in an episode at most; null leaves it to max_turns."""
    tool_role: str = setting("tool", choices=("tool", "user"))
    """Role of a tool's answer: tool, or user for chat templates that know no tools."""

    masked_prompts: ClassVar[str] = "never"

    def build(self, run: BuildSettings, say: Say) -> "EnvironmentLike":
        from covey_integrations.tools.rows import build_tools

        return build_tools(self, run)

    def build_of(self, run: BuildSettings, rewards: Sequence[Any], rows: Any, tools: Sequence[Any]) -> "Environment":
        """Build it from a program's functions, rows by split and tools."""
        from covey_integrations.tools.rows import build_tools

        return build_tools(self, run, rewards, rows, tools)

    def check(self, run: BuildSettings) -> None:
        """Require tools, something that rewards, and names that can be imported."""
        super().check(run)
        if not self.tools and self.toolset is None and not self.servers and run.data.path is None:
            raise ValueError(f"{NEEDS}, got none")
        if not run.rewards and self.toolset is None:
            raise ValueError(
                "environment=tools needs rewards=[module:function], or a toolset with get_reward, got none"
            )
        for name in (*self.tools, *([self.toolset] if self.toolset is not None else [])):
            if not is_function_path(name):
                raise ValueError(f"tools of environment=tools must be module:function, got {name}")
