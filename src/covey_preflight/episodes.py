"""Check that episodes can be played and sampled tokens are trained."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from covey.engine.fake import FakeEngine
from covey.environments.base import Environment, EnvironmentFault, Split, naming
from covey.environments.episode import Answer, Episode, Observation, maybe_await
from covey.rollouts.encoding import as_conversation, encode_prompt
from covey.rollouts.rollout import roll_out
from covey.rollouts.turns import as_messages, roles_are_marks
from covey.rollouts.verdicts import call_env, new_episode
from covey.types import Failure, Group, Message, Prompt, Reward, Rollout, RunStopped
from covey_integrations.tools.calls import InStyle
from covey_integrations.tools.check import check_tools
from covey_integrations.tools.environment import ToolEnvironment
from covey_preflight.subject import Check, PreflightContext


def has_episodes(subject: PreflightContext) -> bool:
    return subject.run.policy.mask_id is None and _first_episode(subject) is not None


def _first_episode(subject: PreflightContext) -> Episode | Failure | None:
    """Open and close the first prompt's episode: None, or a Failure."""
    prompt, environment = subject.prompts[0], subject.run.environment
    episode = new_episode(environment, prompt, 0)
    if episode is None or isinstance(episode, Failure):
        return episode
    # It may hold an object of a pool, or a session with a server
    return call_env(prompt, "close", lambda: asyncio.run(maybe_await(episode.close()))) or episode


def check_episodes(subject: PreflightContext) -> Check:
    """Play gold turns, and check template, tool calls and tools."""
    environment, tokenizer = subject.run.environment, subject.run.policy.tokenizer
    notes: list[str] = []
    begun = _first_episode(subject)
    if isinstance(begun, Failure):
        return Check(False, begun.reason, "", "fix it: every attempt at this prompt would be a failure")
    # Roles must be told by tokens that no text can make
    if not isinstance(subject.prompts[0].text, str):
        notes.append("roles are marked by special tokens" if roles_are_marks(tokenizer) else "ROLES ARE PLAIN TEXT")
    if isinstance(environment, ToolEnvironment):
        try:
            facts = asyncio.run(check_tools(environment, subject.prompts[0], tokenizer))
        except EnvironmentFault:
            raise
        except ValueError as error:
            return Check(False, str(error), "", "fix the tool's types and docstring, which make its schema")
        for fault in filter(None, (_unshown(subject, prompt) for prompt in subject.prompts)):
            teach = "name every tool in the prompt and how it is called"
            return Check(False, fault, "", f"take a chat template that shows tools and prompts of messages, or {teach}")
        for name in facts.silent:
            return Check(False, f"tool {name}: {facts.answers[name]}", "", "start what it needs, or leave it out")
        others = len(environment.shown_tools(subject.prompts[0])) - len(facts.answers)
        listed = f", {others} of servers are listed" if others else ""
        notes.append(f"{len(facts.answers)} tools answer{listed}, and calls are read by {facts.read_by}")
    # Gold turns must win, token for token
    played = [(prompt, found) for prompt in subject.prompts if (found := _gold(subject, prompt)) is not None]
    wrong = [(prompt, found) for prompt, found in played if isinstance(found, str)]
    full = subject.config.evaluation.correct_above
    rewards = [(prompt, found.reward.value) for prompt, found in played if not isinstance(found, str)]
    low = [(prompt, f"reward {value:g}") for prompt, value in rewards if value < full]
    values = {"num_gold": float(len(played)), "num_wrong": float(len(wrong)), "num_low": float(len(low))}
    for prompt, said in (*wrong, *low):
        figure = f"{len(wrong) + len(low)} of {len(played)} gold episodes fail, first: prompt {prompt.id}, {said}"
        return Check(False, figure, f">= {full:g}", "fix the environment, or set sampling and limits for it", values)
    if played:
        turns = max(len(found.turns) for _, found in played if not isinstance(found, str))
        notes.insert(0, f"{len(played)} gold episodes of up to {turns} turns get the maximum reward, token for token")
    return Check(True, "; ".join(notes) or "no gold turns are known", f">= {full:g}", "", values, bool(notes))


