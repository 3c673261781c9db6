"""Whether the hub answers is asked at its own port, or at the proxy's."""

import socket
import urllib.request
from types import SimpleNamespace
from typing import Any

import pytest

from covey.system import hub


@pytest.mark.parametrize(
    ("scheme", "port", "proxy", "expected"),
    [
        ("https", None, "", ("hub", 443)),
        ("http", None, "", ("hub", 80)),
        ("https", 8443, "", ("hub", 8443)),
        ("https", None, "http://gate:3128", ("gate", 3128)),
        ("https", None, "gate", ("gate", 80)),
    ],
)
def test_a_host_is_asked_at_its_port_or_at_its_proxys(
    scheme: str, port: int | None, proxy: str, expected: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(urllib.request, "getproxies", lambda: {"https": proxy} if proxy else {})
    monkeypatch.setattr(urllib.request, "proxy_bypass", lambda host: False)
    monkeypatch.setattr(
        socket, "create_connection", lambda place, seconds: asked.append(place) or SimpleNamespace(close=lambda: None)
    )
    assert hub._unreachable(scheme, "hub", port) == ""
    assert asked == [expected]
