"""The five types of every part, and their small values.

    Prompt --engine--> Completion --environment--> Rollout --> Group --advantages, packing--> Batch

Each is frozen and complete when it is made. Notation of shapes, used everywhere: N rollouts of an optimiser step,
L loss tokens (positions whose target the policy chose), B x T tokens of a micro-batch, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # a worker that judges needs none of torch, which takes seconds to import
    from torch import Tensor

Message = Mapping[str, Any]
"""One message of a conversation: {"role": ..., "content": ...}, and `name` or `tool_calls` where tools speak."""

FinishReason = Literal["stop", "length"]
"""`stop`: ended by a stop token or stop string. `length`: cut by the token limit ("truncated")."""


class CutText(str):
    """A completion cut by the token limit, for `isinstance` checks.

    >>> isinstance(CutText("so there are 12"), str)
    True
    """


StopReason = Literal[
    "completed",
    "tool_stopped",
    "max_turns",
    "max_tokens",
    "max_context",
    "max_tool_calls",
    "parse_error",
    "timeout",
    "failure",
]
"""Reason why an episode ended: done, ended by a tool, or a limit was met (turns, tokens of a turn, tokens of the whole
context, tool calls); the answer could not be read; a turn took too long; the environment broke."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Input of the policy: one row of a data set.

    >>> Prompt(id="train-17", environment="arithmetic", text="41+7=", columns={"answer": 48})
    """

    id: str
    """Unique within a run. Groups are identified by it, never by text or position."""
    environment: str
    """Name of the environment that made this prompt and will score its completions."""
    text: str | tuple[Message, ...]
    """Plain text, or the messages of a conversation (rendered with the tokenizer's chat template)."""
    columns: Mapping[str, Any]
    """The data set row. Only the environment reads it."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, end) of a completion sampled on one version.

    >>> Span(version=3, start=0, end=83)
    """

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the policy in an episode: its stretch of the rollout's loss tokens, and what the environment made of
    it.

    >>> Turn(start=0, end=3, reward=0.5, state="between 0 and 15")
    """

    start: int
    """First loss token, counted over them alone."""
    end: int
    """One past the last."""
    reward: float = 0.0
    """Reward of the environment for this turn; the verdict on the whole episode comes on top."""
    state: str = ""
    """Names the state in which the turn began: turns of a group with equal names began alike."""
    is_void: bool = False
    """Whether it held neither a tool call nor an answer."""
    info: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Notes of the environment on it for rollouts.jsonl: plain data."""


@dataclass(frozen=True, slots=True)
class Completion:
    """Tokens the policy sampled in one call.

    >>> Completion(token_ids=(8, 12, 2), logprobs=(-0.1, -0.7, -0.01), finish_reason="stop", policy_version=3)
    """

    token_ids: tuple[int, ...]
    """Sampled tokens; the stop token is included where there was one."""
    logprobs: tuple[float, ...]
    """Natural log-probability of each token under the distribution it was really drawn from."""
    finish_reason: FinishReason
    policy_version: int
    """Training steps behind the weights that produced the oldest token."""
    passes: tuple[int, ...] = ()
    """Pass in which each token of a masked policy's fill in several passes was filled in, 0 first."""
    spans: tuple[Span, ...] = ()
    """The version of each token, where weights changed while it was sampled; empty: all are of `policy_version`."""
    cached_tokens: int | None = field(default=None, compare=False)
    """Tokens of its prompt that the engine had cached, if it says so: a cost, and nothing of the completion."""

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.logprobs), f"{len(self.token_ids)} tokens, {len(self.logprobs)} logprobs"


@dataclass(frozen=True, slots=True)
class Reward:
    """A completion's verdict: the trained value, and logged parts.

    >>> Reward(value=1.1, parts={"correct": 1.0, "format": 0.1}, extra={"found": "48"})
    """

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Notes of the judge on this completion for rollouts.jsonl, by column: plain data, and no part of the verdict."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Reward, (self.value, self.parts, self.extra)  # pickled faster than by fields


