"""Hostile programs beside those of the shared file: each defines `solve`, and passes none of its tests.

Two tests expect secrets that nobody can guess, of the form SECRET-0-0123456789abcdef, the last one "OUT".
"""

# ruff: noqa: E501

FORGING = {
    "answers ahead of their calls": """
import os, json
def frame(message):
    body = json.dumps(message).encode()
    return len(body).to_bytes(4, "big") + body
def solve(x):
    os.write(4, frame({"i": x, "out": 1}) + frame({"i": x + 1, "out": 1}) + frame({"i": x, "out": 1}))
    return 1
""",
    "a verdict in place of an answer": """
import os, json
body = json.dumps({"results": [{"passed": True, "kind": "passed", "message": ""}] * 2, "imports": [], "seconds": 0}).encode()
os.write(4, len(body).to_bytes(4, "big") + body)
def solve(x): return 1
""",
    "a frame that never ends": """
import os
def solve(x):
    os.write(4, b"\\xff\\xff\\xff\\xff" + b"A" * 100000)
    return 1
""",
    "the sending code is changed": """
import sys
program = sys.modules["covey_sandbox.inside.program"]
program.ResultChannel.send_value = lambda self, index, value: self.send({"i": index, "out": True, "passed": True})
def solve(x): return 1
""",
    "the channel is another": "import os\ndef solve(x):\n    os.dup2(1, 4)\n    return 1",
    "all descriptors are closed": "import os\ndef solve(x):\n    os.closerange(0, 1000)\n    return 1",
    "an int that lies about everything": """
class I(int):
    def __index__(self): return 7
    def __eq__(self, other): return True
    def __class__(self): return int
    __hash__ = int.__hash__
    __int__ = __pos__ = __index__
def solve(x): return I(3)
""",
    "a metaclass that lies": """
class M(type):
    def __instancecheck__(cls, other): return True
    def __subclasscheck__(cls, other): return True
    def __eq__(cls, other): return True
    __hash__ = type.__hash__
    __name__ = property(lambda cls: 1 / 0)
class A(metaclass=M):
    __class__ = property(lambda self: str)
    def __eq__(self, other): return True
def solve(x): return A()
""",
    "an exception that lies": """
class E(Exception):
    def __str__(self): raise SystemExit(0)
    __name__ = "passed"
def solve(x): raise E
""",
    "the encoding code is changed": """
import sys
codec = sys.modules["covey_sandbox.inside.codec"]
class Equal(codec.Opaque):
    def __eq__(self, other): return True
    __hash__ = object.__hash__
codec.Opaque.__eq__ = Equal.__eq__
codec.Encoder.encode = lambda self, value, depth=0: {"o": True}
def solve(x): return Equal(True)
""",
    "builtins that lie": """
import builtins, operator
class M(type):
    def __eq__(cls, other): return True
    def __hash__(cls): return hash(str)
    __mro__ = property(lambda cls: (str, object))
class Lie(str, metaclass=M):
    def __eq__(self, other): return True
    def __str__(self): return "OUT"
    __hash__ = str.__hash__
operator.eq = builtins.isinstance = builtins.issubclass = lambda a, b: True
builtins.type, builtins.hash = lambda x: str, lambda x: 0
def solve(x): return Lie("in")
""",
    "the caller's variables are changed": """
import sys
def solve(x):
    frame = sys._getframe(1)
    frame.f_locals.update(index=2, function=str, call={"i": 2})
    return "OUT" if x < 2 else "in"
""",
    "an exit from within a collection": """
import gc, os
class D:
    def __del__(self): os.write(4, b"\\xff" * 9); os._exit(0)
gc.disable()
def solve(x):
    d = D(); d.me = d
    del d; gc.collect()
    return "OUT"
""",
    "answers behind the end": """
import atexit, os, threading, time
body = b'{"i": 0, "out": true}'
late = lambda: os.write(4, len(body).to_bytes(4, "big") + body)
threading.Thread(target=lambda: (time.sleep(0.2), late()), daemon=True).start()
atexit.register(late)
def solve(x): return "in"
""",
    "the channel by its path": """
import os
def solve(x):
    for path in ("/proc/self/fd/4", "/dev/fd/4", f"/proc/{os.getpid()}/fd/4"):
        try: os.symlink(path, "l"); open("l", "wb").write(b'\\0\\0\\0\\2{}'); os.unlink("l")
        except OSError: pass
    return "in"
""",
    "hooks": """
import sys, os, signal, atexit
sys.excepthook = lambda *a: os._exit(0)
signal.signal(signal.SIGSEGV, lambda *a: os._exit(0))
atexit.register(os._exit, 0)
sys.settrace(lambda *a: None)
def solve(x): raise KeyboardInterrupt
""",
}

