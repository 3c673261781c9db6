"""Rules of a teacher that its settings alone can break."""

from covey.algorithm.teacher.settings import is_address
from covey.config.schema import Config


def check_teacher(config: Config) -> None:
    """Refuse unfillable templates, and questions that no server answers."""
    template = config.algorithm.teacher_template
    try:
        template.format(what="", text="")
    except (LookupError, ValueError, AttributeError) as error:
        raise ValueError(
            f"algorithm.teacher_template must have no other braces than {{what}} and {{text}}, got {template!r:.80}"
        ) from error
    if is_address(config.algorithm.teacher):
        _check_server(config)


def _check_server(config: Config) -> None:
    sampling, algorithm = config.sampling, config.algorithm
    wanted, options = algorithm.teacher_temperature or sampling.temperature, algorithm.teacher_options
    got = {
        f"algorithm.teacher_temperature={wanted:g}": wanted not in (0.0, 1.0),
        f"sampling.top_p={sampling.top_p:g}": sampling.top_p < 1,
        f"sampling.top_k={sampling.top_k}": sampling.top_k > 0,
        f"sampling.min_p={sampling.min_p:g}": sampling.min_p > 0,
        f"model.kind={config.model.kind}": config.model.kind != "causal",
    }
    if wrong := [name for name, is_wrong in got.items() if is_wrong]:
        raise ValueError(
            f"algorithm.teacher={algorithm.teacher} needs algorithm.teacher_temperature=1, no filter of sampling and "
            f"model.kind=causal, for a server tells log-probs at temperature 1, got {wrong[0]}"
        )
    is_told = options.get("support") == "teacher" and isinstance(top_k := options.get("top_k"), int) and top_k > 0
    if algorithm.teacher_term == "divergence" and not is_told:
        raise ValueError(
            "algorithm.teacher_term=divergence with a server needs algorithm.teacher_options={top_k: 20, support: "
            f"teacher}}, for it tells its likeliest tokens alone, got {options}"
        )
