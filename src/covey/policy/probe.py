"""What an architecture can do, found out by running it on a few tokens; what a layout would get wrong is refused."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from covey.policy.attention import DENSE, Heads, Layout, Rule
from covey.policy.bidirectional import WHOLE
from covey.policy.policy import Policy, inference

NUM_TOKENS = 8
NOISE = 1e-2
"""Largest difference between training and evaluation mode, in standard deviations of the logits."""


@dataclass(frozen=True, slots=True)
class Recorder:
    """Attention of another layout that notes which layers asked for it, and with what heads."""

    layout: Layout
    layers: set[int] = field(default_factory=set)
    heads: set[Heads] = field(default_factory=set)

    def attend(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, rule: Rule) -> Tensor:
        self.layers.add(layer)
        widths = key_BKTD.shape[-1], value_BKTD.shape[-1]
        # Under autocast values may be of another type than queries and keys.
        dtypes = {tensor.dtype for tensor in (query_BHTD, key_BKTD, value_BKTD)}
        self.heads.update(Heads(dtype, query_BHTD.device.type, *widths, rule.is_plain) for dtype in dtypes)
        return self.layout.attend(layer, query_BHTD, key_BKTD, value_BKTD, rule)


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


def probed(policy: Policy) -> Policy:
    """The policy with what a few tokens show of its architecture: whether its head is plain, where positions begin,
    what the heads of its attention are like.

    ValueError for an architecture that covey cannot train: where a layer mixes tokens by other means than attention
    handed over by transformers, packed rollouts would see each other; where training mode is noisy, the policy that is
    trained is not the one that was sampled.
    """
    model = policy.causal_lm
    kind, layout = type(model).__name__, DENSE if policy.mask_id is None else WHOLE
    recorder = Recorder(layout)
    with inference(model):
        try:
            found = replace(policy, first_position=_first_position(policy, layout))
            logits_TV = _logits(found, recorder)
            hidden_TC = found.hidden(*_probe(policy), layout)[0]
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
        if not torch.allclose(_logits(found, layout), logits_TV, rtol=0.0, atol=NOISE * float(logits_TV.std())):
            raise ValueError(f"model.name needs an architecture without noise in training mode, {kind} has it")
        return replace(found, plain_head=_is_plain(found, hidden_TC, logits_TV), heads=frozenset(recorder.heads))


def _first_position(policy: Policy, layout: Layout) -> int:
    """Where a masked model's position encoding begins: RoBERTa and its kin leave room for the padding token."""
    model = policy.causal_lm
    if policy.mask_id is None:
        return 0
    with policy.autocast():
        expected_TV = model(input_ids=_probe(policy)[0], layout=layout).logits[0]
    padding = model.config.pad_token_id
    for first in dict.fromkeys((0, 0 if padding is None else padding + 1)):
        if torch.equal(_logits(replace(policy, first_position=first), layout), expected_TV):
            return first
    raise ValueError(f"model.name needs positions that are counted through, {type(model).__name__} has others")


def _is_plain(policy: Policy, hidden_TC: Tensor, logits_TV: Tensor) -> bool:
    try:
        return bool(torch.equal(policy.head(hidden_TC), logits_TV))
    except (TypeError, RuntimeError):  # modules that take something else, or stand in another order
        return False


def _logits(policy: Policy, layout: Layout) -> Tensor:
    return policy.logits(*_probe(policy), layout)


def _probe(policy: Policy) -> tuple[Tensor, Tensor]:
    """Token ids and positions of a short input; masked models may give padding tokens positions of their own."""
    config, device = policy.causal_lm.config, policy.causal_lm.device
    ids: Sequence[int] = range(config.vocab_size)
    if policy.mask_id is not None:
        ids = [token_id for token_id in ids if token_id != config.pad_token_id]
    chosen = torch.tensor([list(ids[:NUM_TOKENS])], device=device)
    return chosen, torch.arange(chosen.shape[1], device=device)[None]
