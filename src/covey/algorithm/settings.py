"""The settings of the algorithm. Part of the schema in schema.py."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.algorithm.teacher.settings import TeacherSettings
from covey.system.setting import CONTINUES, Requires, is_positive, is_set, setting

if TYPE_CHECKING:
    from covey.types import Rollout

WITHOUT_RATIO = ("reinforce", "reinforce_ratio", "nll")
"""Losses that compare the policy with no other."""
WITH_RATIO_LEVEL = ("clip", "cispo", "sapo")
"""Losses defined for an importance ratio of any level; the others take the token's."""
WITHOUT_EXPONENTIAL = (*WITHOUT_RATIO, "dro")
"""Losses that never form exp(log ratio)."""
OVER_THE_BATCH = (
    "group_center_batch_std",
    "group_center_token_whiten",
    "gpg",
    "gdpo",
    "role_ema",
    "reinforce_plus_plus",
)
"""Advantages of a rollout that depend on more than its own group."""
TURN_CREDITS = ("episode", "discounted", "turn_mixed", "anchor_state")
"""Shares of turns in an episode's reward: the keys of turns.TURN_CREDIT."""
OF_ANY_ROWS = (
    "group_zscore",
    "group_center",
    "leave_one_out",
    "group_center_batch_std",
    "group_center_token_whiten",
    "opo",
    "gpg",
    "maxrl",
    "reinforce_plus_plus",
    "none",
)
"""Advantages that look at rewards, groups and lengths alone, so that a row may also be a turn or an outcome."""
WITHOUT_CLAMP = ("k1", "k2", "abs", "k1_forward", "full")
"""KL estimators without an exponential of the log ratio."""


def is_sampled(estimator: str) -> bool:
    return estimator != "full"


def _has_kl_in_loss(kl_coef: float, kl_in: str, sampler_kl_coef: float) -> bool:
    return (kl_coef > 0 and kl_in == "loss") or sampler_kl_coef > 0


def _exponentiates(kl_coef: float, estimator: str, gradient: str, sampler_kl_coef: float, sampler: str) -> bool:
    own = kl_coef > 0 and (estimator not in WITHOUT_CLAMP or gradient == "is_weighted")
    return own or (sampler_kl_coef > 0 and sampler == "k3")


def _allows_ratio_level(loss: str) -> bool:
    return loss in WITH_RATIO_LEVEL or ":" in loss


def _reads_advantages(loss: str, off_policy_mask_delta: float | None) -> bool:
    return loss != "nll" or off_policy_mask_delta is not None


BY_TURN = (
    Requires(
        f"algorithm.advantage = {', '.join(OF_ANY_ROWS)} or module:function",
        ("algorithm.advantage",),
        lambda name: name in OF_ANY_ROWS or ":" in name,
    ),
    Requires("algorithm.selection = null", ("algorithm.selection",), lambda name: name is None),
)
"""Requirements of advantages of single turns. Shaping, length weights, clips and filters go with all of them."""
PENALISED = Requires("algorithm.kl_coef > 0", ("algorithm.kl_coef",), is_positive)
KL_IN_LOSS = Requires("algorithm.kl_in = loss", ("algorithm.kl_in",), lambda kl_in: kl_in == "loss")
STEERED = Requires("algorithm.target_kl set", ("algorithm.target_kl",), is_set)
CORRECTED = Requires("algorithm.correction = truncate or mask", ("algorithm.correction",), lambda mode: mode != "none")
FILTERED = Requires("algorithm.group_filter set", ("algorithm.group_filter",), is_set)
COMPARED = Requires(
    "algorithm.kl_coef > 0",
    ("algorithm.kl_coef", "algorithm.ratio_denominator"),
    lambda coef, denominator: coef > 0 or denominator == "reference",
)
"""Something is compared with a reference."""
FROZEN = Requires(
    "a reference that is not refreshed",
    ("algorithm.reference_refresh_every", "algorithm.reference_refresh_on_best"),
    lambda every, on_best: not is_set(every) and not on_best,
)
READ_ADVANTAGES = Requires(
    "a loss that reads advantages", ("algorithm.loss", "algorithm.off_policy_mask_delta"), _reads_advantages
)
READ_REWARDS = Requires(
    "a loss that reads advantages, or a selection",
    ("algorithm.loss", "algorithm.off_policy_mask_delta", "algorithm.selection"),
    lambda loss, delta, selection: _reads_advantages(loss, delta) or selection is not None,
)
MEAN_OF_SEQUENCES = Requires(
    "an aggregation that is a mean over sequences",
    ("algorithm.aggregation", "algorithm.kl_aggregation"),
    lambda *modes: any((mode or "").startswith("seq_mean") or ":" in (mode or "") for mode in modes),
)
CONSTANT_LENGTH = Requires(
    "algorithm.aggregation to end in _norm",
    ("algorithm.aggregation", "algorithm.kl_aggregation"),
    lambda *modes: any((mode or "").endswith("_norm") or ":" in (mode or "") for mode in modes),
)