FINDING = {
    "the job channel": """
import os, re
os.set_blocking(3, False)
def solve(x):
    try: text = os.read(3, 1 << 16).decode("latin1")
    except OSError: return "nothing"
    found = re.search("SECRET-[0-9]-[0-9a-f]{16}", text)
    return found.group() if found else "nothing"
""",
    "frames, modules and all objects": """
import gc, re, sys
def solve(x):
    objects, frame = gc.get_objects(), sys._getframe()
    while frame:
        objects += [*frame.f_locals.values(), *frame.f_globals.values()]
        frame = frame.f_back
    for module in list(sys.modules.values()): objects += list(vars(module).values())
    for o in objects:
        for item in (o.values() if type(o) is dict else o if type(o) in (list, tuple, set) else [o]):
            if type(item) in (str, bytes) and re.search(rb"SECRET-%d-[0-9a-f]{16}" % x, item if type(item) is bytes else item.encode("utf-8", "replace")):
                return item
    return "nothing"
""",
    "memory by address": """
import ctypes, gc, re
def solve(x):
    pages = {id(o) & ~0xFFF for o in gc.get_objects()[-2000:]} | {id(str(i)) & ~0xFFF for i in range(2000)}
    text = b"".join(ctypes.string_at(page, 4096) for page in pages)
    found = re.search(b"SECRET-%d-[0-9a-f]{16}" % x, text)
    return found.group().decode() if found else "nothing"
""",
    "memory of itself and others by path": """
import os, re
def solve(x):
    for process in ["self", *filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else [])]:
        for name in ("maps", "environ", "cmdline", "root/etc/hostname", "mem"):
            try: file = open(f"/proc/{process}/{name}", "rb", 0); text = file.read(1 << 20) if name != "mem" else b""
            except OSError: continue
            if name == "maps": places = [[int(part, 16) for part in line.split()[0].split(b"-")] for line in text.splitlines()]
            for begin, end in places if name == "mem" else []:
                try: file.seek(begin); text += file.read(min(end - begin, 1 << 22))
                except (OSError, OverflowError): pass
            found = re.search(b"SECRET-%d-[0-9a-f]{16}" % x, text)
            if found: return found.group().decode()
    return "nothing"
""",
    "what an earlier process of the same program left": """
import os
found = os.path.exists("left") or os.path.exists("/dev/shm/left") or os.path.exists("/var/tmp/left")
for path in ("left", "/dev/shm/left", "/var/tmp/left"):
    try: open(path, "w").close()
    except OSError: pass
def solve(x):
    if x < 2: os._exit(0)
    return "OUT" if found else "nothing"
""",
}

