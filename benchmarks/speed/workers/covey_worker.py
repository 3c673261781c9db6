"""covey's worker process."""

import sys

from benchmarks.speed.workers.worker import Channel, serve
from benchmarks.speed.workloads import Job
from covey.system import machine


def main(job: Job) -> None:
    machine.prepare()  # as the command does, before torch is imported
    with machine.heavy_imports():
        from benchmarks.speed.workers.covey_steps import make_step

    channel = Channel()
    serve(channel, make_step(job))


if __name__ == "__main__":
    main(Job.from_json(sys.argv[1]))