UNREWARDED = "taught_alone"
"""The part of a reward that stands for none, where a teacher trains alone."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The system could not judge a completion: data, never a reward."""

    reason: str
    is_fault: bool = field(default=True, compare=False)
    """Whether something broke; False where the judge has nothing to say about such a prompt."""
    num_tokens: int = field(default=0, compare=False)
    """Tokens of the completion sampled so far."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """A scored attempt, already shifted: position t predicts target_ids[t].

    For the prompt (5, 6) and the completion (8, 2):

    >>> Rollout(input_ids=(5, 6, 8), target_ids=(6, 8, 2), loss_mask=(False, True, True),
    ...         sampler_logprobs=(0.0, -0.1, -0.7), reward=Reward(1.0, {}), text="8", finish_reason="stop",
    ...         policy_version=3)
    """

    input_ids: tuple[int, ...]
    target_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    """True where the policy chose the target."""
    sampler_logprobs: tuple[float, ...]
    """The engine's log-probabilities of the targets; 0.0 where loss_mask is False."""
    reward: Reward
    text: str
    """The completion, decoded without special tokens."""
    finish_reason: FinishReason
    policy_version: int
    input_length: int | None = None
    """Length of a masked policy's inputs in tokens: the lists hold one for each pass, each read in both directions.
    None: they are read from left to right."""
    messages: tuple[Message, ...] = ()
    """Messages of policy and environment since the prompt, after several turns; empty after one."""
    spans: tuple[Span, ...] = ()
    """The version of each token that the policy chose, counted over them alone; empty: all are of `policy_version`."""
    turns: tuple[Turn, ...] = ()
    """Turns of an episode, in order; empty: there was one."""
    stop_reason: StopReason | None = None
    """Reason why an episode ended."""
    branches: tuple[int, ...] = ()
    """Starts of the sequences that a rewritten history leaves in the lists, one after the other, each read from its
    own start; the first is 0. Every sampled token is learnt in one of them. Empty: there is one."""
    re_encoded_tokens: int = field(default=0, compare=False)
    """Tokens of an episode's earlier turns that the engine had to encode again."""

    def __post_init__(self) -> None:
        assert self.input_length is None or len(self.input_ids) % self.input_length == 0, "inputs of one length"
        lengths = {len(self.input_ids), len(self.target_ids), len(self.loss_mask), len(self.sampler_logprobs)}
        assert len(lengths) == 1, f"four lists of one length, got lengths {sorted(lengths)}"
        ends = (*self.branches[1:], len(self.input_ids))
        is_in_order = all(start < end for start, end in zip(self.branches, ends, strict=False))
        assert not self.branches or (self.branches[0] == 0 and is_in_order), f"branches begin at {self.branches}"

    def __reduce__(self) -> tuple[Any, ...]:
        return Rollout, tuple(getattr(self, name) for name in Rollout.__slots__)  # as of a reward

    @property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        """Return begin and end of each sequence read by itself."""
        length = len(self.input_ids)
        starts = self.branches or (0,) if self.input_length is None else range(0, length, self.input_length)
        return tuple(pairwise((*starts, length)))

    @property
    def num_loss_tokens(self) -> int:
        return self.loss_mask.count(True)

    @property
    def policy_turns(self) -> tuple[Turn, ...]:
        """Return the turns, the whole rollout as one where it has none."""
        return self.turns or (Turn(0, self.num_loss_tokens),)

    @property
    def parts(self) -> Mapping[str, float]:
        """Return the reward's parts; unpaid turns count 0."""
        own = self.reward.parts
        return {**(own or {"outcome": self.reward.value}), "turns": 0.0} if self.turns and "turns" not in own else own


