"""The zygote's namespaces, with a root folder of the interpreter alone.

The same as root and as an ordinary user. Root first opens the interpreter's folders (they may lie in a private home),
then becomes another user, then makes the user namespace: in one made by root, programs would own root's files.
"""

import os
import stat
from collections.abc import Sequence

from covey_sandbox.inside.isolation import kernel
from covey_sandbox.inside.isolation.layers import DEVICES, WORK, Spec, change_user

FLAG_OF = {"network_namespace": kernel.CLONE_NEWNET, "ipc_namespace": kernel.CLONE_NEWIPC}
"""Namespaces of the zygote, shared by its successive programs. Mounts and processes are each program's own."""
INSIDE_ID = 1000
"""User and group as the program sees them."""
_READ_ONLY_DEVICE = kernel.MOUNT_ATTR_RDONLY | kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_NOEXEC
_READ_ONLY = kernel.MOUNT_ATTR_RDONLY | kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_NODEV


def enter(spec: Spec, readable: Sequence[str], hidden: Sequence[str]) -> None:
    """Move the calling, single-threaded process into namespaces.

    `readable`: folders of the host that stay. `hidden`: folders in them that become empty. Raises OSError where the
    kernel or the container forbids it.
    """
    trees: dict[str, int] = {}
    if spec.uid is not None:
        trees = take_hold(readable)
        change_user(spec.uid)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # otherwise /proc/self/uid_map belongs to root
    uid, gid = os.getuid(), os.getgid()
    flags = sum(flag for layer, flag in FLAG_OF.items() if spec.has(layer))
    flags |= kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWUTS | kernel.CLONE_NEWCGROUP
    kernel.call("unshare", flags)
    write_maps(uid, gid)
    kernel.make_mounts_private()
    if spec.has("mount_namespace"):
        trees = trees or take_hold(readable)
        build_root(trees, hidden)
        kernel.make_root(WORK)
        kernel.restrict_mount("/", _READ_ONLY)


def write_maps(uid: int, gid: int) -> None:
    """Map one user and one group into the namespace."""
    for name, content in (
        ("setgroups", "deny"),
        ("uid_map", f"{INSIDE_ID} {uid} 1"),
        ("gid_map", f"{INSIDE_ID} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(content)


def take_hold(readable: Sequence[str]) -> dict[str, int]:
    """Detach copies of the mounts at existing paths, and of the devices."""
    return {path: kernel.clone_tree(path) for path in (*readable, *DEVICES) if os.path.exists(path)}


def build_root(trees: dict[str, int], hidden: Sequence[str]) -> None:
    """Build a small root over the host's /tmp, with the trees in place."""
    kernel.mount("tmpfs", WORK, kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=0755")
    for path, tree in trees.items():
        target = WORK + path
        os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
        if stat.S_ISDIR(os.fstat(tree).st_mode):
            os.makedirs(target, exist_ok=True)
        else:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC))
        # A device on a read-only mount can still be written to; only its times cannot, which all programs see
        kernel.set_attributes(tree, _READ_ONLY_DEVICE if path in DEVICES else _READ_ONLY)
        kernel.attach_tree(tree, target)
        os.close(tree)
    for path in hidden:
        if os.path.isdir(WORK + path):
            flags = kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV  # or its owner, the program, may write to it
            kernel.mount("tmpfs", WORK + path, flags, "size=4k,mode=0555")
    os.makedirs(WORK + WORK, exist_ok=True)
