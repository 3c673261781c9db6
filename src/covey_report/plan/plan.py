"""Plan a run on one kind of machine."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from covey.algorithm.intervals import Estimate
from covey.config.schema import Config
from covey.engine.settings import cache_budget
from covey.policy.settings import ModelConfig
from covey.rollouts.settings import group_sizes
from covey.run.memory.estimate import answer_bound, with_checkpointing, with_fused_layers, workload
from covey.run.memory.memory_model import Workload, memory_of
from covey.run.memory.model_shapes import Shape
from covey.system.section import flat
from covey_doctor.advice import still_open
from covey_report.plan.hardware import Hardware
from covey_report.plan.seconds import PHASES, Work, constants, step_seconds
from covey_report.plan.settings import as_cold_start, derive_numbers

Change = tuple[str, Callable[[Config], Config]]
CONTEXT, FRAGMENTS = 0.5e9, 0.05
"""Bytes of a GPU's context, share of its memory between tensors."""
PROCESS, HOLES = 0.42e9, 0.1
"""Bytes of a process on a CPU that has imported torch, transformers and covey, before it holds a model; holes there."""
EXTRA = 1.4
"""Storage and traffic on top of hours times price."""
USUAL_PROMPT = 128
LENGTHS = (0.25, 0.5, 1.0)
"""Mean length of an answer over its bound where nobody has measured it: low, middle, high."""
SPREAD_OF_PROBE = 1.1
MIN_MICRO_BATCH = 1024
START_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of a run, by a probe or its user."""

    prompt_tokens: float = USUAL_PROMPT
    completion_tokens: float | None = None
    factors: Mapping[str, float] = field(default_factory=dict)
    """Measured over predicted seconds, by phase."""
    source: str = ""


UNMEASURED = Measured()


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of a run on one kind of machine."""

    on: Hardware
    num_gpus: int
    memory: dict[str, int]
    """Bytes of one GPU by purpose, `in_all` the most at once."""
    change: tuple[str, ...]
    """The cheapest settings that make it fit, none where it fits; ("no change", why) where nothing does."""
    same_update: tuple[str, ...]
    """Settings that fit it on more GPUs with the same update, where `change` alters it."""
    phases: dict[str, float]
    """Seconds of a step."""
    step: Estimate
    hours: Estimate
    cost: Estimate | None
    """Dollars."""
    bottleneck: str
    source: str
    """Source of the numbers."""

    @property
    def fits(self) -> bool:
        return self.memory["in_all"] <= self.on.memory


def plan_of(config: Config, shape: Shape, on: Hardware, num_gpus: int, known: Measured) -> Plan:
    """Plan a run on `num_gpus` trainers, plus samplers of source=ray."""
    given, config = config, with_checkpointing(config, num_gpus, int(on.memory), is_gpu=on.is_gpu)
    low, value, high = (_step(config, shape, on, num_gpus, known, share) for share in LENGTHS)
    spread = SPREAD_OF_PROBE if known.factors else constants(on).spread
    step = Estimate(sum(value.values()), sum(low.values()) / spread, sum(high.values()) * spread)
    seconds = _run_seconds(config, shape, on, num_gpus, known, value)
    hours = Estimate(*(seconds * bound / step.value / 3600 for bound in (step.value, step.low, step.high)))
    gpus = num_gpus + (config.devices.sampler if config.source == "ray" else 0)
    memory = memory_on(shape, load_on(config, shape, on, num_gpus, known), on)
    change, same = ((), ()) if memory["in_all"] <= on.memory else changes(config, shape, on, num_gpus, known)
    limit = bottleneck(given, value, is_gpu=on.is_gpu)
    return Plan(on, gpus, memory, change, same, value, step, hours, _cost(on, gpus, hours), limit, known.source)


def load_on(config: Config, shape: Shape, on: Hardware, num_gpus: int, known: Measured) -> Workload:
    """Return a step's load on one GPU."""
    load = _within_a_step(config, workload(config, num_gpus), num_gpus, known)
    return bounded(with_fused_layers(load, config.model, shape, is_gpu=on.is_gpu), shape, on)


