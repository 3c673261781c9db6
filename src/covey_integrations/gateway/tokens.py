"""Read and write token calls, as vLLM's /inference/v1/generate has them.

{"token_ids": [5, 7], "sampling_params": {"max_tokens": 64, "stop_token_ids": [2], "logprobs": 1}}
-> {"choices": [{"index": 0, "token_ids": [9, 2], "finish_reason": "stop", "logprobs": {"content": [...]}}]}
"""

from collections.abc import Mapping
from typing import Any

from covey_integrations.gateway.refused import Refused
from covey_integrations.gateway.wire import ChatRequest, RunSampling, Spoken, checked_sampling

IGNORED = frozenset(("model", "request_id", "cache_salt", "priority", "features", "stream", "return_token_ids"))
"""Fields that do not affect the next tokens, where left out or false."""
MUST_BE_FALSE = ("stream", "features")
OF_TEXT = frozenset(
    ("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output", "detokenize", "logprobs")
)
"""Sampling parameters about text, which is not answered, or about log-probs, which always are."""
MAX_IDS = 1024
"""Tokens that a call may stop at."""


def generate_request(body: Mapping[str, Any], run: RunSampling) -> ChatRequest:
    """Return a token request. Refused for unsupported settings."""
    known = (*IGNORED, "token_ids", "sampling_params")
    unknown = next((name for name, value in body.items() if value is not None and name not in known), None)
    if unknown is not None:
        raise Refused(400, f"{unknown[:60]} is not supported", unknown[:60])
    wrong = next((name for name in MUST_BE_FALSE if body.get(name)), None)
    if wrong is not None:
        raise Refused(400, f"{wrong} must be left out, got {wrong}={body[wrong]!r:.40}", wrong)
    given = body.get("sampling_params")
    if given is not None and not isinstance(given, Mapping):
        raise Refused(400, "sampling_params must be an object", "sampling_params")
    parameters = {name: value for name, value in (given or {}).items() if name not in OF_TEXT}
    stop_ids = _ids(parameters.pop("stop_token_ids", None) or [], "stop_token_ids")
    max_tokens, stop = checked_sampling(parameters, run)
    ids = _ids(body.get("token_ids"), "token_ids")
    if not ids:
        raise Refused(400, "token_ids must be a list of at least one token", "token_ids")
    return ChatRequest(
        (),
        max_tokens=max_tokens,
        stop=stop,
        model=str(body.get("model") or "policy")[:200],
        token_ids=ids,
        stop_ids=stop_ids[:MAX_IDS],
    )


def generation_of(spoken: Spoken, request: ChatRequest) -> dict[str, Any]:
    """Return the tokens of the policy's turn with the log-prob of each."""
    pairs = zip(spoken.token_ids, spoken.logprobs, strict=True)
    content = [{"token": f"token_id:{token}", "logprob": logprob} for token, logprob in pairs]
    reason = "length" if spoken.finish_reason == "length" else "stop"
    choice = {"index": 0, "token_ids": list(spoken.token_ids), "finish_reason": reason}
    return {
        "request_id": f"generate-{spoken.turn}",
        "model": request.model,
        "choices": [{**choice, "logprobs": {"content": content}}],
        "prompt_token_ids": list(spoken.prompt_ids),
    }


def _ids(value: Any, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in value):
        raise Refused(400, f"{name} must be a list of tokens, whole numbers >= 0", name)
    return tuple(value)