ESCAPING = {
    "descriptors are passed on": """
import socket, array
def solve(x):
    a, b = socket.socketpair()
    a.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]))])
    return "OUT"
""",
    "datagrams to a path": """
import socket
def solve(x):
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    a.sendto(b"x", "/dev/log")
    return "OUT"
""",
    "datagrams over the network": """
import socket
def solve(x):
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", 9))
    return "OUT"
""",
    "an abstract address": """
import socket
def solve(x):
    socket.socket(socket.AF_UNIX).bind("\\0out")
    return "OUT"
""",
    "memory files": "import os\ndef solve(x):\n    os.memfd_create('x')\n    return 'OUT'",
    "a session": "import os\ndef solve(x):\n    os.setsid()\n    return 'OUT'",
    "a process group": "import os\ndef solve(x):\n    os.setpgid(0, 0)\n    return 'OUT'",
    "another program": "import os\ndef solve(x):\n    os.execv('/bin/true', ['true'])",
    "a process by clone": """
import ctypes, os
libc = ctypes.CDLL(None)
def solve(x):
    number = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
    pid = libc.syscall(number, 17, 0, 0, 0, 0)
    if pid == 0: os._exit(0)
    return "OUT" if pid > 0 else "in"
""",
    "signals by a descriptor's owner": """
import fcntl, os
def solve(x):
    r, w = os.pipe()
    fcntl.fcntl(r, fcntl.F_SETOWN, os.getppid() or 1)
    return "OUT"
""",
    "limits of others": "import os, resource\ndef solve(x):\n    resource.prlimit(os.getppid() or 2, resource.RLIMIT_CPU)\n    return 'OUT'",
    "calls of another architecture": """
import ctypes, mmap, platform
def solve(x):
    if platform.machine() != "x86_64": return "in"
    page = mmap.mmap(-1, 4096, prot=7)
    page.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, 20 (getpid of i386); int 0x80; ret
    call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    return "OUT" if call() > 0 else "in"
""",
    "files of the host": """
import os
def solve(x):
    v = "/tmp/sbx_canary/victim"
    tries = [(os.chmod, (v, 0)), (os.utime, (v, (0, 0))), (os.truncate, (v, 0)), (os.chmod, ("/tmp/sbx_canary", 0)),
             (os.link, (v, "l")), (os.rename, (v, "l")), (os.mkdir, ("/tmp/sbx_canary/out",)), (os.unlink, (v,)),
             (os.symlink, ("/etc/passwd", "/tmp/sbx_canary/out")), (os.mkfifo, ("/tmp/sbx_canary/out",)), (open, (v, "w"))]
    done = []
    for function, arguments in tries:
        try: function(*arguments); done.append(function.__name__)
        except OSError: pass
    return "OUT" if done else "in"
""",
    "installed packages": """
import os, sysconfig
def solve(x):
    for key in ("purelib", "platlib"):
        for folder, _, files in os.walk(sysconfig.get_path(key)):
            for name in files:
                try: open(os.path.join(folder, name)); return "OUT"
                except OSError: pass
    return "in"
""",
    "a link out of its folder": """
import os
def solve(x):
    os.symlink("/", "root")
    return "OUT" if os.path.exists("root/tmp/sbx_canary/victim") and open("root/tmp/sbx_canary/victim").read() else "in"
""",
}

EXHAUSTING = {
    "a sparse file": "def solve(x):\n    f = open('s', 'wb'); f.seek(1 << 40); f.write(b'x'); f.flush()\n    return 'OUT'",
    "files without a name": """
import os
def solve(x):
    kept = []
    for i in range(500):
        kept.append(open(str(i), "wb")); os.unlink(str(i))
        for _ in range(32): kept[-1].write(b"z" * (1 << 20))
    return "OUT"
""",
    "folders within folders": "import os\ndef solve(x):\n    for i in range(3000): os.mkdir('d'); os.chdir('d')\n    return 'deep'",
    "folders nobody may enter": "import os\ndef solve(x):\n    os.umask(0)\n    for i in range(9): os.mkdir(str(i), 0)\n    return 1",
    "many files": "def solve(x):\n    for i in range(200000): open(str(i), 'w').close()\n    return 'OUT'",
    "many threads": """
import threading, time
threading.stack_size(65536)
def solve(x):
    for i in range(5000): threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
    return "OUT"
""",
    "it stops itself": "import os, signal\ndef solve(x):\n    os.kill(os.getpid(), signal.SIGSTOP)\n    while True: pass",
    "all signals are blocked": "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\ndef solve(x):\n    while True: pass",
    "an endless iterator": "import itertools\ndef solve(x): return itertools.count()",
    "truth that never comes": "class B:\n    def __bool__(self):\n        while True: pass\ndef solve(x): return B()",
    "a finalizer that never ends": "class D:\n    def __del__(self):\n        while True: pass\ndef solve(x):\n    D()\n    return 1",
}

