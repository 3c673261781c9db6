"""Build environment=ifeval: rows, or prompts that are made up."""

from functools import partial

from covey.environments.base import Environment, Split
from covey.environments.data.rows import row_settings
from covey.environments.settings import BuildSettings
from covey.types import Prompt
from covey_tasks.ifeval.environment import IFEval
from covey_tasks.ifeval.generator import generate
from covey_tasks.ifeval.prompts import COLUMNS, Source, from_requests, load, prompt_of
from covey_tasks.ifeval.rewards import scheme_of
from covey_tasks.ifeval.settings import IfevalConfig


def build_ifeval(settings: IfevalConfig, config: BuildSettings) -> Environment:
    scheme = scheme_of(settings)
    ask = scheme.instruction if settings.instruction is None else settings.instruction

    def generated() -> dict[Split, list[Prompt]]:
        requests = generate(settings)
        return {split: from_requests(found, split, settings.style, ask) for split, found in requests.items()}

    make = partial(prompt_of, instruction=ask)
    how_to_read = row_settings(config.data, COLUMNS, prompt=("prompt",), make=make)
    return IFEval(load(Source(config.data.path, settings.benchmark, how_to_read), generated), scheme)
