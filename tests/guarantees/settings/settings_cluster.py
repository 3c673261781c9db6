"""What settings of samplers in processes of their own change, over a Ray of one process."""

from typing import Any

from covey.cluster.trainers import trainer_ranks
from covey.config.schema import Config
from covey.run.build import build_environment, build_run
from covey.system.waits.timer import PhaseTimer

from ...support.fake_ray import fake_ray


def started(config: Config) -> dict[str, Any]:
    """What Ray is asked for when the run is built and one step was taken."""
    with fake_ray() as ray:
        run = build_run(config, build_environment(config), PhaseTimer())
        try:
            run.source.take(config.groups_per_step)
            actors = [{name: actor.options[name] for name in ("num_cpus", "num_gpus")} for actor in ray.actors]
            return {"cluster": ray.started_with.get("address"), "actors": actors}
        finally:
            run.close()


def interpreter(config: Config) -> str | None:
    """The interpreter that samplers run on."""
    with fake_ray() as ray:
        run = build_run(config, build_environment(config), PhaseTimer())
        try:
            run.source.take(config.groups_per_step)
            return ray.actors[0].options["runtime_env"].get("py_executable")
        finally:
            run.close()


def published(config: Config) -> dict[str, Any]:
    """How many prompts are admitted after each of four steps, and how often weights are pushed."""
    with fake_ray() as ray:
        run = build_run(config, build_environment(config), PhaseTimer())
        try:
            admitted = []
            for step in range(4):
                run.source.take(config.groups_per_step)
                run.source.publish(step + 1)
                admitted.append(run.source.stream.position)
            return {"admitted": admitted, "pushes": ray.puts}
        finally:
            run.close()


def most_under_way(config: Config) -> int:
    """Most groups that one sampler had at a time."""
    most = 0
    with fake_ray() as ray:
        run = build_run(config, build_environment(config), PhaseTimer())
        try:
            place = run.source._pool._slots[0]  # type: ignore[attr-defined]
            assign = run.source._pool._assign  # type: ignore[attr-defined]

            def noted() -> None:
                nonlocal most
                assign()
                most = max(most, len(place.under_way))

            run.source._pool._assign = noted  # type: ignore[attr-defined]
            run.source.take(config.groups_per_step)
            assert len(ray.actors) == 1
            return most
        finally:
            run.close()


def ranks(config: Config) -> list[tuple[float, str, str]]:
    """GPUs, rank and number of ranks of each process that is started to train beside this one."""
    with fake_ray() as ray, trainer_ranks(config.devices, lambda: None):
        started = [actor for actor in ray.actors if not actor.is_dead]
        variables = [actor.options["runtime_env"]["env_vars"] for actor in started]
        numbers = zip(started, variables, strict=True)
        return [(actor.options["num_gpus"], v["RANK"], v["WORLD_SIZE"]) for actor, v in numbers]


def patience(config: Config) -> float:
    """Seconds that a silent sampler is waited for."""
    with fake_ray():
        run = build_run(config, build_environment(config), PhaseTimer())
        try:
            return float(run.source._pool._limits.silence)  # type: ignore[attr-defined]
        finally:
            run.close()