@dataclass(frozen=True, slots=True)
class Group:
    """All rollouts of one prompt, and the failures of scoring.

    >>> Group(prompt=prompt, rollouts=(rollout_a, rollout_b), failures=(Failure("judge timed out"),))
    """

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    failures: tuple[Failure, ...]

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(r.reward.value for r in self.rollouts)

    @property
    def earned(self) -> tuple[float, ...]:
        """Return the rewards that something gave: none where a teacher trains alone."""
        return tuple(r.reward.value for r in self.rollouts if UNREWARDED not in r.reward.parts)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Tensors of one pass; the L loss tokens are listed in rollout order.

    Several rollouts that share a prompt share its tokens in the packed stream, so a loss token names the position
    whose hidden state predicts it.
    """

    input_ids_BT: "Tensor"
    """Packed layouts have B = 1."""
    position_ids_BT: "Tensor"
    layout: Any
    """Layout of attention: which tokens each may attend to (`policy.attention.Layout`)."""
    source_L: "Tensor"
    """Index into the flattened (B * T) stream of the position whose hidden state predicts loss token l."""
    target_L: "Tensor"
    row_L: "Tensor"
    """Rollout (row) of the loss token within this micro-batch."""
    column_L: "Tensor"
    """Index of the loss token within its rollout, counting loss tokens only."""
    num_columns: int
    """Loss tokens of the rollout that has most, known without asking the device."""
    prompt_ids: tuple[str, ...]
    """Prompt of each rollout (row)."""
    advantage_L: "Tensor"
    sampler_logprob_L: "Tensor"
    taught_L: "Tensor | None" = None
    """bool: loss tokens that have a teacher; None: all, or there is no teacher."""
    taught: "MicroBatch | None" = None
    """The same tokens after what the teacher reads in place of the prompt; None: it reads the prompt."""
    supervised_L: "Tensor | None" = None
    """bool: tokens of given answers, to learn as they are; None: all were sampled."""
    num_supervised: int = 0
    """Such answers among the rows."""
    rollouts: tuple[Rollout, ...] = ()
    """The rows themselves, on the host."""

    @property
    def num_rows(self) -> int:
        return len(self.prompt_ids)


@dataclass(frozen=True, slots=True)
class Batch:
    """Everything one optimiser step trains on, on this rank.

    The three counts are global: over all micro-batches and all ranks. They are what divides the loss.

    >>> Batch(micro_batches=(first, second), num_loss_tokens=4096, num_sequences=63, num_rollouts=64)
    """

    micro_batches: tuple[MicroBatch, ...]
    num_loss_tokens: int
    num_sequences: int
    """Rollouts with at least one loss token."""
    num_rollouts: int
    """All rollouts, those without loss tokens included."""
    taught: tuple[int, int] = (0, 0)
    """Loss tokens that have a teacher, and their sequences, over all ranks too."""
    supervised: tuple[int, int] = (0, 0)
    """Tokens of given answers that are learnt as they are, and these answers."""


LIKELIHOODS = ("trajectory", "one_step")


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings of the sampler. The distribution is softmax(logits / temperature), cut by top-k, then top-p, then min-p,
    and renormalised. Log-probabilities are those of that distribution."""

    temperature: float = 1.0
    """0 means greedy (argmax; log-probabilities are then those of temperature 1)."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens with at least this probability mass."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the most likely one."""
    max_tokens: int = 256
    """Completion length at which sampling stops with finish_reason "length"."""
    stop: tuple[str, ...] = ()
    """Stop strings; the token that completes one is the last token of the completion."""
    seed: int = 0
    """Random numbers are a pure function of (seed, sample index, position)."""
    num_passes: int = 1
    """Passes in which a masked policy fills an input."""
    likelihood: str = "trajectory"
    """Likelihood of a fill in several passes: `trajectory` or `one_step`."""
    max_total_tokens: int | None = None
    """Length of prompt and completion together at which sampling stops likewise; None has the model's own length."""
    first_sample: int = 0
    """Sample index of the first completion: a part of a group is drawn as it is in the whole one."""
    stop_ids: frozenset[int] | None = None
    """Tokens that end a completion, in place of the policy's own; None has those (engines in this process)."""

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature must be >= 0, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"min_p must be in [0, 1), got {self.min_p}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be >= 1, got {self.max_tokens}")
        if self.max_total_tokens is not None and self.max_total_tokens < 2:
            raise ValueError(f"max_total_tokens must be >= 2, got {self.max_total_tokens}")
        if self.num_passes < 1:
            raise ValueError(f"num_passes must be >= 1, got {self.num_passes}")
        if self.likelihood not in LIKELIHOODS:
            raise ValueError(f"likelihood must be one of {', '.join(LIKELIHOODS)}, got {self.likelihood}")
        if "" in self.stop:
            raise ValueError("stop strings must not be empty, got an empty one")

    def room(self, num_prompt_tokens: int) -> int:
        """Return the longest completion after a prompt, below 1 for none."""
        if self.max_total_tokens is None:
            return self.max_tokens
        return min(self.max_tokens, self.max_total_tokens - num_prompt_tokens)

    def within(self, num_prompt_tokens: int) -> "Sampling":
        """Return the sampling after a prompt. ValueError without room."""
        room = self.room(num_prompt_tokens)
        if room < 1:
            raise ValueError(
                f"a prompt of {num_prompt_tokens} tokens leaves no room in max_total_tokens={self.max_total_tokens}"
            )
        return self if room == self.max_tokens else replace(self, max_tokens=room)

    @property
    def filters(self) -> bool:
        """Return True if top-k, top-p or min-p cut the distribution."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class RunStopped(RuntimeError):
    """An environment ends the run on purpose; the message is the reason."""
