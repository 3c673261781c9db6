"""Run an optimiser phase: score, forward, backward, clip, step.

The loss of a micro-batch is divided by the counts of the whole batch, so micro-batch losses add up and the update does
not depend on how the batch was split, packed or spread over ranks.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from covey.algorithm import controllers
from covey.algorithm.controllers import MismatchWatch
from covey.algorithm.loss_inputs import ObjectiveInputs
from covey.algorithm.metrics import LOSS_TERMS, Sums, Update, combine, largest, over_updates, summarise
from covey.algorithm.objective import BatchStatistics, Objective
from covey.algorithm.settings import AlgorithmConfig
from covey.policy import sharding
from covey.policy.experts import ExpertWatch
from covey.policy.head import add_rows_in_place
from covey.policy.logprobs import ReferenceElsewhere, Scoring
from covey.policy.policy import Policy, inference, repeating
from covey.policy.reference import Reference, load_moved, moved_weights, refresh_reference
from covey.policy.teacher import Teacher
from covey.system import collectives
from covey.system.waits.timer import PhaseTimer
from covey.trainer.batch import count_work, pad_micro_batches, totals_of
from covey.trainer.forward import (
    FrozenLogProbs,
    ScoringContext,
    StreamedWork,
    gather_rows,
    objective_inputs,
    precompute_logprob_grad,
    score,
    score_frozen,
    split_statistics,
    stack,
    unscored_prompts,
)
from covey.trainer.optimizer import (
    TrainerSettings,
    build_optimizer,
    clipped_step,
    gradients_first,
    learning_rate,
    load_moments,
    optimizer_state,
    order_of_updates,
)
from covey.types import Batch, RunStopped

Statistics = Sequence[BatchStatistics | None]


class Trainer:
    """Owns the changing state: weights, optimiser, loss scale, coefficients."""

    def __init__(
        self,
        policy: Policy,
        settings: TrainerSettings,
        reference: Reference | ReferenceElsewhere | None = None,
        timer: PhaseTimer | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        self.policy = policy
        self.reference = reference
        self._follower = None if teacher is None else teacher.follower
        self.timer = timer or PhaseTimer()
        self.observer: Callable[[FrozenLogProbs, ObjectiveInputs], None] = lambda part, inputs: None
        """Called with every micro-batch and the objective's inputs of it; changes nothing."""
        self.experts = ExpertWatch.of(policy, settings.algorithm.router_aux_loss_coef)
        self.controller = controllers.kl_controller(settings.algorithm)
        self.entropy = controllers.entropy_control(settings.algorithm)
        self.settings = settings
        needed = self.objective.needs_entropy_gradient
        asked = {"entropy_gradient": needed, "in_place": True}
        scoring = Scoring.of(policy, settings.sampling, settings.logprob_chunk, **asked)
        if scoring.in_place:
            add_rows_in_place(policy.model)
        self.forward = ScoringContext(policy, reference, settings.objective, scoring, teacher)
        sharding.reshard(policy)  # else the parameters below would be the whole ones that a pass has left behind
        self._optimizer = build_optimizer(policy.model, settings.optimizer, settings.kernels)
        self._parameters = [p for p in policy.model.parameters() if p.requires_grad]
        # One scaler for the whole run: a fresh one would forget the scale it had found.
        self._scaler = torch.amp.GradScaler(policy.device.type, enabled=policy.precision == torch.float16)
        # Its scale is made at the first use, which a rank without rows would not come to.
        self._scaler.scale(torch.zeros((), device=policy.device))
        self._nonfinite_in_a_row = 0
        self._mismatch = MismatchWatch(
            settings.algorithm.max_mismatch, settings.max_staleness > 0, settings.algorithm.correction != "none"
        )
        self.ahead = StreamedWork()
        """Streamed work of the coming step."""

    def accumulate(self, part: Batch, step: int) -> None:
        """Add the gradients of early groups of the coming step.

        The counts of `part` stand in for those of the step, which `Trainer.step` brings them to.
        """
        ahead = self.ahead
        if ahead.totals is None:
            ahead.totals = totals_of(part)
            self._optimizer.zero_grad(set_to_none=True)
        assert ahead.totals == totals_of(part), "parts of a step are divided by one count"
        with self.timer.phase("logprobs"):
            prepared = self._prepare(part)
        sums, maxima = self._backward_all(prepared, [None] * len(prepared), part, step)
        ahead.prepared += prepared
        ahead.sums += sums
        ahead.maxima += maxima

    def step(
        self, batch: Batch | Sequence[Batch], step: int, on_before_update: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """Make all updates on a batch or its mini-batches; return metrics.

        Each pass takes the mini-batches in an order of its own. A batch without rows changes nothing.
        `on_before_update` is called just before weights or optimiser change.

        Raises RunStopped, naming prompts, when too many updates in a row were not finite.
        """
        rate = learning_rate(step, self.settings.num_steps, self.settings.optimizer)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        given = [batch] if isinstance(batch, Batch) else batch
        batches = [pad_micro_batches(own, self.policy) for own in given]
        with self.timer.phase("logprobs"):
            prepared = [self._prepare(own) for own in batches]
        updates: list[Update] = []
        ahead: StreamedWork | None
        ahead, self.ahead = self.ahead, StreamedWork()
        early = [part.batch for part in ahead.prepared]
        counts = count_work([*early, *(part for own in batches for part in own.micro_batches)])
        if self.settings.streaming:
            (trained_early,) = collectives.all_sum_ints(sum(part.num_rows for part in early))
            counts["streamed_fraction"] = trained_early / max(1.0, counts["num_rollouts_trained"])
        num_updates = self.settings.updates_per_batch * len(batches)
        for place in order_of_updates(self.settings, step, len(batches)):
            seed = step * num_updates + len(updates)
            updates.append(self._update(prepared[place], batches[place], seed, on_before_update, ahead))
            if ahead is not None:
                ahead = None
                prepared = [[replace(part, is_current=False) for part in own] for own in prepared]
        metrics = over_updates(updates)
        last_pass = over_updates(updates[-len(batches) :])
        num_sequences = sum(own.num_sequences for own in batches)
        self._update_controllers({**last_pass, "skipped": metrics["skipped"]}, num_sequences, step)
        steered = {"kl_coef": self.controller.coef, "entropy_coef": self.entropy.applied}
        # Rows without gradient may have been left out of the work: where that are all, the loss of the batch is 0.
        has_tokens = any(own.num_loss_tokens > 0 for own in batches)
        unmeasured = {"loss": 0.0, "policy_loss": 0.0} if has_tokens else {}
        loads = self.experts.tell_load() if self.experts.routers else {}
        return {**unmeasured, **metrics, "learning_rate": rate, **steered, **counts, **loads}

    def drop_gradients(self) -> None:
        """Free the gradients' memory for sampling."""
        self._optimizer.zero_grad(set_to_none=True)

    def measure(self, batch: Batch, seed: int) -> dict[str, float]:
        """Return `step`'s metrics of log-probs without an update."""
        with self.timer.phase("logprobs"):
            micro_batches = pad_micro_batches(batch, self.policy).micro_batches
            prepared = [score_frozen(self.forward, m, several=False, keep_old=False) for m in micro_batches]
            statistics = self._batch_statistics(prepared, seed)
        sums: list[Sums] = []
        maxima: list[Mapping[str, float]] = []
        with self.timer.phase("logprobs"), inference(self.policy.model):
            for part, chosen in zip(prepared, statistics, strict=True):
                scores = score(self.forward, part)
                if part.batch.num_rows > 0:
                    inputs = objective_inputs(part, scores)
                    self.observer(part, inputs)
                    sums.append(self._loss(inputs, batch, chosen)[1])
                    maxima.append(self._maxima(inputs))
            found = summarise(combine(collectives.all_sum_pairs(sums))) | collectives.all_max(largest(maxima))
        return {name: value for name, value in found.items() if name not in LOSS_TERMS}

    @property
    def objective(self) -> Objective:
        return self.settings.objective

    @property
    def algorithm(self) -> AlgorithmConfig:
        return self.settings.algorithm

    @property
    def loss_scale(self) -> float:
        """Return the loss scale: 1 except in float16."""
        return float(self._scaler.get_scale())

    def sequence_kl(self, batch: Batch) -> list[float]:
        """Return each row's KL to the reference, summed over tokens."""
        values: list[float] = []
        with self.timer.phase("logprobs"):
            for micro_batch in pad_micro_batches(batch, self.policy).micro_batches:
                prepared = score_frozen(self.forward, micro_batch, several=False, keep_old=True, asks_teacher=False)
                assert prepared.old is not None
                if micro_batch.num_rows > 0:
                    inputs = objective_inputs(prepared, prepared.old)
                    values.extend(self.objective.kl_values(inputs).sum(dim=1).tolist())
        return values

    def state_dict(self) -> dict[str, Any]:
        """Return all state but the weights, whole even if sharded. Collective then."""
        return {
            "optimizer_name": self.settings.optimizer.name,
            "optimizer": optimizer_state(self._optimizer, sharded=self.policy.sharded),
            "scaler": self._scaler.state_dict(),
            "kl_coef": self.controller.coef if self.algorithm.target_kl is not None else None,
            "entropy": (self.entropy.coef, self.entropy.active) if self.algorithm.target_entropy is not None else None,
            "nonfinite_in_a_row": self._nonfinite_in_a_row,
            "reference": moved_weights(self.reference, self.algorithm.refreshes_reference),
            "teacher": moved_weights(self._follower, moves=True),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of `state_dict`, from any number of ranks.

        Settings may have changed since: what they say stays, and only what training has found is loaded.
        """
        if state["optimizer_name"] == self.settings.optimizer.name:
            load_moments(self._optimizer, state["optimizer"], sharded=self.policy.sharded)
        if state["scaler"]:  # else the precision had no loss scale
            self._scaler.load_state_dict(state["scaler"])
        if self.algorithm.target_kl is not None and state["kl_coef"]:
            self.controller = self.controller.with_coef(float(state["kl_coef"]))
        if self.algorithm.target_entropy is not None and state["entropy"]:
            coef, active = state["entropy"]
            self.entropy = controllers.EntropyControl(float(coef), bool(active))
        self._nonfinite_in_a_row = int(state["nonfinite_in_a_row"])
        load_moved(self.reference, state["reference"])
        load_moved(self._follower, state.get("teacher", {}))

    def _prepare(self, batch: Batch) -> list[FrozenLogProbs]:
        objective = self.objective
        several = self.settings.updates_per_batch * self.settings.num_mini_batches > 1
        keep_old = several and objective.needs_old
        return [score_frozen(self.forward, m, several=several, keep_old=keep_old) for m in batch.micro_batches]

    def _update(
        self,
        prepared: Sequence[FrozenLogProbs],
        batch: Batch,
        seed: int,
        on_before_update: Callable[[], None],
        ahead: StreamedWork | None,
    ) -> Update:
        """Run backward over all micro-batches, then one step if all is finite.

        `ahead` is what was trained ahead of a step's first update, None for later ones.
        """
        is_first, ahead = ahead is not None, ahead or StreamedWork()
        statistics = self._batch_statistics(prepared, seed)
        if ahead.totals is None:
            self._optimizer.zero_grad(set_to_none=True)
        else:
            ahead.rescale(self._parameters, self.objective.divisors, totals_of(batch))
        lies_first = len(prepared) > 1 and self.policy.device.type == "cpu" and not self.policy.sharded
        with gradients_first(self._parameters if lies_first else []):
            sums, maxima = self._backward_all(prepared, statistics, batch, seed)
        sums, maxima = [*ahead.sums, *sums], [*ahead.maxima, *maxima]
        if not self.policy.sharded:  # else the backward passes have done it
            with self.timer.phase("backward"):
                collectives.sum_gradients(self._parameters)
        on_before_update()
        with self.timer.phase("optimizer"):
            summed = combine(collectives.all_sum_pairs(sums))
            metrics = summarise(summed)
            # Later updates on a batch have moved away themselves.
            if self.settings.are_sampled and is_first:
                self._mismatch.look(metrics.get("mismatch", 0.0))
            metrics |= collectives.all_max(largest(maxima)) | self._optimizer_step(metrics)
        if metrics["skipped"] and not self._is_overflow(metrics):
            early: list[BatchStatistics | None] = [None] * len(ahead.prepared)
            self._count_nonfinite([*ahead.prepared, *prepared], batch, [*early, *statistics])
        elif "loss" in metrics:
            self._nonfinite_in_a_row = 0
        return Update(summed, metrics)

    @contextmanager
    def _dropout_of(self, update: int) -> Iterator[None]:
        """Draw dropout by seed, update and rank, preserving global generators."""
        device = self.policy.device
        name = f"{self.settings.seed}/dropout/{update}/{collectives.rank()}"
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(random.Random(name).getrandbits(63))
            yield

    def _backward_all(
        self, prepared: Sequence[FrozenLogProbs], statistics: Statistics, batch: Batch, seed: int
    ) -> tuple[list[Sums], list[Mapping[str, float]]]:
        self.policy.model.train()
        quiet = repeating(self.policy.deterministic)
        with self.timer.phase("backward"), self._dropout_of(seed), quiet, self.policy.keeping_casts():
            pairs = zip(prepared, statistics, strict=True)
            found = [self._backward(part, batch, chosen) for part, chosen in pairs]
        return [sums for sums, _ in found], [maxima for _, maxima in found]

    def _backward(
        self, part: FrozenLogProbs, batch: Batch, statistics: BatchStatistics | None
    ) -> tuple[Sums, dict[str, float]]:
        self.timer.watchdog.progress()
        predicted_L = precompute_logprob_grad(self.forward, part, lambda given: self._loss(given, batch, statistics)[0])
        with self.experts.watching() as routed:
            scores = score(self.forward, part, predicted_L)
        if part.batch.num_rows == 0:  # made so that other ranks are not left waiting in theirs
            scores.logprob_L.sum().backward()
            return {}, {}
        if routed:
            scores = replace(scores, balance_L=self.experts.weigh(routed, part.batch))
        inputs = objective_inputs(part, scores)
        loss, sums = self._loss(inputs, batch, statistics)
        loss.backward()
        self.observer(part, inputs)
        return sums, self._maxima(inputs)

    def _loss(self, inputs: ObjectiveInputs, batch: Batch, statistics: BatchStatistics | None) -> tuple[Tensor, Sums]:
        """Return this micro-batch's scaled share of the loss, and metrics."""
        loss, sums = self.objective(inputs, totals_of(batch), self.controller.coef, self.entropy.applied, statistics)
        return self._scaler.scale(loss), sums

    def _maxima(self, inputs: ObjectiveInputs) -> dict[str, float]:
        return {name: float(value) for name, value in self.objective.maxima(inputs).items()}

    def _batch_statistics(self, prepared: Sequence[FrozenLogProbs], seed: int) -> list[BatchStatistics | None]:
        """Decide rules over all ranks' batch before the first backward pass."""
        if not self.objective.needs_batch_selection:
            return [None] * len(prepared)
        with self.timer.phase("logprobs"), inference(self.policy.model):
            scored = [(p, score(self.forward, p)) for p in prepared]
        parts = [objective_inputs(p, scores) for p, scores in scored if p.batch.num_rows > 0]
        of_ranks = gather_rows(stack(parts) if parts else None, self.policy.device)
        filled = [inputs for inputs in of_ranks if inputs is not None]
        if not filled:
            return [None] * len(prepared)
        whole = self.objective.batch_statistics(stack(filled), self.settings.seed + seed)
        start = sum(len(i.mask_NT) for i in of_ranks[: collectives.rank()] if i is not None)
        fillers = [None] * (len(prepared) - len(parts))
        return [*split_statistics(whole, parts, start), *fillers]

    def _optimizer_step(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Step unless the loss or a gradient is not finite."""
        if "loss" not in metrics:
            return {"grad_norm": 0.0, "grad_clipped": 0.0, "skipped": 0.0}
        limit, is_finite = self.settings.optimizer.max_grad_norm, math.isfinite(metrics["loss"])
        return clipped_step(self._optimizer, self._scaler, self._parameters, limit, is_finite=is_finite)

    def _is_overflow(self, metrics: Mapping[str, float]) -> bool:
        """Return True for a float16 overflow that the loss scale handles."""
        return self._scaler.is_enabled() and math.isfinite(metrics["loss"]) and self._scaler.get_scale() >= 1

    def _count_nonfinite(self, prepared: Sequence[FrozenLogProbs], batch: Batch, statistics: Statistics) -> None:
        self._nonfinite_in_a_row += 1
        limit = self.settings.optimizer.max_nonfinite_steps
        if self._nonfinite_in_a_row >= limit:
            found = collectives.all_gather(self._nonfinite_prompts(prepared, batch, statistics))
            culprits = ", ".join([name for names in found for name in names][:4]) or "none on its own"
            raise RunStopped(
                f"loss or gradient was not finite {limit} times in a row (optimizer.max_nonfinite_steps); "
                f"prompts that cause it: {culprits}"
            )

    def _nonfinite_prompts(self, prepared: Sequence[FrozenLogProbs], batch: Batch, statistics: Statistics) -> list[str]:
        """Name the prompts of this rank's first micro-batch that is not finite.

        Its loss or gradient alone is not. Every pass is made, also after one was found: passes may be collective.
        """
        found: list[str] = []
        for part, chosen in zip(prepared, statistics, strict=True):
            self._optimizer.zero_grad(set_to_none=True)
            names = unscored_prompts(self.forward, part)
            sums, _ = self._backward(part, batch, chosen)
            if not names and not math.isfinite(summarise(sums).get("loss", 0.0)):
                names = list(part.batch.prompt_ids)
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            # A sharded gradient is already that of all ranks: it tells nothing of this one's prompts.
            if not names and not self.policy.sharded and not all(bool(g.isfinite().all()) for g in gradients):
                names = list(part.batch.prompt_ids)
            found = found or names
        return list(dict.fromkeys(found))[:4]

    def _update_controllers(self, metrics: Mapping[str, float], num_sequences: int, step: int) -> None:
        algorithm = self.algorithm
        measured = metrics["skipped"] == 0
        kl, limit = metrics.get("kl_sequence_mean"), algorithm.max_kl
        if measured and kl is not None and limit is not None and kl > limit:
            told = f"KL to the reference is {kl:.3g} nats per token, algorithm.max_kl={limit:g}: it explodes"
            raise RunStopped(f"{told}; raise algorithm.kl_coef or lower optimizer.lr")
        if measured and kl is not None:
            self.controller = controllers.update_kl_controller(self.controller, kl, num_sequences)
        if measured and algorithm.target_entropy is not None and "entropy" in metrics:
            seen, target = metrics["entropy"], algorithm.target_entropy
            self.entropy = controllers.update_entropy_control(self.entropy, entropy=seen, target=target)
        every = algorithm.reference_refresh_every
        if every and isinstance(self.reference, Reference) and (step + 1) % every == 0:
            refresh_reference(self.reference, self.policy, algorithm.reference_refresh_alpha)
        if self._follower is not None:
            refresh_reference(self._follower, self.policy, algorithm.teacher_rate)
