"""Join a Ray cluster, or start one that ends with the run."""

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
"""Longest wait of a thread for the interpreter: Python's 5 ms would be paid several times per step, as calls of Ray
pass through several threads."""
INLINE_BYTES = 500_000
"""Largest object inside calls of a cluster started here, not through the object store: cheaper, and Ray silently ends
a process whose store dies during access."""
LOOK_SECONDS = 2.0
"""Seconds between two checks whether the cluster lives."""
AGENTS = (b"ray::DashboardAgent", b"ray::RuntimeEnvAgent")
"""Names of processes that a node of Ray starts beside those of actors."""
CLUSTER_SECONDS = 20.0
"""Most seconds for the cluster to answer: Ray itself ends a process without a word that has not reached it for 60 s."""
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
"""Program of a process that outlives its parent, and speaks where the node's store was gone before: a killed parent
takes its node along."""
_speakers: list["subprocess.Popen[bytes]"] = []
KINDS = {"SamplerActor": "sampler", "JudgeActor": "judge", "TrainerRank": "trainer rank"}
"""Actors whose programs may print, and how they are called here."""


class ClusterLost(RunStopped):
    """The cluster is gone, and with it all processes to end."""


def import_ray() -> Any:
    """Import Ray. ValueError names the extra where it is missing."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise ValueError("source=ray needs the package ray: pip install 'covey[ray]'") from error
    return ray


@contextmanager
def kept_handlers() -> Iterator[None]:
    """Restore the signal handlers that ray.init replaces, in the main thread."""
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
    """Connect to the cluster; return True if it was started here.

    ValueError where there is no such cluster, or it lacks devices for the roles.
    """
    ray = import_ray()
    address = devices.address or os.environ.get("RAY_ADDRESS")
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": True, "namespace": "covey"}
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
    show_prints(ray)
    leave_last_word(store_path(ray))
    try:
        check_counts(ray, devices)
    except ValueError:
        disconnect(is_own=address is None)
        raise
    return address is None


def disconnect(is_own: bool) -> None:
    """Leave the cluster; one that was started here ends."""
    if not is_own:
        return
    hush()
    agents = agents_of(import_ray())
    with kept_handlers():
        import_ray().shutdown()
    kill_agents(agents)  # Ray leaves them for a minute where its GCS died before its node


def agents_of(ray: Any, proc: Path = Path("/proc")) -> list[int]:
    """Return the agent processes of a node that was started here.

    They are found by the logs that they write, also after their node's death.
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
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _is_below(file: Path, folder: str) -> bool:
    try:
        return file.readlink().is_relative_to(folder)
    except OSError:
        return False


def leave_last_word(store: str | None) -> None:
    """Let another process report why this one ended, where Ray ends it.

    A process that accesses an object when the node dies ends without a handler, with code 1.
    """
    if store is None or not hasattr(select, "epoll"):  # of Linux
        return
    command = [sys.executable, "-I", "-S", "-c", LAST_WORD, store]
    _speakers.append(subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True))


@atexit.register
def hush() -> None:
    """End the reporting processes: this one reports its end itself."""
    while _speakers:
        speaker = _speakers.pop()
        speaker.kill()
        speaker.communicate()


def show_prints(ray: Any) -> None:
    """Print the actors' prints instead of Ray's output."""
    with suppress(AttributeError):  # another Ray keeps it elsewhere, and prints them itself
        dispatcher = ray._private.ray_logging.global_worker_stdstream_dispatcher
        dispatcher.remove_handler("ray_print_logs")
        dispatcher.add_handler("covey", print_lines)


def print_lines(batch: Mapping[str, Any]) -> None:
    """Print the lines of one process, prefixed by its kind and number."""
    name = str(batch.get("actor_name") or "")
    kind = next((own for actor, own in KINDS.items() if name.startswith((actor, own))), None)
    if kind is None:
        return
    where = sys.stderr if batch.get("is_err") else sys.stdout  # worker processes of rewards print to the former
    for line in batch.get("lines", ()):
        if not str(line).startswith(":"):  # what Ray writes there for itself
            print(escape(f"{kind} {batch.get('pid')}: {line}"), file=where, flush=True)


def worker_environment(num_threads: int, python: str | None = None) -> dict[str, Any]:
    """Return the environment of an actor's process, for another interpreter if given."""
    # The other interpreter has its own packages, perhaps of other versions: this one's are not passed on.
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
    """Prepare an actor's process, started in `worker_environment`.

    Threads wait less for the interpreter, imported objects are frozen, and children do not inherit the memory settings.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.freeze()
    for name, value in KEPT_MEMORY.items():
        if os.environ.get(name) == value:
            del os.environ[name]


def _store_bytes(weight_bytes: int) -> int:
    """Return the object store's bytes, for a few versions of weights."""
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
    """Return the largest object inside a call, 0 if unknown."""
    try:
        return int(import_ray()._private.state.state.get_system_config()["max_direct_call_object_size"])
    except (AttributeError, KeyError):
        return 0


def put(value: object, what: str) -> Any:
    """Put an object into the object store. ClusterLost where the store is gone, RunStopped where it refuses `what`."""
    check_store()
    ray = import_ray()
    try:
        return ray.put(value)
    except ray.exceptions.RayError as error:
        raise RunStopped(f"{what} could not be put into Ray's object store: {last_line(error)}") from error


def check_store() -> None:
    """Raise ClusterLost where this machine's object store is gone."""
    with store_of_this_machine(import_ray()):
        pass


def store_path(ray: Any) -> str | None:
    """Return the address of this machine's object store, None if unknown."""
    try:
        return str(ray._private.worker.global_worker.node.plasma_store_socket_name)
    except AttributeError:
        return None


@contextmanager
def store_of_this_machine(ray: Any) -> Iterator[list[socket.socket]]:
    """Connect to this machine's object store, whose connection ends with the node.

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
    """Return the cluster's or node's loss, None if it answers within `seconds`."""
    try:
        check_store()  # at once, while the cluster may not know it yet
    except ClusterLost as lost:
        return lost
    return _loss_elsewhere(import_ray(), seconds)


def _loss_elsewhere(ray: Any, seconds: float) -> ClusterLost | None:
    """Return the cluster's loss, None with an answer and a live node."""
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
    """Watch the cluster in a thread until `silence` seconds without an answer.

    In threads, as Ray's calls may block while nothing answers.
    """
    ray, seconds = import_ray(), min(silence, CLUSTER_SECONDS)

    def look() -> None:
        try:
            _await_loss(ray, seconds, is_over)
        except ClusterLost as lost:
            tell(lost)

    threading.Thread(target=look, name="covey-cluster", daemon=True).start()


def _await_loss(ray: Any, seconds: float, is_over: threading.Event) -> None:
    """Wait for `is_over`. ClusterLost where the cluster is gone before.

    The death of this machine's node is seen at once by one connection, as the node logs the end of each.
    """
    with store_of_this_machine(ray) as connections:
        while not is_over.is_set():
            has_ended = bool(select.select(connections, [], [], LOOK_SECONDS)[0])
            lost = ClusterLost("the Ray node of this machine is gone") if has_ended else _loss_elsewhere(ray, seconds)
            if lost is not None and not is_over.is_set():
                raise lost
