"""A server on loopback that speaks the API of the Hugging Face Hub as its own client uses it, and can be made to fail.

Repos are folders at several commits. Large files are served as the Hub serves them: by a redirect to another origin
(``localhost`` in place of ``127.0.0.1``), where a token must not be sent.
"""

import hashlib
import json
import re
import socket
import struct
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest.mock import patch
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = (".parquet", ".mp4")
"""Kept outside git, as on the Hub."""


@dataclass
class Fault:
    """What goes wrong with the requests whose path ends so, until it has gone wrong `times` times."""

    path: str
    kind: str = ""
    """Of the request; empty for any."""
    times: int = 1
    status: int = 0
    headers: dict = field(default_factory=dict)
    delay_s: float = 0.0
    cut_after: int = -1
    """Bytes of the body that are sent before the connection is reset."""
    truncate_to: int = -1
    """Bytes of the body that are sent before the connection ends, less than Content-Length promises."""
    pause_after: int = -1
    """Bytes of the body that are sent before a pause of `pause_s`."""
    pause_s: float = 0.0
    drip_s: float = 0.0
    """Between single bytes of the body, which come one by one until the other side has enough of it."""
    content: bytes = b""
    """In place of the right content."""
    is_missing: bool = False
    ignores_ranges: bool = False


@dataclass
class Repo:
    """A dataset: its commits, and the names of some of them."""

    files: dict = field(default_factory=dict)
    """Of each commit: the content by file name."""
    branches: dict = field(default_factory=dict)
    tags: dict = field(default_factory=dict)
    token: str = ""
    """Wanted for any request, if there is one."""
    is_gated: bool = False

    def add_commit(self, folder, *, branch="main", tags=(), sha=""):
        """Add the state of a folder, and let a branch and tags point to it; its SHA is returned."""
        found = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(Path(folder).rglob("*"))
            if path.is_file()
        }
        sha = sha or hashlib.sha1(repr((len(self.files), sorted(found))).encode()).hexdigest()
        self.files[sha] = found
        self.branches[branch] = sha
        self.tags |= dict.fromkeys(tags, sha)
        return sha

    def find_commit(self, revision):
        return self.tags.get(revision) or self.branches.get(revision) or (revision if revision in self.files else None)

    def split(self, path):
        """Return revision and file of a path: a revision may hold slashes."""
        for revision in sorted([*self.files, *self.branches, *self.tags], key=len, reverse=True):
            if path == revision or path.startswith(f"{revision}/"):
                return revision, path[len(revision) + 1 :]
        revision, _, name = path.partition("/")
        return revision, name


class HubServer:
    """The server while it runs: ``with HubServer() as hub``."""

    def __init__(self, page_size=1000):
        self.page_size = page_size
        self.repos = {}
        self.faults = []
        self.counts = Counter()
        """Requests by kind: refs, revision, tree, paths-info, head, resolve, lfs."""
        self.paths = Counter()
        """Requests for a file's content, by its name."""
        self.times = []
        """When requests came, on the monotonic clock."""
        self.ranges = []
        """The ranges of content that were asked for."""
        self.tokens_elsewhere = 0
        """Requests to the other origin that brought a token along."""
        self.link = ""
        """The next page of every page of a listing, in place of the right one; ``"count"`` for another every time."""
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_error):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def storage_endpoint(self):
        return f"http://localhost:{self._server.server_port}"

    @property
    def num_requests(self):
        with self._lock:
            return sum(self.counts.values())

    def add_repo(self, repo_id, folder=None, **options):
        """Add a repo, with `folder` as its first commit."""
        commit = {key: options.pop(key) for key in ("branch", "tags", "sha") if key in options}
        repo = self.repos[repo_id] = Repo(**options)
        if folder is not None:
            repo.add_commit(folder, **commit)
        return repo

    def fail(self, path, **fault):
        """Let requests whose path ends in `path` fail."""
        self.faults.append(Fault(path, **fault))

    def reset(self):
        """Forget faults and counts."""
        with self._lock:
            self.faults.clear()
            self.counts.clear()
            self.paths.clear()
            self.times.clear()
            self.ranges.clear()

    def take_fault(self, path, kind):
        """Return the fault of this request, and count it."""
        with self._lock:
            for fault in self.faults:
                if fault.times > 0 and path.endswith(fault.path) and fault.kind in ("", kind):
                    fault.times -= 1
                    return fault
        return Fault("")

    def note(self, kind, path):
        with self._lock:
            self.counts[kind] += 1
            self.times.append(time.monotonic())
            if kind in ("resolve", "lfs"):
                self.paths[re.sub(r"^[0-9a-f]{40}/", "", path)] += 1

    @contextmanager
    def as_hub(self, cache, *, is_offline=False, timeout_s=10):
        """Let huggingface_hub in this process take this server for the Hub, with a cache of its own."""
        from huggingface_hub import constants

        settings = {
            "ENDPOINT": self.endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": self.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(cache),
            "HF_HUB_OFFLINE": is_offline,
            "HF_HUB_DOWNLOAD_TIMEOUT": timeout_s,
            "HF_HUB_DISABLE_XET": True,
        }
        with patch.multiple(constants, **settings):
            yield self

    def environment(self, cache, **more):
        """Return the variables by which another process takes this server for the Hub."""
        return {"HF_ENDPOINT": self.endpoint, "HF_HUB_CACHE": str(cache), "HF_HUB_DISABLE_XET": "1", **more}


