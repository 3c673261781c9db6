"""`covey plan SETTINGS ...`: memory, time and cost before a run."""

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from covey.cli.flags import split_flags
from covey.config.schema import Config
from covey.run.memory.model_shapes import Shape
from covey.system.section import flat
from covey.system.text.console import CleanConsole
from covey.system.text.format import memory, number_of
from covey.system.waits.running import Pulse
from covey_report.plan.hardware import THIS, Hardware, named
from covey_report.plan.kept import keep_plan
from covey_report.plan.known import keep_probe, kept_probe, prompt_tokens_of
from covey_report.plan.plan import USUAL_PROMPT, Measured, Plan, plan_of
from covey_report.plan.settings import shape_for

WITH_VALUE = dict.fromkeys(("--on", "--gpus", "--price", "--prompt-tokens", "--answer-tokens"), "a value")
ALONE = ("--probe", "--json")
PROBE_SECONDS = 9.0
"""Seconds between lines on how long a probe has run."""
DEFAULT_ON = ("h100", "l40s", "rtx4090")


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options from the flags."""

    on: tuple[str, ...] = DEFAULT_ON
    num_gpus: int | None = None
    price: float | None = None
    prompt_tokens: float | None = None
    answer_tokens: float | None = None
    probe: bool = False
    as_json: bool = False


def read_flags(words: Sequence[str]) -> tuple[list[str], PlanOptions]:
    """Split the planner's flags from settings. ValueError for bad ones."""
    kept, given = split_flags(words, WITH_VALUE, ALONE)
    names = tuple(given["--on"].split(",")) if "--on" in given else (*DEFAULT_ON, THIS)
    for name in names:
        _ = name == THIS or named(name)
    if "--probe" in given and THIS not in names:
        raise ValueError(f"--probe measures this machine: --on {','.join((*names, THIS))}")
    gpus = _number(given, "--gpus")
    if gpus is not None and not gpus.is_integer():
        raise ValueError(f"--gpus must be a whole number, got {given['--gpus']}")
    return kept, PlanOptions(
        on=names,
        num_gpus=None if gpus is None else int(gpus),
        price=_number(given, "--price"),
        prompt_tokens=_number(given, "--prompt-tokens"),
        answer_tokens=_number(given, "--answer-tokens"),
        probe="--probe" in given,
        as_json="--json" in given,
    )


def _number(given: dict[str, str], flag: str) -> float | None:
    if flag not in given:
        return None
    try:
        found = float(given[flag])
    except ValueError:
        found = 0.0
    if not 0 < found < math.inf:
        raise ValueError(f"{flag} must be a number above 0, got {given[flag]}")
    return found


def print_plans(config: Config, asked: PlanOptions) -> None:
    """Print the plan on each machine. ValueError for unknown models."""
    shape = shape_for(config.model)
    prompt_tokens = cache(lambda: prompt_tokens_of(config))  # one environment for all machines, if any asks
    machines = [named(name).with_price(asked.price if name != THIS else None) for name in asked.on]
    plans = [
        plan_of(config, shape, on, asked.num_gpus or 1, _known(config, shape, on, asked, prompt_tokens, name == THIS))
        for name, on in zip(asked.on, machines, strict=True)
    ]
    for name, plan in zip(asked.on, plans, strict=True):
        if name == THIS:
            keep_plan(flat(asdict(config)), as_row(plan))
    if asked.as_json:
        print(json.dumps([as_row(plan) for plan in plans], indent=1))
        return
    console = CleanConsole()
    console.print(f"{config.model.name}: {_weights(config, shape)}; {_steps(config)}", soft_wrap=True)
    for plan in plans:
        for line in lines_of(plan):
            console.print(line, soft_wrap=True)


