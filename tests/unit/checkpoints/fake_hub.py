"""A small Hugging Face hub on localhost, with the faults that networks have.

It speaks what the hub library uses: model info by revision, the file tree, and
``resolve`` with HEAD, GET, ETag, X-Repo-Commit, Range and redirects of large files
to another host. With ``has_xet`` weights are in Xet storage too: HEAD names it, and
the hub answers ``hf_xet`` itself as a storage of uncompressed objects of 1 MiB.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LFS_SUFFIXES = (".safetensors", ".bin", ".pth")
CHUNK_BYTES = 64 * 1024
CHUNKS_PER_OBJECT = 16
_XET = "answer of the Xet storage"
_API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?")
_XET_TOKEN = re.compile(r"/api/models/([^/]+/[^/]+)/xet-read-token/([^/]+)")
_XET_FILE = re.compile(r"/v1/reconstructions/([0-9a-f]{64})")
_XET_OBJECT = re.compile(r"/xet/([0-9a-f]{64})/(\d+)")
XET_TOKEN = "xet-right"
_RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Repo:
    """One repository: revision → commit → files. ``access`` is open, gated or private."""

    revisions: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    access: str = "open"

    def commit(self, files: dict[str, bytes], revision: str = "main") -> str:
        content = b"".join(name.encode() + data for name, data in sorted(files.items()))
        sha = hashlib.sha1(content).hexdigest()
        self.commits[sha] = dict(files)
        self.revisions[revision] = sha
        return sha

    def resolve(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.revisions.get(revision)


@dataclass
class Request:
    """One request as it came in; ``sent_bytes`` counts what went into the body."""

    method: str
    path: str
    range: str | None
    token: str | None
    sent_bytes: int = 0


@dataclass
class FakeHub:
    """Repositories, faults to play, and a log of requests.

    ``cuts[file]``: the next answers for this file end the connection after so many
    bytes. ``holds[file]``: they stop there until ``released`` is set.
    ``statuses[file]``: they have this HTTP status instead. A hold of -1 and a status
    of 0 leave an answer as it is.

    The next answers of the Xet storage break after ``xet_cuts`` bytes, or wait there
    (``xet_holds``) for ``released``; with ``breaks_xet`` it delivers wrong bytes.
    ``xet_url`` is the address that the hub names for the storage, else its own.
    """

    url: str = ""
    cdn_url: str = ""
    token: str = "hf_right"
    repos: dict[str, Repo] = field(default_factory=dict)
    cuts: dict[str, list[int]] = field(default_factory=dict)
    holds: dict[str, list[int]] = field(default_factory=dict)
    statuses: dict[str, list[int]] = field(default_factory=dict)
    ignores_range: bool = False
    redirects_large_files: bool = False
    broken_listing: bytes | None = None
    has_sizes: bool = True
    has_xet: bool = False
    xet_url: str | None = None
    breaks_xet: bool = False
    xet_cuts: list[int] = field(default_factory=list)
    xet_holds: list[int] = field(default_factory=list)
    held: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    requests: list[Request] = field(default_factory=list)

    def add(self, repo_id: str, files: dict[str, bytes], access: str = "open") -> Repo:
        self.repos[repo_id] = repo = Repo(access=access)
        repo.commit(files)
        return repo

    def xet_downloads(self) -> list[Request]:
        """GET requests for objects of the Xet storage, in order."""
        return [r for r in self.requests if r.path.startswith("/xet/")]

    def downloads(self, file: str) -> list[Request]:
        """GET requests for a file of any repository, in order."""
        return [r for r in self.requests if r.method == "GET" and r.path.endswith(f"/{file}")]


@contextmanager
def run_hub() -> Iterator[FakeHub]:
    """A hub on a free port, with its CDN under another host name."""
    hub = FakeHub()

    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    hub.cdn_url = f"http://localhost:{server.server_address[1]}/cdn"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        hub.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    state: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test output clean."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = urlsplit(self.path).path
        authorization = self.headers.get("Authorization")
        token = authorization.removeprefix("Bearer ") if authorization else None
        self.request_log = Request(self.command, unquote(path), self.headers.get("Range"), token)
        self.state.requests.append(self.request_log)
        is_cdn = path.startswith("/cdn/")
        path = path.removeprefix("/cdn")
        if match := _XET_TOKEN.fullmatch(path):
            self._xet_token(match[1], match[2])
        elif match := _XET_FILE.fullmatch(path):
            self._xet_file(match[1], token)
        elif match := _XET_OBJECT.fullmatch(path):
            self._xet_object(match[1], int(match[2]))
        elif match := _API.fullmatch(path):
            self._api(match[1], match[2], match[3] and unquote(match[3]))
        elif match := _RESOLVE.fullmatch(path):
            self._resolve(match[1], unquote(match[2]), unquote(match[3]), is_cdn)
        else:
            self._fail(404, "NotFound")

    def _api(self, repo_id: str, kind: str | None, revision: str | None) -> None:
        if self.state.broken_listing is not None:
            self._send(200, {"Content-Type": "text/html"}, self.state.broken_listing)
            return
        found = self._find(repo_id, revision or "main", gate=False)
        if found is None:
            return
        commit, files = found
        entries = [_entry(name, data) for name, data in sorted(files.items())]
        answer: Any
        if kind == "tree":
            answer = [
                {"type": "file", "path": e["rfilename"], "size": e["size"], "oid": e["blobId"]}
                | ({"lfs": {"oid": e["lfs"]["sha256"], **e["lfs"]}} if e["lfs"] else {})
                for e in entries
            ]
        else:
            hidden = () if self.state.has_sizes else ("size", "lfs", "blobId")
            siblings = [
                {k: v for k, v in e.items() if v is not None and k not in hidden} for e in entries
            ]
            answer = {"id": repo_id, "sha": commit, "siblings": siblings}
        self._send(200, {"Content-Type": "application/json"}, json.dumps(answer).encode())

    def _find(self, repo_id: str, revision: str, gate: bool) -> tuple[str, dict[str, bytes]] | None:
        """Commit and files; without access or such a revision, the hub's error."""
        repo = self.state.repos.get(repo_id)
        known = self.request_log.token == self.state.token
        if repo is None or (repo.access == "private" and not known):
            self._fail(401 if not known else 404, "RepoNotFound")
        elif gate and repo.access == "gated" and not known:
            self._fail(401, "GatedRepo")
        elif (commit := repo.resolve(revision)) is None:
            self._fail(404, "RevisionNotFound")
        else:
            return commit, repo.commits[commit]
        return None

    def _resolve(self, repo_id: str, revision: str, file: str, is_cdn: bool) -> None:
        if is_cdn:  # its addresses are signed; it wants no token
            self.request_log.token, sent = self.state.token, self.request_log.token
            found = self._find(repo_id, revision, gate=False)
            self.request_log.token = sent
        else:
            found = self._find(repo_id, revision, gate=True)
        if found is None:
            return
        commit, files = found
        statuses = self.state.statuses.get(file) if self.command == "GET" else None
        if statuses and (status := statuses.pop(0)):
            self._fail(status, "")
        elif file not in files:
            self._fail(404, "EntryNotFound")
        elif self.state.redirects_large_files and file.endswith(LFS_SUFFIXES) and not is_cdn:
            self._redirect(commit, file, files[file])
        else:
            self._send_file(commit, file, files[file])

    def _redirect(self, commit: str, file: str, data: bytes) -> None:
        headers = {
            "Location": self.state.cdn_url + self.path,
            "X-Repo-Commit": commit,
            "X-Linked-Size": str(len(data)),
            "X-Linked-Etag": f'"{_digest(file, data)}"',
        }
        self._send(302, headers, b"")

    def _send_file(self, commit: str, file: str, data: bytes) -> None:
        headers = {
            "ETag": f'"{_digest(file, data)}"',
            "X-Repo-Commit": commit,
            "Accept-Ranges": "bytes",
        }
        if self.state.has_xet and self.command == "HEAD" and file.endswith(LFS_SUFFIXES):
            headers |= self._xet_headers(file, data)
        begin, status = 0, 200
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.request_log.range or "")
        end = len(data)
        if wanted and not self.state.ignores_range:
            begin, status = int(wanted[1]), 206
            if begin >= len(data):
                self._send(416, {"Content-Range": f"bytes */{len(data)}"}, b"")
                return
            end = min(end, int(wanted[2]) + 1) if wanted[2] else end
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(data)}"
        self._send(status, headers, data[begin:end], file)

    def _xet_headers(self, file: str, data: bytes) -> dict[str, str]:
        repo_id, commit = _RESOLVE.fullmatch(unquote(urlsplit(self.path).path)).group(1, 2)  # type: ignore[union-attr]
        route = f"{self.state.url}/api/models/{repo_id}/xet-read-token/{commit}"
        return {"X-Xet-Hash": _digest(file, data), "Link": f'<{route}>; rel="xet-auth"'}

    def _xet_token(self, repo_id: str, revision: str) -> None:
        if self._find(repo_id, revision, gate=True) is None:
            return
        headers = {
            "X-Xet-Cas-Url": self.state.xet_url or self.state.url,
            "X-Xet-Access-Token": XET_TOKEN,
            "X-Xet-Token-Expiration": str(int(time.time()) + 3600),
        }
        self._send(200, headers, b"{}")

    def _xet_file(self, wanted: str, token: str | None) -> None:
        """Tell which chunks of which object make up a range of a file."""
        data = self._xet_data(wanted)
        if data is None or token != XET_TOKEN:
            self._fail(404 if data is None else 401, "")
            return
        begin, end = 0, len(data)
        if match := re.fullmatch(r"bytes=(\d+)-(\d+)", self.request_log.range or ""):
            begin, end = int(match[1]), min(int(match[2]) + 1, len(data))
        if begin >= len(data):
            self._send(416, {}, b"")
            return
        first, last = begin // CHUNK_BYTES, (end - 1) // CHUNK_BYTES + 1
        terms, sources = [], {}
        for number in range(first // CHUNKS_PER_OBJECT, (last - 1) // CHUNKS_PER_OBJECT + 1):
            base = number * CHUNKS_PER_OBJECT
            span = max(first, base) - base, min(last, base + CHUNKS_PER_OBJECT) - base
            name = f"{number:064x}"
            num_bytes = min((base + span[1]) * CHUNK_BYTES, len(data))
            num_bytes -= (base + span[0]) * CHUNK_BYTES
            where = {"start": span[0], "end": span[1]}
            terms.append({"hash": name, "unpacked_length": num_bytes, "range": where})
            sources[name] = [self._xet_source(wanted, data, number, where)]
        answer = {
            "offset_into_first_range": begin - first * CHUNK_BYTES,
            "terms": terms,
            "fetch_info": sources,
        }
        self._send(200, {"Content-Type": "application/json"}, json.dumps(answer).encode())

    def _xet_source(
        self, wanted: str, data: bytes, number: int, where: dict[str, int]
    ) -> dict[str, Any]:
        chunks = _xet_chunks(data, number)
        first = sum(map(len, chunks[: where["start"]]))
        last = sum(map(len, chunks[: where["end"]])) - 1
        return {
            "range": where,
            "url": f"{self.state.url}/xet/{wanted}/{number}",
            "url_range": {"start": first, "end": last},
        }

    def _xet_object(self, wanted: str, number: int) -> None:
        data = self._xet_data(wanted)
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.request_log.range or "")
        if data is None or match is None:
            self._fail(404, "")
            return
        packed = b"".join(_xet_chunks(data[::-1] if self.state.breaks_xet else data, number))
        begin, end = int(match[1]), int(match[2]) + 1
        headers = {"Content-Range": f"bytes {begin}-{end - 1}/{len(packed)}"}
        self._send(206, headers, packed[begin:end], _XET)

    def _xet_data(self, wanted: str) -> bytes | None:
        """Find a file by its hash. The real hash is another; ``hf_xet`` compares nothing."""
        for repo in self.state.repos.values():
            for files in repo.commits.values():
                for name, data in files.items():
                    if name.endswith(LFS_SUFFIXES) and _digest(name, data) == wanted:
                        return data
        return None

    def _fail(self, status: int, code: str) -> None:
        self._send(status, {"X-Error-Code": code} if code else {}, b'{"error": "refused"}')

    def _send(self, status: int, headers: dict[str, str], body: bytes, file: str = "") -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if file == _XET:
            cuts, holds = self.state.xet_cuts, self.state.xet_holds
        else:
            cuts, holds = self.state.cuts.get(file, []), self.state.holds.get(file, [])
        cut = cuts.pop(0) if cuts else None
        hold = holds.pop(0) if holds else None
        hold = None if hold == -1 else hold
        try:
            self._send_body(body, cut, hold)
        except OSError:
            self.close_connection = True

    def _send_body(self, body: bytes, cut: int | None, hold: int | None) -> None:
        stop = cut if cut is not None else hold if hold is not None else len(body)
        self._write(body[:stop])
        if hold is not None:
            self.state.held.set()
            self.state.released.wait()
            self._write(body[stop:])
        elif cut is not None:
            self.close_connection = True

    def _write(self, data: bytes) -> None:
        for begin in range(0, len(data), CHUNK_BYTES):
            chunk = data[begin : begin + CHUNK_BYTES]
            self.wfile.write(chunk)
            self.request_log.sent_bytes += len(chunk)
        self.wfile.flush()


def _entry(name: str, data: bytes) -> dict[str, Any]:
    lfs = None
    if name.endswith(LFS_SUFFIXES):
        lfs = {"size": len(data), "sha256": _digest(name, data), "pointerSize": 134}
    blob = hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
    return {"rfilename": name, "size": len(data), "blobId": blob, "lfs": lfs}


def _xet_chunks(data: bytes, number: int) -> list[bytes]:
    """Pack an object of a file in chunks: version, packed size, no compression, size, bytes."""
    num_bytes = CHUNKS_PER_OBJECT * CHUNK_BYTES
    data = data[number * num_bytes : (number + 1) * num_bytes]
    pieces = [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]
    sizes = [len(piece).to_bytes(3, "little") for piece in pieces]
    return [b"\0" + n + b"\0" + n + piece for n, piece in zip(sizes, pieces, strict=True)]


def _digest(name: str, data: bytes) -> str:
    if name.endswith(LFS_SUFFIXES):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
