"""Play environments of verifiers. Run by the interpreter that has the package; it imports nothing of covey's.

Lines of JSON come in, one for each request, and go out, one for each answer, in any order:

{"id": 1, "do": "load", "name", "options", "counts"}  -> {"id": 1, "result": {"kind", "prompts": {"train": [], ...}}}
{"id": 2, "do": "play", "split", "index", "base_url", "api_key"}                   -> {"id": 2, "result": REWARD}
{"id": 3, "do": "stop", "play": 2}                                                 -> nothing
Where it goes wrong: {"id": 2, "error": "in one line"}

The model is whoever answers at base_url: the gateway of the run, which keeps its tokens.
"""

import asyncio
import inspect
import itertools
import json
import os
import sys
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

OVER = ("episode_over", "context_length_exceeded")
"""Codes with which the run says that no turn follows."""
MODEL = "policy"
HELD_OUT = 0.1
"""Share of the tasks that are held out, where an environment has no others for tests."""


class Player(Protocol):
    """One environment, loaded."""

    kind: str
    splits: dict[str, list[Any]]

    def prompt(self, task: Any) -> Any:
        """Return the prompt, as text or messages."""

    async def play(self, task: Any, base_url: str, api_key: str) -> float:
        """Return the reward of an attempt."""


# ---- verifiers v0: load_environment() returns an Environment


class Environments:
    """An environment of v0, which leads its rollouts itself."""

    kind = "v0"

    def __init__(self, name: str, options: dict[str, Any], counts: dict[str, int]) -> None:
        import verifiers as vf

        self._env: Any = vf.load_environment(name, **options)
        if getattr(self._env, "requires_group_rollouts", False):
            raise ValueError(f"{name} rewards the attempts of a group by comparing them, which covey does not hand it")
        train = list(itertools.islice(self._env.get_dataset(), counts["train"] + counts["test"]))
        own = getattr(self._env, "eval_dataset", None) or getattr(self._env, "eval_dataset_source", None)
        test = list(itertools.islice(self._env.get_eval_dataset(), counts["test"])) if own is not None else None
        self.splits = divided(train, test, counts)

    def prompt(self, task: Any) -> Any:
        return task["prompt"]

    async def play(self, task: Any, base_url: str, api_key: str) -> float:
        """Have the environment play. It scores an answer that it cannot use; a broken system raises."""
        # The key stands in the URL, which is what the client is given
        os.environ["COVEY_EPISODE_KEY"] = api_key
        from verifiers.types import ClientConfig

        client = ClientConfig(
            api_base_url=base_url, api_key_var="COVEY_EPISODE_KEY", max_retries=0, timeout=86400.0, connect_timeout=30.0
        )
        found = await self._env.run_rollout(dict(task), client, MODEL, {})
        error = found.get("error")
        if error and not is_policys(str(error)):
            raise RuntimeError(one_line(error))
        return float(found.get("reward") or 0.0)


def is_policys(error: str) -> bool:
    """Return True if an error of v0 is about the policy's text, or about the end that the run set."""
    names = ("EmptyModelResponseError", "OverlongPromptError", "ToolParseError", "ToolCallError", *OVER)
    return any(name in error for name in names)


# ---- verifiers v1: a taskset of tasks, each with tools and rewards


class Tasks:
    """A taskset of v1, played in this process: tools are called as methods, and scoring needs no runtime."""

    kind = "v1"

    def __init__(self, name: str, options: dict[str, Any], counts: dict[str, int]) -> None:
        from verifiers.v1.envs.single_agent import SingleAgentEnv
        from verifiers.v1.utils.loaders import environment_class, load_taskset, taskset_config_type

        leader = environment_class(name)
        if leader is not SingleAgentEnv:
            raise ValueError(f"{name} has an Env of its own ({leader.__name__}), which leads agents by itself")
        config = taskset_config_type(name).model_validate({"id": name, **options})
        self._taskset: Any = load_taskset(config)
        shared = type(self._taskset).toolsets(config)
        if shared:
            raise ValueError(f"{name} has tools that all its tasks share, which need a server of their own")
        tasks = list(itertools.islice(iter(self._taskset), counts["train"] + counts["test"]))
        for task in tasks[:1]:
            refuse_runtimes(name, task)
        self.splits = divided(tasks, None, counts)

    def prompt(self, task: Any) -> Any:
        return [said.model_dump(exclude_none=True) for said in opening(task)]

    async def play(self, task: Any, base_url: str, api_key: str) -> float:
        """Have the policy call the task's tools until it says something without a call, and score that."""
        import verifiers.v1 as vf
        from verifiers.v1.state import state_cls
        from verifiers.v1.utils.decorators import invoke

        named = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        agent = vf.AgentInfo(config=vf.AgentConfig())
        trace: Any = vf.Trace(task=named, state=state_cls(type(task))(), agent=agent)
        await invoke(task.setup, {"trace": trace, "runtime": None})
        await self._converse(task, trace, base_url, api_key)
        await invoke(task.finalize, {"trace": trace, "runtime": None})
        await task.score(trace, None)
        return float(trace.reward)

    async def _converse(self, task: Any, trace: Any, base_url: str, api_key: str) -> None:
        from verifiers.v1.types import ToolMessage

        tools = await tools_of(task, trace)
        messages = list(opening(task))
        schemas = [schema for schema, _ in tools.values()]
        while (stopped := await stopped_by(task, trace)) is None:
            said = await spoken(trace, messages, schemas, base_url, api_key)
            if said is None:
                trace.stop("max_turns")
                return
            messages.append(said)
            if not said.tool_calls:
                trace.stop("agent_completed")
                return
            for call in said.tool_calls:
                content = await called(tools, call)
                messages.append(ToolMessage(tool_call_id=call.id, content=content, name=call.name))
        trace.stop(stopped)


