"""Servers made with the official MCP package, by both of its transports: `make test-doors` installs it."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from covey.environments.data.settings import DataConfig
from covey_integrations.tools.mcp import McpSession, ToolRefused
from covey_integrations.tools.settings import ToolsConfig

from ..support.doors.training import free_port, trained

pytestmark = pytest.mark.doors

SERVER = '''
import sys
from mcp.server.fastmcp import FastMCP

server = FastMCP("numbers", port=int((sys.argv + ["", "8000"])[2]) if len(sys.argv) > 2 else 8000)
seen = {"calls": 0}


@server.tool()
def add(first: int, second: int = 2) -> int:
    """Add two numbers."""
    seen["calls"] += 1
    return first + second


@server.tool()
def shapes(sides: list[int]) -> dict[str, int]:
    """Name shapes by their sides."""
    return {f"shape of {side}": side for side in sides}


@server.tool()
def fail(why: str) -> str:
    """Fail on purpose."""
    raise ValueError(why)


server.run(transport=sys.argv[1])
'''
REWARD = """
def said(completions, **columns):
    return [float(len(messages)) for messages in completions]
"""


def client_of_the_package(server: str) -> dict[str, Any]:
    """What the package's own client is told: names of tools, and the texts of three calls."""
    from mcp import ClientSession, StdioServerParameters
    from mcp.client.stdio import stdio_client
    from mcp.client.streamable_http import streamablehttp_client

    async def asked() -> dict[str, Any]:
        async with AsyncExitStack() as stack:
            if server.startswith("http"):
                read, write, _ = await stack.enter_async_context(streamablehttp_client(server))
            else:
                command, *rest = server.split()
                wires = stdio_client(StdioServerParameters(command=command, args=rest))
                read, write = await stack.enter_async_context(wires)
            session = await stack.enter_async_context(ClientSession(read, write))
            await session.initialize()
            listed = (await session.list_tools()).tools
            calls = [("add", {"first": 3}), ("shapes", {"sides": [3, 4]}), ("fail", {"why": "too late"})]
            answers = [await session.call_tool(name, given) for name, given in calls]
            return {
                "tools": [(tool.name, tool.description, tool.inputSchema) for tool in listed],
                "texts": ["\n".join(part.text for part in answer.content) for answer in answers],
                "errors": [bool(answer.isError) for answer in answers],
            }

    return asyncio.run(asked())


@pytest.fixture(params=["stdio", "streamable-http"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    pytest.importorskip("mcp")
    (tmp_path / "server.py").write_text(SERVER)
    command = [sys.executable, str(tmp_path / "server.py"), request.param]
    if request.param == "stdio":
        yield " ".join(command)
        return
    port = free_port()
    process = subprocess.Popen([*command, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}/mcp"
    try:
        wait_for(address)
        yield address
    finally:
        process.kill()
        process.wait()


def wait_for(address: str) -> None:
    for _ in range(600):
        try:
            httpx.get(address, timeout=1, headers={"Accept": "application/json"})
            return
        except httpx.TransportError:
            time.sleep(0.1)
    raise TimeoutError(address)


def test_tools_and_answers_are_those_of_the_package_s_own_client(server: str) -> None:
    expected = client_of_the_package(server)
    session = McpSession(server, seconds=30)
    try:
        found = [(tool["name"], tool["description"], tool["inputSchema"]) for tool in session.tools()]
        texts = [session.call("add", {"first": 3}), session.call("shapes", {"sides": [3, 4]})]
        with pytest.raises(ToolRefused) as refused:
            session.call("fail", {"why": "too late"})
    finally:
        session.close()
    assert found == expected["tools"]
    assert [name for name, *_ in found] == ["add", "shapes", "fail"]
    assert expected["errors"] == [False, False, True]
    assert texts == expected["texts"][:2]
    assert texts[0] == "5"
    assert str(refused.value) == expected["texts"][2]


def test_a_policy_with_tools_of_the_server_trains(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rewards.py").write_text(REWARD)
    rows = [{"prompt": [{"role": "user", "content": f"Number {n}."}]} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    environment = ToolsConfig(servers=[server], in_process=True, server_sessions="shared")
    for rollout in trained(
        environment, data=DataConfig("rows.jsonl"), rewards=["own_rewards:said"]
    ):  # a single message stands there as its text
        said = rollout["completion"]
        assert rollout["reward"] == (1 if isinstance(said, str) else len(said))
    sys.modules.pop("own_rewards", None)
