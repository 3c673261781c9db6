"""Join a Ray cluster that runs, or start one on this machine that ends with the run."""

import atexit
import gc
import logging
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from covey.cluster.roles import asked_of, check_counts
from covey.cluster.settings import DevicesConfig
from covey.cluster.slot import last_line
from covey.system.machine import KEPT_MEMORY, keeps_memory
from covey.system.text.escaping import escape
from covey.types import RunStopped

LOGGER = logging.getLogger(__name__)

LOOPBACK = "127.0.0.2"
"""Ray replaces 127.0.0.1 by the machine's own address; nothing of a cluster on one machine leaves it."""
STORE_BYTES = 200_000_000
"""Least memory of the object store, through which weights travel."""

SWITCH_SECONDS = 0.0005
"""The longest that a thread which wants the interpreter waits for another one: Python's own 5 ms come several times a
step, as calls of Ray pass through several threads."""
INLINE_BYTES = 500_000
"""Most that travels inside of calls in a cluster that is started here, and not through the object store: cheaper where
it is little, and Ray ends a process without a word whose store dies while it writes or reads."""
LOOK_SECONDS = 2.0
"""Between two looks at whether the cluster lives."""
AGENTS = (b"ray::DashboardAgent", b"ray::RuntimeEnvAgent")
"""Names of processes that a node of Ray starts beside those of actors."""
CLUSTER_SECONDS = 20.0
"""For the cluster to answer, at most: Ray itself ends a process without a word that has not reached it for 60 s."""
LAST_WORD = """
import os, select, socket, sys
store, ends = socket.socket(socket.AF_UNIX), select.epoll()
if not store.connect_ex(sys.argv[1]):
    ends.register(store, select.EPOLLIN)
    ends.register(0, select.EPOLLIN)
    if ends.poll(maxevents=1)[0][0] == store.fileno():
        os.read(0, 1)
        os.write(2, b"covey: the Ray node of this machine is gone, and Ray ended this process with it\\n")
"""
"""Program of a process that outlives its parent, and speaks where the node's store was gone before: a parent that is
killed takes its node along."""
_speakers: list["subprocess.Popen[bytes]"] = []
KINDS = {"SamplerActor": "sampler", "JudgeActor": "judge", "TrainerRank": "trainer rank"}
"""Actors whose programs may print, and how they are called here."""


class ClusterLost(RunStopped):
    """Raised where there is no cluster any more: nobody is left who could be told to end."""


def import_ray() -> Any:
    """Return Ray. ValueError names the extra where it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise ValueError("source=ray needs the package ray: pip install 'covey[ray]'") from error
    return ray


@contextmanager
def kept_handlers() -> Iterator[None]:
    """Put the handlers of signals back that ray.init replaces, where this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def connect(devices: DevicesConfig, weight_bytes: int) -> bool:
    """Connect to the cluster. Returns whether it was started here, and so ends with the run.

    ValueError where there is no such cluster, or it has not what the roles ask for.
    """
    ray = import_ray()
    address = devices.address or os.environ.get("RAY_ADDRESS")
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": True, "namespace": "covey"}
    # Join the cluster that is named, or start one here
    with kept_handlers():
        if ray.is_initialized():
            return False
        os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # of a rank that ends with this one, which says why
        if address is not None:
            try:
                ray.init(address=address, **quiet)
            except ConnectionError as error:
                raise ValueError(f"no Ray cluster answers at {address}: `ray start --head` starts one") from error
        else:
            # Counts of Ray are its own book-keeping: a laptop has as many places as the roles ask for.
            num_cpus = max(os.cpu_count() or 1, int(asked_of(devices)["CPU"]))
            ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                object_store_memory=_store_bytes(weight_bytes),
                _node_ip_address=LOOPBACK,
                _system_config={"max_direct_call_object_size": INLINE_BYTES},
                **quiet,
            )
    # Compare what it has with what the roles ask for
    show_prints(ray)
    leave_last_word(store_path(ray))
    try:
        check_counts(ray, devices)
    except ValueError:
        disconnect(is_own=address is None)
        raise
    return address is None