def opening(task: Any) -> list[Any]:
    """Return the messages that a task begins with."""
    from verifiers.v1.types import SystemMessage, UserMessage

    data = task.data
    if data.prompt is None:
        raise ValueError("the task has no prompt: somebody else opens its conversation")
    asked = [UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else list(data.prompt)
    return [SystemMessage(content=data.system_prompt), *asked] if data.system_prompt else asked


def refuse_runtimes(name: str, task: Any) -> None:
    """Raise ValueError for a task that needs a machine of its own, or looks into single requests."""
    from verifiers.v1.task import Task
    from verifiers.v1.trace import Trace

    if type(task).NEEDS_CONTAINER:
        raise ValueError(f"{name} needs a container (NEEDS_CONTAINER)")
    hooks = [*task.hooks("metric"), *task.hooks("reward")]
    hooks += [getattr(task, hook) for hook in ("setup", "finalize") if is_own(task, hook, Task)]
    for hook in hooks:
        parameter = inspect.signature(hook).parameters.get("runtime")
        if parameter is not None and parameter.default is inspect.Parameter.empty:
            raise ValueError(f"{name}.{hook.__name__} asks for a runtime")
    from verifiers.v1.session import hook_boundary
    from verifiers.v1.utils.decorators import discover_decorated

    wrong = [hook.__name__ for hook in task.hooks("stop") if hook_boundary(hook, allow_trace=True) is not Trace]
    wrong += [hook.__name__ for hook in discover_decorated(task, "intercept")]
    if wrong:
        raise ValueError(f"{name}.{wrong[0]} looks into single requests")


def is_own(task: Any, name: str, base: type) -> bool:
    """Return True if a task has a method of its own in place of the base's."""
    return getattr(type(task), name) is not getattr(base, name)


async def stopped_by(task: Any, trace: Any) -> str | None:
    """Return the name of the stop that holds, where one does."""
    from verifiers.v1.session import call_hook
    from verifiers.v1.trace import Trace

    if trace.num_turns == 0:
        return None
    for hook in task.hooks("stop"):
        if await call_hook(hook, {Trace: trace}):
            return str(hook.__name__)
    return None


async def tools_of(task: Any, trace: Any) -> dict[str, tuple[dict[str, Any], Any]]:
    """Return schema and function of each tool by the name that the policy knows, all with the state of the trace."""
    from mcp.server.mcpserver import MCPServer

    async def state() -> Any:
        return trace.state

    found: dict[str, tuple[dict[str, Any], Any]] = {}
    for toolset in type(task).toolsets(task.config):
        toolset._pull_state = state
        await toolset.setup()
        await toolset.setup_task(task.data)
        server: Any = MCPServer(toolset.server_name or "tools")
        toolset.register(server)
        for tool in await server.list_tools():
            name = f"{toolset.server_name}_{tool.name}" if toolset.server_name else tool.name
            about = {"name": name, "description": tool.description or "", "parameters": tool.input_schema}
            found[name] = {"type": "function", "function": about}, partial(server.call_tool, tool.name)
    return found


async def called(tools: dict[str, tuple[dict[str, Any], Any]], call: Any) -> str:
    """Return a tool's answer, or the fault of the call: words for the policy."""
    if call.name not in tools:
        return f"error: unknown tool {call.name!r}"
    try:
        arguments = json.loads(call.arguments)
    except ValueError as error:
        return f"error: invalid JSON in tool arguments ({error}); resend the call with valid JSON"
    if not isinstance(arguments, dict):
        return f"error: tool arguments must be a JSON object, got {type(arguments).__name__}; resend as an object"
    try:
        found = await tools[call.name][1](arguments)
    except Exception as error:  # their tool's own
        return str(error)
    blocks: list[Any] = found.content if hasattr(found, "content") else list(found)
    return "\n".join(str(getattr(block, "text", block)) for block in blocks)


async def spoken(trace: Any, messages: list[Any], schemas: list[Any], base_url: str, api_key: str) -> Any:
    """Return the policy's message, noted in the trace. None where the run says that no turn follows."""
    import httpx
    from verifiers.v1 import graph
    from verifiers.v1.types import AssistantMessage, Response, Tool, ToolCall, Usage

    body: dict[str, Any] = {"model": MODEL, "messages": [on_the_wire(said) for said in messages]}
    body |= {"tools": schemas} if schemas else {}
    async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
        answer = await client.post(
            f"{base_url}/chat/completions", json=body, headers={"Authorization": f"Bearer {api_key}"}
        )
    found = answer.json()
    if answer.status_code != 200:
        if found["error"].get("code") in OVER:
            return None
        raise RuntimeError(found["error"]["message"])
    choice, usage = found["choices"][0], found["usage"]
    calls = [
        ToolCall(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
        for call in choice["message"].get("tool_calls") or ()
    ]
    said = AssistantMessage(content=choice["message"].get("content"), tool_calls=calls or None)
    shown = [Tool(**schema["function"]) for schema in schemas]
    response = Response(
        id=found["id"],
        created=found["created"],
        model=MODEL,
        message=said,
        finish_reason=choice["finish_reason"],
        usage=Usage(prompt_tokens=usage["prompt_tokens"], completion_tokens=usage["completion_tokens"]),
    )
    graph._commit_turn(graph.prepare_turn(trace, list(messages), shown), response)
    return said


def on_the_wire(said: Any) -> dict[str, Any]:
    """Return a message as the chat API writes it."""
    found: dict[str, Any] = said.model_dump(exclude_none=True)
    if found.get("tool_calls"):
        found["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in found["tool_calls"]
        ]
    return found


# ---- both


def divided(train: list[Any], test: list[Any] | None, counts: dict[str, int]) -> dict[str, list[Any]]:
    """Return the tasks of both splits. Without any for tests, the last ones are held out."""
    if test is None:
        held_out = max(1, min(counts["test"], round(HELD_OUT * len(train)), len(train) - 1))
        held_out = max(held_out, min(len(train) - counts["train"], counts["test"]))
        train, test = train[:-held_out], train[-held_out:]
    return {"train": train[: counts["train"]], "test": test[: counts["test"]]}


def load(name: str, options: dict[str, Any], counts: dict[str, int]) -> Player:
    """Load an environment: a taskset of v1 where there is one of that name, else of v0."""
    problem = ""
    try:
        from verifiers.v1.utils.loaders import taskset_class

        taskset_class(name)
    except (ImportError, AttributeError, TypeError) as error:
        problem = one_line(error)
    else:
        return Tasks(name, options, counts)
    import verifiers

    if not hasattr(verifiers, "load_environment"):
        raise ValueError(f"this version of verifiers knows tasksets alone, and {problem}")
    return Environments(name, options, counts)


def one_line(error: Any) -> str:
    said = f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else str(error)
    return " ".join(said.split())[:600]


class Worker:
    """Answers requests, many at a time."""

    def __init__(self, answers: Any) -> None:
        self._answers = answers
        self._player: Player | None = None
        self._playing: dict[int, asyncio.Task[None]] = {}

    async def serve(self, requests: Any) -> None:
        """Answer until there are no more requests."""
        while line := await asyncio.to_thread(requests.readline):
            request = json.loads(line)
            if request["do"] == "load":
                await self._answer(request, self._load(request))
            elif request["do"] == "stop":
                if request["play"] in self._playing:
                    self._playing[request["play"]].cancel()
            else:
                task = asyncio.ensure_future(self._answer(request, self._play(request)))
                self._playing[request["id"]] = task
                task.add_done_callback(partial(self._playing.pop, request["id"]))  # the task is pop's default

    async def _answer(self, request: dict[str, Any], doing: Any) -> None:
        try:
            found = {"result": await doing}
        except Exception as error:  # foreign code
            found = {"error": one_line(error)}
        with suppress(BrokenPipeError):
            print(json.dumps({"id": request["id"], **found}, default=str), file=self._answers, flush=True)

    async def _load(self, request: dict[str, Any]) -> dict[str, Any]:
        # In the main thread, where environments of v0 set handlers of signals
        player = load(request["name"], request["options"], request["counts"])
        self._player = player
        prompts = {split: [player.prompt(task) for task in tasks] for split, tasks in player.splits.items()}
        return {"kind": player.kind, "prompts": prompts}

    async def _play(self, request: dict[str, Any]) -> float:
        if self._player is None:
            raise RuntimeError("the environment was not loaded")
        task = self._player.splits[request["split"]][request["index"]]
        return await self._player.play(task, request["base_url"], request["api_key"])


def main() -> None:
    """Serve on standard input and output, of which whatever else is printed goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    asyncio.run(Worker(answers).serve(sys.stdin))


if __name__ == "__main__":
    # Modules are looked for where the run was started, and not beside this file
    sys.path[0] = os.getcwd()
    main()
