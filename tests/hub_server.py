"""Fake Hugging Face Hub on loopback: creates repositories, accepts commits, serves files."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REVISION = "a" * 40


class Hub(ThreadingHTTPServer):
    """`files`: contents by repository and path; `private`: visibility by repository."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def serving() -> Iterator[Hub]:
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        yield hub
        hub.shutdown()


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            created = json.loads(body)
            name = "/".join(filter(None, [created.get("organization"), created["name"]]))
            self.server.files[name], self.server.private[name] = {}, created.get("visibility") == "private"
            self._json({"url": f"{self.server.url}/{name}"})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            self._json({"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]})
        elif "/commit/" in self.path:
            stored = self.server.files[self._repository()]
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    stored[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._json(
                {"commitOid": REVISION, "commitUrl": f"{self.server.url}/{self._repository()}/commit/{REVISION}"}
            )
        else:  # /api/validate-yaml
            self._json({"errors": [], "warnings": []})

    def do_GET(self) -> None:
        if "/resolve/" in self.path:
            return self._file()
        stored = self.server.files.get(self._repository())
        if stored is None:
            return self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        if "/tree/" in self.path:
            files = [
                {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for path, content in stored.items()
            ]
            return self._json(files)
        self._json({"id": self._repository(), "sha": REVISION, "siblings": [{"rfilename": path} for path in stored]})

    do_HEAD = do_GET

    def _repository(self) -> str:
        return "/".join(self.path.removeprefix("/api/models").strip("/").split("/")[:2])

    def _file(self) -> None:
        repository, _, rest = self.path.strip("/").partition("/resolve/")
        content = self.server.files[repository][rest.partition("/")[2]]
        etag = hashlib.sha1(content).hexdigest()
        self._send(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": REVISION})

    def _json(self, value: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass
