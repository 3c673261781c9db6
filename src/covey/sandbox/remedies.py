"""What to do about a layer that is missing, by what the kernel said."""

ELSEWHERE = 'or use a remote runner (docs/trust/sandbox.md), or accept the risk with tier="unsafe_no_isolation"'

NAMESPACES = (
    "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1 user.max_user_namespaces=10000; on Ubuntu "
    "kernel.apparmor_restrict_unprivileged_userns=0; containers forbid them by their seccomp profile)"
)
LANDLOCK = "use Linux >= 5.13 with landlock in the kernel's list of security modules (boot with lsm=landlock,...)"
SECCOMP = "use a kernel with CONFIG_SECCOMP_FILTER; gVisor and some emulators have none"

REMEDIES = (
    ("landlock", LANDLOCK),
    ("seccomp", SECCOMP),
    ("unshare", NAMESPACES),
    ("uid_map", NAMESPACES),
    ("setgroups", NAMESPACES),
    ("namespace", NAMESPACES),
    ("clone", NAMESPACES),
    ("mount", NAMESPACES),
    ("open_tree", NAMESPACES),
    ("pivot_root", NAMESPACES),
    ("temporary", "set TMPDIR to a folder that every user may enter"),
)


def remedy_for(message: str) -> str:
    """Return the remedy for a message. Empty where none is known."""
    return next((remedy for word, remedy in REMEDIES if word in message), "")


def with_remedy(tier: str, message: str) -> str:
    """Write one line: the tier, what is missing, and what brings it."""
    remedy = remedy_for(message)
    return f"tier {tier}: {message}" + (f"; {remedy}" if remedy else "")
