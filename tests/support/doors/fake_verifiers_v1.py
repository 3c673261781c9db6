"""What stands for version 1 of verifiers in a folder: as much of it as a worker asks for, in the form of 0.4.0."""

from pathlib import Path

MODULES = {
    "verifiers/__init__": "",
    "verifiers/v1/__init__": """
from types import SimpleNamespace as AgentInfo, SimpleNamespace as AgentConfig, SimpleNamespace as TraceTask
from .trace import Trace
""",
    "verifiers/v1/trace": """
class Trace:
    def __init__(self, task, state, agent):
        self.task, self.state, self.said, self.stop_condition, self.reward = task, state, [], None, 0.0

    num_turns = property(lambda self: len(self.said))
    last_reply = property(lambda self: self.said[-1].content if self.said else "")

    def stop(self, condition):
        self.stop_condition = condition
""",
    "verifiers/v1/task": """
class Task:
    NEEDS_CONTAINER = False
    rewards, stops, metrics = (), (), ()

    def __init__(self, data, config=None):
        self.data, self.config, self.key, self.hash = data, config, "key", "hash"

    async def setup(self, trace, runtime): ...

    async def finalize(self, trace, runtime): ...

    @classmethod
    def toolsets(cls, config):
        return []

    def hooks(self, kind):
        return [getattr(self, name) for name in getattr(self, kind + "s")]

    async def score(self, trace, runtime):
        trace.reward = sum([await hook(trace) for hook in self.hooks("reward")])
""",
    "verifiers/v1/state": "state_cls = lambda task: type(task).__mro__ and __import__('types').SimpleNamespace",
    "verifiers/v1/envs/__init__": "",
    "verifiers/v1/envs/single_agent": "class SingleAgentEnv: ...",
    "verifiers/v1/utils/__init__": "",
    "verifiers/v1/utils/decorators": """
import inspect


def invoke(function, available):
    return function(**{name: available[name] for name in inspect.signature(function).parameters})


def discover_decorated(task, kind):
    return [getattr(task, name) for name in getattr(task, kind, ())]
""",
    "verifiers/v1/utils/loaders": """
import importlib
from verifiers.v1.envs.single_agent import SingleAgentEnv


class Config:
    @classmethod
    def model_validate(cls, given):
        made = cls()
        made.__dict__.update(given)
        return made


def taskset_class(name):
    return importlib.import_module(name).Tasks


def taskset_config_type(name):
    return Config


def environment_class(name):
    return getattr(importlib.import_module(name), "Env", SingleAgentEnv)


def load_taskset(config):
    return taskset_class(config.id)(config)
""",
    "verifiers/v1/session": """
from typing import get_type_hints
from verifiers.v1.trace import Trace


def hook_boundary(hook, allow_trace):
    return Trace if Trace in get_type_hints(hook).values() else object


async def call_hook(hook, available):
    return hook(available[Trace])
""",
    "verifiers/v1/graph": """
def prepare_turn(trace, messages, tools):
    return trace


def _commit_turn(trace, response):
    trace.said.append(response.message)
""",
    "verifiers/v1/types": """
class Message:
    role = ""

    def __init__(self, **given):
        self.content, self.tool_calls = None, None
        self.__dict__.update(given)

    def model_dump(self, exclude_none):
        found = {"role": self.role}
        for name, value in self.__dict__.items():
            if value is not None:
                found[name] = [dict(call.__dict__) for call in value] if name == "tool_calls" else value
        return found


class SystemMessage(Message):
    role = "system"


class UserMessage(Message):
    role = "user"


class AssistantMessage(Message):
    role = "assistant"


class ToolMessage(Message):
    role = "tool"


from types import SimpleNamespace as Response

Tool = ToolCall = Usage = Response
""",
    "mcp/__init__": "",
    "mcp/server/__init__": "",
    "mcp/server/mcpserver": """
import inspect
from types import SimpleNamespace


class MCPServer:
    def __init__(self, name):
        self.tools = {}

    def add(self, function):
        self.tools[function.__name__] = function

    async def list_tools(self):
        schema = lambda f: {"type": "object", "properties": dict.fromkeys(inspect.signature(f).parameters, {})}
        return [SimpleNamespace(name=n, description=f.__doc__, input_schema=schema(f)) for n, f in self.tools.items()]

    async def call_tool(self, name, arguments):
        return [SimpleNamespace(text=str(await self.tools[name](**arguments)))]
""",
    "sums_v1": """
from types import SimpleNamespace
from verifiers.v1.task import Task
from verifiers.v1.trace import Trace


class Calculator:
    server_name = "calculator"

    async def setup(self): ...

    async def setup_task(self, task):
        self.factor = task.factor

    def register(self, server):
        server.add(self.multiply)

    async def multiply(self, a):
        "Multiply by the task's number."
        state = await self._pull_state()
        state.calls = getattr(state, "calls", 0) + 1
        return a * self.factor


class Sum(Task):
    rewards, stops = ("right", "used"), ("long",)

    @classmethod
    def toolsets(cls, config):
        return [Calculator()]

    async def right(self, trace):
        return float(str(3 * self.data.factor) in (trace.last_reply or ""))

    async def used(self, trace):
        return getattr(trace.state, "calls", 0) / 8

    def long(self, trace: Trace):
        return "enough" in (trace.last_reply or "")


class Boxed(Sum):
    NEEDS_CONTAINER = True


class Rooted(Sum):
    async def right(self, trace, runtime):
        return 1.0


class Tasks:
    def __init__(self, config):
        self.kind = {"boxed": Boxed, "rooted": Rooted}.get(getattr(config, "kind", ""), Sum)
        self.asks = getattr(config, "asks", True)

    @classmethod
    def toolsets(cls, config):
        return [Calculator()] if getattr(config, "kind", "") == "shared" else []

    def __iter__(self):
        for factor in range(4, 10):
            asked = f"3 times {factor}?" if self.asks else None
            yield self.kind(SimpleNamespace(prompt=asked, system_prompt="Use the tool.", factor=factor))
""",
    "led_v1": """
from sums_v1 import Tasks


class Env: ...
""",
}


def write_verifiers_v1(folder: Path) -> None:
    """Write the package, its taskset `sums_v1`, and one with an Env of its own, `led_v1`."""
    for name, text in MODULES.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
