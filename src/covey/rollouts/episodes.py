"""Play the episodes of a group as independent coroutines.

Every sampled token is kept as it was sampled and is never tokenised again. `history=append` puts what the environment
says after it; `history=template` renders the conversation again, and where that does not begin with the tokens so far
a branch begins.
"""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from covey.engine.base import Session, open_sessions
from covey.environments.base import are_words, split_prefill, text_of
from covey.environments.episode import Answer, Episode, Observation
from covey.environments.reward_functions.call import problem_with
from covey.rollouts.attempt import Attempt, Segment, to_segment
from covey.rollouts.encoding import Tools, as_conversation
from covey.rollouts.sampler import EpisodeLimits, Sampler
from covey.rollouts.turns import (
    as_messages,
    decode_tokens,
    known_ids,
    observed_tokens,
    open_prompt,
    rendered_tokens,
    turn_seed,
)
from covey.rollouts.verdicts import call_env, call_env_async, check_verdict, close, judge_together
from covey.types import Completion, Failure, Message, Prompt, Sampling, StopReason, Turn

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Opening:
    """A prompt with an episode's additions, and its tokens."""

    prompt: Prompt
    ids: tuple[int, ...]
    tools: Tools = ()
    first: Observation = field(default_factory=Observation)
    """Observation before the first turn: the episode's additions, and bounds of that turn."""
    failure: Failure | None = None
    """Reason why the episode could not begin."""

    @property
    def added(self) -> tuple[Message, ...]:
        """Return the messages before the first turn, beside or replacing the prompt."""
        return self.first.conversation or as_messages(self.first.messages)

    def sampling(self, sampling: Sampling) -> Sampling:
        """Return the sampling of its first turn."""
        return _bound_sampling(sampling, self.first)


async def play_group(
    sampler: Sampler,
    prompt: Prompt,
    episodes: Sequence[Episode | Failure],
    sampling: Sampling,
    take: Callable[[int, Attempt | Failure], None],
) -> None:
    """Play an episode per sample, and report each attempt at its end. One that the system broke is a Failure."""
    are_together = sampler.environment.judges_groups(prompt)

    async def play(
        index: int, opening: Opening, episode: Episode | Failure, session: Session | None
    ) -> Attempt | Failure:
        attempt = (
            episode
            if isinstance(episode, Failure)
            else await _Player(sampler, opening, episode, sampling, index).play(session)
        )
        if not are_together:
            take(index, attempt)
        return attempt

    tools = call_env(prompt, "tool_schemas", lambda: sampler.environment.tool_schemas(prompt))
    sessions: list[Session | None] = []
    tasks: list[asyncio.Future[Any]] = []
    # Whatever ends one of them early ends all, and leaves nothing behind
    try:
        tasks += [asyncio.ensure_future(_begin(sampler, prompt, episode, tools)) for episode in episodes]
        openings = await asyncio.gather(*tasks)
        sessions += _open(sampler, sampler.limits_for(prompt), openings, sampling)
        each = enumerate(zip(openings, episodes, sessions, strict=True), sampling.first_sample)
        playing = [asyncio.ensure_future(play(index, *one)) for index, one in each]
        tasks += playing
        attempts = list(await asyncio.gather(*playing))
        if are_together:
            await judge_together(sampler.environment, sampler.waits, prompt, episodes, attempts)
            for index, attempt in enumerate(attempts, sampling.first_sample):
                take(index, attempt)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for session in filter(None, sessions):
            session.close()
        begun, seconds = [e for e in episodes if not isinstance(e, Failure)], sampler.limits_for(prompt).turn_timeout
        await asyncio.gather(*(close(sampler.waits, prompt, episode, seconds) for episode in begun))


