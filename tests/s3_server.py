"""moto's S3 on loopback behind a layer of ours that counts requests and can be made to fail."""

import os
import socket
import struct
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import boto3
import s3fs
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

ACCOUNT = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_DEFAULT_REGION": "us-east-1"}

_REASONS = {404: "NoSuchKey", 429: "SlowDown", 500: "InternalError", 503: "SlowDown"}


@dataclass
class Fault:
    """What goes wrong with the requests whose key ends so, until it has gone wrong `times` times."""

    key: str
    kind: str = "get"
    """Of the request: get, head, list; empty for any."""
    times: int = 1
    status: int = 0
    headers: dict = field(default_factory=dict)
    delay_s: float = 0.0
    cut_after: int = -1
    """Bytes of the body that are sent before the connection is reset."""
    truncate_to: int = -1
    """Bytes of the body that are sent before the connection ends, less than Content-Length promises."""
    drip_s: float = 0.0
    """Between single bytes of the body."""
    content: bytes = b""
    """In place of the right content."""
    ignores_ranges: bool = False
    before: Callable[[], None] | None = None
    """Called before the request is answered, which may change the files."""


class _Handler(WSGIRequestHandler):
    def log(self, *_arguments):
        pass


class S3Server:
    """The server while it runs, with one bucket: ``with S3Server() as s3``."""

    def __init__(self, bucket=""):
        self.bucket = bucket or f"lab-{uuid.uuid4().hex}"
        self.faults = []
        self.counts = Counter()
        """Requests by kind: list, head, get."""
        self.keys = Counter()
        """Requests for content, by key."""
        self.ranges = []
        """Of each request for content its key and range."""
        self._lock = threading.Lock()
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=_Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self):
        self._thread.start()
        self._client = boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id="x",
            aws_secret_access_key="y",
            region_name="us-east-1",
        )
        self._client.create_bucket(Bucket=self.bucket)
        self.reset()
        return self

    def __exit__(self, *_error):
        self._client.close()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def num_requests(self):
        with self._lock:
            return sum(self.counts.values())

    def add(self, name, folder):
        """Put the files of a folder in the bucket under `name`; its URI is returned."""
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                self.put(f"{name}/{path.relative_to(folder).as_posix()}", path.read_bytes())
        self.reset()
        return f"s3://{self.bucket}/{name}"

    def put(self, key, content, **more):
        self._client.put_object(Bucket=self.bucket, Key=key, Body=content, **more)

    def remove(self, key):
        self._client.delete_object(Bucket=self.bucket, Key=key)

    def fail(self, key, **fault):
        """Let requests whose key ends in `key` fail."""
        self.faults.append(Fault(key, **fault))

    def reset(self):
        """Forget faults and counts."""
        with self._lock:
            self.faults.clear()
            self.counts.clear()
            self.keys.clear()
            self.ranges.clear()

    def environment(self, **more):
        """Return the variables by which another process takes this server for S3."""
        return {**ACCOUNT, "AWS_ENDPOINT_URL": self.endpoint, "AWS_MAX_ATTEMPTS": "1", **more}

    @contextmanager
    def as_s3(self, *, timeout_s=15, retries=2):
        """Let s3fs in this process take this server for S3; what fails is given back to us soon."""
        s3fs.S3FileSystem.clear_instance_cache()
        with (
            patch.dict(os.environ, self.environment()),
            patch.object(s3fs.S3FileSystem, "read_timeout", timeout_s),
            patch.object(s3fs.S3FileSystem, "retries", retries),
        ):
            try:
                yield self
            finally:
                s3fs.S3FileSystem.clear_instance_cache()

    def _answer(self, environ, start_response):
        kind, key = self._note(environ)
        fault = self._take_fault(kind, key)
        if fault.before is not None:
            fault.before()
        time.sleep(fault.delay_s)
        if fault.ignores_ranges:
            environ.pop("HTTP_RANGE", None)
        if fault.status:
            return _refuse(fault, start_response, is_head=kind == "head")
        told = []
        body = b"".join(self._app(environ, lambda status, headers, _error=None: told.append((status, headers))))
        ((status, headers),) = told
        if fault.content and kind == "get":
            body, headers = fault.content, _with_length(headers, len(fault.content))
        start_response(status, headers)
        return _body(body, fault, environ["werkzeug.socket"])

    def _note(self, environ):
        _, _, key = environ["PATH_INFO"].lstrip("/").partition("/")
        method = environ["REQUEST_METHOD"]
        kind = {"HEAD": "head", "GET": "get" if key else "list"}.get(method, "other")
        if kind == "other":
            return kind, key
        with self._lock:
            self.counts[kind] += 1
            if kind == "get":
                self.keys[key] += 1
                self.ranges.append((key, environ.get("HTTP_RANGE", "")))
        return kind, key

    def _take_fault(self, kind, key):
        with self._lock:
            for fault in self.faults:
                if fault.times > 0 and kind != "other" and key.endswith(fault.key) and fault.kind in ("", kind):
                    fault.times -= 1
                    return fault
        return Fault("")


def _refuse(fault, start_response, *, is_head):
    code = _REASONS.get(fault.status, "Refused")
    body = f"<Error><Code>{code}</Code><Message>as asked</Message></Error>".encode()
    headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(body))), *fault.headers.items()]
    start_response(f"{fault.status} {code}", headers)
    return [] if is_head else [body]


def _with_length(headers, length):
    # The sums of the right content would give the wrong one away.
    kept = [(key, value) for key, value in headers if key.lower() != "content-length" and "checksum" not in key.lower()]
    return [*kept, ("Content-Length", str(length))]


def _body(body, fault, connection):
    if fault.drip_s:
        for at in range(len(body)):
            yield body[at : at + 1]
            time.sleep(fault.drip_s)
        return
    if fault.truncate_to >= 0:
        yield body[: fault.truncate_to]
        return
    if fault.cut_after < 0:
        yield body
        return
    yield body[: fault.cut_after]
    # Without lingering the other side sees a reset, not an end.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    raise ConnectionResetError