def git_oid(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def describe(name, content):
    """Return what the tree says of a file."""
    told = {"type": "file", "path": name, "size": len(content), "oid": git_oid(content)}
    if name.endswith(LARGE):
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256(content)}\nsize {len(content)}\n"
        told["oid"] = git_oid(pointer.encode())
        told["lfs"] = {"oid": sha256(content), "size": len(content), "pointerSize": len(pointer)}
    return told


def list_tree(files, folder, *, is_recursive):
    """Return the entries of a folder, as the Hub lists them; None where there is no such folder."""
    prefix = f"{folder}/" if folder else ""
    below = {name: content for name, content in files.items() if name.startswith(prefix)}
    if folder and not below:
        return None
    folders, entries = {}, []
    for name, content in below.items():
        parts = name[len(prefix) :].split("/")
        for depth in range(1, len(parts) if is_recursive else min(len(parts), 2)):
            path = prefix + "/".join(parts[:depth])
            folders[path] = {"type": "directory", "path": path, "size": 0, "oid": git_oid(path.encode())}
        if is_recursive or len(parts) == 1:
            entries.append(describe(name, content))
    return sorted([*folders.values(), *entries], key=lambda one: one["path"])


def _handler_of(hub):
    class Handler(_Handler):
        server_hub = hub

    return Handler


