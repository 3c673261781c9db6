"""User numbers of slots' programs.

Thread limits count by user, so slots must not share one.
"""

import os
import secrets
import socket
from contextlib import suppress

FIRST_UID, NUM_UIDS = 61184, 4336
"""The range that systemd uses for the same purpose."""


def reserve() -> tuple[int, socket.socket]:
    """Reserve an unused user number while the socket is open. OSError.

    The kernel releases the reservation however the judge ends.
    """
    taken = owners()
    for uid in secrets.SystemRandom().sample(range(FIRST_UID, FIRST_UID + NUM_UIDS), NUM_UIDS):
        reservation = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with suppress(OSError):
            reservation.bind(f"\0covey-sandbox-user-{uid}")
            if uid not in taken:
                return uid, reservation
        reservation.close()
    raise OSError(f"the users {FIRST_UID} to {FIRST_UID + NUM_UIDS - 1} are all taken")


def owners() -> set[int]:
    found = set()
    for name in os.listdir("/proc"):
        with suppress(OSError):
            if name.isdigit():
                found.add(os.stat(f"/proc/{name}").st_uid)
    return found
