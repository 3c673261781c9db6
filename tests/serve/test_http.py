"""What strangers and broken clients send over HTTP: one line each, and nothing grows."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from covey_serve.limits import ServiceLimits
from covey_serve.service import Service
from covey_serve.web.routes import answer
from covey_serve.web.server import HttpAnswer, HttpCall, HttpServer

from .served import KEY, NAME, bases, cross_entropy, training_body

LIMITS = ServiceLimits(body_bytes=1 << 20, head_seconds=0.5, body_seconds=0.5, idle_seconds=2.0, connections=40)
HEAD = f"Host: x\r\nX-API-Key: {KEY}\r\n"


@asynccontextmanager
async def listening(root: Path, limits: ServiceLimits = LIMITS) -> AsyncIterator[tuple[Service, int]]:
    service = Service(root, bases(), KEY, limits)

    async def answer_call(call: HttpCall) -> HttpAnswer:
        return await answer(service, call)

    server = HttpServer(answer_call, service.check_head, limits)
    work = asyncio.create_task(service.work())
    try:
        _, port = await server.start("127.0.0.1", 0)
        yield service, port
    finally:
        await server.stop()
        work.cancel()
        service.close()


async def send(port: int, raw: bytes, seconds: float = 10.0) -> bytes:
    """Send bytes; return all that comes until the server closes or is done answering."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(raw)
        await writer.drain()
        async with asyncio.timeout(seconds):
            head = await reader.readuntil(b"\r\n\r\n")
            length = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
            return head + (await reader.readexactly(int(length[0])) if length else b"")
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        return error.partial if isinstance(error, asyncio.IncompleteReadError) else b""
    finally:
        writer.close()


def post(path: str, body: bytes = b"{}", head: str = HEAD, kind: str = "application/json") -> bytes:
    first = f"POST /api/v1/{path} HTTP/1.1\r\n{head}Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return first.encode() + body


def get(path: str, method: str = "GET") -> bytes:
    return f"{method} /api/v1/{path} HTTP/1.1\r\n{HEAD}\r\n".encode()


def of_json(route: str, /, **body: Any) -> bytes:
    return post(route, json.dumps(body).encode())


