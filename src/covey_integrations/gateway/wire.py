"""Read and write the OpenAI chat API: requests, answers, streams, errors.

Unsupported options are refused in one line that names them. Nothing of a request is left out silently, but fields
without effect on the answer (`IGNORED`).
"""

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from covey.types import Message
from covey_integrations.gateway.messages import normal_messages
from covey_integrations.gateway.refused import Refused
from covey_integrations.tools.calls import plain_json

IGNORED = frozenset(
    ("model", "user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier", "stream_options")
)
"""Fields that do not affect the answer."""
READ = frozenset(("messages", "tools", "stop", "max_tokens", "max_completion_tokens", "stream", "return_token_ids"))
NEUTRAL: Mapping[str, Any] = {
    "n": 1,
    "logit_bias": {},
    "logprobs": False,
    "top_logprobs": 0,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "min_tokens": 0,
    "ignore_eos": False,
    "use_beam_search": False,
    "best_of": 1,
    "length_penalty": 1,
}
"""Settings that may be given where they change nothing."""
OVERRIDDEN = frozenset(
    ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed")
)
"""Fields that environment.program_sampling=override drops from a request, besides a larger max_tokens."""
MAX_STOPS = 16


@dataclass(frozen=True, slots=True)
class RunSampling:
    """Sampling settings of the run; a request may only repeat them.

    >>> RunSampling(temperature=1.0, max_tokens=256)
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 256
    max_model_len: int | None = None
    """Tokens of prompt and all turns together, where environment.max_context says so."""
    overrides: bool = False
    """Whether the run's settings are taken where a request has others (environment.program_sampling=override)."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One call of the program, checked."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    model: str = "policy"
    streams: bool = False
    with_usage: bool = False
    """Whether the stream ends with the usage."""
    with_ids: bool = False
    """Whether tokens are returned too (return_token_ids, as in vLLM)."""
    token_ids: tuple[int, ...] | None = None
    """Tokens that the policy reads, where the program sends tokens instead of messages."""
    stop_ids: tuple[int, ...] = ()
    """Tokens at which the program expects the turn to end."""


@dataclass(frozen=True, slots=True)
class Spoken:
    """The policy's turn as the program gets it."""

    message: Message
    finish_reason: str
    turn: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    """Log-prob of each token, as it was sampled."""


def body_of(raw: bytes) -> dict[str, Any]:
    """Return the JSON object of a request. Raises Refused."""
    try:
        found = plain_json(json.loads(raw))
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body must be JSON that every receiver reads: {error}"[:200]) from error
    if not isinstance(found, dict):
        raise Refused(400, f"the body must be a JSON object, got {type(found).__name__}")
    return found


def chat_request(body: Mapping[str, Any], run: RunSampling) -> ChatRequest:
    """Return a chat request. Refused for unsupported settings."""
    _check_settings(body, run)
    options = body.get("stream_options") or {}
    return ChatRequest(
        messages=normal_messages(body.get("messages")),
        tools=_tools(body.get("tools")),
        max_tokens=_max_tokens(body, run),
        stop=_stops(body.get("stop")),
        model=str(body.get("model") or "policy")[:200],
        streams=_flag(body, "stream"),
        with_usage=isinstance(options, Mapping) and bool(options.get("include_usage")),
        with_ids=_flag(body, "return_token_ids"),
    )


def checked_sampling(parameters: Mapping[str, Any], run: RunSampling) -> tuple[int | None, tuple[str, ...]]:
    """Return a turn's length and stop strings. Refused for other sampling."""
    _check_settings(parameters, run)
    return _max_tokens(parameters, run), _stops(parameters.get("stop"))


def reward_of(body: Mapping[str, Any]) -> float:
    """Return the reward that a program posts, {"reward": 0.5}. Raises Refused."""
    value = body.get("reward")
    if isinstance(value, bool) or not isinstance(value, int | float) or not is_finite(value):
        raise Refused(400, f'the body must be {{"reward": a finite number}}, got {value!r:.60}', "reward")
    return float(value)