async def _begin(sampler: Sampler, prompt: Prompt, episode: Episode | Failure, tools: Tools | Failure) -> Opening:
    if isinstance(episode, Failure):
        return Opening(prompt, (), failure=episode)
    if isinstance(tools, Failure):
        return Opening(prompt, (), failure=tools)
    said = await observe(sampler, prompt, "reset", episode.reset)
    if isinstance(said, Failure):
        return Opening(prompt, (), failure=said)
    tools = tools if said.tools is None else said.tools
    if said.token_ids is not None:
        return _begun_by_tokens(sampler, prompt, said, said.token_ids)
    if said.conversation is None:
        whole, ids = open_prompt(sampler.tokenizer, prompt, said.messages, tools)
        return Opening(whole, ids, tools, said)
    try:
        ids = rendered_tokens(sampler.tokenizer, said.conversation, tools, num_given=0)
    except ValueError as error:
        return Opening(prompt, (), failure=Failure(f"{prompt.environment}: {error}"))
    return Opening(replace(prompt, text=said.conversation), ids, tools, said)


def _begun_by_tokens(sampler: Sampler, prompt: Prompt, said: Observation, ids: tuple[int, ...]) -> Opening:
    """Begin with a program's tokens, recorded as the user's text."""
    try:
        words = as_messages(decode_tokens(sampler.tokenizer, known_ids(sampler.tokenizer, ids)))
    except ValueError as error:
        return Opening(prompt, (), failure=Failure(f"{prompt.environment}: {error}"))
    return Opening(replace(prompt, text=words), ids, (), replace(said, conversation=words))


def _open(
    sampler: Sampler, limits: EpisodeLimits, openings: Sequence[Opening], sampling: Sampling
) -> list[Session | None]:
    """Open a session per attempt, sharing the encoding of equal prompts.

    None where the prompt leaves no room, or the environment broke.
    """
    begun = {(opening.ids, opening.sampling(sampling)) for opening in openings if opening.failure is None}
    if len(begun) == 1:
        ((ids, shared),) = begun
        return _open_sessions(sampler, limits, ids, len(openings), shared)
    found: list[Session | None] = []
    for index, opening in enumerate(openings, sampling.first_sample):
        own = replace(opening.sampling(sampling), first_sample=index)
        found += [None] if opening.failure else _open_sessions(sampler, limits, opening.ids, 1, own)
    return found


def _open_sessions(
    sampler: Sampler, limits: EpisodeLimits, ids: Sequence[int], n: int, sampling: Sampling
) -> list[Session | None]:
    room = limits.room(len(ids))
    if room < 1:
        return [None] * n
    return [*open_sessions(sampler.engine, ids, n, cut(sampling, room))]


def cut(sampling: Sampling, room: int) -> Sampling:
    """Return the sampling with at most `room` tokens."""
    return replace(sampling, max_tokens=min(sampling.max_tokens, room))


def _bound_sampling(sampling: Sampling, said: Observation) -> Sampling:
    most = sampling.max_tokens if said.max_tokens is None else min(sampling.max_tokens, said.max_tokens)
    return replace(sampling, max_tokens=most, stop=tuple(dict.fromkeys((*sampling.stop, *said.stop))))


