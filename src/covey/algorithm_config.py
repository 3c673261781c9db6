"""The settings of the algorithm; part of the schema in config.py."""

from dataclasses import dataclass, field
from typing import Any

from covey.section import Section


@dataclass
class AlgorithmConfig(Section):
    """From rewards to a loss. The presets under conf/algorithm are named settings of this."""

    advantage: str = "group_zscore"
    """A key of advantages.ADVANTAGES, or module:function of the same signature."""
    advantage_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the advantage function; unknown ones are refused."""
    advantage_clip: float | None = None
    """Clamp advantages to [-c, c], the last step before selection; null leaves them."""
    shaping: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Reward shaping by name (shaping.SHAPING) with options, applied in order before the baseline."""
    selection: str | None = None
    """Train on a part of each group: a key of selection.SELECTION; null trains on all."""
    selection_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the selection."""
    length_normalizer: float | None = None
    """Weight advantages by length^-alpha within the group (VL-Norm); null is off."""
    group_filter: str | None = None
    """Dynamic sampling: drop groups and draw others (zero_std or mean_bounds); null keeps all."""
    group_filter_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the group filter."""
    group_filter_rounds: int = 3
    """How often at most a step draws again to replace filtered groups; then it trains on what there is."""
    loss: str = "clip"
    """A key of losses.LOSSES, or module:function of the same signature."""
    loss_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the loss function; unknown ones are refused."""
    ratio: str = "token"
    """Level of the importance ratio: token, sequence, sequence_mean (GSPO) or sequence_mean_token."""
    ratio_denominator: str = "old"
    """What the ratio is taken against: old, behaviour (the sampler's log-probs) or reference."""
    log_ratio_clamp: float | None = 20.0
    """Log ratios are clamped to +- this before exp; null does not clamp."""
    aggregation: str = "token_mean"
    """How token losses become one number: a key of losses.AGGREGATIONS. Denominators are global."""
    norm_length: int | None = None
    """The constant length of the *_norm aggregations; null takes sampling.max_tokens."""
    count_empty: bool = False
    """Count sequences without loss tokens in sequence means."""
    kl_coef: float = 0.0
    """Weight of the KL penalty to the reference; 0 needs no reference at all."""
    kl_estimator: str = "k3"
    """k1, k2, k3, abs or full (exact over the vocabulary)."""
    kl_gradient: str = "straight_through_k2"
    """Gradient of the KL term in the loss: naive, straight_through_k2 or is_weighted."""
    kl_in: str = "loss"
    """Where the KL penalty enters: loss or reward (before the baseline, detached)."""
    kl_aggregation: str | None = None
    """Reduction of the KL term; null takes `aggregation`."""
    kl_clamp: float | None = 20.0
    """log pi - log ref is clamped to +- this where it is exponentiated (k3, is_weighted); null does not clamp."""
    sampler_kl_coef: float = 0.0
    """Weight of a KL penalty to the policy that sampled the data, in the loss."""
    sampler_kl_estimator: str = "k3"
    """k1_forward or k3, estimates of KL(sampler || policy)."""
    target_kl: float | None = None
    """Steer kl_coef so that the measured KL comes to this; null keeps kl_coef fixed."""
    max_kl: float | None = None
    """Stop the run where the KL to the reference, mean of the tokens, exceeds this many nats; null never does."""
    max_mismatch: float | None = None
    """Stop the run, before the update, where log-probs of sampler and trainer differ by more nats on average; null only
    writes a warning to the log, above 0.1."""
    kl_controller: str = "proportional"
    """proportional (Ziegler et al.) or doubling (PPO); used with target_kl."""
    kl_horizon: int = 10000
    """Horizon of the proportional controller, in completions."""
    kl_coef_min: float = 0.0
    """Lower bound of the steered coefficient."""
    kl_coef_max: float = 10.0
    """Upper bound of the steered coefficient."""
    reference_refresh_every: int | None = None
    """Mix the policy into the reference every so many steps; null keeps the reference frozen."""
    reference_refresh_alpha: float = 1.0
    """Share of the policy in a refresh: 1 copies it, a small value every step is an EMA."""
    correction: str = "none"
    """Importance weights trainer/sampler on the loss: none, truncate (TIS) or mask (IcePop)."""
    correction_level: str = "token"
    """token, sequence or sequence_mean."""
    correction_min: float | None = None
    """Lower bound of the weights; null has none."""
    correction_max: float = 2.0
    """Upper bound of the weights."""
    correction_self_normalize: bool = False
    """Divide the weights by their mean over the batch."""
    rejection: str | None = None
    """Comma list of rejection criteria such as "token_k1,seq_mean_k3"; null rejects nothing."""
    rejection_thresholds: str | None = None
    """Comma list of thresholds, one for each criterion ("lo_hi" for k1)."""
    off_policy_mask_delta: float | None = None
    """Drop sequences with negative advantage and mean log-prob gap above this (DeepSeek-V3.2); null is off."""
    m2po_threshold: float | None = None
    """Drop the most off-policy tokens until their second moment is below this (M2PO); null is off."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    target_entropy: float | None = None
    """Adapt the entropy bonus towards this entropy (Skywork-OR1); null keeps entropy_coef fixed."""
    mask_truncated: bool = False
    """Leave completions cut by the token limit out of the loss (their reward stays in the group statistics)."""
    high_entropy_fraction: float = 1.0
    """Policy term only on this share of the tokens, those of highest entropy; 1 uses all."""
