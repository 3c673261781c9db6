"""Watch the routers of mixtures of experts: balance and load.

Only positions that predict loss tokens are counted, so that no number depends on the layout of rollouts. The
balancing loss is that of each rollout by itself (DeepSeek-V3, arXiv 2412.19437): the product of two means over a whole
batch would be no sum over its micro-batches.

Shapes: T tokens of a pass, L loss tokens, N rollouts, E experts, K experts of a token.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from covey.policy.attention.forked import ForkedLayout, Held
from covey.policy.models.probe import tell
from covey.policy.policy import Policy
from covey.system import collectives
from covey.types import MicroBatch

RECORDED = "router_logits"
"""Name of logits in transformers' tables of recordable outputs."""
Returned = list[tuple[Any, ...]]
"""Outputs of a router in a pass, one for each call."""


@dataclass(frozen=True, slots=True)
class Router:
    module: nn.Module
    place: int
    """Index of the logits in its output."""


@dataclass(slots=True)
class ExpertWatch:
    """The routers of a policy, and the tokens of each expert."""

    routers: Sequence[Router]
    coef: float
    """Coefficient of the balancing loss, 0 for none."""
    num_chosen: int
    """Experts of a token, for routers that do not return them."""
    load: dict[int, Tensor] = field(default_factory=dict)
    """Tokens of each expert (E,) since they were last told, by router."""

    @classmethod
    def of(cls, policy: Policy, coef: float | None) -> "ExpertWatch":
        """Watch a policy's routers; None takes the model's own coefficient.

        ValueError for a coefficient without routers.
        """
        model = policy.causal_lm
        routers, kind = list(find_routers(model)), type(model).__name__
        if coef and not routers:
            raise ValueError(f"algorithm.router_aux_loss_coef={coef} needs a mixture of experts, {kind} has no routers")
        config = model.config.get_text_config(decoder=True)
        own = getattr(config, "router_aux_loss_coef", None) if hasattr(config, "output_router_logits") else None
        chosen = float(own or 0.0) if coef is None else coef
        if routers and chosen:
            tell(f"{kind}: experts are balanced (algorithm.router_aux_loss_coef={chosen:g})")
        return cls(routers, chosen if routers else 0.0, getattr(config, "num_experts_per_tok", None) or 1)

    @contextmanager
    def watching(self) -> Iterator[list[Returned]]:
        """Note inside what each router returns."""
        found: list[Returned] = [[] for _ in self.routers]
        hooks = [
            router.module.register_forward_hook(lambda module, given, out, noted=noted: noted.append(_as_tuple(out)))
            for router, noted in zip(self.routers, found, strict=True)
        ]
        try:
            yield found
        finally:
            for hook in hooks:
                hook.remove()

    def weigh(self, found: Sequence[Returned], batch: MicroBatch) -> Tensor | None:
        """Note the load, and return the balancing loss.

        (L,): that of each loss token's rollout, coefficient included; None without one.
        """
        num_calls, place_L = _places(batch)
        terms = [self._weigh(number, calls[:num_calls], place_L, batch) for number, calls in enumerate(found)]
        known = [term_N for term_N in terms if term_N is not None]
        return self.coef * torch.stack(known).mean(dim=0).index_select(0, batch.row_L) if known else None

    def tell_load(self) -> dict[str, float]:
        """Return metrics of the load on all ranks, and forget it. Collective."""
        of_ranks = collectives.all_gather({number: load_E.tolist() for number, load_E in self.load.items()})
        self.load = {}
        numbers = sorted({number for of_rank in of_ranks for number in of_rank})
        loads = [[sum(c) for c in zip(*(r[n] for r in of_ranks if n in r), strict=True)] for n in numbers]
        if not loads:
            return {}
        return {
            "moe/load_max": max(max(load) * len(load) / sum(load) for load in loads),
            "moe/dead_fraction": sum(load.count(0) for load in loads) / sum(map(len, loads)),
        }

    def _weigh(self, number: int, calls: Returned, place_L: Tensor, batch: MicroBatch) -> Tensor | None:
        """Return E sum_e f_e P_e of each rollout, (N,).

        f_e is the share of its tokens that go to expert e, P_e the mean of its probability.
        """
        logits_TE = torch.cat([out[self.routers[number].place].flatten(0, -2) for out in calls])
        chosen_TK = _chosen(calls)
        if chosen_TK is None or len(chosen_TK) != len(logits_TE):
            chosen_TK = logits_TE.detach().topk(self.num_chosen).indices
        chosen_LK = chosen_TK.index_select(0, place_L)
        num_experts, ones_LK = logits_TE.shape[1], torch.ones_like(chosen_LK)
        load_E = chosen_LK.new_zeros(num_experts).index_add_(0, chosen_LK.flatten(), ones_LK.flatten())
        self.load[number] = self.load[number] + load_E if number in self.load else load_E
        if not self.coef:
            return None
        wide = torch.promote_types(logits_TE.dtype, torch.float32)
        probability_LE = logits_TE.index_select(0, place_L).to(wide).softmax(dim=-1)
        none_NE = probability_LE.new_zeros(batch.num_rows, num_experts)
        row_L = batch.row_L
        tokens_N1 = none_NE.new_zeros(batch.num_rows, 1).index_add_(0, row_L, torch.ones_like(row_L)[:, None].to(wide))
        entry_LK = row_L[:, None] * num_experts + chosen_LK
        count_NE = none_NE.flatten().index_add(0, entry_LK.flatten(), ones_LK.flatten().to(wide)).view_as(none_NE)
        probability_NE = none_NE.index_add(0, row_L, probability_LE)
        return num_experts * (count_NE / tokens_N1 * probability_NE / tokens_N1).sum(dim=1)


