"""A small server on loopback that speaks the part of both hubs' APIs which their own clients need to fetch and to push.

The clients are the real ones: what they send is kept in memory and looked at by tests.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "a-token-of-a-test"
USER = "tester"


@dataclass
class Repository:
    """What one holds, by branch."""

    private: bool = False
    revisions: dict[str, dict[str, bytes]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)


@dataclass
class Hubs:
    """Both hubs' repositories, and what was asked of the server."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    blobs: dict[str, bytes] = field(default_factory=dict)
    breaks_at: str = ""
    """A file whose download ends in the middle."""
    refuses_writes: int = 0
    """So many of the next ones are answered 500."""

    def put(self, name: str, files: dict[str, str], *, revisions: tuple[str, ...] = ("main", "master")) -> None:
        """A repository like ``models/org/name`` with the same files at some revisions."""
        repository = self.repositories.setdefault(name, Repository())
        for revision in revisions:
            repository.revisions[revision] = {path: text.encode() for path, text in files.items()}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hubs: Hubs

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._serve("HEAD")

    def do_GET(self) -> None:
        self._serve("GET")

    def do_POST(self) -> None:
        self._serve("POST")

    def do_PUT(self) -> None:
        self._serve("PUT")

    def _serve(self, method: str) -> None:
        split = urlsplit(self.path)
        parts = [unquote(part) for part in split.path.strip("/").split("/")]
        query = {name: values[0] for name, values in parse_qs(split.query).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hubs.asked.append(f"{method} {split.path}")
        if (
            method in ("POST", "PUT")
            and TOKEN not in f"{self.headers.get('Authorization')}{self.headers.get('Cookie')}"
        ):
            return self._json({"Code": 401, "Message": "no token", "error": "no token"}, 401)
        if method == "POST" and self.hubs.refuses_writes:
            self.hubs.refuses_writes -= 1
            return self._json({"Code": 500, "Message": "not now", "error": "not now"}, 500)
        if parts[:2] == ["api", "v1"]:
            return self._modelscope(method, parts[2:], query, body)
        if parts[:2] == ["openapi", "v1"]:
            return self._openapi(parts[2:])
        if parts[0] == "blobs":
            self.hubs.blobs[parts[1]] = body
            return self._json({})
        return self._hugging_face(method, parts, body)

    # ModelScope.

    def _openapi(self, parts: list[str]) -> None:
        if parts == ["users", "me"]:
            is_known = TOKEN in str(self.headers.get("Authorization"))
            return self._json({"success": True, "data": {"username": USER}}) if is_known else self._json({}, 401)
        return self._modelscope("GET", parts, {}, b"")

    def _modelscope(self, method: str, parts: list[str], query: dict[str, str], body: bytes) -> None:
        if method == "POST" and parts == ["models"]:
            sent = json.loads(body)
            if f"models/{sent['Path']}/{sent['Name']}" in self.hubs.repositories:
                return self._json({"Code": 10020101001, "Message": "exists", "Success": False}, 400)
            self.hubs.repositories[f"models/{sent['Path']}/{sent['Name']}"] = Repository(
                private=sent["Visibility"] == 1
            )
            return self._data({})
        if parts[0] == "repos":
            return self._modelscope_push(parts[1:], body)
        name = "/".join(parts[:3])
        repository = self.hubs.repositories.get(name)
        revision = query.get("Revision", "master")
        if repository is None or len(parts) < 3 or (parts[3:] and revision not in repository.revisions):
            return self._json({"Code": 10010205001, "Message": f"{name} does not exist"}, 404)
        if not parts[3:]:
            return self._data({"Path": parts[1], "Name": parts[2]})
        files = repository.revisions[revision]
        if parts[3:] == ["repo"]:
            content = files.get(query["FilePath"])
            return self._json({}, 404) if content is None else self._bytes(content, query["FilePath"])
        listed = [
            {"Path": path, "Type": "blob", "Size": len(content), "Sha256": hashlib.sha256(content).hexdigest()}
            for path, content in files.items()
        ]
        return self._data({"Files": listed})

    def _modelscope_push(self, parts: list[str], body: bytes) -> None:
        repository = self.hubs.repositories["/".join(parts[:3])]
        sent = json.loads(body)
        if parts[3] == "info":
            objects = [
                {"oid": item["oid"], "actions": {"upload": {"href": f"{self.hubs.url}/blobs/{item['oid']}"}}}
                for item in sent["objects"]
            ]
            return self._data({"objects": objects})
        files = repository.revisions.setdefault(parts[4], {})
        for action in sent["actions"]:
            is_large = action["type"] == "lfs"
            content = self.hubs.blobs[action["sha256"]] if is_large else base64.b64decode(action["content"])
            files[action["path"]] = content
        repository.messages.append(sent["commit_message"])
        return self._data({"oid": "0" * 40})

    # Hugging Face.

    def _hugging_face(self, method: str, parts: list[str], body: bytes) -> None:
        if parts == ["api", "whoami-v2"]:
            is_known = TOKEN in str(self.headers.get("Authorization"))
            return self._json({"name": USER, "type": "user"}) if is_known else self._json({"error": "who"}, 401)
        if parts == ["api", "repos", "create"]:
            sent = json.loads(body)
            name = f"{sent['organization']}/{sent['name']}" if sent.get("organization") else f"{USER}/{sent['name']}"
            if f"models/{name}" in self.hubs.repositories:
                return self._json({"error": "exists", "url": f"{self.hubs.url}/{name}"}, 409)
            self.hubs.repositories[f"models/{name}"] = Repository(private=sent.get("visibility") == "private")
            return self._json({"url": f"{self.hubs.url}/{name}"})
        if parts == ["api", "validate-yaml"]:
            return self._json({"errors": [], "warnings": []})
        if parts[0] == "api":
            return self._hugging_face_api("/".join(parts[1:4]), parts[4:], body)
        kind, rest = ("datasets", parts[1:]) if parts[0] == "datasets" else ("models", parts)
        repository = self.hubs.repositories.get(f"{kind}/{rest[0]}/{rest[1]}")
        files = self._files(repository, rest[3]) if repository is not None and len(rest) > 4 else None
        content = None if files is None else files.get("/".join(rest[4:]))
        if content is None:
            code = "EntryNotFound" if files is not None else "RepoNotFound"
            return self._json({"error": "nothing there"}, 404, {"X-Error-Code": code})
        etag = hashlib.sha256(content).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": _commit(files or {})}
        return self._bytes(content, rest[-1], headers)

    def _hugging_face_api(self, name: str, rest: list[str], body: bytes) -> None:
        repository = self.hubs.repositories.get(name)
        if repository is None:
            return self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        if rest[:1] == ["preupload"]:
            sent = json.loads(body)["files"]
            modes = [{"path": item["path"], "uploadMode": "regular", "shouldIgnore": False} for item in sent]
            return self._json({"files": modes})
        if rest[:1] == ["commit"]:
            lines = [json.loads(line) for line in body.splitlines() if line.strip()]
            files = repository.revisions.setdefault(rest[1], {})
            for line in lines:
                if line["key"] == "header":
                    repository.messages.append(line["value"]["summary"])
                elif line["key"] == "file":
                    files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            commit = _commit(files)
            url = f"{self.hubs.url}/{name}/commit/{commit}"
            return self._json({"commitUrl": url, "commitOid": commit, "pullRequestUrl": None})
        files = self._files(repository, rest[1] if len(rest) > 1 else "main")
        if files is None:
            return self._json({"error": "no revision"}, 404, {"X-Error-Code": "RevisionNotFound"})
        if rest[:1] == ["tree"]:
            tree = [
                {"type": "file", "path": path, "size": len(text), "oid": _commit({path: text})}
                for path, text in files.items()
            ]
            return self._json(tree)
        siblings = [{"rfilename": path} for path in files]
        plain = name.partition("/")[2]
        return self._json({"id": plain, "sha": _commit(files), "private": repository.private, "siblings": siblings})

    @staticmethod
    def _files(repository: Repository, revision: str) -> dict[str, bytes] | None:
        by_commit = {_commit(files): files for files in repository.revisions.values()}
        return repository.revisions.get(revision) or by_commit.get(revision)

    # Answers.

    def _data(self, data: Any) -> None:
        self._json({"Code": 200, "Success": True, "Data": data})

    def _json(self, data: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(json.dumps(data).encode(), status, {"Content-Type": "application/json", **(headers or {})})

    def _bytes(self, content: bytes, name: str, headers: dict[str, str] | None = None) -> None:
        if self.hubs.breaks_at and name.endswith(self.hubs.breaks_at) and self.command == "GET":
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[:1])
            self.close_connection = True
            return
        self._send(content, 200, headers or {})

    def _send(self, content: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def hub_server() -> Iterator[Hubs]:
    """Both hubs on a free port of loopback."""
    hubs = Hubs()
    handler = type("Handler", (_Handler,), {"hubs": hubs})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hubs.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hubs
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _commit(files: dict[str, bytes]) -> str:
    digest = hashlib.sha1(usedforsecurity=False)
    for path in sorted(files):
        digest.update(path.encode() + files[path])
    return digest.hexdigest()