def _known(
    config: Config, shape: Shape, on: Hardware, asked: PlanOptions, count: Callable[[], float | None], is_here: bool
) -> Measured:
    """Return the probe's measurements that hold on a machine."""
    found, unknown = None, ""
    if is_here:
        if asked.probe:
            from covey.loop import train
            from covey_report.plan.probe import probe

            said = "a probe of this machine is under way, {:.0f} s"
            with Pulse(lambda seconds: print(said.format(seconds), file=sys.stderr, flush=True), PROBE_SECONDS):
                found = probe(config, shape, on, train)
            keep_probe(config, on, found)
        else:
            found = kept_probe(config, on)
    if found is None:
        rates = "data sheets" if on.is_gpu else "rates measured here"
        counted = None if asked.prompt_tokens else count()
        unknown = "" if counted or asked.prompt_tokens else ", a guess (--prompt-tokens)"
        found = Measured(counted or USUAL_PROMPT, source=f"{rates} and usual shares")
    # Lengths given by hand outrank measured ones
    prompts, answers = asked.prompt_tokens or found.prompt_tokens, found.completion_tokens
    if asked.answer_tokens is not None:
        answers = min(asked.answer_tokens, config.sampling.max_tokens)
    usual = "between a quarter and all of sampling.max_tokens (--answer-tokens)"
    lengths = usual if answers is None else f"of {answers:.0f} tokens"
    source = f"{found.source}; prompts of {prompts:.0f} tokens{unknown}, answers {lengths}"
    return replace(found, prompt_tokens=prompts, completion_tokens=answers, source=source)


def _weights(config: Config, shape: Shape) -> str:
    rank, beside = config.model.lora_rank, f", and {shape.beside:,} beside the text" if shape.beside else ""
    if rank == 0:
        return f"{shape.weights:,} weights, all trained{beside and beside + ', which stay as they are'}"
    adapters = shape.adapter_weights(rank, config.model.lora_targets)
    known = f"{shape.weights:,} weights{beside}"
    return f"{known}, all frozen; adapters of rank {rank} are trained, {adapters:,} weights"


def _steps(config: Config) -> str:
    per_step = f"{config.groups_per_step} × {config.group_size} answers of at most {config.sampling.max_tokens} tokens"
    return f"{number_of(config.num_steps, 'step')} of {per_step}"


def lines_of(plan: Plan) -> list[str]:
    on, parts = plan.on, dict(plan.memory)
    total = parts.pop("in_all")
    many = f"{plan.num_gpus} × " if plan.num_gpus > 1 else ""
    room = f"{memory(total)} of {memory(int(on.memory))}"
    fit = f"fits, {room}" if plan.fits else f"does not fit, {room}: {' and '.join(plan.change)}"
    fit += f"; for the same update {' and '.join(plan.same_update)}" if plan.same_update else ""
    kept = ", ".join(f"{name.replace('_', ' ')} {memory(count)}" for name, count in parts.items())
    step = ", ".join(f"{name} {_seconds(seconds)}" for name, seconds in plan.phases.items() if seconds > 0)
    bounds = plan.step
    found = [
        "",
        f"{many}{on.name}: {fit}",
        f"  memory      {kept}",
        f"  a step      {_seconds(bounds.value)} ({_seconds(bounds.low)} to {_seconds(bounds.high)}): {step}",
        f"  the run     {_hours(plan.hours.value)} ({_hours(plan.hours.low)} to {_hours(plan.hours.high)}), h:m:s",
    ]
    if plan.cost is not None:
        low, value, high = plan.cost.low, plan.cost.value, plan.cost.high
        found.append(f"  cost        ${value:,.2f} (${low:,.2f} to ${high:,.2f}); prices: {on.source}")
    return [*found, f"  bottleneck  {plan.bottleneck}", f"  from        {plan.source}"]


def as_row(plan: Plan) -> dict[str, Any]:
    return asdict(plan) | {"fits": plan.fits}


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value < 999.5 else f"{value:,.0f} s"


def _hours(value: float) -> str:
    """Write hours as h:mm:ss, also below one.

    >>> _hours(0.75), _hours(30.5)
    ('0:45:00', '30:30:00')
    """
    minutes, seconds = divmod(round(3600 * value), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
