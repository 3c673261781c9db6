"""A translated command has the loss and the gradient of the command it comes from, by that system's own formulas.

These are written here a second time, plainly, and read the words of the source; covey's side is built from the words
that `covey translate` prints. N rollouts, T tokens, all float64.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
import yaml
from torch import Tensor

from covey.algorithm.aggregation import count_totals
from covey.algorithm.build import build_credit, build_objective
from covey.algorithm.credit.assign import shape_rewards
from covey.algorithm.credit.scores import scores
from covey.algorithm.loss_inputs import ObjectiveInputs
from covey.algorithm.settings import AlgorithmConfig
from covey.config.schema import Config
from covey.config.validate import validate
from covey_trl.translation.command import translate

TOLERANCE = 1e-6
LONGEST = 8
GROUPS = [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
VOCABULARY = 6


@dataclass
class Data:
    """Rollouts of three prompts, and what four policies say of their tokens."""

    logits_NTV: Tensor
    ids_NT: Tensor
    mask_NT: Tensor
    old_NT: Tensor
    sampler_NT: Tensor
    ref_NT: Tensor
    rewards_N: Tensor

    def log_probs(self) -> Tensor:
        return self.logits_NTV.log_softmax(-1).gather(-1, self.ids_NT[..., None]).squeeze(-1)

    def entropy(self) -> Tensor:
        log_p_NTV = self.logits_NTV.log_softmax(-1)
        return -(log_p_NTV.exp() * log_p_NTV).sum(-1)


def data(seed: int) -> Data:
    torch.manual_seed(seed)
    n = len(GROUPS)
    lengths_N = torch.randint(2, LONGEST + 1, (n,))
    logits_NTV = torch.randn(n, LONGEST, VOCABULARY, dtype=torch.float64)
    ids_NT = torch.randint(0, VOCABULARY, (n, LONGEST))
    now_NT = logits_NTV.log_softmax(-1).gather(-1, ids_NT[..., None]).squeeze(-1)

    def near(far: float) -> Tensor:
        return now_NT + far * torch.randn(n, LONGEST, dtype=torch.float64)

    return Data(
        logits_NTV.requires_grad_(), ids_NT, torch.arange(LONGEST) < lengths_N[:, None],
        near(0.4), near(0.5), near(0.6), torch.rand(n, dtype=torch.float64).round(decimals=1),
    )  # fmt: skip


Loss = Callable[[Mapping[str, str], Data], Tensor]


# --- verl


def verl(said: Mapping[str, str], x: Data) -> Tensor:
    """The policy loss of verl's actor after its advantages, by its words."""

    def get(name: str, default: str) -> str:
        return said.get(name, default)

    actor = "actor_rollout_ref.actor."
    mask_NT, lengths_N = x.mask_NT, x.mask_NT.sum(1)
    rewards_N = x.rewards_N
    if get("reward_model.overlong_buffer.enable", "False") == "True":
        buffer, factor = (
            float(said["reward_model.overlong_buffer.len"]),
            float(said["reward_model.overlong_buffer.penalty_factor"]),
        )
        over_N = lengths_N - (float(said["data.max_response_length"]) - buffer)
        rewards_N = rewards_N + (-over_N / buffer * factor).clamp(max=0)
    token_NT = torch.zeros_like(x.old_NT)
    token_NT[torch.arange(len(lengths_N)), lengths_N - 1] = rewards_N
    if get("algorithm.use_kl_in_reward", "False") == "True":
        beta = float(get("algorithm.kl_ctrl.kl_coef", "0.001"))
        token_NT = token_NT - beta * verl_kl(x.old_NT, x.ref_NT, get("algorithm.kl_penalty", "kl")) * mask_NT
    advantages_NT = verl_advantages(said, (token_NT * mask_NT).sum(1), mask_NT)
    # The policy loss
    log_p_NT = x.log_probs()
    agg = get(actor + "loss_agg_mode", "token-mean")
    term = verl_policy(said, log_p_NT, x, advantages_NT, agg)
    if float(get(actor + "entropy_coeff", "0")):
        term = term - float(said[actor + "entropy_coeff"]) * verl_mean(x.entropy(), mask_NT, agg)
    if get(actor + "use_kl_loss", "False") == "True":
        kl_NT = verl_kl(log_p_NT, x.ref_NT, get(actor + "kl_loss_type", "low_var_kl"))
        term = term + float(get(actor + "kl_loss_coef", "0.001")) * verl_mean(kl_NT, mask_NT, agg)
    return term