def _within_a_step(config: Config, load: Workload, num_gpus: int, known: Measured) -> Workload:
    """Bound a micro-batch by the tokens of a step.

    Shared, a prompt is read once a group; what branches of a conversation have in common beyond it is unknown here,
    and counted for each.
    """
    counts = derive_numbers(config, num_gpus)
    prompts = counts["groups_per_rank" if config.packing == "shared" else "rollouts_per_rank"]
    tokens = max(1, int(counts["rollouts_per_rank"] * answer_bound(config) + prompts * known.prompt_tokens))
    load = replace(load, group_tokens=-(-tokens // counts["groups_per_rank"]))
    if tokens > load.micro_batch_tokens:
        return load
    return replace(load, micro_batch_tokens=tokens, single_pass=not config.streaming)


def memory_on(shape: Shape, load: Workload, on: Hardware) -> dict[str, int]:
    """Sum the model's bytes and those of the process or context."""
    parts = memory_of(shape, load)
    total = parts.pop("in_all")
    name, count, share = ("context", CONTEXT, FRAGMENTS) if on.is_gpu else ("process", PROCESS, HOLES)
    around = {name: int(count), "fragments": int(share * total)}
    return parts | around | {"in_all": total + sum(around.values())}


def bounded(load: Workload, shape: Shape, on: Hardware) -> Workload:
    """Bound a cache that nobody has bounded, as the native engine does."""
    parts = memory_of(shape, replace(load, num_rows=0, num_cached=0, micro_batch_tokens=1))
    # The engine looks when sampling begins, with gradients let go
    kept = parts["in_all"] - (0 if load.keeps_gradients else parts["gradients"])
    free = int(on.memory - CONTEXT - kept) if on.is_gpu else None
    return replace(load, cache_bytes=cache_budget(load.cache_bytes, free))


Settings = tuple[str, ...]


def changes(
    config: Config, shape: Shape, on: Hardware, num_gpus: int, known: Measured = UNMEASURED
) -> tuple[Settings, Settings]:
    """Find the fewest, cheapest changes that make a run fit.

    Changes that keep the update come first: smaller pieces, then sharded weights. If these take more GPUs than there
    are, the first result changes the update, and the second keeps it.
    """

    def fits(some: Sequence[Change], gpus: int, strategy: str) -> bool:
        changed = replace(config, parallel=replace(config.parallel, strategy=strategy))
        for _, change in some:
            changed = change(changed)
        return memory_on(shape, load_on(changed, shape, on, gpus, known), on)["in_all"] <= on.memory

    def needed(known_changes: Sequence[Change], gpus: int, strategy: str) -> Settings | None:
        count = next((n for n in range(len(known_changes) + 1) if fits(known_changes[:n], gpus, strategy)), None)
        if count is None:
            return None
        some = list(known_changes[:count])
        for one in reversed(known_changes[:count]):
            rest = [other for other in some if other is not one]
            some = rest if fits(rest, gpus, strategy) else some
        return tuple(words.format(tokens=_least_batch(config)) for words, _ in some)

    given = config.parallel.strategy
    if (found := needed(KEEPING, num_gpus, given)) is not None:
        return found, ()
    shared = ("parallel.strategy=fsdp",)
    if num_gpus > 1 and given == "ddp" and (found := needed(KEEPING, num_gpus, "fsdp")) is not None:
        return (*shared, *found), ()
    same: Settings = ()
    for gpus in (2, 4, 8, 16, 32, 64):
        if gpus > num_gpus and not same and (found := needed(KEEPING, gpus, "fsdp")) is not None:
            same = (f"parallel.strategy=fsdp on {gpus} GPUs", *found)
    found = needed((*KEEPING, *CHANGING), num_gpus, given)
    why = f"nothing, as {_too_large(config, shape, on, known)}"
    if found is not None:
        return found, same or (why,)
    return (same, ()) if same else (("no change", why.removeprefix("nothing, ")), ())


def _too_large(config: Config, shape: Shape, on: Hardware, known: Measured) -> str:
    """Say which part is too large however weights are shared out."""
    apart = replace(config, parallel=replace(config.parallel, strategy="fsdp"))
    for _, change in KEEPING:
        apart = change(apart)
    parts = memory_on(shape, load_on(apart, shape, on, 64, known), on)
    name = max((part for part in parts if part != "in_all"), key=lambda part: parts[part])
    whole = ", for the weights that sample are whole on each" if name == "sampling" else ""
    return f"{name} takes {parts[name] / 2**30:.1f} GiB of each of 64 GPUs{whole}"


def _least_batch(config: Config) -> int:
    return min(config.micro_batch_tokens, max(MIN_MICRO_BATCH, 2 * config.sampling.max_tokens))


def _of_model(values: Callable[[ModelConfig], dict[str, Any]]) -> Callable[[Config], Config]:
    return lambda config: replace(config, model=replace(config.model, **values(config.model)))


KEEPING: tuple[Change, ...] = (
    ("micro_batch_tokens={tokens}", lambda config: replace(config, micro_batch_tokens=_least_batch(config))),
    ("model.gradient_checkpointing=true", _of_model(lambda model: {"gradient_checkpointing": True})),
    ("logprob_chunk=1024", lambda config: replace(config, logprob_chunk=min(config.logprob_chunk or 1024, 1024))),
    (
        "engine.max_rows=32",
        lambda config: replace(config, engine=replace(config.engine, max_rows=min(config.engine.max_rows, 32))),
    ),
)
"""Changes that keep the update, cheapest first."""
CHANGING: tuple[Change, ...] = (
    ("optimizer=adamw8bit", lambda config: replace(config, optimizer=replace(config.optimizer, name="adamw8bit"))),
    ("model.lora_rank=32", _of_model(lambda model: {"lora_rank": model.lora_rank or 32})),
    (
        "model.load_in_8bit=true",
        _of_model(lambda model: {"load_in_8bit": model.lora_rank > 0 and not model.load_in_4bit}),
    ),
    ("model.load_in_4bit=true", _of_model(lambda model: {"load_in_4bit": model.lora_rank > 0, "load_in_8bit": False})),
)
"""Changes of the update, smallest first."""


def work_of(config: Config, num_gpus: int, prompt_tokens: float, completion_tokens: float, samplers: int = 0) -> Work:
    """Count the work of one process in a step."""
    algorithm, processes = config.algorithm, samplers or num_gpus
    size = max(group_sizes(config.group_size, config.group_size_schedule))
    # Few groups are shared by several processes
    is_shared = not samplers and config.groups_per_step < processes
    return Work(
        num_groups=-(-config.groups_per_step // processes),
        group_size=-(-config.groups_per_step * size // processes) if is_shared else size,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        max_tokens=answer_bound(config),
        max_rows=config.engine.max_rows,
        num_updates=config.updates_per_batch,
        num_mini_batches=config.num_mini_batches,
        reads_old=config.updates_per_batch * config.num_mini_batches > 1,
        has_reference=algorithm.kl_coef > 0 or algorithm.ratio_denominator == "reference",
        shares_prompts=config.packing == "shared",
    )


def _step(config: Config, shape: Shape, on: Hardware, num_gpus: int, known: Measured, share: float) -> dict[str, float]:
    """Predict seconds of a step by phase, separate samplers included."""
    length = known.completion_tokens or share * answer_bound(config)
    load = workload(config, num_gpus)
    work = work_of(config, num_gpus, known.prompt_tokens, length)
    found = step_seconds(shape, load, work, on, known.factors)
    if config.source != "ray":
        return found
    apart = work_of(config, num_gpus, known.prompt_tokens, length, samplers=config.devices.sampler)
    sampling = step_seconds(shape, load, apart, on, known.factors)["sampling"]
    rest = sum(found.values()) - found["sampling"]
    waits = sampling if config.max_staleness == 0 else max(0.0, sampling - rest)
    return found | {"sampling": waits}


def _run_seconds(
    config: Config, shape: Shape, on: Hardware, num_gpus: int, known: Measured, step: Mapping[str, float]
) -> float:
    """Return the seconds of a run: steps, evaluations, the cold start, loading."""
    counts = derive_numbers(config, num_gpus)
    rollouts = max(1, config.groups_per_step * config.group_size)
    answers = counts["evaluations"] * counts["completions_per_evaluation"]
    evaluating = (step["sampling"] + step["reward"]) * answers / rollouts
    length = known.completion_tokens or LENGTHS[1] * answer_bound(config)
    cold = 0.0
    if config.cold_start.enabled:
        rows = Work(config.cold_start.batch_size, 1, known.prompt_tokens, length, answer_bound(config), 1)
        load = workload(as_cold_start(config), num_gpus)
        cold = config.cold_start.num_steps * step_seconds(shape, load, rows, on)["backward"]
    return config.num_steps * sum(step.values()) + evaluating + cold + START_SECONDS


def _cost(on: Hardware, gpus: int, hours: Estimate) -> Estimate | None:
    if on.price is None:
        return None
    low, high = on.price
    middle = math.sqrt(low * high)
    return Estimate(EXTRA * gpus * hours.value * middle, gpus * hours.low * low, EXTRA * gpus * hours.high * high)


def bottleneck(config: Config, phases: Mapping[str, float], *, is_gpu: bool) -> str:
    """Describe the slowest phase of a step, and remedies left."""
    name = max(PHASES, key=lambda one: phases[one])
    settings = flat(asdict(config)) | {CHECKPOINTING: bool(config.model.gradient_checkpointing)}
    ways = still_open([way for way in REMEDIES[name] if is_gpu or way not in ON_GPUS], settings)
    return f"{name}, {100 * phases[name] / sum(phases.values()):.0f} % of a step: {', '.join(ways)}"


CHECKPOINTING = "model.gradient_checkpointing"
ON_GPUS = ("larger micro_batch_tokens", "more GPUs", "parallel.strategy=fsdp", "source=ray")
REMEDIES = {
    "sampling": ("shorter sampling.max_tokens (the longest answer decides, more cost little)", ON_GPUS[3]),
    "reward": ("more workers (environment.num_workers)", "streaming=true"),
    "logprobs": ("updates_per_batch=1", "algorithm.kl_coef=0"),
    "backward": (*ON_GPUS[:2], "packing=shared", f"{CHECKPOINTING}=false", "shorter sampling.max_tokens"),
    "optimizer": ("adapters (model.lora_rank)", ON_GPUS[2], "larger steps"),
    "other": ("larger steps: this is paid by the step and by the answer",),
}
