"""The settings of a teacher and of the supervised term.

Policies that teach themselves: OPSD, arXiv 2601.18734; SDFT, 2601.19897; SDPO, 2601.20802.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from covey.system.section import Section
from covey.system.setting import CONTINUES, Requires, is_positive, is_set, setting

SELF = "self"
"""The teacher that is the policy."""
SHOWN = ("gold", "solution", "feedback")
TEMPLATE = "{what}:\n{text}\n\n"
TAUGHT = Requires("algorithm.teacher set", ("algorithm.teacher",), is_set)
BY_ITSELF = Requires("algorithm.teacher = self", ("algorithm.teacher",), lambda name: name == SELF)
SHOWS = Requires("algorithm.teacher_shows to name something", ("algorithm.teacher_shows",), bool)


def is_address(name: str | None) -> bool:
    return name is not None and name.startswith(("http://", "https://"))


def asks_for_gold(shown: Sequence[str], coef: float, answers: str) -> bool:
    """Return True if right answers are shown or learnt."""
    return "gold" in shown or (coef > 0 and answers == "gold")


GIVEN_GOLD = Requires(
    "algorithm.teacher_shows with gold, or a supervised term on gold",
    ("algorithm.teacher_shows", "algorithm.sft_coef", "algorithm.sft_answers"),
    asks_for_gold,
)
DIFFERS = Requires(
    "algorithm.teacher_shows=[gold], [solution] or [feedback], or algorithm.teacher_temperature: a policy that sees "
    "nothing more is no teacher, and algorithm.kl_coef keeps to the first one",
    ("algorithm.teacher_shows", "algorithm.teacher_temperature"),
    lambda shown, temperature: bool(shown) or temperature is not None,
)
WHOLE = Requires(
    "model.lora_rank = 0 (the mean of adapters is no adapter)", ("model.lora_rank",), lambda rank: rank == 0
)
APART = Requires(
    "algorithm.teacher_term = sampled or divergence", ("algorithm.teacher_term",), lambda term: term != "advantage"
)
SUPERVISED = Requires("algorithm.sft_coef > 0", ("algorithm.sft_coef",), is_positive)


def _is_averaged(weights: str) -> bool:
    return weights in ("ema", "trust_region")


@dataclass
class TeacherSettings(Section):
    """A teacher, and answers to learn as they are."""

    teacher: str | None = setting(
        None,
        needs=(
            Requires("parallel.strategy = ddp", ("parallel.strategy",), lambda strategy: strategy == "ddp"),
            DIFFERS.for_value(SELF),
        ),
    )
    """Teacher of what the policy samples (on-policy distillation): a model's folder or hub name of the policy's
    tokens, the address of a server, or self; null has none."""
    teacher_shows: list[str] = setting([], choices=SHOWN, needs=(CONTINUES, TAUGHT))
    """Texts that the teacher reads before the prompt: gold (a right answer), solution (a sibling's that was rewarded),
    feedback (words of the environment); a rollout without any of them has no teacher."""
    teacher_template: str = setting(TEMPLATE, needs=(TAUGHT, SHOWS))
    """Text before the prompt for each of them, with {what} and {text}."""
    teacher_selection: dict[str, Any] = setting({}, needs=(TAUGHT, SHOWS))
    """Keyword arguments of the choice of solution and feedback: threshold, exclude_self,
    feedback_only_without_solution."""
    gold_column: str | None = setting(None, needs=GIVEN_GOLD)
    """Column of a right answer; null asks the environment for one."""
    teacher_weights: str = setting(
        "base",
        choices=("base", "ema", "live", "trust_region"),
        needs=(TAUGHT, BY_ITSELF, WHOLE.for_value("ema"), SHOWS.for_value("live")),
    )
    """Weights of a teacher that is the policy: base (as it began), ema (their running average), live (as they are) or
    trust_region (logits between base and live)."""
    teacher_rate: float = setting(
        0.05,
        gt=0,
        le=1,
        needs=Requires("algorithm.teacher_weights = ema or trust_region", ("algorithm.teacher_weights",), _is_averaged),
    )
    """Share of the policy in an ema's step, or in the logits of trust_region."""
    teacher_term: str = setting("advantage", needs=TAUGHT, choices=("advantage", "sampled", "divergence"))
    """advantage (the reverse KL of each sampled token), sampled (a loss of its own on them) or divergence (a loss over
    the vocabulary)."""
    teacher_options: dict[str, Any] = setting({}, needs=TAUGHT)
    """Keyword arguments of the term; unknown ones are refused."""
    teacher_coef: float = setting(1.0, gt=0, needs=TAUGHT)
    """Weight of the term."""
    teacher_mix: str = setting("sum", choices=("sum", "convex"), needs=(TAUGHT, APART))
    """sum, or convex: the policy term weighs 1 - teacher_coef."""
    teacher_max_ratio: float | None = setting(2.0, gt=0, needs=(TAUGHT, APART))
    """Bound of the weight policy/old of each token's loss, where several updates share a batch; null has no weight."""
    teacher_denominator: str = setting("all_tokens", choices=("all_tokens", "teacher_tokens"), needs=TAUGHT)
    """Tokens that divide the term: all, or those that have a teacher."""
    teacher_temperature: float | None = setting(None, gt=0, needs=TAUGHT)
    """Temperature of the teacher; null takes that of sampling."""
    reward_weight: float = setting(1.0, ge=0, needs=TAUGHT)
    """Factor of the advantages that rewards give; 0 trains by the teacher alone."""
    sft_coef: float = setting(0.0, ge=0, needs=CONTINUES)
    """Weight of a supervised term beside the policy's, -log pi of good answers over their own tokens."""
    sft_answers: str = setting("gold", choices=("gold", "best"), needs=SUPERVISED)
    """Its answers: gold, or the best of each group, from algorithm.sft_threshold."""
    sft_threshold: float = setting(
        1.0,
        needs=(
            SUPERVISED,
            Requires("algorithm.sft_answers = best", ("algorithm.sft_answers",), lambda answers: answers == "best"),
        ),
    )
    """Least reward of such an answer."""
    sft_skip_first: int = setting(0, ge=0, needs=SUPERVISED)
    """Tokens at the beginning of each answer that are not learnt."""