def verl_policy(said: Mapping[str, str], log_p_NT: Tensor, x: Data, advantages_NT: Tensor, agg: str) -> Tensor:
    actor = "actor_rollout_ref.actor."
    both = said.get(actor + "clip_ratio", "0.2")
    low, high = (float(said.get(actor + f"clip_ratio_{side}", both)) for side in ("low", "high"))
    mode = said.get(actor + "policy_loss.loss_mode", "vanilla")
    gap_NT = (log_p_NT - x.old_NT).clamp(-20, 20)
    ratio_NT = gap_NT.exp()
    if mode == "gpg":
        return verl_mean(-log_p_NT * advantages_NT * verl_weights(said, x), x.mask_NT, agg)
    if mode == "gspo":
        mean_N1 = (gap_NT * x.mask_NT).sum(1, keepdim=True) / x.mask_NT.sum(1, keepdim=True)
        ratio_NT = (log_p_NT - log_p_NT.detach() + mean_N1.detach()).clamp(max=10).exp()
        agg = "seq-mean-token-mean"
    if mode == "geo_mean":
        cut_NT = gap_NT.clamp(-low, high)
        worse_NT = torch.where(advantages_NT > 0, torch.minimum(gap_NT, cut_NT), torch.maximum(gap_NT, cut_NT))
        n_N = x.mask_NT.sum(1)
        geometric_N = ((worse_NT * x.mask_NT).sum(1) / n_N).exp()
        weight_N = (verl_weights(said, x) * x.mask_NT).sum(1) / n_N
        return (-(advantages_NT * x.mask_NT).sum(1) / n_N * geometric_N * weight_N).mean()
    loss_NT = torch.maximum(-advantages_NT * ratio_NT, -advantages_NT * ratio_NT.clamp(1 - low, 1 + high))
    if mode == "vanilla":
        bound_NT = torch.minimum(-advantages_NT * float(said.get(actor + "clip_ratio_c", "3.0")), loss_NT)
        loss_NT = torch.where(advantages_NT < 0, bound_NT, loss_NT)
    return verl_mean(loss_NT * verl_weights(said, x), x.mask_NT, agg)


def verl_weights(said: Mapping[str, str], x: Data) -> Tensor:
    level = said.get("algorithm.rollout_correction.rollout_is", "null")
    most = float(said.get("algorithm.rollout_correction.rollout_is_threshold", "2.0"))
    u_NT = torch.where(x.mask_NT, x.old_NT - x.sampler_NT, 0.0)
    if level == "token":
        return u_NT.clamp(-20, 20).exp().clamp(max=most)
    if level == "sequence":
        return u_NT.sum(1, keepdim=True).clamp(-20, 20).exp().clamp(max=most).expand_as(u_NT)
    return torch.ones_like(u_NT)


def verl_mean(values_NT: Tensor, mask_NT: Tensor, mode: str) -> Tensor:
    sums_N, n_N = torch.where(mask_NT, values_NT, 0.0).sum(1), mask_NT.sum(1)
    if mode == "token-mean":
        return sums_N.sum() / n_N.sum()
    if mode == "seq-mean-token-mean":
        return (sums_N / n_N).mean()
    return sums_N.mean() / (LONGEST if mode == "seq-mean-token-sum-norm" else 1)


def verl_kl(log_p_NT: Tensor, ref_NT: Tensor, kind: str) -> Tensor:
    q_NT = log_p_NT - ref_NT
    forms = {"k1": q_NT, "kl": q_NT, "abs": q_NT.abs(), "mse": q_NT.square() / 2, "k2": q_NT.square() / 2}
    k3_NT = ((-q_NT).clamp(-20, 20).exp() + q_NT - 1).clamp(-10, 10)
    value_NT = forms.get(kind.removesuffix("+"), k3_NT)
    if kind.endswith("+"):
        return value_NT.detach() + forms["k2"] - forms["k2"].detach()
    return value_NT