def disconnect(is_own: bool) -> None:
    """Leave the cluster. One that was started here ends."""
    if not is_own:
        return
    hush()
    agents = agents_of(import_ray())
    with kept_handlers():
        import_ray().shutdown()
    kill_agents(agents)  # Ray leaves them for a minute where its GCS died before its node


def agents_of(ray: Any, proc: Path = Path("/proc")) -> list[int]:
    """Return the processes that a node which was started here has started to look after itself: no workers.

    Found by the logs that they write, which they do after the death of their node too.
    """
    try:
        node = ray._private.worker._global_node
        session = str(node.get_session_dir_path())
        if "raylet" not in node.all_processes:  # of a cluster that somebody else started
            return []
    except AttributeError:  # another Ray keeps them elsewhere
        return []
    found = []
    for entry in proc.glob("[0-9]*"):
        with suppress(OSError):
            is_agent = (entry / "cmdline").read_bytes().startswith(AGENTS)
            if is_agent and any(_is_below(file, session) for file in (entry / "fd").iterdir()):
                found.append(int(entry.name))
    return found


def kill_agents(pids: Iterable[int]) -> None:
    """Kill agents, of which some may have ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _is_below(file: Path, folder: str) -> bool:
    """Tell whether an open file of a process lies in a folder, False where it is closed meanwhile."""
    try:
        return file.readlink().is_relative_to(folder)
    except OSError:
        return False


def leave_last_word(store: str | None) -> None:
    """Have another process say why this one ended, where Ray ends it with a node that died.

    Who writes or reads an object at that moment ends without a handler and a line, with code 1.
    """
    if store is None or not hasattr(select, "epoll"):  # of Linux
        return
    command = [sys.executable, "-I", "-S", "-c", LAST_WORD, store]
    _speakers.append(subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True))


@atexit.register
def hush() -> None:
    """End those who would say why this process ended: it says so itself."""
    while _speakers:
        speaker = _speakers.pop()
        speaker.kill()
        speaker.communicate()


def show_prints(ray: Any) -> None:
    """Print what actors of this run print, in the place of all that Ray would print of them and of itself."""
    try:
        dispatcher = ray._private.ray_logging.global_worker_stdstream_dispatcher
        dispatcher.remove_handler("ray_print_logs")
        dispatcher.add_handler("covey", print_lines)
    except AttributeError:  # another Ray keeps it elsewhere, and prints them itself
        return


def print_lines(batch: Mapping[str, Any]) -> None:
    """Print the lines of one process, each with its kind and number before it."""
    name = str(batch.get("actor_name") or "")
    kind = next((own for actor, own in KINDS.items() if name.startswith((actor, own))), None)
    if kind is None:
        return
    where = sys.stderr if batch.get("is_err") else sys.stdout  # worker processes of rewards print to the former
    for line in batch.get("lines", ()):
        if not str(line).startswith(":"):  # what Ray writes there for itself
            print(escape(f"{kind} {batch.get('pid')}: {line}"), file=where, flush=True)


def worker_environment(num_threads: int, python: str | None = None) -> dict[str, Any]:
    """Return the environment that an actor's process starts with. `python` is an interpreter other than this one."""
    # What belongs to this interpreter the other one has itself, and perhaps in another version.
    prefixes = (sys.prefix, sys.base_prefix)
    foreign = [path for path in sys.path if path and not any(Path(path).is_relative_to(own) for own in prefixes)]
    paths = [os.getcwd(), *foreign]
    variables = {
        "OMP_NUM_THREADS": str(num_threads),  # else Ray sets it, and the bits of sums depend on it
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # what an actor prints is passed on
    }
    # Ray runs the methods of an actor in a thread that is not the first
    if keeps_memory(os.environ):
        variables |= KEPT_MEMORY
    return {"env_vars": variables} | ({} if python is None else {"py_executable": python})


