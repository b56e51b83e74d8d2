"""A Hugging Face Hub on loopback that speaks the protocol of the real client, and fails when it is told to."""

import base64
import hashlib
import io
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import yaml

WRITER, READER, STRANGER = "hf_writer", "hf_reader", "hf_stranger"
USERS = {
    WRITER: {
        "name": "me",
        "role": "write",
        "orgs": [{"name": "lab", "roleInOrg": "write"}, {"name": "club", "roleInOrg": "read"}],
    },
    READER: {"name": "me", "role": "read", "orgs": []},
    STRANGER: {"name": "other", "role": "write", "orgs": []},
}


@dataclass
class Repository:
    """Branches of commits; a commit maps paths to contents."""

    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    listed_too: list[dict[str, Any]] = field(default_factory=list)
    """Entries that only the listing has: what a hostile repository says of itself."""

    def files(self, revision: str = "main") -> dict[str, bytes]:
        """Path -> content."""
        return self.commits[self.branches.get(revision, revision)]

    def commit(self, branch: str, files: dict[str, bytes], message: str) -> str:
        """Move a branch to a new commit."""
        text = f"{branch} {len(self.commits)} {sorted(files)}"
        oid = hashlib.sha1(text.encode()).hexdigest()
        self.commits[oid], self.branches[branch] = dict(files), oid
        self.messages.append(message)
        return oid


class FakeHub:
    """The state of the hub, what it was asked, and what it shall do wrong."""

    def __init__(self) -> None:
        self.port = 0
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.repositories: dict[str, Repository] = {}
        self.blobs: dict[str, bytes] = {}
        self.requests: list[tuple[str, str, str | None]] = []
        """Method, path, token."""
        self.faults: list[list[Any]] = []
        self.chunk_size: int | None = None
        """Bytes of a part, where large files are to come in parts."""
        self.ignored: set[str] = set()
        """What the repository's .gitignore leaves out."""
        self.size_error = 0
        """By how much the size is wrong that is told for a large file."""

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def fail(self, method: str, path: str, what: int | str, times: int = 1) -> None:
        """Answer the next requests for a path (a regular expression) with a status, or with a broken connection.

        `what` is "drop" (before the work is done), "drop body" (while it is sent), "drop answer" (after the work) or
        "cut answer" (in the middle of it).
        """
        self.faults.append([method, path, what, times])

    def asked(self, method: str, path: str) -> int:
        """How many requests there were."""
        return sum(m == method and re.search(path, p) is not None for m, p, _ in self.requests)

    def add(self, repo: str, files: dict[str, bytes] | None = None, *, private: bool = False) -> Repository:
        """A repository with one commit."""
        self.repositories[repo] = Repository(private=private)
        self.repositories[repo].commit("main", {".gitattributes": b"", **(files or {})}, "initial commit")
        return self.repositories[repo]

    def take_fault(self, method: str, path: str) -> int | str | None:
        for fault in self.faults:
            if fault[3] and fault[0] == method and re.search(fault[1], path):
                fault[3] -= 1
                return fault[2]
        return None


def is_large(path: str, size: int) -> bool:
    """Whether the hub keeps a file outside git."""
    return path.endswith((".safetensors", ".bin", ".png")) or size > 10_000_000


def blob_id(content: bytes) -> str:
    """Git's."""
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