def _unshown(subject: PreflightContext, prompt: Prompt) -> str | None:
    """Return the tool that a prompt does not show, if any."""
    tokenizer, schemas = subject.run.policy.tokenizer, subject.run.environment.tool_schemas(prompt)
    with_tools, alone = (str(tokenizer.decode(encode_prompt(tokenizer, prompt, tools))) for tools in (schemas, ()))
    reader = subject.run.environment.rules.read if isinstance(subject.run.environment, ToolEnvironment) else None
    opening = reader.style.opening if isinstance(reader, InStyle) else ""
    is_taught = with_tools != alone or opening in alone
    names = [str(schema["function"]["name"]) for schema in schemas]
    missing = next((name for name in names if not is_taught or name not in with_tools), None)
    return missing and f"no prompt shows the tool {missing}, as in prompt {prompt.id}: {alone[-60:]!r}"


@dataclass
class GoldPlayer(Environment):
    """An environment's stand-in with the perfect policy's turns."""

    inner: Environment
    next_turn: str | None = None
    said: list[str] = field(default_factory=list)

    def prompts(self, split: Split) -> list[Prompt]:
        return []

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        return await maybe_await(self.inner.score(prompt, completions))

    def max_turns(self, prompt: Prompt) -> int:
        return self.inner.max_turns(prompt)

    def tool_schemas(self, prompt: Prompt) -> Sequence[Mapping[str, Any]]:
        return self.inner.tool_schemas(prompt)

    def episode(self, prompt: Prompt, seed: int) -> Episode | None:
        episode = self.inner.episode(prompt, seed)
        return None if episode is None else GoldEpisode(self, prompt, episode)


@dataclass
class GoldEpisode(Episode):
    """An episode that tells its player each turn in advance."""

    player: GoldPlayer
    prompt: Prompt
    inner: Episode

    async def reset(self) -> Observation:
        observation = await maybe_await(self.inner.reset())
        self._find((*as_conversation(self.prompt.text), *as_messages(observation.messages)))
        return observation

    async def reply(self, answer: Answer) -> Observation:
        observation = await maybe_await(self.inner.reply(answer))
        if not observation.done:
            self._find((*answer.conversation, *as_messages(observation.messages)))
        return observation

    async def score(self, conversation: Sequence[Message]) -> Reward | Failure | None:
        return await maybe_await(self.inner.score(conversation))

    async def close(self) -> None:
        await maybe_await(self.inner.close())

    def _find(self, conversation: Sequence[Message]) -> None:
        with naming(self.player.inner, "gold_turn"):
            self.player.next_turn = self.player.inner.gold_turn(self.prompt, conversation)
        if self.player.next_turn is not None:
            self.player.said.append(self.player.next_turn)


def _gold(subject: PreflightContext, prompt: Prompt) -> Rollout | str | None:
    """Play a prompt's gold turns; None without any, text for an error."""
    policy, source = subject.run.policy, subject.run.local
    player = GoldPlayer(subject.run.environment)
    # Nothing is played, no tool called and no program started, where nobody knows what to say
    with naming(player.inner, "gold_turn"):
        if player.inner.gold_turn(prompt, as_conversation(prompt.text)) is None:
            return None
    stop = source.sampling.stop

    def script(prompt_ids: tuple[int, ...], sample_index: int) -> list[int]:
        text = player.next_turn or ""
        ids = list(policy.tokenizer(text, add_special_tokens=False)["input_ids"])
        return ids if stop and text.endswith(stop) else [*ids, *sorted(policy.stop_ids)[:1]]

    engine = FakeEngine(script, len(policy.tokenizer))
    sampler = replace(source.sampler, engine=engine, environment=player)
    try:
        group: Group = asyncio.run(roll_out(sampler, prompt, 1, source.sampling))
    except (RunStopped, ValueError) as error:
        return str(error)
    if not player.said:
        return None
    if group.failures:
        return group.failures[0].reason
    (rollout,) = group.rollouts
    return _find_altered(subject, rollout, player) or rollout


def _find_altered(subject: PreflightContext, rollout: Rollout, player: GoldPlayer) -> str | None:
    """Describe where trained and sampled tokens differ, None if nowhere."""
    tokenizer = subject.run.policy.tokenizer
    learnt = [t for t, mine in zip(rollout.target_ids, rollout.loss_mask, strict=True) if mine]
    for turn, text in zip(rollout.turns, player.said, strict=False):
        found = str(tokenizer.decode(learnt[turn.start : turn.end], skip_special_tokens=True))
        if found != text:
            return f"turn {text!r:.60} came back as {found!r:.60}"
    return None
