"""Adjust unset values of presets and files to typed settings."""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from covey.cluster.settings import APART, DevicesConfig
from covey.config.budget import BUDGETS, resolve_budget
from covey.config.checks import MOST, format_value, read, unmet, walk
from covey.config.engine_choice import HostDevices, obstacle_to_vllm
from covey.config.rules.options import OPTION_BOUNDS, unread_options
from covey.config.schema import Config
from covey.config.shelves import preset_fields
from covey.engine.settings import EngineConfig
from covey.system.lookup import option_names, resolve

NARROW_CLIP = 0.01
"""Clip ranges below this are meant for the geometric mean of a sequence's ratios (GSPO, arXiv 2507.18071)."""
ROUNDS = 10
"""Most rounds of adjustments that follow from adjustments."""


@dataclass(slots=True)
class _Change:
    """The typed settings, and the adjustments so far."""

    config: Config
    typed: Collection[str]
    notices: dict[str, str] = field(default_factory=dict)
    """Setting -> the line that reports its change."""

    def is_typed(self, name: str) -> bool:
        """Return True if the setting, its group or a key was typed."""
        named = (name, name.removesuffix(".name"))
        return any(word in named or word.startswith(f"{name}.") for word in self.typed)

    def is_moved(self, names: Sequence[str]) -> bool:
        """Return True if one of the settings was typed or adjusted."""
        groups = {name.partition(".")[0] for name in names if "." in name}
        return any(self.is_typed(name) or name in self.notices for name in names) or not groups.isdisjoint(self.typed)

    def override(self, name: str, value: Any, reason: str) -> None:
        """Set an adjusted option, and keep the line that reports it."""
        section, _, last = name.rpartition(".")
        before = read(self.config, name)
        setattr(read(self.config, section) if section else self.config, last, value)
        self.notices[name] = f"{name}={format_value(value)} in place of {format_value(before)}: {reason}"


def adjust_unset_options(
    config: Config, typed: Collection[str], look: Callable[[], HostDevices] | None = None
) -> list[str]:
    """Adjust settings that nothing typed and that contradict typed ones.

    `typed` holds dotted names and groups, such as {"algorithm.kl_coef", "environment"}. `look`, of a new run, tells
    what the machine has: nobody's engine is then the one that suits it. Changes `config` and returns a line for each
    change. Contradictions between values that were not typed stay, for `validate` to refuse.
    """
    change = _Change(config, typed)
    if look is not None:
        _choose_engine(change, look)
    _settle_budget(change)
    _fit_numbers(change)
    # Reset settings whose condition no longer holds; each reset may void another
    for _ in range(ROUNDS):
        idle = [
            (found, need)
            for found, need in unmet(config)
            if not change.is_typed(found.name) and change.is_moved(need.partners)
        ]
        for found, need in idle:
            change.override(found.name, found.default, f"{format_value(found.value)} needs {need.condition}")
        if not idle:
            break
    _drop_options(change)
    _drop_narrow_clip(change)
    if config.resume is None:  # else it was begun so
        _sample_in_place(change)
        _correct_for_the_sampler(change)
    return list(change.notices.values())


def add_correction(config: Config) -> tuple[Config, list[str]]:
    """Return settings with importance weights where off-policy tokens need them, and lines that say so."""
    change = _Change(copy.deepcopy(config), ())
    _correct_for_the_sampler(change)
    return change.config, list(change.notices.values())


def find_shadowed_presets(config: Config, typed: Sequence[str]) -> list[str]:
    """Return a line for each typed algorithm preset that is overridden entirely.

    For example "algorithm=gdpo has no effect: algorithm.advantage=pairwise in place of gdpo". `typed` holds the typed
    words. Presets in the user's own folders are skipped.
    """
    lines = []
    for group, _, choice in (word.partition("=") for word in typed):
        preset = preset_fields(group, choice) if group == "algorithm" else None
        if preset is None:
            continue
        now = {key: read(config, f"{group}.{key}") for key in preset}
        if preset and all(now[key] != value for key, value in preset.items()):
            instead = ", ".join(
                f"{group}.{key}={format_value(now[key])} in place of {format_value(preset[key])}" for key in preset
            )
            lines.append(f"{group}={choice} has no effect: {instead}")
    return lines