class _Answered(Exception):  # noqa: N818
    """The request has been answered."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_hub: HubServer

    def log_message(self, *_arguments):
        pass

    def do_GET(self):
        self._answer()

    def do_HEAD(self):
        self._answer()

    def do_POST(self):
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer()

    def handle(self):
        # A client may leave in the middle.
        try:
            super().handle()
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    def _answer(self):
        self.fault = Fault("")
        with suppress(_Answered):
            self._route()

    def _route(self):
        url = urlsplit(self.path)
        path, query = unquote(url.path), parse_qs(url.query)
        if match := re.fullmatch(r"/lfs/([^/]+/[^/]+)/([0-9a-f]{40})/(.+)", path):
            return self._send_stored(*match.groups())
        if match := re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/(.+)", path):
            return self._resolve(match[1], match[2])
        if match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)(?:/(refs|revision|tree|paths-info)(?:/(.+))?)?", path):
            repo = self._open_repo(match[1], match[2] or "revision", path)
            return self._api(repo, match[2] or "revision", match[3] or "main", url.path, query)
        return self._refuse(404, "", "no such page")

    def _open_repo(self, repo_id, kind, path):
        self.server_hub.note(kind, path)
        self.fault = self.server_hub.take_fault(path, kind)
        time.sleep(self.fault.delay_s)
        if self.fault.status:
            self._refuse(self.fault.status, "", "as asked", self.fault.headers)
        if self.fault.cut_after == 0:
            self._reset()
        repo = self.server_hub.repos.get(repo_id)
        sent = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if sent.startswith("bad"):
            self._refuse(401, "", "Invalid credentials in Authorization header")
        if repo is None or (repo.token and sent != repo.token):
            self._refuse(404 if sent else 401, "RepoNotFound", "Repository not found")
        return repo

    def _api(self, repo, kind, rest, path, query):
        if kind == "refs":
            refs = {"branches": repo.branches, "tags": repo.tags}
            named = {
                key: [{"name": name, "ref": f"refs/{key}/{name}", "targetCommit": sha} for name, sha in found.items()]
                for key, found in refs.items()
            }
            return self._send_json({**named, "converts": []})
        revision, folder = repo.split(rest)
        commit = repo.find_commit(revision)
        if commit is None:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files = repo.files[commit]
        if kind == "revision":
            return self._send_json(
                {"id": "x/y", "sha": commit, "private": bool(repo.token), "tags": [], "siblings": []}
            )
        if kind == "paths-info":
            wanted = parse_qs(self.body.decode()).get("paths", [])
            return self._send_json([describe(name, files[name]) for name in wanted if name in files])
        entries = list_tree(files, folder, is_recursive=query.get("recursive", ["false"])[0].lower() == "true")
        if entries is None:
            return self._refuse(404, "EntryNotFound", f"{folder} does not exist")
        start = int(query.get("cursor", ["0"])[0])
        stop = start + self.server_hub.page_size
        recursive = query.get("recursive", ["false"])[0]
        link = f'<{self.server_hub.endpoint}{path}?recursive={recursive}&cursor={stop}>; rel="next"'
        if self.server_hub.link:
            counted = f'<{self.server_hub.endpoint}{path}?recursive={recursive}&cursor={start + 1}>; rel="next"'
            link = counted if self.server_hub.link == "count" else self.server_hub.link
        has_more = stop < len(entries) or self.server_hub.link
        return self._send_json(entries[start:stop], {"Link": link} if has_more else {})

    def _resolve(self, repo_id, rest):
        repo = self._open_repo(repo_id, "head" if self.command == "HEAD" else "resolve", rest)
        revision, name = repo.split(rest)
        if repo.is_gated:
            self._refuse(403 if self.headers.get("Authorization") else 401, "GatedRepo", "Access is restricted")
        commit = repo.find_commit(revision)
        if commit is None:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        headers = {"X-Repo-Commit": commit}
        content = repo.files[commit].get(name)
        if content is None or self.fault.is_missing:
            self._refuse(404, "EntryNotFound", "Entry not found", headers)
        if not name.endswith(LARGE):
            return self._send_content(content, {**headers, "ETag": f'"{git_oid(content)}"'})
        headers |= {
            "X-Linked-ETag": f'"{sha256(content)}"',
            "X-Linked-Size": str(len(content)),
            "Location": f"{self.server_hub.storage_endpoint}/lfs/{repo_id}/{commit}/{name}",
        }
        return self._send(302, b"", headers)

    def _send_stored(self, repo_id, commit, name):
        self.server_hub.note("lfs", name)
        self.fault = self.server_hub.take_fault(name, "lfs")
        self.server_hub.tokens_elsewhere += "Authorization" in self.headers
        time.sleep(self.fault.delay_s)
        if self.fault.status:
            self._refuse(self.fault.status, "", "as asked", self.fault.headers)
        content = self.server_hub.repos[repo_id].files[commit][name]
        return self._send_content(content, {"ETag": f'"{sha256(content)}"'})

    def _send_content(self, content, headers):
        content = self.fault.content or content
        status, body = 200, content
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked and not self.fault.ignores_ranges:
            self.server_hub.ranges.append(asked[0])
            start, stop = int(asked[1]), min(int(asked[2]) + 1 if asked[2] else len(content), len(content))
            if start >= len(content):
                return self._refuse(416, "", "", {"Content-Range": f"bytes */{len(content)}"})
            status, body = 206, content[start:stop]
            headers = {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}
        return self._send(status, body, {**headers, "Accept-Ranges": "bytes"})

    def _send_json(self, value, headers=None):
        body = self.fault.content or json.dumps(value).encode()
        return self._send(200, body, {"Content-Type": "application/json", **(headers or {})})

    def _refuse(self, status, code, message, headers=None):
        told = {"X-Error-Code": code, "X-Error-Message": message}
        self._send(status, b"", {**{key: value for key, value in told.items() if value}, **(headers or {})})
        raise _Answered

    def _send(self, status, body, headers):
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        fault = self.fault
        if fault.truncate_to >= 0:
            self.wfile.write(body[: fault.truncate_to])
            self.close_connection = True
        elif fault.cut_after >= 0:
            self.wfile.write(body[: fault.cut_after])
            self._reset()
        elif fault.drip_s:
            for at in range(len(body)):
                self.wfile.write(body[at : at + 1])
                time.sleep(fault.drip_s)
        else:
            pause_at = fault.pause_after if fault.pause_after >= 0 else len(body)
            self.wfile.write(body[:pause_at])
            time.sleep(fault.pause_s)
            self.wfile.write(body[pause_at:])

    def _reset(self):
        self.wfile.flush()
        # Without lingering the other side sees a reset, not an end.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True
        raise _Answered
