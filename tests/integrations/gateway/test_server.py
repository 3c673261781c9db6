"""The server itself: who may come in, and clients that are slow, dead, many or malformed."""

import asyncio
import http.client
import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from covey_integrations.gateway import server
from covey_integrations.gateway.endpoint import Endpoint
from covey_integrations.gateway.server import Gateway
from covey_integrations.gateway.wire import RunSampling, Spoken

from ...support.doors.agents import send, user

SPOKEN = Spoken({"role": "assistant", "content": "Hi"}, "stop", 1, (5,), (7,))
BODY = {"messages": [user("?")]}


@contextmanager
def opened(num_doors: int = 1) -> Iterator[tuple[Gateway, list[Endpoint], Any]]:
    """A gateway with endpoints, and what runs coroutines in the loop of their episodes."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    gateway = Gateway(RunSampling())

    def run(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(20)

    async def endpoints() -> list[Endpoint]:
        return [gateway.open() for _ in range(num_doors)]

    try:
        yield gateway, run(endpoints()), run
    finally:
        gateway.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        loop.close()


def begun(url: str, found: list[Any]) -> threading.Thread:
    thread = threading.Thread(target=lambda: found.append(send(f"{url}/chat/completions", BODY)))
    thread.start()
    return thread


def expect_answer(endpoint: Endpoint, run: Callable[[Any], Any]) -> None:
    """Call, answer the call as the episode does, and see that the answer arrives."""
    found: list[Any] = []
    thread = begun(endpoint.url, found)
    run(endpoint.next_call())
    endpoint.answer(SPOKEN)
    thread.join(10)
    assert found[0][0] == 200


def test_every_episode_has_a_key_that_cannot_be_guessed() -> None:
    with opened(50) as (_, endpoints, _):
        keys = {endpoint.key for endpoint in endpoints}
        assert len(keys) == 50
        assert all(len(key) == 43 for key in keys), "256 bits"
        assert all(
            endpoint.url == f"http://127.0.0.1:{endpoint.url.split(':')[2].split('/')[0]}/e/{endpoint.key}/v1"
            for endpoint in endpoints
        )


def test_it_listens_on_the_loopback_interface_alone() -> None:
    with opened() as (gateway, _, _):
        assert gateway._server is not None
        assert gateway._server.address[0] == "127.0.0.1"


def test_unknown_keys_and_paths_are_answered_alike() -> None:
    with opened() as (gateway, (endpoint,), _):
        root = f"http://127.0.0.1:{gateway.port}"
        wrong = [
            f"{root}/e/{endpoint.key[:-1]}/v1/chat/completions",
            f"{root}/e/x/reward",
            f"{root}/",
            f"{endpoint.url}/files",
        ]
        wrong += [f"{root}/v1/chat/completions", f"{root}/e//v1/models", f"{root}/e/{endpoint.key}/../v1/x"]
        answers = {send(url, BODY) for url in wrong}
        assert len(answers) == 1
        ((status, said),) = answers
        assert status == 404
        assert json.loads(said)["error"]["message"] == "not found"


def test_a_call_is_answered_as_json_and_as_a_stream() -> None:
    with opened() as (_, (endpoint,), run):
        for streams in (False, True):
            found: list[Any] = []
            body = {**BODY, "stream": streams}
            thread = threading.Thread(
                target=lambda b=body, f=found: f.append(send(f"{endpoint.url}/chat/completions", b))
            )
            thread.start()
            request = run(endpoint.next_call())
            assert request.streams == streams
            endpoint.answer(SPOKEN)
            thread.join(10)
            assert found[0][0] == 200
            assert found[0][1].endswith(b"data: [DONE]\n\n") == streams
        assert json.loads(send(f"{endpoint.url}/models")[1])["data"][0]["id"] == "policy"


def test_a_second_call_at_the_same_time_is_refused() -> None:
    with opened() as (_, (endpoint,), run):
        found: list[Any] = []
        thread = begun(endpoint.url, found)
        run(endpoint.next_call())
        assert send(f"{endpoint.url}/chat/completions", BODY)[0] == 409
        endpoint.answer(SPOKEN)
        thread.join(10)
        assert found[0][0] == 200


def test_after_the_end_every_route_says_that_it_is_gone() -> None:
    with opened() as (gateway, (endpoint,), run):
        found: list[Any] = []
        thread = begun(endpoint.url, found)
        run(endpoint.next_call())
        gateway.close_endpoint(endpoint)
        thread.join(10)
        later = [
            send(f"{endpoint.url}/chat/completions", BODY),
            send(f"{endpoint.url}/models"),
            send(endpoint.reward_url, {"reward": 1}),
        ]
        assert [status for status, _ in (*found, *later)] == [410] * 4


def test_a_client_that_dies_while_waiting_affects_no_other() -> None:
    with opened(2) as (gateway, (dead, alive), run):
        body = json.dumps(BODY).encode()
        path = dead.url.partition(str(gateway.port))[2]
        with socket.create_connection(("127.0.0.1", gateway.port)) as client:
            head = f"POST {path}/chat/completions HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            run(dead.next_call())
        dead.answer(SPOKEN)
        expect_answer(alive, run)


def test_a_client_that_never_finishes_its_request_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SECONDS", 0.2)
    with opened() as (gateway, (endpoint,), _):
        path = endpoint.url.partition(str(gateway.port))[2]
        for sent in (f"POST {path}/chat/completions HTTP/1.1\r\nContent-Length: 90\r\n\r\n{{", "POST"):
            with socket.create_connection(("127.0.0.1", gateway.port), timeout=10) as client:
                client.sendall(sent.encode())
                said = b"".join(iter(lambda c=client: c.recv(4096), b""))
            assert said == b"" if sent == "POST" else said.startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (f"Content-Length: {server.MAX_BYTES + 1}", b"413"),
        ("Content-Length: 9999999999999999999999999", b"413"),
        ("Content-Length: -1", b"411"),
        ("Transfer-Encoding: chunked", b"411"),
        ("X: y", b"411"),
    ],
)
def test_the_length_of_a_request_is_said_and_bounded(head: str, status: bytes) -> None:
    with opened() as (gateway, (endpoint,), _):
        path = endpoint.url.partition(str(gateway.port))[2]
        with socket.create_connection(("127.0.0.1", gateway.port), timeout=10) as client:
            client.sendall(f"POST {path}/chat/completions HTTP/1.1\r\n{head}\r\n\r\n".encode())
            said = b"".join(iter(lambda: client.recv(4096), b""))
        assert said.split()[1] == status


def held(port: int, sent: bytes = b"POST /e/x HTTP/1.1\r\n") -> socket.socket:
    """A connection whose head never ends."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=10)
    connection.sendall(sent)
    return connection


