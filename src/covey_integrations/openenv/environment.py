"""Environments of an OpenEnv server: every attempt has one of its own, behind a connection of its own.

A step's reward belongs to its turn; that of the last step is the verdict on the episode.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from covey.environments.base import Split, are_words, conversation
from covey.environments.data.rows import make_prompts
from covey.environments.episode import Answer, Observation
from covey.system.waits.signals import outside_of_loops
from covey.types import Message, Prompt
from covey_graders.tags import without_thoughts
from covey_integrations.openenv.wire import ActionRefused, Session, action_schema
from covey_integrations.settings import OpenEnvConfig
from covey_integrations.steps import Played, PlayedEpisode
from covey_integrations.tools.calling import ToolServerLost, shortened, tool_message
from covey_integrations.tools.calls import BadCall, Call, Reader, hermes, plain_json, reader_for
from covey_integrations.tools.mcp import result_text
from covey_integrations.tools.tool import schema_of


@dataclass(frozen=True)
class Actions:
    """Actions that a server accepts."""

    schema: Mapping[str, Any]
    tools: tuple[Mapping[str, Any], ...] = ()
    """Schemas of its tools, where actions are calls of them."""

    @property
    def described(self) -> str:
        """Return the policy's instructions for actions that are no calls. "" where any text is one."""
        properties = self.schema.get("properties", {})
        required = self.schema.get("required") or []
        if self.tools or (len(required) == 1 and properties.get(required[0], {}).get("type") == "string"):
            return ""
        kept = {name: found for name, found in properties.items() if name != "metadata"}
        asked = {"type": "object", "properties": kept, "required": required}
        return f"Answer with a JSON object of this schema: {json.dumps(asked, ensure_ascii=False)}"


class OpenEnv(Played):
    """Environment whose attempts are played on a server. Prompts are seeds, or rows of arguments of `reset`."""

    def __init__(self, settings: OpenEnvConfig, actions: Actions, prompts: Mapping[Split, Sequence[Prompt]]) -> None:
        super().__init__(prompts)
        self._settings, self._actions = settings, actions
        self._read: Reader = hermes

    def tool_schemas(self, prompt: Prompt) -> Sequence[Mapping[str, Any]]:
        return self._actions.tools

    def read_with(self, tokenizer: Any) -> None:
        self._read = reader_for(tokenizer)

    def episode(self, prompt: Prompt, seed: int) -> "ActingEpisode":
        if self._actions.tools:
            return CallingEpisode(self._settings, self._actions, prompt, self._read)
        return ActingEpisode(self._settings, self._actions, prompt)

    def facts(self) -> Mapping[str, Any]:
        return {"openenv_tools": [schema["function"]["name"] for schema in self._actions.tools]}


class ActingEpisode(PlayedEpisode):
    """Takes the policy's text for an action."""

    def __init__(self, settings: OpenEnvConfig, actions: Actions, prompt: Prompt) -> None:
        self.settings, self.actions = settings, actions
        self.session = Session(settings.url, settings.server_timeout)
        self._arguments = {**settings.options, **prompt.columns}

    async def reset(self) -> Observation:
        seen = await self.session.reset(self._arguments)
        if seen.done:
            raise ToolServerLost(f"the episode is over before it begins: {shown(seen.observation, None)[:80]}")
        told = self.actions.described if self.settings.describe_actions else ""
        said = [text for text in (shown(seen.observation, self.settings.observation_field), told) if text]
        return Observation("".join(f"\n\n{shortened(text)}" for text in said))

    async def reply(self, answer: Answer) -> Observation:
        try:
            seen = await self.session.step(action_of(answer.text, self.actions.schema))
        except ActionRefused as error:
            return Observation(shortened(f"This is no action: {error}"), is_void=True)
        self.verdict = seen.reward if seen.done else 0.0
        said = shortened(shown(seen.observation, self.settings.observation_field))
        return Observation(said, reward=None if seen.done else seen.reward or None, done=seen.done)

    async def close(self) -> None:
        await self.session.close()


class CallingEpisode(ActingEpisode):
    """Takes the policy's calls of tools for actions, each a step. It is over where a turn has none."""

    def __init__(self, settings: OpenEnvConfig, actions: Actions, prompt: Prompt, read: Reader) -> None:
        super().__init__(settings, actions, prompt)
        self._read = read

    async def reply(self, answer: Answer) -> Observation:
        said = self._read(answer, self.actions.tools)
        if not said.calls:
            return Observation(done=True, is_void=not said.text.strip())
        # One call after the other: they change one environment
        messages: list[Message] = []
        earned, done, errors = 0.0, False, 0
        for place, call in enumerate(said.calls):
            text, reward, done, is_error = await self._called(call)
            messages.append(tool_message(call.name, text, answer.turn, place))
            errors += is_error
            if done:
                self.verdict = reward
                break
            earned += reward
        return Observation(
            tuple(messages),
            reward=earned or None,
            done=done,
            is_void=all(isinstance(call, BadCall) for call in said.calls),
            info={"tool_calls": float(len(said.calls)), "tool_errors": float(errors)},
        )

    async def _called(self, call: Call | BadCall) -> tuple[str, float, bool, bool]:
        """Return a call's text, reward, whether the episode is over, and whether that is an error."""
        if isinstance(call, BadCall):
            return _refused(call.problem)
        try:
            seen = await self.session.step(call_of(call.name, call.arguments))
        except ActionRefused as error:
            return _refused(str(error))
        text, is_error, is_systems = answer_of_call(seen.observation)
        if is_systems:
            raise ToolServerLost(f"the tool {call.name} of {self.settings.url} failed: {text[:200]}")
        return shortened(text), seen.reward, seen.done, is_error