def verl_advantages(said: Mapping[str, str], rewards_N: Tensor, mask_NT: Tensor) -> Tensor:
    kind = said["algorithm.adv_estimator"]
    by_std = said.get("algorithm.norm_adv_by_std_in_grpo", "True") == "True"
    groups_N, lengths_N = torch.tensor(GROUPS), mask_NT.sum(1).to(rewards_N)
    found_N = torch.zeros_like(rewards_N)
    for group in set(GROUPS):
        at = groups_N == group
        r, n = rewards_N[at], int(at.sum())
        std = r.std() + 1e-6
        center = r - r.mean()
        if kind == "grpo":
            found_N[at] = center / std if by_std else center
        elif kind == "rloo":
            found_N[at] = center * n / (n - 1)
        elif kind == "opo":
            found_N[at] = r - (lengths_N[at] * r).sum() / lengths_N[at].sum()
        elif kind == "grpo_passk":
            top = r.topk(2).values
            best = torch.zeros_like(r)
            best[r.argmax()] = (top[0] - top[1]) / (std if by_std else 1.0)
            found_N[at] = best
        else:  # reinforce_plus_plus_baseline, gpg
            found_N[at] = center
    if kind == "gpg":
        found_N = found_N * len(found_N) / max(1, int((rewards_N != 0).sum()))
    advantages_NT = found_N[:, None] * mask_NT
    if kind == "reinforce_plus_plus_baseline":
        valid = advantages_NT[mask_NT]
        advantages_NT = (advantages_NT - valid.mean()) * torch.rsqrt(valid.var() + 1e-8) * mask_NT
    return advantages_NT


VERL_WORDS: dict[str, Sequence[str]] = {
    "algorithm.adv_estimator": ("grpo", "grpo", "rloo", "opo", "grpo_passk", "reinforce_plus_plus_baseline", "gpg"),
    "algorithm.norm_adv_by_std_in_grpo": ("True", "False"),
    "algorithm.use_kl_in_reward": ("False", "True"),
    "algorithm.kl_penalty": ("kl", "k1", "abs", "mse", "low_var_kl"),
    "algorithm.kl_ctrl.kl_coef": ("0.001", "0.2"),
    "algorithm.rollout_correction.rollout_is": ("token", "sequence"),
    "algorithm.rollout_correction.rollout_is_threshold": ("1.5", "3.0"),
    "actor_rollout_ref.actor.use_kl_loss": ("True", "False"),
    "actor_rollout_ref.actor.kl_loss_coef": ("0.001", "0.3"),
    "actor_rollout_ref.actor.kl_loss_type": ("low_var_kl", "k3+", "kl", "mse", "abs", "k1+"),
    "actor_rollout_ref.actor.clip_ratio": ("0.1", "0.3"),
    "actor_rollout_ref.actor.clip_ratio_low": ("0.05", "0.25"),
    "actor_rollout_ref.actor.clip_ratio_high": ("0.28", "0.4"),
    "actor_rollout_ref.actor.clip_ratio_c": ("1.5", "10.0"),
    "actor_rollout_ref.actor.loss_agg_mode": (
        "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm",
    ),
    "actor_rollout_ref.actor.entropy_coeff": ("0", "0.01"),
    "actor_rollout_ref.actor.policy_loss.loss_mode": ("vanilla", "vanilla", "gspo", "gpg", "geo_mean"),
    "reward_model.overlong_buffer.enable": ("True", "False"),
}  # fmt: skip


def verl_case(chance: random.Random) -> dict[str, str]:
    said = {"algorithm.adv_estimator": "grpo", "data.max_response_length": str(LONGEST)}
    said |= {name: chance.choice(values) for name, values in VERL_WORDS.items() if chance.random() < 0.5}
    if said.get("reward_model.overlong_buffer.enable") == "True":
        said |= {"reward_model.overlong_buffer.len": "4", "reward_model.overlong_buffer.penalty_factor": "0.5"}
    if said.get("algorithm.use_kl_in_reward") == said.get("actor_rollout_ref.actor.use_kl_loss") == "True":
        del said["algorithm.use_kl_in_reward"]  # covey has one penalty, and says so: tested below
    return dict(chance.sample([*said.items()], len(said)))


# --- OpenRLHF and TorchRL


