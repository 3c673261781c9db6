"""What an architecture can do, found out by running it on a few tokens; what a layout would get wrong is refused."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from covey.policy.attention import DENSE, Layout, Rule
from covey.policy.policy import inference

NUM_TOKENS = 8
NOISE = 1e-2
"""Largest difference between training and evaluation mode, in standard deviations of the logits."""


@dataclass(frozen=True, slots=True)
class Recorder:
    """Plain causal attention that notes which layers asked for it."""

    layers: set[int] = field(default_factory=set)

    def attend(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, rule: Rule) -> Tensor:
        self.layers.add(layer)
        return DENSE.attend(layer, query_BHTD, key_BKTD, value_BKTD, rule)


def remove_dropout(model: nn.Module) -> None:
    """A policy that is sampled without dropout must be trained without it, or the ratio is noise.

    Some architectures keep the rate in a module of its own, others as a number beside the layers that use it.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def has_plain_head(model: PreTrainedModel) -> bool:
    """Whether logits are just the output embedding of the last hidden state (no scaling, no soft cap).

    ValueError for an architecture that covey cannot train: where a layer mixes tokens by other means than attention
    handed over by transformers, packed rollouts would see each other; where training mode is noisy, the policy that is
    trained is not the one that was sampled.
    """
    kind = type(model).__name__
    recorder = Recorder()
    with inference(model):
        try:
            logits = _logits(model, recorder)
            hidden = model.base_model(**_keywords(model, DENSE)).last_hidden_state
        except ValueError:
            raise
        except Exception as error:  # foreign code, which may trip over the layout in any way
            raise ValueError(f"model.name needs another architecture: {kind} does not run ({error!r})") from error
        num_layers = model.config.num_hidden_layers
        if len(recorder.layers) != num_layers:
            raise ValueError(
                f"model.name needs attention in every layer, {kind} has it in {len(recorder.layers)} of {num_layers}"
            )
        model.train()
        if not torch.allclose(_logits(model, DENSE), logits, rtol=0.0, atol=NOISE * float(logits.std())):
            raise ValueError(f"model.name needs an architecture without noise in training mode, {kind} has it")
        return bool(torch.equal(model.get_output_embeddings()(hidden), logits))


def _logits(model: PreTrainedModel, layout: Layout) -> Tensor:
    return model(**_keywords(model, layout)).logits


def _keywords(model: PreTrainedModel, layout: Layout) -> dict[str, object]:
    probe = torch.arange(min(NUM_TOKENS, model.config.vocab_size), device=model.device)[None]
    return {"input_ids": probe, "position_ids": probe, "layout": layout, "use_cache": False}