class _Player:
    def __init__(
        self, sampler: Sampler, opening: Opening, episode: Episode, sampling: Sampling, sample_index: int
    ) -> None:
        self._sampler, self._opening, self._episode, self._tools = sampler, opening, episode, opening.tools
        self._prompt, self._sampling, self._sample_index = opening.prompt, sampling, sample_index
        begin = Segment(opening.ids, "prompt", 0)
        self._attempt = Attempt([[begin]], sampler.engine.version, opening=opening.added)
        self._limits = sampler.limits_for(opening.prompt)
        self._state: str | None = None
        # The branch begins with these messages, and with those said from this place on
        self._base, self._since = as_conversation(opening.prompt.text), 0
        self._most_tokens = opening.sampling(sampling).max_tokens

    async def play(self, session: Session | None) -> Attempt | Failure:
        """Take turns until the end or a limit, and get the verdict.

        Without a session there was no room for the first turn.
        """
        if self._opening.failure is not None:
            return self._opening.failure
        if session is None:
            self._attempt.stop_reason = "max_context"
        else:
            failure = await self._converse(session)
            if failure is not None:
                return failure
        seconds = self._limits.turn_timeout
        self._attempt.conversation = conversation = self._conversation()
        if self._sampler.environment.judges_groups(self._prompt):
            return self._attempt
        verdict = await call_env_async(
            self._sampler.waits, self._prompt, "score", lambda: self._episode.score(conversation), seconds
        )
        self._attempt.verdict = None if verdict is None else check_verdict(verdict, self._prompt.environment)
        return self._attempt

    async def _converse(self, session: Session) -> Failure | None:
        """Take turns; return the environment's Failure, if any."""
        attempt = self._attempt
        self._session = session
        try:
            with self._sampler.waits.sampling():
                completion: Completion | None = await session.first()
            while completion is not None:
                said = await self._take(completion)
                if isinstance(said, Failure):
                    return said
                if attempt.stop_reason is not None:
                    return None
                found = await self._next(said)
                if isinstance(found, Failure):
                    return found
                completion = found
            return None
        finally:
            self._leave_session()

    def _leave_session(self) -> None:
        self._attempt.re_encoded_tokens += self._session.re_encoded_tokens
        self._session.close()

    async def _take(self, completion: Completion) -> Observation | Failure:
        """Add a turn of the policy, and get the environment's reply."""
        attempt, sampler = self._attempt, self._sampler
        turn = len(attempt.turns) + 1
        read = tuple(attempt.token_ids)
        attempt.turns.append(Turn(0, 0, state=self._state or _name_of(read)))
        attempt.branches[-1].append(to_segment(completion, turn))
        text = decode_tokens(sampler.tokenizer, completion.token_ids)
        attempt.messages.append({"role": "assistant", "content": text})
        # A turn that was cut is no answer
        cut_by = self._cut_by(completion)
        if cut_by is not None and not self._episode.hears_cuts:
            attempt.stop_reason = cut_by
            return Observation()
        answer = Answer(
            text,
            completion.token_ids,
            completion.finish_reason,
            turn,
            self._conversation(),
            is_last=turn == self._limits.max_turns,
            marked=decode_tokens(sampler.tokenizer, completion.token_ids, with_special=True),
            prompt_ids=read,
            logprobs=tuple(completion.logprobs),
        )
        said = await observe(sampler, self._prompt, "reply", lambda: self._episode.reply(answer))
        if isinstance(said, Observation):
            self._note(said, turn, cut_by)
        return said

    def _cut_by(self, completion: Completion) -> StopReason | None:
        """Return the limit that cut a turn, None without one."""
        if completion.finish_reason != "length":
            return None
        return "max_context" if len(completion.token_ids) < self._most_tokens else "max_tokens"

    def _note(self, said: Observation, turn: int, cut_by: StopReason | None) -> None:
        """Record the turn's reward, and the episode's end, if any."""
        attempt = self._attempt
        reward = float(said.reward or 0.0)
        attempt.turns[-1] = replace(attempt.turns[-1], reward=reward, is_void=said.is_void, info=said.info)
        self._state = said.state
        if said.done:
            attempt.stop_reason = said.stop_reason or cut_by or "completed"
            attempt.messages += as_messages(said.messages)
        elif turn == self._limits.max_turns:
            attempt.stop_reason = "max_turns"

    async def _next(self, said: Observation) -> Completion | Failure | None:
        """Sample the next turn; None, with the reason noted, without room."""
        attempt = self._attempt
        turn = len(attempt.turns) + 1
        seed = turn_seed(self._sampling.seed, self._sample_index, turn)
        sampling = replace(self._sampling, seed=seed, first_sample=0)
        bounded = _bound_sampling(sampling, said)
        try:
            new, is_branch = self._encoded(said)
            said = said if said.token_ids is None else self._in_words(said, new, is_branch)
        except ValueError as error:
            if not self._episode.is_program:
                raise
            return Failure(f"{self._prompt.environment}: {error}")
        room = self._limits.room(len(new) + (0 if is_branch else len(attempt.token_ids)))
        try:
            if room < 1:
                raise ValueError(f"environment.max_context={self._limits.max_context} is reached")
            with self._sampler.waits.sampling():
                ask = self._branch if is_branch else self._extend
                completion = await ask(new, said, cut(bounded, room))
        except ValueError as error:  # no room for it: the last answer stands
            LOGGER.info("prompt %s has no turn %d: %s", self._prompt.id, turn, error)
            attempt.stop_reason = "max_context"
            return None
        self._most_tokens = bounded.max_tokens
        self._hear(said)
        return completion

    def _in_words(self, said: Observation, new: tuple[int, ...], is_branch: bool) -> Observation:
        """Add a program's tokens as the user's text, for the record."""
        words = as_messages(decode_tokens(self._sampler.tokenizer, new))
        return replace(said, conversation=words) if is_branch else replace(said, messages=words)

    def _hear(self, said: Observation) -> None:
        """Record the reply; a rewritten history replaces earlier messages."""
        messages = self._attempt.messages
        if said.conversation is None:
            messages += as_messages(said.messages)
            return
        before = self._conversation()
        pairs = zip(before, said.conversation, strict=False)
        alike = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(before), len(said.conversation)))
        messages += said.conversation[alike:]
        self._base, self._since = said.conversation, len(messages)

    def _encoded(self, said: Observation) -> tuple[tuple[int, ...], bool]:
        """Return the next tokens, and True for a rewritten history's."""
        attempt, tokenizer = self._attempt, self._sampler.tokenizer
        is_text = isinstance(self._prompt.text, str)
        is_whole = said.conversation is not None or said.token_ids is not None
        if is_whole or (self._limits.history == "template" and not is_text):
            whole = self._rendered(said)
            so_far = tuple(attempt.token_ids)
            breaks = whole[: len(so_far)] != so_far
            return (whole, True) if breaks else (whole[len(so_far) :], False)
        conversation = self._prompt.text if isinstance(self._prompt.text, str) else self._conversation()
        last = attempt.branches[-1][-1].ids
        return observed_tokens(tokenizer, conversation, said.messages, last, self._tools), False

    def _rendered(self, said: Observation) -> tuple[int, ...]:
        if said.token_ids is not None:
            return known_ids(self._sampler.tokenizer, said.token_ids)
        if said.conversation is not None:
            return rendered_tokens(self._sampler.tokenizer, said.conversation, self._tools, num_given=0)
        whole = (*self._conversation(), *as_messages(said.messages))
        num_given = 0 if self._episode.is_program else None
        return rendered_tokens(self._sampler.tokenizer, whole, self._tools, num_given)

    async def _extend(self, ids: tuple[int, ...], said: Observation, sampling: Sampling) -> Completion:
        completion = await self._session.extend(ids, sampling)
        told = said.conversation or as_messages(said.messages)
        role = str(told[-1]["role"]) if told else "user"
        self._attempt.branches[-1].append(Segment(ids, role, len(self._attempt.turns)))
        return completion

    async def _branch(self, ids: tuple[int, ...], said: Observation, sampling: Sampling) -> Completion:
        (session,) = open_sessions(self._sampler.engine, ids, 1, sampling)
        self._leave_session()
        self._session = session
        completion = await session.first()
        self._attempt.branches.append([Segment(ids, "prompt", len(self._attempt.turns))])
        return completion

    def _conversation(self) -> tuple[Message, ...]:
        opening, begun = split_prefill(self._base)
        since = self._attempt.messages[self._since :]
        if not since:
            return tuple(opening)
        first, *later = since
        return (*opening, {**first, "content": begun + text_of(first)}, *later)


async def observe(
    sampler: Sampler, prompt: Prompt, method: str, ask: Callable[[], Awaitable[Observation]]
) -> Observation | Failure:
    """Return an episode's observation, a Failure for anything else."""
    said = await call_env_async(sampler.waits, prompt, method, ask, sampler.limits_for(prompt).turn_timeout)
    if isinstance(said, Failure):
        return said
    if not isinstance(said, Observation):
        kind = type(said).__name__
        return Failure(f"{prompt.environment}.{method} returned a {kind} where an Observation is due")
    for words in (said.messages, tuple(said.conversation or ())):  # a conversation is no text
        if not are_words(words):
            what = "neither text nor messages with role and content"
            return Failure(f"{prompt.environment}.{method} said {words!r:.80}, which is {what}")
    if said.reward is not None and problem_with(said.reward):
        return Failure(f"{prompt.environment}.{method} gave a turn the reward {said.reward}")
    return said


def _name_of(token_ids: Sequence[int]) -> str:
    """Name the state of these tokens; equal ones have equal names."""
    return hashlib.blake2b(repr(tuple(token_ids)).encode(), digest_size=8).hexdigest()