DISK = {
    "space that no file shows": """
import ctypes, os
call = ctypes.CDLL(None, use_errno=True).syscall
call.argtypes = [ctypes.c_long] * 5
def solve(x):
    fd = os.open("big", os.O_RDWR | os.O_CREAT); os.unlink("big")
    number = {"x86_64": 285, "aarch64": 47}[os.uname().machine]
    return "OUT" if any(call(number, fd, mode, 0, 100 << 20) == 0 for mode in (0, 1, 0x10, 0x11, 0x20, 0x40)) else "in"
""",
    "files that only a mapping holds": """
import ctypes, os
call = ctypes.CDLL(None).mmap
call.argtypes, call.restype = [ctypes.c_long] * 6, ctypes.c_long
def solve(x):
    for i in range(60):
        fd = os.open("a", os.O_RDWR | os.O_CREAT)
        os.write(fd, b"z" * (1 << 20))
        if call(0, 4096, 1, [1, 2, 0x802][x], fd, 0) == -1: return "in"  # shared, private, as the linker does it
        os.unlink("a"); os.close(fd)
    return "OUT"
""",
    "files that never had a name": """
import os
def solve(x):
    for i in range(60): os.write(os.open(".", os.O_TMPFILE | os.O_RDWR), b"z" * (1 << 20))
    return "OUT"
""",
    "a file that others were renamed onto": """
import os
def solve(x):
    kept = []
    for i in range(60):
        kept.append(os.open("b", os.O_RDWR | os.O_CREAT)); os.write(kept[-1], b"z" * (1 << 20))
        os.rename("b", "a")
    return "OUT"
""",
    "files in a folder that may not be listed": """
import os, time
def solve(x):
    os.mkdir("d", 0o300)
    for i in range(60): open(f"d/{i}", "wb").write(b"z" * (1 << 20)); time.sleep(0.01)
    return "OUT"
""",
    "files behind a path that is too long": """
import os, time
def solve(x):
    for _ in range(24): os.mkdir("n" * 250); os.chdir("n" * 250)
    for i in range(60): open(str(i), "wb").write(b"z" * (1 << 20)); time.sleep(0.01)
    return "OUT"
""",
    "files in folders that change their names": """
import os, threading, time
def turn():
    while True:
        os.rename("a", "c"); os.rename("b", "a"); os.rename("c", "b")
def solve(x):
    os.mkdir("a"); os.symlink("/", "b")
    at = os.open("a", os.O_RDONLY)
    threading.Thread(target=turn, daemon=True).start()
    for i in range(60): os.write(os.open(str(i), os.O_CREAT | os.O_WRONLY, dir_fd=at), b"z" * (1 << 20)); os.close(at + 1); time.sleep(0.02)
    return "OUT"
""",
    "one file as large as many": """
import os
def solve(x):
    fd = os.open("a", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 10 << 20)
    for i in range(60): os.pwrite(fd, b"z" * (1 << 20), i << 20)
    return "OUT"
""",
    "files held by threads with descriptors of their own": """
import ctypes, os, threading, time
call, held = ctypes.CDLL(None).syscall, []
def hold(name):
    call(436, 1000, 1001, 2)  # close_range with CLOSE_RANGE_UNSHARE
    try:
        for i in range(9):
            held.append(os.open(name, os.O_RDWR | os.O_CREAT)); os.unlink(name)
            os.write(held[-1], b"z" * (1 << 20))
    except OSError: pass
    time.sleep(9)
def solve(x):
    for n in range(9): threading.Thread(target=hold, args=(str(n),), daemon=True).start()
    time.sleep(0.3)
    return "OUT" if len(held) > 40 else "in"
""",
    "threads that share nothing but memory": """
import ctypes, os
call = ctypes.CDLL(None).syscall
number = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
stack = ctypes.addressof(ctypes.create_string_buffer(1 << 16)) + 65000 & ~15
kept = [stack]
def solve(x):
    flags = 0x10900 | [0, 0x200, 0x400][x]  # CLONE_VM, CLONE_SIGHAND and CLONE_THREAD, without CLONE_FILES or CLONE_FS
    return "OUT" if call(number, flags, ctypes.c_void_p(stack), 0, 0, 0) > 0 else "in"
""",
    "memory that is a file": """
import ctypes, os
def solve(x):
    number = {"x86_64": 319, "aarch64": 279}[os.uname().machine]
    return "OUT" if ctypes.CDLL(None).syscall(number, b"m", 0) >= 0 else "in"
""",
}
"""Programs that want more of the disk than `file_bytes`, in pieces of 1 MiB."""