def is_dropped(connection: socket.socket) -> bool:
    try:
        return connection.recv(10) == b""
    except ConnectionResetError:
        return True


def test_clients_without_a_key_take_no_descriptors_or_threads() -> None:
    with opened() as (gateway, (endpoint,), run):
        threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
        strangers = [held(gateway.port) for _ in range(server.MAX_WAITING + 50)]
        expect_answer(endpoint, run)
        # The gateway's own end of each; the first ones were dropped for the later
        assert len(os.listdir("/proc/self/fd")) - descriptors - len(strangers) <= server.MAX_WAITING
        assert threading.active_count() <= threads + 1
        assert all(map(is_dropped, strangers[:40]))
        for stranger in strangers:
            stranger.close()


def test_connections_that_wait_are_not_taken_all_at_once() -> None:
    with opened() as (gateway, (endpoint,), run):
        assert gateway._server is not None
        loop, seen, own = gateway._server._loop, [0], len(os.listdir("/proc/self/fd"))

        def look() -> None:
            seen.append(len(os.listdir("/proc/self/fd")) - own - len(strangers))
            loop.call_soon(look)

        strangers: list[socket.socket] = []
        loop.call_soon_threadsafe(time.sleep, 0.5)
        strangers += [held(gateway.port) for _ in range(server.MAX_WAITING + 9 * server.MAX_ACCEPTED)]
        loop.call_soon_threadsafe(look)
        expect_answer(endpoint, run)
        assert server.MAX_WAITING / 2 < max(seen) < server.MAX_WAITING + 5 * server.MAX_ACCEPTED
        for stranger in strangers:
            stranger.close()


def test_a_byte_now_and_then_does_not_move_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SECONDS", 0.4)
    with opened() as (gateway, (endpoint,), _):
        path = endpoint.url.partition(str(gateway.port))[2]
        body = f"POST {path}/chat/completions HTTP/1.1\r\nContent-Length: 9999\r\n\r\n".encode()
        for begin in (b"POST /e/x HTTP/1.1\r\nX: ", body):
            connection, began = held(gateway.port, begin), time.monotonic()
            with suppress(OSError):
                while not select.select([connection], [], [], 0.05)[0] and time.monotonic() < began + 5:
                    connection.sendall(b"x")
            assert 0.3 < time.monotonic() - began < 3
            connection.close()


def test_a_head_without_end_is_not_kept() -> None:
    with opened() as (gateway, _, _), suppress(OSError):
        connection = held(gateway.port, b"GET / HTTP/1.1\r\n")
        for _ in range(2 * server.MAX_HEAD // 1024):
            connection.sendall(b"X" * 1024)
        assert is_dropped(connection)


def test_closing_it_ends_every_connection_and_thread() -> None:
    before = set(threading.enumerate())
    with opened() as (gateway, (endpoint,), run):
        found: list[Any] = []
        waiting = begun(endpoint.url, found)
        run(endpoint.next_call())
        idle = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=10)
        idle.request("GET", endpoint.url.partition(str(gateway.port))[2] + "/models")
        idle.getresponse().read()
        silent = socket.create_connection(("127.0.0.1", gateway.port), timeout=10)
        while gateway._server is not None and not gateway._server._waiting:
            time.sleep(0.01)
        gateway.close()
        waiting.join(10)
        assert found[0][0] == 410
        assert idle.sock is None
        assert is_dropped(silent)
        silent.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
    assert set(threading.enumerate()) <= before