def oid_of(content: bytes) -> str:
    """Git LFS's."""
    return hashlib.sha256(content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # header and body in one packet
    disable_nagle_algorithm = True
    hub: FakeHub

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.serve()

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

    def serve(self) -> None:
        hub = self.hub
        self.path, self.query = unquote(urlsplit(self.path).path), parse_qs(urlsplit(self.path).query)
        authorization = self.headers.get("Authorization")
        self.token = authorization.removeprefix("Bearer ") if authorization else None
        hub.requests.append((self.command, self.path, self.token))
        fault = hub.take_fault(self.command, self.path)
        self.fault = fault
        if fault == "drop body":
            self.rfile.read(int(self.headers["Content-Length"]) // 2)
        if fault in ("drop", "drop body"):
            return self.drop()
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            self.body = b"".join(self.chunks())
        if isinstance(fault, int):
            return self.answer(fault, {"error": "as told"}, {"X-Error-Message": "as told"})
        if self.token is not None and self.token not in USERS:
            return self.answer(401, {}, {"X-Error-Message": "Invalid credentials in Authorization header"})
        for method, pattern, serve in ROUTES:
            found = re.fullmatch(pattern, self.path)
            if found and self.command in method:
                return serve(self, *found.groups())
        return self.answer(404, {"error": f"no route for {self.command} {self.path}"})

    def chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def drop(self) -> None:
        self.close_connection = True
        # The answer that the base class would flush has nowhere to go.
        self.wfile = io.BytesIO()
        self.connection.shutdown(socket.SHUT_RDWR)

    def answer(self, status: int, content: Any = None, headers: dict[str, str] | None = None) -> None:
        if self.fault == "drop answer":
            return self.drop()
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body if self.fault != "cut answer" else body[: len(body) // 2])
        if self.fault == "cut answer":
            self.wfile.flush()
            return self.drop()
        return None

    def find(self, repo: str, *, write: bool = False) -> Repository | None:
        """The repository; None, and an answer sent, where the token may not see or write it."""
        user = USERS.get(self.token or "")
        owner = repo.split("/")[0]
        is_member = user is not None and owner in (user["name"], *(org["name"] for org in user["orgs"]))
        found = self.hub.repositories.get(repo)
        if found is None or (found.private and not is_member):
            self.answer(404 if user else 401, {}, {"X-Error-Code": "RepoNotFound"})
            return None
        if write and not (is_member and user is not None and user["role"] == "write"):
            self.answer(403, {}, {"X-Error-Message": "You have read access but not the required permissions"})
            return None
        return found

    def at(self, repository: Repository, revision: str) -> str | None:
        """The commit; None, and an answer sent, where there is no such revision."""
        oid = repository.branches.get(revision, revision)
        if oid not in repository.commits:
            self.answer(404, {}, {"X-Error-Code": "RevisionNotFound"})
            return None
        return oid

    def whoami(self) -> None:
        user = USERS.get(self.token or "")
        if user is None:
            return self.answer(401, {}, {"X-Error-Message": "Invalid credentials in Authorization header"})
        return self.answer(
            200, {"name": user["name"], "orgs": user["orgs"], "auth": {"accessToken": {"role": user["role"]}}}
        )

    def create(self) -> None:
        asked = json.loads(self.body)
        user = USERS.get(self.token or "")
        owner = asked["organization"] or (user and user["name"])
        repo = f"{owner}/{asked['name']}"
        if user is None:
            return self.answer(401, {})
        if user["role"] != "write" or owner not in (user["name"], *(org["name"] for org in user["orgs"])):
            return self.answer(403, {}, {"X-Error-Message": "You don't have the rights to create a model there"})
        url = {"url": f"{self.hub.endpoint}/{repo}"}
        if repo in self.hub.repositories:
            return self.answer(409, url)
        self.hub.add(repo, private=asked.get("visibility") == "private" or asked.get("private") is True)
        return self.answer(200, url)

    def validate_yaml(self) -> None:
        """What the hub checks of a card's metadata, as far as it concerns an adapter."""
        found = re.match(r"---\n(.*?)\n---\n", json.loads(self.body)["content"], re.DOTALL)
        values = yaml.safe_load(found.group(1)) if found else {}
        base = values.get("base_model")
        if base is not None and not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", base):
            error = {"message": f'"base_model" with value "{base}" is not valid. Use a model id'}
            return self.answer(400, {"errors": [error], "warnings": []})
        return self.answer(200, {"errors": [], "warnings": []})

    def info(self, repo: str, revision: str | None = None) -> None:
        repository = self.find(repo)
        oid = self.at(repository, revision or "main") if repository else None
        if repository is None or oid is None:
            return None
        card = repository.commits[oid].get("README.md", b"").decode()
        found = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
        data = {"id": repo, "sha": oid, "private": repository.private, "tags": [], "siblings": []}
        return self.answer(200, data | ({"cardData": yaml.safe_load(found.group(1))} if found else {}))

    def tree(self, repo: str, revision: str) -> None:
        repository = self.find(repo)
        oid = self.at(repository, revision) if repository else None
        if repository is None or oid is None:
            return None
        entries: list[dict[str, Any]] = []
        for path, content in repository.commits[oid].items():
            entry = {"type": "file", "path": path, "size": len(content), "oid": blob_id(content)}
            if is_large(path, len(content)):
                entry["lfs"] = {"oid": oid_of(content), "size": len(content), "pointerSize": 134}
            entries.append(entry)
        folders = {path.rpartition("/")[0] for path in repository.commits[oid]} - {""}
        entries += [{"type": "directory", "path": path, "oid": "0" * 40} for path in folders]
        return self.answer(200, entries + repository.listed_too)

    def preupload(self, repo: str, revision: str) -> None:
        repository = self.find(repo, write=True)
        oid = self.at(repository, revision) if repository else None
        if repository is None or oid is None:
            return None
        there, modes = repository.commits[oid], []
        for file in json.loads(self.body)["files"]:
            path, size = file["path"], file["size"]
            mode = {"path": path, "uploadMode": "lfs" if is_large(path, size) else "regular"}
            mode["shouldIgnore"] = path in self.hub.ignored
            if path in there:
                mode["oid"] = (oid_of if is_large(path, size) else blob_id)(there[path])
            modes.append(mode)
        return self.answer(200, {"files": modes})

    def batch(self, repo: str) -> None:
        if self.find(repo, write=True) is None:
            return None
        objects = []
        for asked in json.loads(self.body)["objects"]:
            oid, size = asked["oid"], asked["size"]
            item: dict[str, Any] = {"oid": oid, "size": size}
            # Storage is another host, which must not see the token.
            storage = f"http://localhost:{self.hub.port}/storage/{oid}"
            if oid not in self.hub.blobs and self.hub.chunk_size:
                number = -(-size // self.hub.chunk_size)
                parts = {f"{part:05}": f"{storage}/{part}" for part in range(1, number + 1)}
                upload = {"href": f"{storage}/complete", "header": {"chunk_size": str(self.hub.chunk_size), **parts}}
                item["actions"] = {"upload": upload}
            elif oid not in self.hub.blobs:
                item["actions"] = {"upload": {"href": storage}}
            objects.append(item)
        return self.answer(200, {"objects": objects})

    def store(self, oid: str, part: str | None = None) -> None:
        content = self.body
        if part is None and oid_of(content) != oid:
            return self.answer(400, {"error": "the digest does not match"})
        self.hub.blobs[oid if part is None else f"{oid}/{part}"] = content
        return self.answer(200, {}, {"ETag": f'"{hashlib.md5(content).hexdigest()}"'})

    def complete(self, oid: str) -> None:
        parts = [self.hub.blobs.pop(f"{oid}/{part['partNumber']}") for part in json.loads(self.body)["parts"]]
        self.body = b"".join(parts)
        return self.store(oid)

    def commit(self, repo: str, revision: str) -> None:
        repository = self.find(repo, write=True)
        oid = self.at(repository, revision) if repository else None
        if repository is None or oid is None:
            return None
        files, message = dict(repository.commits[oid]), ""
        for line in self.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                message = value["summary"]
            elif item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"], validate=True)
            elif item["key"] == "lfsFile":
                if value["oid"] not in self.hub.blobs:
                    return self.answer(400, {"error": "an LFS object is missing"})
                files[value["path"]] = self.hub.blobs[value["oid"]]
            else:
                assert item["key"] == "deletedFile"
                del files[value["path"]]
        oid = repository.commit(revision, files, message)
        return self.answer(200, {"commitUrl": f"{self.hub.endpoint}/{repo}/commit/{oid}", "commitOid": oid})

    def branch(self, repo: str, branch: str) -> None:
        repository = self.find(repo, write=True)
        if repository is None:
            return None
        if branch in repository.branches:
            return self.answer(409, {"error": "the branch exists"})
        repository.branches[branch] = repository.branches["main"]
        return self.answer(200, {})

    def resolve(self, repo: str, revision: str, path: str) -> None:
        repository = self.find(repo)
        oid = self.at(repository, revision) if repository else None
        if repository is None or oid is None:
            return None
        headers = {"X-Repo-Commit": oid}
        content = repository.commits[oid].get(path)
        if content is None:
            return self.answer(404, {}, {"X-Error-Code": "EntryNotFound", **headers})
        if not is_large(path, len(content)):
            return self.answer(200, content, {"ETag": f'"{blob_id(content)}"', **headers})
        self.hub.blobs[oid_of(content)] = content
        size = len(content) + self.hub.size_error
        headers |= {"X-Linked-ETag": f'"{oid_of(content)}"', "X-Linked-Size": str(size)}
        headers["Location"] = f"http://localhost:{self.hub.port}/storage/{oid_of(content)}"
        return self.answer(302, b"", headers)

    def fetch(self, oid: str) -> None:
        content, wanted = self.hub.blobs[oid], self.headers.get("Range")
        if wanted is None:
            return self.answer(200, content)
        start = int(wanted.removeprefix("bytes=").partition("-")[0])
        return self.answer(206, content[start:], {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"})


REPO, REVISION, OID = r"([\w.-]+/[\w.-]+)", r"([\w.-]+)", r"([0-9a-f]{64})"
ROUTES: list[tuple[tuple[str, ...], str, Any]] = [
    (("GET",), r"/api/whoami-v2", _Handler.whoami),
    (("POST",), r"/api/repos/create", _Handler.create),
    (("POST",), r"/api/validate-yaml", _Handler.validate_yaml),
    (("GET",), rf"/api/models/{REPO}", _Handler.info),
    (("GET",), rf"/api/models/{REPO}/revision/{REVISION}", _Handler.info),
    (("GET",), rf"/api/models/{REPO}/tree/{REVISION}", _Handler.tree),
    (("POST",), rf"/api/models/{REPO}/preupload/{REVISION}", _Handler.preupload),
    (("POST",), rf"/api/models/{REPO}/commit/{REVISION}", _Handler.commit),
    (("POST",), rf"/api/models/{REPO}/branch/{REVISION}", _Handler.branch),
    (("POST",), rf"/{REPO}\.git/info/lfs/objects/batch", _Handler.batch),
    (("PUT",), rf"/storage/{OID}", _Handler.store),
    (("PUT",), rf"/storage/{OID}/(\d+)", _Handler.store),
    (("POST",), rf"/storage/{OID}/complete", _Handler.complete),
    (("GET",), rf"/storage/{OID}", _Handler.fetch),
    (("GET", "HEAD"), rf"/{REPO}/resolve/{REVISION}/(.+)", _Handler.resolve),
]


@contextmanager
def run_hub() -> Iterator[FakeHub]:
    """A hub that serves until the block ends."""
    hub = FakeHub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def point_client_at(hub: FakeHub, cache: Any, token: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What HF_ENDPOINT, HF_HUB_CACHE, HF_TOKEN and HF_HUB_DISABLE_XET do to a process that starts with them."""
    constants = "huggingface_hub.constants"
    monkeypatch.setattr(f"{constants}.ENDPOINT", hub.endpoint)
    template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(f"{constants}.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(f"{constants}.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(f"{constants}.HF_TOKEN_PATH", str(cache / "token"))
    monkeypatch.setattr(f"{constants}.HF_HUB_OFFLINE", False)
    # Its storage speaks a protocol of its own.
    monkeypatch.setattr(f"{constants}.HF_HUB_DISABLE_XET", True)
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