@dataclass
class AlgorithmConfig(TeacherSettings):
    """From rewards to a loss. The presets under conf/algorithm are named settings of this."""

    advantage: str = setting(
        "group_zscore", needs=READ_ADVANTAGES, table="covey.algorithm.credit.advantages:ADVANTAGES"
    )
    """Estimator of advantages from rewards."""
    advantage_options: dict[str, Any] = setting({}, needs=READ_ADVANTAGES)
    """Keyword arguments of the advantage function; unknown ones are refused."""
    advantage_clip: float | None = setting(None, gt=0, needs=READ_ADVANTAGES)
    """Clamp advantages to [-c, c], the last step; null leaves them."""
    turn_credit: str = setting("episode", choices=TURN_CREDITS, needs=(READ_ADVANTAGES, CONTINUES, *BY_TURN))
    """Shares of turns in an episode's reward (outcome + rewards of its turns): episode (alike), discounted,
    turn_mixed or anchor_state."""
    turn_credit_options: dict[str, Any] = setting(
        {},
        needs=Requires(
            "algorithm.turn_credit = discounted, turn_mixed or anchor_state",
            ("algorithm.turn_credit",),
            lambda name: name != "episode",
        ),
    )
    """Keyword arguments of the turn credit; unknown ones are refused."""
    shaping: dict[str, dict[str, Any]] = setting({}, needs=READ_REWARDS, table="covey.algorithm.credit.shaping:SHAPING")
    """Reward shaping by name, with options, applied in order before the baseline."""
    selection: str | None = setting(None, table="covey.algorithm.credit.selection:SELECTION")
    """Train on a part of each group; null trains on all."""
    selection_options: dict[str, Any] = setting(
        {}, needs=Requires("algorithm.selection set", ("algorithm.selection",), is_set)
    )
    """Keyword arguments of the selection."""
    length_normalizer: float | None = setting(None, needs=READ_ADVANTAGES)
    """Weight advantages by length^-alpha over its mean in the batch (VL-Norm); null is off."""
    group_filter: str | None = setting(None, table="covey.algorithm.credit.selection:GROUP_FILTERS")
    """Dynamic sampling: drop groups and draw others; null keeps all."""
    group_filter_options: dict[str, Any] = setting({}, needs=FILTERED)
    """Keyword arguments of the group filter."""
    group_filter_rounds: int = setting(3, ge=0, needs=FILTERED)
    """Most extra draws of a step to replace filtered groups; then it trains on the groups it has."""
    loss: str = setting("clip", table="covey.algorithm.losses:LOSSES")
    """Loss of each token that the policy chose."""
    loss_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the loss function; unknown ones are refused."""
    ratio: str = setting(
        "token",
        choices=("token", "sequence", "sequence_mean", "sequence_mean_token"),
        needs=Requires(
            "algorithm.loss = clip, cispo, sapo or module:function", ("algorithm.loss",), _allows_ratio_level
        ),
    )
    """Level of the importance ratio: token, sequence, sequence_mean (GSPO) or sequence_mean_token."""
    ratio_denominator: str = setting(
        "old",
        choices=("old", "behaviour", "reference"),
        needs=Requires("a loss with an importance ratio", ("algorithm.loss",), lambda loss: loss not in WITHOUT_RATIO),
    )
    """Denominator of the importance ratio: old, behaviour (the sampler's log-probs) or reference."""
    log_ratio_clamp: float | None = setting(
        20.0,
        gt=0,
        needs=Requires(
            "a loss with an importance ratio, or a correction",
            ("algorithm.loss", "algorithm.correction"),
            lambda loss, correction: loss not in WITHOUT_EXPONENTIAL or correction != "none",
        ),
    )
    """Log ratios are clamped to +- this before exp; null does not clamp."""
    aggregation: str = setting("token_mean", table="covey.algorithm.aggregation:AGGREGATIONS")
    """Aggregation of token losses to one number. Denominators are global."""
    norm_length: int | None = setting(None, ge=1, needs=CONSTANT_LENGTH)
    """The constant length of the *_norm aggregations; null takes sampling.max_tokens."""
    count_empty: bool = setting(False, needs=MEAN_OF_SEQUENCES)
    """Count sequences without loss tokens in sequence means."""
    kl_coef: float = setting(0.0, ge=0)
    """Weight of the KL penalty to the reference; 0 needs no reference at all."""
    kl_estimator: str = setting(
        "k3", choices=("full",), needs=(PENALISED, KL_IN_LOSS.for_value("full")), table="covey.algorithm.kl:ESTIMATORS"
    )
    """Estimate of the KL to the reference; full is exact over the vocabulary."""
    kl_gradient: str = setting(
        "straight_through_k2",
        choices=("naive", "straight_through_k2", "is_weighted"),
        needs=(
            PENALISED,
            KL_IN_LOSS,
            Requires("a sampled algorithm.kl_estimator such as k3", ("algorithm.kl_estimator",), is_sampled),
        ),
    )
    """Gradient of the KL term in the loss: naive, straight_through_k2 or is_weighted."""
    kl_in: str = setting(
        "loss",
        choices=("loss", "reward"),
        needs=(
            PENALISED,
            READ_REWARDS,
            Requires("a sampled algorithm.kl_estimator such as k1", ("algorithm.kl_estimator",), is_sampled),
        ),
    )
    """Place of the KL penalty: loss or reward (before the baseline, detached)."""
    kl_aggregation: str | None = setting(
        None,
        needs=Requires(
            "a KL penalty in the loss",
            ("algorithm.kl_coef", "algorithm.kl_in", "algorithm.sampler_kl_coef"),
            _has_kl_in_loss,
        ),
        table="covey.algorithm.aggregation:AGGREGATIONS",
    )
    """Reduction of the KL term; null takes `aggregation`."""
    kl_clamp: float | None = setting(
        20.0,
        gt=0,
        needs=Requires(
            "a KL penalty with an exponential (k3 or is_weighted)",
            (
                "algorithm.kl_coef",
                "algorithm.kl_estimator",
                "algorithm.kl_gradient",
                "algorithm.sampler_kl_coef",
                "algorithm.sampler_kl_estimator",
            ),
            _exponentiates,
        ),
    )
    """log pi - log ref is clamped to +- this where it is exponentiated (k3, is_weighted); null does not clamp."""
    sampler_kl_coef: float = setting(0.0, ge=0)
    """Weight of a KL penalty to the policy that sampled the data, in the loss."""
    sampler_kl_estimator: str = setting(
        "k3",
        choices=("k1_forward", "k3"),
        needs=Requires("algorithm.sampler_kl_coef > 0", ("algorithm.sampler_kl_coef",), is_positive),
    )
    """k1_forward or k3, estimates of KL(sampler || policy)."""
    target_kl: float | None = setting(None, gt=0, needs=PENALISED)
    """Steer kl_coef towards this measured KL; null keeps kl_coef fixed."""
    max_kl: float | None = setting(None, gt=0, needs=PENALISED)
    """Stop the run where the KL to the reference, mean over sequences of their token means, exceeds this many nats;
    null never does."""
    router_aux_loss_coef: float | None = setting(None, ge=0)
    """Coefficient of the loss that balances a mixture's experts within each rollout; null takes the model's own."""
    max_mismatch: float | None = setting(None, gt=0)
    """Stop the run, before the update, where log-probs of sampler and trainer differ by more nats on average; null only
    writes a warning to the log, above 0.1."""
    kl_controller: str = setting("proportional", choices=("fixed", "proportional", "doubling"), needs=STEERED)
    """proportional (Ziegler et al.) or doubling (PPO); used with target_kl."""
    kl_horizon: int = setting(
        10000,
        gt=0,
        needs=(
            STEERED,
            Requires(
                "algorithm.kl_controller = proportional",
                ("algorithm.kl_controller",),
                lambda rule: rule == "proportional",
            ),
        ),
    )
    """Horizon of the proportional controller, in completions."""
    kl_coef_min: float = setting(0.0, needs=STEERED)
    """Lower bound of the steered coefficient."""
    kl_coef_max: float = setting(10.0, needs=STEERED)
    """Upper bound of the steered coefficient."""
    reference_model: str | None = setting(None, needs=(COMPARED, FROZEN))
    """Folder or hub name of a model to compare with, of the policy's vocabulary; null takes the policy as it began."""
    reference_revision: str | None = setting(
        None,
        needs=Requires(
            "algorithm.reference_model = a hub name",
            ("algorithm.reference_model",),
            lambda name: is_set(name) and not Path(name).is_dir(),
        ),
    )
    """Hub revision of it; null takes the default branch."""
    reference_refresh_every: int | None = setting(None, ge=1, needs=COMPARED)
    """Steps between mixing the policy into the reference; null keeps it frozen."""
    reference_refresh_alpha: float = setting(
        1.0,
        gt=0,
        le=1,
        needs=(
            Requires("algorithm.reference_refresh_every set", ("algorithm.reference_refresh_every",), is_set),
            Requires("model.lora_rank = 0 (adapters can only be copied)", ("model.lora_rank",), lambda rank: rank == 0),
        ),
    )
    """Share of the policy in a refresh: 1 copies it, a small value every step is an EMA."""
    reference_refresh_on_best: bool = setting(
        False, needs=(COMPARED, Requires("evaluation.every > 0", ("evaluation.every",), is_positive))
    )
    """Take the policy as the reference whenever an evaluation is more accurate than all before it."""
    correction: str = setting("none", choices=("none", "truncate", "mask"))
    """Importance weights trainer/sampler on the loss: none, truncate (TIS) or mask (IcePop)."""
    correction_level: str = setting("token", choices=("token", "sequence", "sequence_mean"), needs=CORRECTED)
    """token, sequence or sequence_mean."""
    correction_min: float | None = setting(None, ge=0, needs=CORRECTED)
    """Lower bound of the weights; null has none."""
    correction_max: float = setting(2.0, gt=0, needs=CORRECTED)
    """Upper bound of the weights."""
    correction_self_normalize: bool = setting(False, needs=CORRECTED)
    """Divide the weights by their mean over the batch."""
    rejection: str | None = None
    """Comma list of rejection criteria such as "token_k1,seq_mean_k3"; null rejects nothing."""
    rejection_thresholds: str | None = setting(
        None, needs=Requires("algorithm.rejection set", ("algorithm.rejection",), is_set)
    )
    """Comma list of thresholds, one for each criterion ("lo_hi" for k1)."""
    off_policy_mask_delta: float | None = None
    """Drop sequences with negative advantage and mean log-prob gap above this (DeepSeek-V3.2); null is off."""
    m2po_threshold: float | None = setting(None, gt=0)
    """Drop the most off-policy tokens until their second moment is below this (M2PO); null is off."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    entropy_aggregation: str = setting(
        "token_mean",
        choices=("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"),
        needs=Requires(
            "an entropy bonus",
            ("algorithm.entropy_coef", "algorithm.target_entropy"),
            lambda coef, target: coef != 0 or is_set(target),
        ),
    )
    """Aggregation of the tokens' entropies to one number."""
    target_entropy: float | None = None
    """Adapt the entropy bonus towards this entropy (Skywork-OR1); null keeps entropy_coef fixed."""
    mask_truncated: bool = setting(False, needs=CONTINUES)
    """Leave completions cut by the token limit out of the loss (their reward stays in the group statistics)."""
    drop_void_turns: bool = setting(False, needs=CONTINUES)
    """Leave episodes with a turn without tool call or answer out of the loss (SimpleTIR; their reward stays in the
    group statistics)."""
    high_entropy_fraction: float = setting(1.0, gt=0, le=1)
    """Policy term only on this share of the tokens, those of highest entropy; 1 uses all."""

    @property
    def refreshes_reference(self) -> bool:
        """Return True if the reference changes during a run."""
        return self.reference_refresh_every is not None or self.reference_refresh_on_best

    def leaves_out(self, rollout: "Rollout") -> bool:
        """Return True for a rollout that settings take out of the loss.

        It was cut by the token limit (DAPO, arXiv 2503.14476) or has a void turn (SimpleTIR, arXiv 2509.02479).
        """
        is_cut = self.mask_truncated and rollout.finish_reason == "length"
        return is_cut or (self.drop_void_turns and any(turn.is_void for turn in rollout.turns))