def openrlhf(said: Mapping[str, str], x: Data) -> Tensor:
    """PolicyLoss, KL loss and advantages of OpenRLHF, token means over the batch."""
    groups_N, found_N = torch.tensor(GROUPS), torch.zeros_like(x.rewards_N)
    kind = said["--advantage_estimator"]
    for group in set(GROUPS):
        at = groups_N == group
        r = x.rewards_N[at]
        others = (r.sum() - r) / (len(r) - 1)
        found_N[at] = {
            "rloo": r - others, "group_norm": (r - r.mean()) / (r.std() + 1e-9), "dr_grpo": r - r.mean(),
            "reinforce_baseline": r - r.mean(),
        }[kind]  # fmt: skip
    advantages_NT = found_N[:, None] * x.mask_NT
    if kind == "reinforce_baseline":
        valid = advantages_NT[x.mask_NT]
        advantages_NT = (advantages_NT - valid.mean()) * valid.var(unbiased=False).clamp(min=1e-8).rsqrt()
    log_p_NT = x.log_probs()
    low, high = map(float, said.get("--eps_clip_low_high", " ".join([said.get("--eps_clip", "0.2")] * 2)).split())
    ratio_NT = (log_p_NT - x.old_NT).clamp(-20, 20).exp()
    loss_NT = -torch.minimum(ratio_NT * advantages_NT, ratio_NT.clamp(1 - low, 1 + high) * advantages_NT)
    if "--dual_clip" in said:
        bounded_NT = torch.minimum(loss_NT, -float(said["--dual_clip"]) * advantages_NT)
        loss_NT = torch.where(advantages_NT < 0, bounded_NT, loss_NT)
    term = verl_mean(loss_NT, x.mask_NT, "token-mean")
    if coef := float(said["--init_kl_coef"]):  # with --use_kl_loss alone is the formula one that covey has
        q_NT = log_p_NT - x.ref_NT
        kl_NT = {"k1": q_NT, "k2": q_NT.square() / 2, "k3": (-q_NT).exp() - 1 + q_NT}[said.get("--kl_estimator", "k1")]
        term = term + coef * verl_mean(kl_NT, x.mask_NT, "token-mean")
    if "--entropy_loss_coef" in said:
        term = term - float(said["--entropy_loss_coef"]) * verl_mean(x.entropy(), x.mask_NT, "token-mean")
    return term


OPENRLHF_WORDS: dict[str, Sequence[str]] = {
    "--advantage_estimator": ("rloo", "group_norm", "dr_grpo", "reinforce_baseline"),
    "--eps_clip": ("0.1", "0.3"),
    "--eps_clip_low_high": ("0.2 0.3", "0.1 0.4"),
    "--dual_clip": ("2", "10.0"),
    "--init_kl_coef": ("0", "1e-3", "0.2"),
    "--kl_estimator": ("k1", "k2", "k3"),
    "--entropy_loss_coef": ("0.01",),
}


def openrlhf_case(chance: random.Random) -> dict[str, str]:
    said = {"--advantage_estimator": "group_norm", "--init_kl_coef": "0.01", "--use_kl_loss": ""}
    said |= {name: chance.choice(values) for name, values in OPENRLHF_WORDS.items() if chance.random() < 0.6}
    return dict(chance.sample([*said.items()], len(said)))


def torchrl(said: Mapping[str, str], x: Data) -> Tensor:
    """GRPOLoss as the sync/async document has it: z-scores with a floor, clip 0.2, two penalties, entropy."""
    groups_N, found_N = torch.tensor(GROUPS), torch.zeros_like(x.rewards_N)
    rewards_N, log_p_NT = x.rewards_N, x.log_probs()
    names = ("train.kl_to_ref_coeff", "policy.kl_coef")
    is_meant = "train.kl_coef_in_loss" in said and "train.use_kl_to_ref" not in said
    coef = next((float(said[name]) for name in names if name in said), 0.01 if is_meant else 0.0)
    coef = 0.0 if said.get("train.use_kl_to_ref") == "False" else coef
    in_loss = said.get("train.kl_coef_in_loss", "True") == "True"
    if not in_loss:
        rewards_N = rewards_N - coef * ((x.old_NT - x.ref_NT) * x.mask_NT).sum(1)
    for group in set(GROUPS):
        r = rewards_N[groups_N == group]
        found_N[groups_N == group] = (r - r.mean()) / r.std().clamp(min=1e-6)
    ratio_NT, advantages_NT = (log_p_NT - x.old_NT).exp(), found_N[:, None]
    gain_NT = torch.minimum(ratio_NT * advantages_NT, ratio_NT.clamp(0.8, 1.2) * advantages_NT)
    gap_NT = x.ref_NT - log_p_NT
    loss_NT = -gain_NT + (coef * (gap_NT.expm1() - gap_NT) if in_loss else 0.0)
    loss_NT = loss_NT + float(said.get("train.kl_to_inference_coeff", "0.01")) * (x.sampler_NT - log_p_NT)
    loss_NT = loss_NT - float(said.get("train.entropy_coeff", "0.0001")) * x.entropy()
    return verl_mean(loss_NT, x.mask_NT, "token-mean")


