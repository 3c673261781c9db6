"""Build environment=tools from settings or objects."""

from collections.abc import Callable, Sequence
from typing import Any

from covey.environments.reward_functions.build import RewardEntry, Rows, build_judged
from covey.environments.settings import BuildSettings
from covey.system.lookup import resolve
from covey_integrations.tools.episode import ToolRules
from covey_integrations.tools.mcp import McpServer
from covey_integrations.tools.rows import RowTools
from covey_integrations.tools.settings import ToolsConfig


def build_tools(
    settings: ToolsConfig,
    run: BuildSettings,
    rewards: Sequence[RewardEntry] | None = None,
    rows_in_memory: Rows | None = None,
    given: Sequence[Callable[..., Any]] | None = None,
) -> RowTools:
    """Build it from settings, or from a program's functions, class and rows."""
    if given is None:
        functions = [resolve(name, {}) for name in settings.tools]
        toolset = None if settings.toolset is None else resolve(settings.toolset, {})
    else:
        functions = [tool for tool in given if not isinstance(tool, type)]
        toolset = next((tool for tool in given if isinstance(tool, type)), None)
    judged = build_judged(settings, run, rewards, rows_in_memory)
    made = RowTools(judged, functions, toolset, has_rewards=bool(run.rewards))
    made.rules = ToolRules(max_calls=settings.max_tool_calls, role=settings.tool_role)
    made.tool_timeout = settings.tool_timeout
    shared = settings.server_sessions == "shared"
    made.servers = [McpServer(server, is_shared=shared, seconds=settings.tool_timeout) for server in settings.servers]
    return made
