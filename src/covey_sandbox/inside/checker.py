"""The process that looks at answers: decodes, compares, shows and uses them.

Whatever an answer does there, only its test pays: memory is limited by the kernel, time by the judge, which kills this
process and has the next one continue.
"""

import importlib
import math
import os
import random
import resource
import socket
import sys
from typing import Any

from covey_sandbox.inside import wire
from covey_sandbox.inside.case import LoadFailed, ProgramCase, Spawner
from covey_sandbox.inside.host import Broken, Process, Program, Unjudged
from covey_sandbox.inside.judging import pytest_like, verdicts
from covey_sandbox.inside.link import Link

BYTES_PER_BYTE = 32
"""Bytes of memory for each byte that an answer may have."""
COPIES = 3
"""Copies of a program's tests in memory: as received, and one as it is decoded."""
MAX_GROWTH = 64 << 20
"""A checker that is larger than that when a program is done makes room for a new one."""


def serve(channel: socket.socket) -> None:
    """Check one program after another."""
    pytest_like.install()
    link, base = Link(channel), address_space()
    spawner = JudgeSpawner(link)
    while True:
        limit_memory(math.inf)
        try:
            order = wire.receive(channel.fileno())
        except EOFError:
            return
        before = address_space()
        lacking = load_packages(order.get("packages", {}))
        base += address_space() - before
        limits, grown = order["limits"], address_space() - base
        limit_memory(base + COPIES * grown + limits["memory_bytes"] + BYTES_PER_BYTE * limits["output_bytes"])
        random.seed()  # test code may have set one
        if lacking:
            link.send(unjudged=lacking)
        else:
            check(order, link, spawner)
        link.send(done=True, is_worn=address_space() > base + MAX_GROWTH)


def check(order: dict[str, Any], link: Link, spawner: Spawner) -> None:
    """Send the verdicts from the first missing one on."""
    case = ProgramCase(spawner, link, order["code"], order["entry_point"], order["limits"], **order["state"])
    try:
        verdicts.judge(case, order["tests"][order["first"] :])
    except Unjudged as error:
        link.send(unjudged=str(error)[:1000])
    except Broken as error:
        link.send(broken=str(error)[:1000])


def load_packages(places: dict[str, str]) -> str:
    """Import the packages of test code; return the reason of a failure, or ""."""
    for name, folder in places.items():
        if name not in sys.modules:
            os.environ.update(dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
            sys.path.append(folder)
            try:
                importlib.import_module(name)
            except Exception as error:
                return f"test code imports {name}, which the judge cannot: {error}"[:1000]
            finally:
                sys.path.remove(folder)
    return ""


class JudgeSpawner:
    """A Spawner whose processes are the judge's, under its watch."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def fresh(self, limits: dict[str, Any], is_script: bool) -> Program:
        self._link.send(spawn=is_script)
        descriptors = self._link.receive_descriptors()
        if not descriptors:
            raise LoadFailed("it left more files than a program may have")
        return Program(Process(0, None, *descriptors), limits)

    def end(self, program: Program) -> None:
        program.close()
        self._link.send(end=True)


def address_space() -> int:
    """Return this process's bytes as RLIMIT_AS counts them, 0 if unknown."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def limit_memory(num_bytes: float) -> None:
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    possible = math.inf if most == resource.RLIM_INFINITY else most
    resource.setrlimit(resource.RLIMIT_AS, (int(num_bytes) if num_bytes < possible else most, most))