def actions_of(settings: OpenEnvConfig) -> Actions:
    """Ask a server for its actions. Raises ValueError, with the setting, where it does not say."""
    schema = action_schema(settings.url, settings.server_timeout)
    if schema.get("title") not in OF_TOOLS:
        return Actions(schema)

    async def listed() -> Any:
        session = Session(settings.url, settings.server_timeout)
        try:
            return (await session.step({"type": "list_tools"})).observation.get("tools")
        finally:
            await session.close()

    try:
        found = outside_of_loops(lambda: asyncio.run(listed()))
    except (ToolServerLost, ActionRefused) as error:
        raise ValueError(f"environment.url={settings.url} does not list its tools: {error}") from error
    if not found:
        raise ValueError(f"environment.url={settings.url} has no tools, and takes nothing but calls of them")
    try:
        tools = [schema_of(str(tool["name"]), tool.get("description"), tool.get("input_schema")) for tool in found]
        return Actions(schema, tuple(tools))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"environment.url={settings.url} lists what is no tool: {found!r:.80}") from error


def with_words(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the row. Raises ValueError where it has a prompt that is neither text nor messages."""
    if not are_words(row.get("prompt") or ""):
        raise ValueError(f"column 'prompt' must be text or a list of messages, got {row['prompt']!r:.80}")
    return row


def reset_prompts(rows: Mapping[Split, Sequence[Mapping[str, Any]]], instruction: str) -> dict[Split, list[Prompt]]:
    """Return a prompt for each row: `prompt` is text or messages; other columns are arguments of `reset`."""

    def prompt(row: Mapping[str, Any]) -> Prompt:
        asked = row.get("prompt") or instruction
        messages = conversation(asked, "") if isinstance(asked, str) else tuple(map(dict, asked))
        return Prompt("", "openenv", messages, {key: value for key, value in row.items() if key != "prompt"})

    return make_prompts(rows, prompt)


def _refused(problem: str) -> tuple[str, float, bool, bool]:
    return shortened(json.dumps({"error": problem}, ensure_ascii=False)), 0.0, False, True


OF_TOOLS = ("Action", "CallToolAction", "ListToolsAction")
"""Titles of schemas whose actions are calls of tools."""
NOT_SHOWN = ("metadata", "done", "reward")
"""Fields of an observation that are not for the policy."""
OF_SYSTEM = ("transport_error", "timeout")
"""Errors of a call that say nothing about the call."""


def action_of(text: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the action that an answer stands for: JSON, JSON in a fence, or the value of the one field there must be.

    Thoughts (<think>) are left out. Raises ActionRefused, in words for the policy.

    >>> action_of("crane", {"required": ["guess"], "properties": {"guess": {"type": "string"}}})
    {'guess': 'crane'}
    """
    said = without_thoughts(text).strip()
    if said.startswith("```") and said.endswith("```"):
        said = "\n".join(said.splitlines()[1:-1]).strip()
    try:
        found = json.loads(said)
    except (ValueError, RecursionError):
        found = said
    if not isinstance(found, dict):
        required = schema.get("required") or []
        if len(required) != 1:
            raise ActionRefused(f"the action must be a JSON object with {', '.join(required) or 'the fields it needs'}")
        kind = schema.get("properties", {}).get(required[0], {}).get("type")
        found = {required[0]: said if kind == "string" and not isinstance(found, str) else found}
    try:
        return dict(plain_json(found))
    except ValueError as error:
        raise ActionRefused(f"the fields of the action {error}") from error


def shown(observation: Mapping[str, Any], name: str | None) -> str:
    """Return an observation as text: one field of it, the only field where that is text, else all of it as JSON.

    >>> shown({"text": "hot", "metadata": {}}, None), shown({"row": 1, "column": 2}, None)
    ('hot', '{"row": 1, "column": 2}')
    """
    fields = {key: value for key, value in observation.items() if key not in NOT_SHOWN}
    if name is not None:
        found = observation.get(name, "")
        return found if isinstance(found, str) else _json(found)
    only = next(iter(fields.values())) if len(fields) == 1 else None
    if isinstance(only, str):
        return only
    return _json(fields) if fields else ""


def call_of(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "call_tool", "tool_name": name, "arguments": dict(arguments)}


def answer_of_call(observation: Mapping[str, Any]) -> tuple[str, bool, bool]:
    """Return a call's result as text, whether it is an error, and whether the system failed."""
    error = observation.get("error")
    if isinstance(error, Mapping):
        return _json({"error": error.get("message")}), True, error.get("error_type") in OF_SYSTEM
    result = observation.get("result")
    if isinstance(result, Mapping) and "content" in result:
        return result_text(result), bool(result.get("is_error")), False
    return (result if isinstance(result, str) else _json(result)), False, False


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
