"""Ask once whether the hub answers: its clients retry for a minute."""

import os
import re
import socket
import threading
from functools import cache
from urllib.parse import urlsplit

CONNECT_SECONDS = 5.0
HUB_NAME = re.compile(r"[\w.-]+(?:/[\w.-]+)?")
"""NAME or OWNER/NAME."""


def check_hub_model(name: str) -> str:
    """Return a warning where the cache replaces a silent hub, else "".

    ValueError where the model is not in the cache either.
    """
    problem = silence()
    if not problem:
        return ""
    from huggingface_hub import try_to_load_from_cache

    if not any(isinstance(try_to_load_from_cache(name, file), str) for file in ("config.json", "adapter_config.json")):
        raise ValueError(f"model.name={name}: there is no such folder, and {problem}; model.name=FOLDER takes a folder")
    return f"model.name={name} is taken from the cache: {problem}"


@cache
def silence() -> str:
    """Return why the hub is unreachable, stopping retries; "" if it answers."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    found = urlsplit(constants.ENDPOINT)
    problem = _unreachable(found.scheme, found.hostname or "", found.port)
    if problem:
        os.environ["HF_HUB_OFFLINE"] = "1"  # for what is not imported yet
        constants.HF_HUB_OFFLINE = True
        return f"the hub ({constants.ENDPOINT}) cannot be reached ({problem})"
    return ""


def _unreachable(scheme: str, host: str, port: int | None) -> str:
    """Return why a host or its proxy is unreachable, else ""."""
    from urllib.request import getproxies, proxy_bypass  # 40 ms, for which a refused setting need not wait

    proxy = None if proxy_bypass(host) else getproxies().get(scheme)
    if proxy:
        found = urlsplit(proxy if "//" in proxy else f"//{proxy}")
        scheme, host, port = found.scheme, found.hostname or "", found.port
    outcome = [f"no answer within {CONNECT_SECONDS:g} s"]

    def connect() -> None:
        try:
            socket.create_connection((host, port or (443 if scheme == "https" else 80)), CONNECT_SECONDS).close()
            outcome[0] = ""
        except OSError as error:
            outcome[0] = error.strerror or str(error) or outcome[0]

    thread = threading.Thread(target=connect, daemon=True)  # looking a name up knows no deadline
    thread.start()
    thread.join(CONNECT_SECONDS)
    return outcome[0]