TORCHRL_WORDS: dict[str, Sequence[str]] = {
    "train.use_kl_to_ref": ("True", "False"),
    "train.kl_to_ref_coeff": ("0.0", "0.05", "0.3"),
    "train.kl_coef_in_loss": ("True", "False"),
    "train.kl_to_inference_coeff": ("0.0", "0.2"),
    "train.entropy_coeff": ("0.0", "0.01"),
    "optimizer.lr": ("2e-5",),
}


def torchrl_case(chance: random.Random) -> dict[str, str]:
    said = {name: chance.choice(values) for name, values in TORCHRL_WORDS.items() if chance.random() < 0.6}
    return dict(chance.sample([*said.items()], len(said)))


# --- prime-rl


def prime_rl(said: Mapping[str, str], x: Data) -> Tensor:
    """The loss of prime-rl's trainer: ratios to the sampler, a token mean, all tokens near the sampler."""

    def get(name: str, default: str) -> float:
        return float(said.get(f"--trainer.loss.{name}", default))

    kind = said.get("--orchestrator.advantage.type", "default")
    weighted = said.get("--orchestrator.advantage.length_weighted_mean") == "true"
    advantages_NT = torch.zeros_like(x.old_NT)
    for group in set(GROUPS):
        rows = [row for row, own in enumerate(GROUPS) if own == group]
        rewards = [float(x.rewards_N[row]) for row in rows]
        lengths = [int(x.mask_NT[row].sum()) for row in rows]
        mean = sum(rewards) / len(rewards)
        if kind != "max_rl" and weighted:
            mean = sum(n * reward for n, reward in zip(lengths, rewards, strict=True)) / sum(lengths)
        for row, reward in zip(rows, rewards, strict=True):
            advantages_NT[row] = (reward - mean) / (mean if kind == "max_rl" else 1.0)
    log_p_NT = x.log_probs()
    gap_NT = log_p_NT - x.sampler_NT
    moved_NT = log_p_NT.detach().exp() - x.sampler_NT.exp()
    too_high_NT = (advantages_NT > 0) & (moved_NT > get("dppo_mask_high", "0.2"))
    too_low_NT = (advantages_NT <= 0) & (-moved_NT > get("dppo_mask_low", "0.2"))
    gain_NT = torch.where(too_high_NT | too_low_NT, 0.0, get("adv_tau", "1.0") * advantages_NT * gap_NT.exp())
    loss_NT = get("kl_tau", "0.001") * gap_NT.square() - gain_NT
    return torch.where(x.mask_NT, loss_NT, 0.0).sum() / x.mask_NT.sum()


PRIME_RL_WORDS: dict[str, Sequence[str]] = {
    "--orchestrator.advantage.type": ("default", "grpo", "max_rl"),
    "--orchestrator.advantage.length_weighted_mean": ("true", "false"),
    "--trainer.loss.type": ("default",),
    "--trainer.loss.dppo_mask_low": ("0.01", "0.05", "0.3"),
    "--trainer.loss.dppo_mask_high": ("0.01", "0.1", "0.4"),
    "--trainer.loss.adv_tau": ("0.5", "2.0"),
    "--trainer.loss.kl_tau": ("0.0", "0.1", "0.01"),
}


def prime_rl_case(chance: random.Random) -> dict[str, str]:
    said = {name: chance.choice(values) for name, values in PRIME_RL_WORDS.items() if chance.random() < 0.6}
    return dict(chance.sample([*said.items()], len(said)))


# --- covey's side

PROGRAMS = {
    "verl": ("python3", "-m", "verl.trainer.main_ppo"),
    "openrlhf": ("deepspeed", "--module", "openrlhf.cli.train_ppo_ray"),
    "torchrl": ("python", "sota-implementations/grpo/grpo-sync.py"),
    "prime-rl": ("uv", "run", "rl"),
}


def tokens_of(system: str, said: Mapping[str, str]) -> list[str]:
    flags = [
        word
        for name, value in said.items()
        for word in ([name, *value.split()] if name[0] == "-" else [f"{name}={value}"])
    ]
    return [*PROGRAMS[system], *flags]


def algorithm_of(words: Mapping[str, str], base: Mapping[str, object]) -> AlgorithmConfig:
    """The settings of the algorithm that covey's words mean."""
    found = AlgorithmConfig()
    for name, value in base.items():
        setattr(found, name, value)
    for name, word in words.items():
        section, _, field = name.partition(".")
        if section == "algorithm" and field:
            value = yaml.safe_load(word.partition("=")[2].replace(":", ": ").replace(",", ", "))
            kind = type(getattr(AlgorithmConfig(), field))
            setattr(
                found,
                field,
                kind(value)
                if kind in (int, float)
                else float(value)
                if field in FLOATS and value is not None
                else value,
            )
    return found