DEEP = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
CSR = {"values": b"\0\0\x80?", "rows": b"\xff" * 24, "columns": b"\0" * 8}
Made = Callable[[str, str], bytes]
"""Session and model to the bytes of a request."""
HOSTILE: dict[str, tuple[bytes | Made, int]] = {
    "no key": (post("create_session", head="Host: x\r\n"), 401),
    "another key": (post("create_session", head="Host: x\r\nX-API-Key: tml-other\r\n"), 401),
    "a key that begins alike": (post("create_session", head=f"Host: x\r\nX-API-Key: {KEY}x\r\n"), 401),
    "an empty key": (post("create_session", head="Host: x\r\nX-API-Key:\r\n"), 401),
    "a key of foreign letters": (b"POST /api/v1/optim_step HTTP/1.1\r\nHost: x\r\nX-API-Key: \xff\xfe\r\n\r\n", 401),
    "another path": (post("../../etc/passwd"), 404),
    "a path outside the API": (b"GET /etc/passwd HTTP/1.1\r\n" + HEAD.encode() + b"\r\n", 404),
    "an encoded path": (get("training_runs/%2e%2e%2f%2e%2e"), 404),
    "another method": (get("create_session"), 404),
    "a long path": (get("x" * 60_000), 404),
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n", 400),
    "no version": (b"GET /\r\n\r\n", 400),
    "a huge head": (b"GET / HTTP/1.1\r\nX: " + b"a" * 200_000 + b"\r\n\r\n", 431),
    "a head alone": (b"HEAD /api/v1/checkpoints HTTP/1.1\r\n" + HEAD.encode() + b"\r\n", 405),
    "a compressed body": (post("create_session", gzip.compress(b"{}"), head=f"{HEAD}Content-Encoding: gzip\r\n"), 400),
    "two lengths": (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
    "a negative length": (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400),
    "a huge length": (b"POST /api/v1/x HTTP/1.1\r\n" + HEAD.encode() + b"Content-Length: 99999999999\r\n\r\n", 413),
    "a huge body": (post("create_session", b"x" * (LIMITS.body_bytes + 1)), 413),
    "a huge body in chunks": (
        b"POST /api/v1/create_session HTTP/1.1\r\n" + HEAD.encode() + b"Transfer-Encoding: chunked\r\n\r\n"
        b"200001\r\n" + b"x" * 0x200001 + b"\r\n0\r\n\r\n",
        413,
    ),
    "no JSON": (post("create_session", b"{"), 400),
    "deep JSON": (post("create_session", DEEP), 400),
    "JSON of a list": (post("create_session", b"[1]"), 400),
    "JSON with NaN": (post("create_session", b'{"a": NaN}'), 400),
    "JSON with huge numbers": (post("create_session", b'{"a": ' + b"9" * 10_000 + b"}"), 400),
    "bytes that are no text": (post("create_session", b"\xff\xfe{}"), 400),
    "an unknown session": (of_json("create_model", session_id="0" * 32, model_seq_id=0, base_model=NAME), 404),
    "a session of another type": (of_json("create_model", session_id=[1], model_seq_id=0, base_model=NAME), 422),
    "an unknown base": (lambda s, m: of_json("create_model", session_id=s, model_seq_id=1, base_model="a/b"), 404),
    "a base as a path": (lambda s, m: of_json("create_model", session_id=s, model_seq_id=1, base_model="/etc"), 404),
    "a negative place": (lambda s, m: of_json("create_model", session_id=s, model_seq_id=-1, base_model=NAME), 422),
    "a huge rank": (
        lambda s, m: of_json(
            "create_model", session_id=s, model_seq_id=1, base_model=NAME, lora_config={"rank": 10**9}
        ),
        422,
    ),
    "another optimiser": (
        lambda s, m: of_json(
            "create_model", session_id=s, model_seq_id=1, base_model=NAME, optimizer_config={"type": "dimuon"}
        ),
        422,
    ),
    "a huge note": (of_json("create_session", user_metadata={"a": "x" * 70_000}), 422),
    "a number far ahead": (lambda s, m: of_json("optim_step", model_id=m, seq_id=2**31 - 1), 409),
    "an unknown model": (of_json("optim_step", model_id="x:train:0", seq_id=1), 404),
    "a model of a path": (of_json("get_info", model_id="../../x"), 404),
    "a number below one": (lambda s, m: of_json("optim_step", model_id=m, seq_id=0), 422),
    "a number of another type": (lambda s, m: of_json("optim_step", model_id=m, seq_id="1"), 422),
    "no protobuf": (post("forward_backward", b"\xff\xff\xff"), 400),
    "cut protobuf": (lambda s, m: post("forward_backward", training_body(m, 9, [cross_entropy([1, 2])])[:-3]), 400),
    "protobuf of an unknown model": (post("forward_backward", training_body("y", 1, [cross_entropy([1, 2])])), 404),
    "JSON in the place of protobuf": (of_json("forward_backward", model_id="m"), 400),
    "an unknown sampler": (of_json("asample", sampling_session_id="x:sample:0", seq_id=0), 404),
    "a sampler of a path": (get("samplers/..%2f..%2fetc"), 404),
    "weights of a path with dots": (
        lambda s, m: of_json(
            "create_sampling_session", session_id=s, sampling_session_seq_id=1, model_path="tinker://../x/y"
        ),
        404,
    ),
    "weights of another scheme": (
        lambda s, m: of_json(
            "create_sampling_session", session_id=s, sampling_session_seq_id=1, model_path="file:///etc/passwd"
        ),
        404,
    ),
    "a checkpoint with dots": (lambda s, m: of_json("weights_info", tinker_path=f"tinker://{m}/weights/../../x"), 404),
    "a checkpoint to load that is none": (
        lambda s, m: of_json("load_weights", session_id=s, model_seq_id=5, path=f"tinker://{m}/weights/none"),
        404,
    ),
    "a checkpoint to delete with dots": (lambda s, m: get(f"training_runs/{m}/checkpoints/weights/..", "DELETE"), 404),
    "an unknown promise": (of_json("retrieve_future", request_id="none"), 410),
    "a promise of another type": (of_json("retrieve_future", request_id={"a": 1}), 422),
    "a page before the first": (get("training_runs?offset=-1"), 422),
    "a page of letters": (get("checkpoints?limit=abc"), 422),
    "a heartbeat of no session": (of_json("session_heartbeat", session_id="none"), 410),
}


async def prepared(port: int) -> tuple[str, str]:
    found = await send(port, of_json("create_session", sdk_version="0.38.0"))
    session = json.loads(found.partition(b"\r\n\r\n")[2])["session_id"]
    lora = {"rank": 2}
    await send(port, of_json("create_model", session_id=session, model_seq_id=0, base_model=NAME, lora_config=lora))
    return session, f"{session}:train:0"


def test_fifty_hostile_requests_get_one_line_each_and_leave_nothing(tmp_path: Path) -> None:
    assert len(HOSTILE) >= 50

    async def run() -> dict[str, tuple[int, bytes]]:
        async with listening(tmp_path) as (service, port):
            session, model = await prepared(port)
            while service.ledger.waiting:
                await asyncio.sleep(0.01)
            before = state_of(service)
            found = {}
            for name, (raw, _) in HOSTILE.items():
                answered = await send(port, raw if isinstance(raw, bytes) else raw(session, model))
                head, _, body = answered.partition(b"\r\n\r\n")
                found[name] = int(head.split()[1]) if head else 0, body
            assert state_of(service) == before
            for path in ("/api/v1/healthz", "/healthz"):  # without a key
                found_health = await send(port, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                assert found_health.endswith(b'{"status": "ok"}')
            return found

    found = asyncio.run(run())
    assert {name: status for name, (status, _) in found.items()} == {name: row[1] for name, row in HOSTILE.items()}
    assert found.pop("a head alone")[1] == b""
    for name, (_, body) in found.items():
        reason = json.loads(body)["detail"]
        assert 5 <= len(reason) <= 300, name
        assert "\n" not in reason, name
        assert "Traceback" not in reason, name
    assert {path.name for path in tmp_path.iterdir()} <= {"journal", "runs", "checkpoints", "snapshots", "samplers"}


def state_of(service: Service) -> tuple[int, ...]:
    ledger = service.ledger
    counts = map(len, (ledger.sessions, ledger.models, ledger.samplers, ledger.promises))
    return (*counts, ledger.waiting, ledger.waiting_bytes, service.journal.size)


@pytest.mark.parametrize(
    "raw",
    [b"", b"POST /api/v1/x HT", post("create_session", b"{}" * 10)[:-5]],
    ids=["nothing", "half a head", "half a body"],
)
def test_a_connection_that_waits_is_closed(tmp_path: Path, raw: bytes) -> None:
    async def run() -> bytes:
        async with listening(tmp_path) as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(raw)
            async with asyncio.timeout(10):
                found = await reader.read()
            writer.close()
            return found

    assert asyncio.run(run()) == b""


def test_a_drip_of_bytes_is_closed_too(tmp_path: Path) -> None:
    async def run() -> bool:
        async with listening(tmp_path) as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for byte in b"POST /api/v1/create_session HTTP/1.1\r\n" * 3:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.05)
                if reader.at_eof():
                    break
            closed = reader.at_eof()
            writer.close()
            return closed

    assert asyncio.run(run())


def test_more_connections_than_allowed_are_dropped_and_others_served(tmp_path: Path) -> None:
    async def run() -> bytes:
        async with listening(tmp_path) as (_, port):
            idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(80)]
            await asyncio.sleep(2.5)
            found = await send(port, get("healthz"))
            for _, writer in idle:
                writer.close()
            return found

    assert b'"ok"' in asyncio.run(run())


def test_many_requests_of_one_connection_are_answered_in_order(tmp_path: Path) -> None:
    async def run() -> list[bytes]:
        async with listening(tmp_path) as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            found = []
            writer.write(get("healthz") + get("nowhere") + get("healthz"))
            for _ in range(3):
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                found.append(head.split()[1])
                await reader.readexactly(length)
            writer.close()
            return found

    assert asyncio.run(run()) == [b"200", b"404", b"200"]


def test_a_poll_is_held_and_then_asks_to_come_again(tmp_path: Path) -> None:
    limits = ServiceLimits(hold_seconds=0.3)

    async def run() -> tuple[float, bytes]:
        async with listening(tmp_path, limits) as (_, port):
            _, model = await prepared(port)
            later = await send(port, of_json("optim_step", model_id=model, seq_id=2))  # 1 never comes
            promise = json.loads(later.partition(b"\r\n\r\n")[2])["request_id"]
            loop = asyncio.get_running_loop()
            began = loop.time()
            found = await send(port, of_json("retrieve_future", request_id=promise))
            return loop.time() - began, found

    seconds, found = asyncio.run(run())
    assert seconds >= 0.3
    assert b'"try_again"' in found
