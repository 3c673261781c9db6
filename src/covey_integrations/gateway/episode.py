"""An episode led by an agent program: its calls are observations."""

import asyncio
import logging
import numbers
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from covey.environments.episode import Answer, Episode, Observation
from covey.types import Failure, Message, Reward, RunStopped
from covey_integrations.gateway.endpoint import Endpoint
from covey_integrations.gateway.messages import continuation
from covey_integrations.gateway.program import Program, ProgramFailed, Running
from covey_integrations.gateway.refused import Refused
from covey_integrations.gateway.server import Gateway
from covey_integrations.gateway.wire import ChatRequest, Spoken
from covey_integrations.tools.calling import Begun, call_id
from covey_integrations.tools.calls import Call, Reader

LOGGER = logging.getLogger(__name__)
MAX_LEFT_BEHIND = 64
"""Programs that still run after their episodes, before the run ends."""


@dataclass
class Outcome:
    """Facts about an attempt when it is judged."""

    opening: tuple[Message, ...] = ()
    """The messages of the first call."""
    messages: list[Message] = field(default_factory=list)
    """Later messages, answers with their `tool_calls`; the program's own result in their place, if it returned one."""
    token_ids: list[int] = field(default_factory=list)
    """Tokens that the policy sampled, over all turns."""
    reward: Any = None
    """The program's own: returned, or else posted."""
    is_cut: bool = False
    """Whether a limit ended the episode, so that the program could not finish."""


Judge = Callable[[Outcome], Awaitable[Reward | Failure]]


@dataclass
class Agents:
    """Objects that the episodes of a run share."""

    program: Program
    gateway: Gateway
    read: Reader
    """Reads calls of tools out of the policy's text."""
    left_behind: list[Begun] = field(default_factory=list)
    """Programs that did not end with their episodes, without those that have ended since."""