def _choose_engine(change: _Change, look: Callable[[], HostDevices]) -> None:
    """Choose vLLM on a machine with a GPU, unless an engine was typed."""
    is_open = change.config.engine.name == EngineConfig().name and not {"engine", "engine.name"} & set(change.typed)
    if is_open and obstacle_to_vllm(change.config, look()) is None:
        change.override("engine.name", "vllm", "vLLM is installed and there is a GPU; engine=native takes covey's own")


def _settle_budget(change: _Change) -> None:
    """Let the typed budget replace the others. ValueError for two."""
    config = change.config
    typed = [name for name in BUDGETS if change.is_typed(name) and read(config, name) is not None]
    given = [f"{name}={format_value(read(config, name))}" for name in typed]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} say twice how long the run is: give one of {', '.join(BUDGETS)}")
    for name in BUDGETS[1:]:
        if typed and name not in typed and read(config, name) is not None:
            change.override(name, None, f"the run has {given[0]}")
    steps = resolve_budget(config).num_steps
    if steps != config.num_steps and 0 < steps <= MOST:  # else the budget itself is refused
        change.override("num_steps", steps, f"the run has total_rollouts={config.total_rollouts}")


def _fit_numbers(change: _Change) -> None:
    """Fit unset lengths and counts to the one that was typed."""
    config = change.config
    steps, most = config.num_steps, config.sampling.max_tokens
    if change.is_moved(["num_steps"]):
        if 0 < steps <= config.optimizer.warmup_steps and not change.is_typed("optimizer.warmup_steps"):
            change.override("optimizer.warmup_steps", steps // 10, f"the run has num_steps={steps}")
        reached = [entry for entry in config.group_size_schedule if entry.step < steps]
        if reached != config.group_size_schedule and not change.is_typed("group_size_schedule"):
            change.override("group_size_schedule", reached, f"the run has num_steps={steps}")
    is_longer = config.micro_batch_tokens < most and change.is_typed("sampling.max_tokens")
    if is_longer and not change.is_typed("micro_batch_tokens"):
        change.override("micro_batch_tokens", most, f"a completion has up to sampling.max_tokens={most}")
    if (mini := config.mini_batch_groups) and not change.is_typed("mini_batch_groups"):
        if change.is_typed("mini_batch_rollouts") and config.mini_batch_rollouts:
            change.override("mini_batch_groups", None, f"the run has mini_batch_rollouts={config.mini_batch_rollouts}")
        elif mini > config.groups_per_step > 0:
            change.override(
                "mini_batch_groups", config.groups_per_step, f"the run has groups_per_step={config.groups_per_step}"
            )
    samples, wanted = config.evaluation.num_samples, config.evaluation.k
    if wanted and max(wanted) > samples:
        if change.is_typed("evaluation.num_samples") and not change.is_typed("evaluation.k"):
            fitting = [k for k in wanted if k <= samples] or [samples]
            change.override("evaluation.k", fitting, f"there are evaluation.num_samples={samples}")
        elif change.is_typed("evaluation.k") and not change.is_typed("evaluation.num_samples"):
            change.override("evaluation.num_samples", max(wanted), f"evaluation.k={format_value(wanted)} needs as many")


def _drop_options(change: _Change) -> None:
    """Drop a preset's options that a typed function does not take."""
    for name, where in OPTIONS.items():
        options = read(change.config, where)
        if not options or not change.is_moved([name]):
            continue
        function = str(read(change.config, name))
        known = _options_of(name, function, options)
        if not change.is_typed(name):  # what no function takes is a mistake of the preset
            known |= options.keys() - OPTION_BOUNDS.keys()
        kept = {key: value for key, value in options.items() if key in known or change.is_typed(f"{where}.{key}")}
        if kept != options and where not in change.typed:
            change.override(where, kept, f"{function} takes no {', '.join(sorted(set(options) - set(kept)))}")


def _drop_narrow_clip(change: _Change) -> None:
    """Drop a clip range for sequence ratios under a token ratio."""
    algorithm, where = change.config.algorithm, "algorithm.loss_options"
    if algorithm.ratio != "token" or not change.is_typed("algorithm.ratio") or change.is_typed(where):
        return
    narrow = _narrow_clip(algorithm.loss_options)
    if narrow:
        kept = {key: value for key, value in algorithm.loss_options.items() if key not in narrow}
        change.override(
            where, kept, f"a clip range below {NARROW_CLIP} is for sequence ratios, got algorithm.ratio=token"
        )


def _sample_in_place(change: _Change) -> None:
    """Let the trainer sample where samplers would only take turns."""
    config, default = change.config, DevicesConfig().sampler
    if config.source != "ray" or config.max_staleness > 0 or config.streaming or config.devices.sampler != default:
        return
    apart = (found.name for found in walk(config) if APART in found.bounds.needs)
    if not any(map(change.is_typed, ("devices.sampler", "engine.update", *apart))):
        reason = "with max_staleness=0 both take turns, so the trainer's processes sample"
        change.override("devices.sampler", 0, f"{reason}; type devices.sampler={default} for a sampler of its own")


def _correct_for_the_sampler(change: _Change) -> None:
    """Weigh tokens by trainer/sampler where these differ."""
    config = change.config
    is_open = config.algorithm.correction == "none" and config.algorithm.ratio_denominator == "old"
    if not is_open or change.is_typed("algorithm.correction"):
        return
    # A token ratio to the sampler is clipped as to any older policy; other losses and narrow ranges are weighted.
    loss, is_wide = config.algorithm.loss, not _narrow_clip(config.algorithm.loss_options)
    if config.engine.name == "vllm":
        change.override("algorithm.correction", "truncate", "engine=vllm is another program than the trainer")
    elif config.engine.weights == "int8":
        change.override("algorithm.correction", "truncate", "engine.weights=int8 samples from rounded weights")
    elif config.max_staleness > 0:
        reason = f"max_staleness={config.max_staleness} trains on tokens of older weights"
        if change.is_typed("algorithm.ratio_denominator"):
            return
        if loss == "clip" and config.algorithm.ratio == "token" and is_wide:
            change.override("algorithm.ratio_denominator", "behaviour", reason)
        else:
            change.override("algorithm.correction", "truncate", reason)


def _narrow_clip(options: Mapping[str, Any]) -> set[str]:
    given = {key: options.get(key) for key in ("eps_low", "eps_high")}
    return {key for key, value in given.items() if isinstance(value, int | float) and value < NARROW_CLIP}


def _options_of(setting: str, function: str, options: Mapping[str, Any]) -> set[str]:
    from covey.algorithm.credit.advantages import ADVANTAGES
    from covey.algorithm.credit.selection import GROUP_FILTERS, SELECTION
    from covey.algorithm.credit.turns import TURN_CREDIT
    from covey.algorithm.losses import LOSS_FUNCTIONS, LOSSES

    selectors = {name: loss.selector for name, loss in LOSSES.items() if loss.selector is not None}
    tables: dict[str, Sequence[Mapping[str, Callable[..., Any]]]] = {
        "algorithm.advantage": (ADVANTAGES,),
        "algorithm.loss": (LOSS_FUNCTIONS, selectors),
        "algorithm.turn_credit": (TURN_CREDIT,),
        "algorithm.selection": (SELECTION,),
        "algorithm.group_filter": (GROUP_FILTERS,),
    }
    own = [resolve(function, {})] if ":" in function else []
    found = own + [table[function] for table in tables.get(setting, ()) if function in table]
    idle = {name for one in found for name in unread_options(function, one, options)}
    taken = [option_names(one) for one in found]
    if None in taken:  # **options, or no signature to read
        return set(options) - idle
    return {name for names in taken for name in names or ()} - idle


OPTIONS = {
    "algorithm.advantage": "algorithm.advantage_options",
    "algorithm.loss": "algorithm.loss_options",
    "algorithm.turn_credit": "algorithm.turn_credit_options",
    "algorithm.selection": "algorithm.selection_options",
    "algorithm.group_filter": "algorithm.group_filter_options",
    "curriculum.name": "curriculum.options",
}
"""Setting that names a function -> the setting of its options."""
