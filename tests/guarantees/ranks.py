"""Updates computed by several processes: torchrun starts this file, each process takes its share of the groups.

    torchrun --nproc-per-node 2 -m tests.guarantees.ranks FOLDER NAME NAME ...

Rank 0 writes FOLDER/updates.pt: {(name of the case, strategy): (gradient, metrics)}.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from covey.algorithm.aggregation import AGGREGATIONS
from covey.algorithm.settings import AlgorithmConfig
from covey.policy import sharding
from covey.run.build import shard_policy
from covey.system import collectives
from covey.system import ranks as launch
from covey.types import Batch, Group

from ..support.builders import copied, make_trainer
from .update.episodes import as_branches, changed, episode_groups, rewritten
from .update.updates import (
    EVERY_LOSS,
    MOVING,
    How,
    Tamper,
    Update,
    UpdateCase,
    algorithm_of,
    any_groups,
    batch_of,
    make_case,
    policy_of,
    reference_of,
)

STRATEGIES = ("ddp", "fsdp")
LOCAL_COUNTS = "local_counts"
"""The mistake of taking a mean on each rank, and then the mean of those."""


@cache
def cases() -> dict[str, UpdateCase]:
    """Every loss and aggregation, what is decided over the whole batch, unequal random groups; by name."""
    found = {f"loss={loss}": make_case(algorithm=algorithm_of(loss)) for loss in EVERY_LOSS}
    found |= {
        f"aggregation={mode}": make_case(algorithm=AlgorithmConfig(aggregation=mode)) for mode in sorted(AGGREGATIONS)
    }
    found |= {
        "kl": make_case(algorithm=AlgorithmConfig(kl_coef=0.1)),
        "kl_full": make_case(algorithm=AlgorithmConfig(kl_coef=0.1, kl_estimator="full")),
        "kl_full_lora": make_case(algorithm=AlgorithmConfig(kl_coef=0.1, kl_estimator="full"), lora_rank=2),
        "m2po": make_case(algorithm=AlgorithmConfig(m2po_threshold=0.05)),
        "entropy": make_case(algorithm=AlgorithmConfig(entropy_coef=0.01, high_entropy_fraction=0.4)),
    }
    found["episodes"] = make_case(algorithm=AlgorithmConfig(kl_coef=0.1), groups=branching_episodes())
    found |= {f"random_{seed}": make_case(groups=any_groups(seed)) for seed in (1, 2, 3)}
    for architecture in ("qwen2", "qwen3", "llama", "mistral"):
        for rank in (0, 2):
            name = f"{architecture}_lora" if rank else architecture
            found[name] = make_case(architecture, torch.float32, AlgorithmConfig(kl_coef=0.1), lora_rank=rank)
    return found | _fills()


def branching_episodes() -> list[Group]:
    """Three groups, of rows and of both kinds of branches."""
    plain, branched, other = episode_groups(0)[:1], episode_groups(0)[1:], episode_groups(1)[:1]
    return [*plain, *changed(branched, as_branches), *changed(other, rewritten)]


def _fills() -> dict[str, UpdateCase]:
    """Of policies that fill in, with the exact KL."""
    exact = AlgorithmConfig(kl_coef=0.1, kl_estimator="full")
    return {
        "bert": make_case("bert", algorithm=exact),
        "roberta_lora": make_case("roberta", algorithm=exact, lora_rank=2),
        "modernbert": make_case("modernbert", torch.float32, exact),
        "bert_random": make_case("bert", groups=any_groups(1)),
    }


def how_of(name: str, share: tuple[int, int]) -> How:
    """Small micro-batches, so that ranks have several, and unequally many; some cases with checkpointing too."""
    checkpointing = name in ("qwen2", "kl_full", "qwen3_lora", "bert")
    return How("shared", budget=20, chunk=7, checkpointing=checkpointing, share=share)


def update_on_ranks(case: UpdateCase, how: How, strategy: str, tamper: Tamper = lambda batch: batch) -> Update:
    """The last update of this rank's share, with the gradient of all."""
    policy, reference = copied(policy_of(case.architecture, case.dtype, case.lora_rank)), None
    if how.checkpointing:
        policy.causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    reference = reference_of(case, policy)
    if reference.policy.model is not policy.model:
        reference = replace(reference, policy=copied(reference.policy))
    policy, reference = shard_policy(policy, reference, strategy)
    trainer = make_trainer(
        policy,
        case.algorithm,
        MOVING,
        reference,
        updates_per_batch=case.num_updates,
        sampling=case.sampling,
        logprob_chunk=how.chunk,
    )
    metrics = trainer.step(tamper(batch_of(case, how)), 0)
    sharding.reshard(policy)
    return Update(whole_gradient([p for p in policy.model.parameters() if p.requires_grad]), metrics)


def local_counts(batch: Batch) -> Batch:
    """Divides by what this rank has, and by the number of ranks."""
    ranks = collectives.world_size()
    tokens = sum(len(micro_batch.target_L) for micro_batch in batch.micro_batches)
    return replace(batch, num_loss_tokens=max(tokens, 1) * ranks)


def whole_gradient(parameters: list[torch.nn.Parameter]) -> Tensor:
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    return torch.cat([sharding.whole(gradient).flatten().double() for gradient in gradients])


def updates_of(names: Sequence[str]) -> dict[tuple[str, str], tuple[Tensor, dict[str, float]]]:
    """What this rank comes to for each case and strategy, and by the mistake."""
    share = (collectives.rank(), collectives.world_size())
    updates = {
        (name, strategy): update_on_ranks(cases()[name], how_of(name, share), strategy)
        for name in names
        for strategy in STRATEGIES
    }
    plain = cases()["loss=clip"]
    updates[LOCAL_COUNTS, "ddp"] = update_on_ranks(plain, how_of("loss=clip", share), "ddp", local_counts)
    return {key: (update.gradient, update.metrics) for key, update in updates.items()}


def main(folder: Path, names: list[str]) -> None:
    with collectives.process_group(60.0):
        found = updates_of(names)
        if collectives.is_main_process():
            torch.save(found, folder / "updates.pt")
        dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
    launch.leave(0)