def prepare_actor() -> None:
    """Prepare the process of an actor, once it has started in `worker_environment`.

    Threads that answer calls wait less for the interpreter than by default, garbage is not looked for among what was
    imported, and what the process starts itself does not keep memory as it does.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.freeze()
    for name, value in KEPT_MEMORY.items():
        if os.environ.get(name) == value:
            del os.environ[name]


def _store_bytes(weight_bytes: int) -> int:
    """Return the memory of an object store for a few versions of the weights, within the shared memory there is."""
    wanted = max(STORE_BYTES, 4 * weight_bytes)
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else wanted
    if free < wanted:
        LOGGER.warning(
            "/dev/shm has %d MB free and %d MB of weights pass through it: give the container more (--shm-size)",
            free // 1_000_000,
            wanted // 1_000_000,
        )
    return wanted


def inline_bytes() -> int:
    """Return the most that may travel inside of a call in this cluster; 0 where this Ray does not say."""
    try:
        return int(import_ray()._private.state.state.get_system_config()["max_direct_call_object_size"])
    except (AttributeError, KeyError):
        return 0


def put(value: object, what: str) -> Any:
    """Put something into the object store, from where nodes fetch it.

    ClusterLost where the store is gone, RunStopped where it does not take `what`.
    """
    check_store()
    ray = import_ray()
    try:
        return ray.put(value)
    except ray.exceptions.RayError as error:
        raise RunStopped(f"{what} could not be put into Ray's object store: {last_line(error)}") from error


def check_store() -> None:
    """Raise ClusterLost where the object store of this machine is gone: Ray would end this process without a word."""
    with store_of_this_machine(import_ray()):
        pass


def store_path(ray: Any) -> str | None:
    """Return the address of the object store of this machine, None where another version of Ray keeps it elsewhere."""
    try:
        return str(ray._private.worker.global_worker.node.plasma_store_socket_name)
    except AttributeError:
        return None


@contextmanager
def store_of_this_machine(ray: Any) -> Iterator[list[socket.socket]]:
    """Connect to the object store, which the node of this machine keeps: the connection ends with the node.

    ClusterLost where it is gone. No connection where another version of Ray keeps its address elsewhere.
    """
    path = store_path(ray)
    if path is None:
        yield []
        return
    with socket.socket(socket.AF_UNIX) as store:
        try:
            store.connect(path)
        except OSError as error:
            raise ClusterLost(f"the object store of the Ray cluster is gone ({error})") from error
        yield [store]


def loss_of_cluster(seconds: float) -> ClusterLost | None:
    """Return what is wrong with the cluster or this machine's node, None where it answers within `seconds`."""
    try:
        check_store()  # at once, while the cluster may not know it yet
    except ClusterLost as lost:
        return lost
    return _loss_elsewhere(import_ray(), seconds)


def _loss_elsewhere(ray: Any, seconds: float) -> ClusterLost | None:
    """Return what is wrong with the cluster, None where it answers within `seconds` and a node is alive."""
    answer: SimpleQueue[bool] = SimpleQueue()

    def ask() -> None:
        # Not through get_runtime_context: it starts a cluster where this process has left its own
        with suppress(Exception):  # who is no longer connected has no answer either
            answer.put(any(node["Alive"] for node in ray.nodes()))

    threading.Thread(target=ask, daemon=True).start()
    try:
        is_alive = answer.get(timeout=seconds)
    except Empty:
        return ClusterLost(f"the Ray cluster gave no sign of life for {seconds:g} s")
    return None if is_alive else ClusterLost("no node of the Ray cluster is alive")


def watch_cluster(silence: float, tell: Callable[[ClusterLost], None], is_over: threading.Event) -> None:
    """Look at the cluster in a thread until it is gone, after `silence` seconds without an answer at the latest.

    In threads, since Ray's own calls may block for as long as nobody answers them.
    """
    ray, seconds = import_ray(), min(silence, CLUSTER_SECONDS)

    def look() -> None:
        try:
            _await_loss(ray, seconds, is_over)
        except ClusterLost as lost:
            tell(lost)

    threading.Thread(target=look, name="covey-cluster", daemon=True).start()


def _await_loss(ray: Any, seconds: float, is_over: threading.Event) -> None:
    """Return once `is_over` is set. ClusterLost where the cluster is gone before.

    The death of this machine's node is known at once, before Ray ends this process for it: by one connection, since
    the node logs the end of each.
    """
    with store_of_this_machine(ray) as connections:
        while not is_over.is_set():
            has_ended = bool(select.select(connections, [], [], LOOK_SECONDS)[0])
            lost = ClusterLost("the Ray node of this machine is gone") if has_ended else _loss_elsewhere(ray, seconds)
            if lost is not None and not is_over.is_set():
                raise lost