TELLING = {
    "locks": """
import fcntl, os, struct
def solve(x):
    for path in (os.__file__, os.path.dirname(os.__file__), "mine"):
        try: one, other = (os.open(path, os.O_RDWR | os.O_CREAT if path == "mine" else os.O_RDONLY) for _ in range(2))
        except OSError: continue
        for kind in (fcntl.LOCK_SH, fcntl.LOCK_EX):
            try: fcntl.flock(one, kind); fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError: return "OUT"
            except PermissionError: pass
        for lock in (37, 6):
            try:
                for fd in (one, other): fcntl.fcntl(fd, lock, struct.pack("hhqqi4x", fcntl.F_WRLCK if path == "mine" else fcntl.F_RDLCK, 0, 0, 0, 0))
            except BlockingIOError: return "OUT"
            except OSError: pass
        for ask in (5, 36):
            try: fcntl.fcntl(one, ask, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0)); return "OUT"
            except OSError: pass
    return "in"
""",
    "a futex in a library": """
import ctypes, os
class Time(ctypes.Structure): _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]
def solve(x):
    libc = ctypes.CDLL(None, use_errno=True)
    number = {"x86_64": 202, "aarch64": 98}[os.uname().machine]
    address = ctypes.cast(libc.getpid, ctypes.c_void_p).value & ~3  # memory that all programs share
    value = ctypes.c_long(ctypes.c_uint32.from_address(address).value)
    for wait in (0, 9, 256, 265):  # any other program could wake what waits here
        libc.syscall(number, ctypes.c_void_p(address), ctypes.c_long(wait), value, ctypes.byref(Time(0, 10**7) if wait == 0 else Time(1)), None, ctypes.c_long(-1))
        if ctypes.get_errno() == 110: return "OUT"
    return "in"
""",
    "times and modes of what all programs see": """
import os, sys
def solve(x):
    library = os.path.dirname(os.__file__)
    paths = ["/", "/dev", "/tmp/..", "/usr", "/dev/null", "/dev/zero", "/dev/random", "/dev/urandom", library, os.path.dirname(library)]
    paths += [os.path.join(library, name) for name in ("site-packages", "dist-packages", "test", "idlelib", "ensurepip", "json", "os.py", "lib-dynload")]
    for path in paths:
        for change in (os.utime, lambda path: os.chmod(path, 0o755), lambda path: os.mkdir(path + "/made"), lambda path: os.truncate(path, 0)):
            try: change(path); return "OUT"
            except OSError: pass
    return "in"
""",
    "times of reading": """
import os, sys
def solve(x):
    library = os.path.dirname(os.__file__)
    folders = [path for name in ("json", "asyncio", "email", "xml", "encodings", "unittest", "sqlite3", "wsgiref") for path, _, _ in os.walk(os.path.join(library, name))]
    paths = folders + [os.path.join(folder, name) for folder in folders for name in os.listdir(folder)]
    paths += [os.path.join(library, name + ".py") for name in sys.stdlib_module_names]
    paths = [path for path in paths if os.path.exists(path)]
    before = [os.stat(path).st_atime_ns for path in paths]
    for path in paths:
        try: os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(1)
        except OSError: pass
    return "OUT" if len(paths) < 100 or before != [os.stat(path).st_atime_ns for path in paths] else "in"
""",
    "what of a file is in memory": """
import ctypes, os
def solve(x):
    fd = os.open(os.__file__, os.O_RDONLY)
    try: os.preadv(fd, [bytearray(9)], 0, 8); return "OUT"
    except OSError: pass
    page = ctypes.create_string_buffer(1 << 16)
    number = {"x86_64": 27, "aarch64": 232}[os.uname().machine]
    address = ctypes.addressof(page) + 4095 & ~4095
    return "OUT" if ctypes.CDLL(None).syscall(number, ctypes.c_void_p(address), 4096, ctypes.create_string_buffer(9)) == 0 else "in"
""",
    "names of installed packages": """
import os, sysconfig
def solve(x):
    found = []
    for path in {sysconfig.get_path(key) for key in ("purelib", "platlib", "stdlib", "platstdlib")} | {os.path.dirname(os.__file__)}:
        for folder in (path, path + "/site-packages", path + "/dist-packages"):
            try: found += [name for name in os.listdir(folder) if name.endswith("-info") or name in ("pip", "site-packages") and folder == path]
            except OSError: pass
    return "OUT" if [name for name in found if name.endswith(("-info", "pip"))] else "in"
""",
    "clocks and scheduling of other processes": """
import ctypes, os, time
def solve(x):
    pids = {os.getppid() or 2, os.getppid() - 1, 1, 2} - {os.getpid(), 0, -1}
    tries = [lambda p: time.clock_gettime(~p << 3 | 2), lambda p: time.clock_getres(~p << 3 | 2), os.getpgid, os.getsid, os.sched_getaffinity,
             os.sched_getscheduler, os.sched_getparam, os.sched_rr_get_interval, lambda p: os.getpriority(os.PRIO_PROCESS, p), lambda p: os.kill(p, 0),
             lambda p: os.getpriority(os.PRIO_USER, 1)]
    for attempt in tries:
        for pid in pids:
            try: attempt(pid); return "OUT"
            except OSError: pass
    return "in"
""",
}
"""Programs that find out about others, or leave them a sign."""