def is_finite(value: float) -> bool:
    """Return True for finite numbers; very large integers are not."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _check_settings(body: Mapping[str, Any], run: RunSampling) -> None:
    """Raise Refused for an unknown setting or one that differs from the run's."""
    own = {"temperature": run.temperature, "top_p": run.top_p, "top_k": run.top_k, "min_p": run.min_p}
    for name, value in body.items():
        if value is None or name in IGNORED or name in READ:
            continue
        if run.overrides and name in OVERRIDDEN:
            continue
        if name in own:
            # vLLM writes "all tokens" as -1, covey as 0
            same = value == own[name] or (name == "top_k" and value == -1 and run.top_k == 0)
            if isinstance(value, bool) or not same:
                told = f"the run samples with sampling.{name}={own[name]:g}, got {name}={value!r:.40}"
                raise Refused(400, f"{told}; leave it out, or set environment.program_sampling=override", name)
        elif name not in NEUTRAL:
            raise Refused(400, f"{name[:60]} is not supported, got {name[:60]}={value!r:.40}", name[:60])
        elif value != NEUTRAL[name] or isinstance(value, bool) != isinstance(NEUTRAL[name], bool):
            shown = json.dumps(NEUTRAL[name])
            raise Refused(400, f"{name} must be left out or {shown}, got {name}={value!r:.40}", name)


def _max_tokens(body: Mapping[str, Any], run: RunSampling) -> int | None:
    found: int | None = None
    for name in ("max_tokens", "max_completion_tokens"):
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise Refused(400, f"{name} must be a whole number >= 1, got {value!r:.40}", name)
        if value > run.max_tokens and not run.overrides:
            told = f"a turn has sampling.max_tokens={run.max_tokens} at most, got {name}={value}"
            raise Refused(400, f"{told}; ask for less, or set environment.program_sampling=override", name)
        found = min(value, run.max_tokens, found or run.max_tokens)
    return found


def _stops(value: Any) -> tuple[str, ...]:
    given = [value] if isinstance(value, str) else value
    if given is None:
        return ()
    if not isinstance(given, list) or len(given) > MAX_STOPS or not all(isinstance(s, str) and s for s in given):
        raise Refused(400, f"stop must be text or a list of at most {MAX_STOPS} texts, none empty", "stop")
    return tuple(given)


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise Refused(400, f"{name} must be true or false, got {value!r:.40}", name)
    return bool(value)


def _tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise Refused(400, "tools must be a list", "tools")
    for tool in value:
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise Refused(400, 'tools must be {"type": "function", "function": {"name": ...}}', "tools")
    return tuple(value)


def completion_of(spoken: Spoken, request: ChatRequest) -> dict[str, Any]:
    choice = {"index": 0, "message": wire_message(spoken.message), "finish_reason": spoken.finish_reason}
    ids = {"token_ids": list(spoken.token_ids)} if request.with_ids else {}
    whole = {"prompt_token_ids": list(spoken.prompt_ids)} if request.with_ids else {}
    choices = [{**choice, "logprobs": None, **ids}]
    return {**_head("chat.completion", spoken, request), "choices": choices, "usage": _usage(spoken), **whole}


def stream_of(spoken: Spoken, request: ChatRequest) -> bytes:
    """Return a chat completion as server-sent events, ending in [DONE]."""
    message = wire_message(spoken.message)
    calls = [{"index": place, **call} for place, call in enumerate(message.pop("tool_calls", ()))]
    ids = {"token_ids": list(spoken.token_ids)} if request.with_ids else {}
    whole = {"prompt_token_ids": list(spoken.prompt_ids)} if request.with_ids else {}
    head = _head("chat.completion.chunk", spoken, request)

    def chunk(
        delta: Mapping[str, Any], finish: str | None = None, more: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        return {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish, **(more or {})}]}

    said = {"content": message["content"], **({"tool_calls": calls} if calls else {})}
    chunks = [{**chunk({"role": "assistant", "content": ""}), **whole}, chunk(said, more=ids)]
    chunks.append(chunk({}, spoken.finish_reason))
    if request.with_usage:
        chunks.append({**head, "choices": [], "usage": _usage(spoken)})
    events = [json.dumps(part) for part in chunks]
    return "".join(f"data: {event}\n\n" for event in (*events, "[DONE]")).encode()


def models(run: RunSampling) -> dict[str, Any]:
    """Return the list of models: the policy."""
    model = {"id": "policy", "object": "model", "created": 0, "owned_by": "covey", "max_model_len": run.max_model_len}
    return {"object": "list", "data": [model]}


def wire_message(message: Message) -> dict[str, Any]:
    """Return the policy's message, arguments of calls as text."""
    if "tool_calls" not in message:
        return dict(message)
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "content": message["content"] or None, "tool_calls": calls}


def _head(kind: str, spoken: Spoken, request: ChatRequest) -> dict[str, Any]:
    return {"id": f"chatcmpl-{spoken.turn}", "object": kind, "created": int(time.time()), "model": request.model}


def _usage(spoken: Spoken) -> dict[str, int]:
    read, said = len(spoken.prompt_ids), len(spoken.token_ids)
    return {"prompt_tokens": read, "completion_tokens": said, "total_tokens": read + said}