def find_routers(model: PreTrainedModel) -> Iterator[Router]:
    """Yield the modules that transformers records router logits of."""
    seen: set[int] = set()
    for part in model.modules():
        recorded = part.can_record_outputs.get(RECORDED, []) if isinstance(part, PreTrainedModel) else []
        for each in recorded if isinstance(recorded, list | tuple) else [recorded]:
            for name, module in part.named_modules():
                is_named = each.layer_name is None or each.layer_name in name
                if isinstance(module, each.target_class) and is_named and id(module) not in seen:
                    seen.add(id(module))
                    yield Router(module, each.index)


def _as_tuple(out: object) -> tuple[Any, ...]:
    return out if isinstance(out, tuple) else (out,)


def _chosen(calls: Returned) -> Tensor | None:
    """Return the experts that a router returned, (T, K)."""
    whole = [
        [part for part in out if isinstance(part, Tensor) and part.dtype == torch.int64 and part.dim() > 1]
        for out in calls
    ]
    return torch.cat([parts[0].flatten(0, -2) for parts in whole]) if all(whole) else None


def _places(batch: MicroBatch) -> tuple[int, Tensor]:
    """Count a layout's passes, and place the loss tokens in them, (L,)."""
    if not isinstance(batch.layout, ForkedLayout):
        return 1, batch.source_L
    read: list[Tensor] = []

    def note(ids_RQ: Tensor, held: Held, keeps: bool) -> tuple[Tensor, Held]:
        read.append(ids_RQ.flatten())
        return ids_RQ[..., None], {}

    stream_T = torch.arange(batch.input_ids_BT.shape[1], device=batch.source_L.device)
    batch.layout.read(note, stream_T[None])
    token_P = torch.cat(read)
    # Padding repeats a token further right, so that each is first found in its own place
    first_T = torch.full_like(stream_T, len(token_P))
    first_T = first_T.scatter_reduce(0, token_P, torch.arange(len(token_P), device=token_P.device), "amin")
    return len(read), first_T.index_select(0, batch.source_L)
