"""A process with the standard library loaded that forks each isolated program.

It sees neither code nor arguments nor answers, which pass through pipes unread, so that programs inherit nothing from
each other. The judge sends it `spawn` and `end` over a socket.
"""

import gc
import json
import os
import signal
import socket
import sys
import sysconfig
from contextlib import suppress
from dataclasses import replace
from typing import Any

from covey_sandbox.inside import program
from covey_sandbox.inside.isolation import folders, kernel, layers, library, namespaces, probes, seccomp, stand_ins
from covey_sandbox.inside.isolation.layers import Spec

MAX_MESSAGE = 1 << 16


def main(control: int) -> None:
    """Serve until the judge closes its end."""
    # Die with the host, and before it when memory runs out
    channel = socket.socket(fileno=control)
    kernel.name_process("covey-zygote")
    kernel.offer_to_oom_killer()
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    config = json.loads(channel.recv(MAX_MESSAGE))
    try:
        spec = prepare(config)
    except (OSError, ImportError) as error:
        tell(channel, {"failed": " ".join(str(error).split())})
        return
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)  # again: a change of user clears it
    tell(channel, {"ready": ".".join(map(str, sys.version_info[:3])), "keep_search": spec.keep_search})
    serve(channel, spec)


def prepare(config: dict[str, Any]) -> Spec:
    """Import, then move into namespaces; return the programs' spec."""
    # Load what programs import, before files are closed to them
    kernel.one_malloc_arena()
    library.preload()
    program.open_streams()
    is_namespaced = any(layer in config["layers"] for layer in layers.NAMESPACE_LAYERS)
    if "seccomp" in config["layers"]:
        stand_ins.install(are_files_private=is_namespaced)
        if not is_namespaced:
            library.preload_extensions()
            library.freshen()
    spec = Spec(layers=tuple(config["layers"]), limits={}, uid=config["uid"], base_bytes=address_space())
    if is_namespaced:
        namespaces.enter(spec, library.folders(), library.hidden())
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    # Prepare filter and rules once; each fork only installs them
    seccomp.template(kernel.MACHINE, spec.has("mount_namespace"))
    spec = replace(
        spec,
        uid=None if is_namespaced else spec.uid,
        keep_search=spec.uid is not None and not is_namespaced and not folders.is_public(sysconfig.get_path("stdlib")),
        is_alone=is_namespaced or spec.uid is not None,
        rules=library.rules() if spec.has("landlock") else (),
        ruleset=library.exact_ruleset(config["base"]) if spec.has("landlock") and not is_namespaced else None,
    )
    # Objects of the zygote stay shared with its forks
    gc.collect()
    gc.freeze()
    return spec


def address_space() -> int:
    """Return this process's bytes, as RLIMIT_AS counts them."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def tell(channel: socket.socket, message: dict[str, Any]) -> None:
    channel.send(json.dumps(message).encode())


def serve(channel: socket.socket, base: Spec) -> None:
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, MAX_MESSAGE, 4)
        if not message:
            return
        request = json.loads(message)
        if "end" in request:
            tell(channel, end(request["end"], base))
            continue
        try:
            tell(channel, {"pid": spawn(request, descriptors, base)})
        except OSError as error:
            tell(channel, {"failed": " ".join(str(error).split())})
        for descriptor in descriptors:
            os.close(descriptor)


def spawn(request: dict[str, Any], descriptors: list[int], base: Spec) -> int:
    """Start a process for one program, and return its number here."""
    spec = replace(
        base,
        layers=tuple(layer for layer in base.layers if layer not in request["omit"]),
        limits=request["limits"],
        folder=request["folder"] or layers.WORK,
    )
    flags = kernel.CLONE_NEWPID if spec.has("pid_namespace") else 0
    flags |= kernel.CLONE_NEWNS if spec.has("mount_namespace") else 0
    pid = kernel.fork_into(flags)
    if pid == 0:
        try:
            become_program(spec, descriptors, request["probe"])
        finally:
            os._exit(1)
    return pid


def become_program(spec: Spec, descriptors: list[int], is_probe: bool) -> None:
    """Set up the new process: descriptors, layers, then the program."""
    step = layers.Step("start")
    try:
        kernel.name_process("covey-program")
        arrange(descriptors)
        if not spec.has("pid_namespace") and not spec.has("seccomp"):
            os.setpgid(0, 0)  # the best that can be done about its children
        layers.enter(spec, step)
    except BaseException as error:
        program.ResultChannel(program.RESULT, 1 << 16).send({"failed": f"{step.layer}: {program.text_of(error)}"})
        os._exit(1)
    if is_probe:
        probes.serve()
    program.serve(spec.limits)


def arrange(descriptors: list[int]) -> None:
    """Arrange job, result and standard streams: pipes for scripts alone."""
    job, result, *streams = descriptors
    null = os.open("/dev/null", os.O_RDWR)
    stdin, stdout = streams or (null, null)
    layers.arrange({0: stdin, 1: stdout, 2: null, program.JOB: job, program.RESULT: result})


def end(pid: int, base: Spec) -> dict[str, Any]:
    """Kill a process and its children; return how it ended by itself, if so."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    if "pid_namespace" not in base.layers and "seccomp" not in base.layers:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    return {"status": os.waitstatus_to_exitcode(status), "cpu": usage.ru_utime + usage.ru_stime}
