"""The presets that reproduce the documents' formulas, from YAML to advantages, loss and gradient."""

from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from covey.algorithm.aggregation import count_totals
from covey.algorithm.build import build_objective
from covey.algorithm.credit.advantages import ADVANTAGES
from covey.algorithm.credit.scores import scores
from covey.algorithm.loss_inputs import ObjectiveInputs, clamp_symmetric
from covey.algorithm.settings import AlgorithmConfig
from covey.config.shelves import former, presets

from .cases import Case, check, golden, tensor
from .reference_masked_policy import fill_kl, fill_log_probs, fill_mask

READINGS: dict[str, dict[Any, dict[str, Any]]] = {
    "kl_per_sequence": {
        "sequence_sum": {"kl_aggregation": "seq_mean_token_sum"},
        "sequence_mean": {"kl_aggregation": "seq_mean_token_mean"},
    },
    "ddof": {0: {"advantage_options": {"ddof": 0}}, 1: {"advantage_options": {"ddof": 1}}},
    "kl": {"k1": {"kl_estimator": "k1"}, "k3": {"kl_estimator": "k3"}},
    "zscore": {"formula": {}, "code": {"advantage_options": {"ddof": 1, "eps": 1e-8}}},
    "kl_reduction": {
        "masked_mean": {"kl_aggregation": "seq_mean_token_mean"},
        "masked_sum": {"kl_aggregation": "seq_mean_token_sum"},
    },
    # What every reading shares, and the preset must hold already.
    "beta": {0.04: {}, 0.05: {}},
    "eps": {1e-8: {}, 0.2: {}},
    "kl_to_ref_coeff": {0.01: {}},
    "kl_to_inference_coeff": {0.02: {}},
    "kl_in_loss": {True: {}},
}


def algorithm(preset: str, *changes: dict[str, Any]) -> AlgorithmConfig:
    chosen = OmegaConf.load(presets("algorithm")[preset])
    del chosen["defaults"]
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(AlgorithmConfig), chosen, *changes))  # type: ignore[return-value]


def advantages_of(config: AlgorithmConfig, rewards: Any, groups: list[Any]) -> Tensor:
    estimated_N = ADVANTAGES[config.advantage](scores(rewards, groups), **config.advantage_options)
    return clamp_symmetric(estimated_N, config.advantage_clip)


def loss_of(config: AlgorithmConfig, inputs: ObjectiveInputs) -> Tensor:
    objective = build_objective(config, norm_length=4)
    return objective(inputs, count_totals(inputs.mask_NT), config.kl_coef, config.entropy_coef)[0]


@golden("document_formulas")
def test_a_document_preset_has_the_golden_advantages_loss_and_gradient(case: Case) -> None:
    readings = [READINGS[name][value] for name, value in case.params.items() if name != "document"]
    config = algorithm(former("algorithm")[f"{case.params['document']}_document"], *readings)
    log_probs_NT = tensor(case.inputs["log_probs"]).requires_grad_(True)
    old_NT = tensor(case.inputs.get("old_log_probs", case.inputs["log_probs"]))
    if "rewards" in case.inputs:
        advantages_N = advantages_of(config, case.inputs["rewards"], case.inputs["groups"])
        check(advantages_N, case, "advantages")
    else:
        advantages_N = tensor(case.inputs["advantages"])
    inputs = ObjectiveInputs(
        log_probs_NT=log_probs_NT,
        old_log_probs_NT=old_NT,
        sampler_log_probs_NT=old_NT,
        advantages=advantages_N,
        mask_NT=tensor(case.inputs["mask"]) > 0,
        ref_log_probs_NT=tensor(case.inputs["ref_log_probs"]),
    )
    loss = loss_of(config, inputs)
    check(loss, case, "loss")
    check(torch.autograd.grad(loss, log_probs_NT)[0], case, "grad_log_probs")


@golden("masked_policy", where=lambda case: case.params["quantity"] == "loss")
def test_the_infill_preset_has_the_golden_advantages_loss_and_gradient(case: Case) -> None:
    config = algorithm("batch_std_reinforce", READINGS["kl_reduction"][case.params["kl_reduction"]])
    logits_BTV, ref_BTV = tensor(case.inputs["logits"]).requires_grad_(True), tensor(case.inputs["ref_logits"])
    positions_BM, samples_BGM = torch.tensor(case.inputs["masked_positions"]), torch.tensor(case.inputs["samples"])
    group_size = samples_BGM.shape[1]
    rewards_N = tensor(case.inputs["rewards"]).flatten()
    advantages_N = advantages_of(config, rewards_N, [n // group_size for n in range(len(rewards_N))])
    log_probs_NM = fill_log_probs(logits_BTV, positions_BM, samples_BGM)
    inputs = ObjectiveInputs(
        log_probs_NT=log_probs_NM,
        old_log_probs_NT=log_probs_NM.detach(),
        sampler_log_probs_NT=log_probs_NM.detach(),
        advantages=advantages_N,
        mask_NT=fill_mask(positions_BM).repeat_interleave(group_size, 0),
        full_kl_NT=fill_kl(logits_BTV, ref_BTV, positions_BM).repeat_interleave(group_size, 0),
    )
    loss = loss_of(config, inputs)
    check(advantages_N, case, "advantages")
    check(loss, case, "loss")
    check(torch.autograd.grad(loss, logits_BTV)[0], case, "grad_logits")