CRASHING = {
    "numbers of one hash": """
import os, json
def solve(x):
    same = [{"i": hex(((1 << 61) - 1) * i)} for i in range(1, 100000)]
    body = json.dumps({"i": x, "out": {"s": same}}).encode()
    left = memoryview(len(body).to_bytes(4, "big") + body)
    while left: left = left[os.write(4, left):]
    while True: pass
""",
    "brackets": "import os\ndef solve(x):\n    os.write(4, (60000).to_bytes(4, 'big') + b'[' * 60000)\n    while True: pass",
    "a list in itself": "def solve(x):\n    a = []; a.append(a); d = {}; d[1] = d\n    return [a, d]",
    "surrogates": "def solve(x): return '\\ud800' * (1 << 20)",
    "a huge integer": "def solve(x): return 1 << (1 << 28)",
    "terminal codes": "def solve(x): raise ValueError('\\x1b[2J\\x07\\ud800')",
    "source that cannot be parsed": "x = " + "(" * 5000,
    "source that cannot be compiled": "x = 1" + "+1" * 100_000,
    "source with a null": "x = 1\0",
    "source with a surrogate": "x = '\ud800'",
    "the stack": "import sys\nsys.setrecursionlimit(1 << 30)\nclass A:\n    def __getattr__(self, n): return getattr(self, n)\ndef solve(x): return A().x",
}

ALL = {**FORGING, **FINDING, **ESCAPING, **EXHAUSTING, **DISK, **TELLING, **CRASHING}