FLOATS = ("target_kl", "correction_min", "advantage_clip")


def of_covey(algorithm: AlgorithmConfig, x: Data) -> Tensor:
    """Loss of a step of these rollouts, from rewards on."""
    objective = build_objective(algorithm, norm_length=LONGEST)
    credit = build_credit(algorithm)
    n, lengths_N = len(GROUPS), x.mask_NT.sum(1)
    log_p_NT = x.log_probs()
    given = {"old_log_probs_NT": x.old_NT, "sampler_log_probs_NT": x.sampler_NT, "mask_NT": x.mask_NT}
    given |= {
        "ref_log_probs_NT": x.ref_NT,
        "entropy_NT": x.entropy(),
        "advantages": torch.zeros(n, dtype=torch.float64),
    }
    inputs = ObjectiveInputs(log_probs_NT=log_p_NT, **given)
    # Rewards: shaped, less a penalty
    info = scores([0.0] * n, GROUPS, lengths=lengths_N)
    rewards_N = x.rewards_N
    for shape in credit.shaping:
        rewards_N = shape_rewards(shape, rewards_N, info)
    if algorithm.kl_in == "reward" and algorithm.kl_coef:
        at_old = ObjectiveInputs(log_probs_NT=x.old_NT, **given)
        rewards_N = rewards_N - algorithm.kl_coef * objective.kl_values(at_old).sum(1)
    advantages_N = credit.estimate(scores(rewards_N, GROUPS, lengths=lengths_N, parts=rewards_N[:, None]))
    inputs = ObjectiveInputs(log_probs_NT=log_p_NT, **{**given, "advantages": advantages_N})
    statistics = objective.batch_statistics(inputs, 0) if objective.needs_batch_selection else None
    totals = count_totals(x.mask_NT)
    return objective(inputs, totals, algorithm.kl_coef, algorithm.entropy_coef, statistics)[0]


TORCHRL_BASE = {
    "advantage_options": {"eps_mode": "floor"}, "loss_options": {"eps_low": 0.2, "eps_high": 0.2},
    "kl_gradient": "naive", "sampler_kl_estimator": "k1_forward",
}  # fmt: skip
"""What differs from the defaults in algorithm=two_kl, which the recipe of the translation takes."""


@pytest.mark.parametrize(
    ("system", "case", "formulas", "count"),
    [
        ("verl", verl_case, verl, 40),
        ("openrlhf", openrlhf_case, openrlhf, 20),
        ("torchrl", torchrl_case, torchrl, 20),
        ("prime-rl", prime_rl_case, prime_rl, 40),
        pytest.param("verl", verl_case, verl, 200, marks=pytest.mark.slow),
        pytest.param("openrlhf", openrlhf_case, openrlhf, 60, marks=pytest.mark.slow),
        pytest.param("torchrl", torchrl_case, torchrl, 60, marks=pytest.mark.slow),
        pytest.param("prime-rl", prime_rl_case, prime_rl, 200, marks=pytest.mark.slow),
    ],
)
def test_loss_and_gradient_are_those_of_the_source(
    system: str, case: Callable[[random.Random], dict[str, str]], formulas: Loss, count: int
) -> None:
    chance = random.Random(7)
    for number in range(count):
        said, x = case(chance), data(number)
        found = translate(tokens_of(system, said))
        algorithm = algorithm_of(found.words, TORCHRL_BASE if system == "torchrl" else {})
        if system != "torchrl":
            validate(Config(algorithm=algorithm, group_size=4, updates_per_batch=2))
        theirs, ours = formulas(said, x), of_covey(algorithm, x)
        (wanted,) = torch.autograd.grad(theirs, x.logits_NTV)
        (gradient,) = torch.autograd.grad(ours, x.logits_NTV)
        assert abs((ours - theirs).item()) <= TOLERANCE * max(1.0, abs(theirs.item())), (said, found.words)
        assert float((gradient - wanted).norm()) <= TOLERANCE * max(1.0, float(wanted.norm())), (said, found.words)
        assert float(wanted.norm()) > 1e-4, said
        # In any order
        again = translate(tokens_of(system, dict(chance.sample([*said.items()], len(said)))))
        assert again.words == found.words