class AgentEpisode(Episode):
    """Answers the calls of a program until it ends."""

    is_program = hears_cuts = True

    def __init__(self, agents: Agents, row: Mapping[str, Any], judge: Judge) -> None:
        self._agents, self._row, self._judge = agents, row, judge
        self._outcome = Outcome()
        self._endpoint: Endpoint | None = None
        self._running: Running | None = None
        self._request = ChatRequest(())
        self._tools: tuple[Mapping[str, Any], ...] = ()
        self._so_far: tuple[Message, ...] = ()

    async def reset(self) -> Observation:
        self._agents.left_behind = left = [call for call in self._agents.left_behind if not call.done()]
        if len(left) >= MAX_LEFT_BEHIND:
            told = f"{len(left)} threads of environment.program did not end with their episodes"
            raise RunStopped(f"{told}: let it return where a call is answered that the episode is over (410)")
        self._endpoint = self._agents.gateway.open()
        self._running = self._agents.program.start(self._endpoint, self._row)
        request = await self._next_call()
        if request is None:
            raise ProgramFailed(f"the program {self._agents.program.name} ended without a call to its base_url")
        self._tools, self._outcome.opening = request.tools, request.messages
        return self._taken(request)

    async def reply(self, answer: Answer) -> Observation:
        endpoint, _ = self._begun()
        early = set(answer.token_ids[:-1]) & set(self._request.stop_ids)
        if early:
            name = self._agents.program.name
            raise ProgramFailed(f"the program {name} stops at token {min(early)}, at which the run does not")
        spoken, info = self._spoken(answer)
        self._note(spoken.message)
        self._outcome.token_ids += answer.token_ids
        endpoint.answer(spoken)
        request = await self._next_call()
        while request is not None and not answer.is_last and (refused := self._change(request)) is not None:
            endpoint.refuse(refused)
            request = await self._next_call()
        if request is None:
            return Observation(done=True, info=info)
        if answer.is_last:
            told = "the episode is over: environment.max_turns is reached"
            self._end(endpoint, Refused(410, told, code="episode_over"))
            return Observation(done=True, stop_reason="max_turns", info=info)
        return self._taken(request, info)

    async def score(self, conversation: Sequence[Message]) -> Reward | Failure:
        """Judge the conversation, with the program's own verdict."""
        endpoint, running = self._begun()
        # A call that no turn will answer: the episode met a limit
        if running.outcome.done() and not self._outcome.is_cut:
            self._hear(running.outcome.result(), endpoint)
            return await self._judge(self._outcome)
        told = "the conversation has no room for another turn (environment.max_context)"
        self._end(endpoint, Refused(400, told, "messages", "context_length_exceeded"))
        returned = None
        try:
            returned = await asyncio.shield(running.outcome)
        except ProgramFailed as error:  # it was told that the episode is over
            LOGGER.debug("after the end of the episode: %s", error)
        self._hear(returned, endpoint)
        return await self._judge(self._outcome)

    async def close(self) -> None:
        if self._endpoint is not None:
            self._agents.gateway.close_endpoint(self._endpoint)
        if self._running is not None and (left := await self._running.stop()) is not None:
            self._agents.left_behind.append(left)

    def _begun(self) -> tuple[Endpoint, Running]:
        assert self._endpoint is not None, "reset begins an episode"
        assert self._running is not None, "reset begins an episode"
        return self._endpoint, self._running

    async def _next_call(self) -> ChatRequest | None:
        """Return the program's next call. None where it ends without one."""
        endpoint, running = self._begun()
        call = asyncio.ensure_future(endpoint.next_call())
        try:
            await asyncio.wait({call, running.outcome}, return_when=asyncio.FIRST_COMPLETED)
            if not running.outcome.done():
                return call.result()
            running.outcome.result()  # raises what the program broke on
            return None
        finally:
            call.cancel()

    def _change(self, request: ChatRequest) -> Refused | None:
        """Return why a call cannot follow the earlier ones, if so."""
        if (request.token_ids is None) != (self._request.token_ids is None):
            return Refused(400, "an episode is led by messages or by tokens, not by both")
        if request.tools != self._tools:
            return Refused(400, "tools must stay those of the first call of the episode", "tools")
        return None

    def _taken(self, request: ChatRequest, info: Mapping[str, Any] | None = None) -> Observation:
        """Return a call's new messages, or a rewritten conversation."""
        new = continuation(self._so_far, request.messages) if self._so_far else None
        self._request = request
        if request.token_ids is not None:
            return Observation(
                token_ids=request.token_ids, max_tokens=request.max_tokens, stop=request.stop, info=info or {}
            )
        return Observation(
            new or (),
            conversation=request.messages if new is None else None,
            tools=request.tools,
            max_tokens=request.max_tokens,
            stop=request.stop,
            info=info or {},
        )

    def _spoken(self, answer: Answer) -> tuple[Spoken, dict[str, Any]]:
        """Return the policy's turn for the program, and numbers to log."""
        said = self._agents.read(answer, self._tools) if self._tools else None
        calls = [call for call in said.calls if isinstance(call, Call)] if said is not None else []
        stop = next((stop for stop in self._request.stop if answer.text.endswith(stop)), "")  # left out, as by the API
        message: dict[str, Any] = {"role": "assistant", "content": answer.text.removesuffix(stop)}
        if said is not None and calls:
            message["content"] = said.text
            message["tool_calls"] = [
                {
                    "id": call_id(answer.turn, place),
                    "type": "function",
                    "function": {"name": call.name, "arguments": dict(call.arguments)},
                }
                for place, call in enumerate(calls)
            ]
        reason = "tool_calls" if calls and answer.finish_reason == "stop" else answer.finish_reason
        errors = 0 if said is None else len(said.calls) - len(calls)
        info = {"tool_calls": float(len(calls)), "parse_errors": float(errors)}
        return Spoken(message, reason, answer.turn, answer.prompt_ids, answer.token_ids, answer.logprobs), info

    def _note(self, message: Message) -> None:
        """Keep the messages; of programs that send tokens, the policy's."""
        if self._request.token_ids is not None:
            self._outcome.messages.append(message)
            return
        self._so_far = (*self._request.messages, message)
        self._outcome.messages = self._since_opening()

    def _since_opening(self) -> list[Message]:
        """Return all messages since the opening, or since a rewritten first turn."""
        if continuation(self._outcome.opening, self._so_far) is not None:
            return list(self._so_far[len(self._outcome.opening) :])
        spoke = (i for i, message in enumerate(self._so_far) if message["role"] == "assistant")
        return list(self._so_far[next(spoke) :])

    def _end(self, endpoint: Endpoint, refused: Refused) -> None:
        """Tell a program that still calls why no turn follows; keep its reward."""
        self._outcome.is_cut = True
        endpoint.end(refused, takes_rewards=True)

    def _hear(self, returned: Any, endpoint: Endpoint) -> None:
        """Take the returned reward or messages, else the posted ones."""
        self._outcome.reward = endpoint.reward
        if isinstance(returned, list | tuple):
            if not all(isinstance(message, Mapping) for message in returned):
                raise ProgramFailed(f"the program {self._agents.program.name} returned a list that is no messages")
            self._outcome.messages = [dict(message) for message in returned]
        elif isinstance(returned, numbers.Real):
            self._outcome.reward = returned
        elif returned is not None:
            kind = type(returned).__name__
            raise ProgramFailed(
                f"the program {self._agents.program.name} must return a reward, messages or None, got {kind}"
            )
