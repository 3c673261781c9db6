"""A hub that takes uploads: the part of its wire that huggingface_hub speaks to create and fill a repository."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_" + "s3cr3t" * 5


@dataclass
class FakeHub:
    """What has arrived."""

    url: str = ""
    refuses: str = ""
    """The path that is answered by 403."""
    created: list[dict[str, Any]] = field(default_factory=list)
    large: dict[str, bytes] = field(default_factory=dict)
    """Files sent by themselves, by SHA-256."""
    committed: dict[str, Any] = field(default_factory=dict)
    """Content of small files, SHA-256 of large ones."""
    tokens: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            return {"url": f"{self.url}/me/mine", "name": "me/mine"}
        if "/preupload/" in path:
            files = json.loads(body)["files"]
            kinds = {True: "lfs", False: "regular"}
            return {"files": [{**one, "uploadMode": kinds[one["path"].endswith(LARGE)]} | NOT_IGNORED for one in files]}
        if path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            ways = [{**one, "actions": {"upload": {"href": f"{self.url}/put/{one['oid']}"}}} for one in objects]
            return {"transfer": "basic", "objects": ways}
        if path.startswith("/put/"):
            self.large[path.rpartition("/")[2]] = body
        if "/commit/" in path:
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.committed[value["path"]] = base64.b64decode(value["content"])
                if line["key"] == "lfsFile":
                    self.committed[value["path"]] = value["oid"]
            return {"commitUrl": f"{self.url}/me/mine/commit/1", "commitOid": "1" * 40, "success": True}
        return {"errors": [], "warnings": []}


LARGE = (".safetensors", ".gguf")
NOT_IGNORED = {"shouldIgnore": False}


@contextmanager
def fake_hub(refuses: str = "") -> Iterator[FakeHub]:
    hub = FakeHub(refuses=refuses)

    class Handler(BaseHTTPRequestHandler):
        def take(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            hub.asked.append(self.path)
            hub.tokens.add(self.headers.get("Authorization") or "")
            status = 403 if hub.refuses and hub.refuses in self.path else 404 if self.command == "GET" else 200
            said = hub.answer(self.path, body) if status == 200 else {"error": "you may not write here"}
            content = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = take

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
