"""From settings to the order in which prompts come."""

from collections.abc import Sequence

from covey import custom
from covey.config import Config
from covey.curriculum import EasyToHard, NearWindow, Promotion, Rotation, Window
from covey.curriculum_config import CurriculumConfig
from covey.environments.base import Environment, Graded, Mixes
from covey.source import PromptStream, Stream
from covey.types import Prompt

STREAM_NAMES = ("prompts", "seed", "position", "draw", "state_dict", "load_state_dict")
"""What `covey.source.Stream` asks for."""


def build_stream(config: Config, environment: Environment, prompts: Sequence[Prompt]) -> Stream:
    """The order in which the prompts come: those of several environments in turn, each in an order of its own.

    ValueError where an environment has no prompts, or a curriculum by difficulty finds only one.
    """
    of_each = {config.environment.name: list(prompts)}
    if isinstance(environment, Mixes):
        names = environment.turn_weights
        of_each = {name: [prompt for prompt in prompts if prompt.environment == name] for name in names}
    empty = [name for name, found in of_each.items() if not found]
    if empty:
        raise ValueError(f"environment={empty[0]} has no training prompts")
    graded = {name: _difficulties(config.curriculum, environment, found) for name, found in of_each.items()}
    if _by_difficulty(config.curriculum) and not any(graded.values()):
        raise ValueError("a curriculum by difficulty needs training prompts of two difficulties or more, got fewer")
    streams = {name: _ordered(config, found, graded[name]) for name, found in of_each.items()}
    if isinstance(environment, Mixes):
        return Rotation(streams, environment.turn_weights, config.seed)
    return streams[config.environment.name]


def check_graded(config: Config, environment: Environment) -> None:
    """ValueError where a curriculum asks for difficulties that this environment does not know."""
    if not _by_difficulty(config.curriculum) or isinstance(environment, Graded):
        return
    asked = "name" if config.curriculum.name == "difficulty" else "per"
    raise ValueError(
        f"curriculum.{asked}=difficulty needs an environment that says how hard its prompts are, "
        f"got environment={config.environment.name}"
    )


def _by_difficulty(curriculum: CurriculumConfig) -> bool:
    return curriculum.name == "difficulty" or (curriculum.name == "success" and curriculum.per == "difficulty")


def _ordered(config: Config, prompts: Sequence[Prompt], difficulties: Sequence[float]) -> Stream:
    """Prompts of one environment; in plain order where the curriculum is by difficulty and there are none to go by."""
    c, seed, shuffle = config.curriculum, config.seed, config.shuffle
    if ":" in c.name:
        return _custom(config, prompts)
    if c.name == "none" or (_by_difficulty(c) and not difficulties):
        return PromptStream(prompts, seed, shuffle)
    if c.name == "difficulty":
        rule = Promotion(c.promote_at, c.promotion_groups, c.demote_below, c.earlier_share)
        return EasyToHard(prompts, difficulties, rule, seed, shuffle=shuffle)
    lanes: dict[str, list[Prompt]] = {}
    for index, prompt in enumerate(prompts):
        lanes.setdefault(str(difficulties[index]) if c.per == "difficulty" else prompt.id, []).append(prompt)
    return NearWindow(lanes, Window(c.window[0], c.window[1], c.decay, c.explore), seed, shuffle=shuffle)


def _custom(config: Config, prompts: Sequence[Prompt]) -> Stream:
    """Make the curriculum of a class of your own. ValueError where it is no `Stream`."""
    make = custom.lookup(custom.CURRICULUM, config.curriculum.name, {}, config.curriculum.options)
    assert isinstance(make, custom.Custom), "the name has a colon"
    stream = make(prompts, config.seed, config.shuffle)
    if not isinstance(stream, Stream):
        missing = [name for name in STREAM_NAMES if name not in {*vars(stream), *dir(type(stream))}]
        raise make.error(f"have {', '.join(STREAM_NAMES)}", f"a {type(stream).__name__} without {', '.join(missing)}")
    return stream


def _difficulties(curriculum: CurriculumConfig, environment: Environment, prompts: Sequence[Prompt]) -> Sequence[float]:
    """Of each prompt; empty where nothing asks for them, the environment does not say, or all are equal."""
    if not (_by_difficulty(curriculum) and isinstance(environment, Graded)):
        return ()
    found = [environment.difficulty(prompt) for prompt in prompts]
    graded = [difficulty for difficulty in found if difficulty is not None]
    if graded and len(graded) < len(prompts):
        name = prompts[found.index(None)].id
        raise ValueError(
            f"a curriculum by difficulty needs one for every prompt of an environment, got none for {name}"
        )
    return graded if len(set(graded)) > 1 else ()
