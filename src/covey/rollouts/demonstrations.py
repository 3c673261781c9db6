"""Given answers as groups of one rollout, for supervised training."""

from collections.abc import Mapping, Sequence
from typing import cast

from covey.environments.base import text_of
from covey.policy.policy import Policy
from covey.rollouts.attempt import Segment, build_rollout, to_segment
from covey.rollouts.encoding import Tools, encode_prompt
from covey.rollouts.rollout import finished_rollout
from covey.rollouts.turns import observed_tokens
from covey.types import Completion, Group, Message, Prompt, Reward


def demonstration_group(
    policy: Policy,
    prompt: Prompt,
    shown: str | Sequence[int] | Sequence[Message],
    stop: Sequence[str] = (),
    tools: Tools = (),
) -> Group:
    """Return a demonstration as a group of one rollout.

    For causal policies the end-of-sequence token is learned with it. `stop` are the stop strings of the sampling.
    """
    prompt_ids = encode_prompt(policy.tokenizer, prompt, tools)
    if not isinstance(shown, str) and shown and isinstance(shown[0], Mapping):
        branch = _demonstrate(policy, prompt, prompt_ids, cast(Sequence[Message], shown), stop, tools)
        return Group(prompt, (build_rollout([branch], Reward(0.0, {}), ""),), ())
    ids = policy.tokenizer(shown, add_special_tokens=False)["input_ids"] if isinstance(shown, str) else shown
    end = () if policy.mask_id is not None else (_end_token(policy),)
    completion = Completion((*ids, *end), (0.0,) * (len(ids) + len(end)), "stop", policy_version=0)
    return Group(prompt, (finished_rollout(policy.mask_id, prompt_ids, completion, Reward(0.0, {}), ""),), ())


def _demonstrate(
    policy: Policy, prompt: Prompt, prompt_ids: list[int], shown: Sequence[Message], stop: Sequence[str], tools: Tools
) -> list[Segment]:
    """Return an episode as segments, learning the assistant's turns."""
    branch = [Segment(tuple(prompt_ids), "prompt", 0)]
    said: list[Message] = []
    last: tuple[int, ...] = ()
    num_turns = 0
    for message in shown:
        if message["role"] == "assistant":
            num_turns += 1
            text = text_of(message)
            ids = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
            last = (*ids, *(() if text.endswith(tuple(stop)) else (_end_token(policy),)))
            branch.append(to_segment(Completion(last, (0.0,) * len(last), "stop", policy_version=0), num_turns))
        else:
            before = prompt.text if isinstance(prompt.text, str) else (*prompt.text, *said)
            told = observed_tokens(policy.tokenizer, before, (message,), last, tools)
            branch.append(Segment(told, str(message["role"]), num_turns))
        said.append(message)
    return branch


def _end_token(policy: Policy) -> int:
    named = policy.tokenizer.eos_token_id
    if named is None and not policy.stop_ids:
        raise ValueError("supervised answers need a tokenizer with an eos_token, got none")
    return int(named) if named is not None else min(policy.stop_ids)
