"""Shows anything: `show` in a notebook finds its view, ``raypipe show`` writes one, or serves a page to browse.

The page is only on 127.0.0.1, for a browser on this machine. Any user of this machine can connect. So the server
answers a request only if it has the token from the link that the program prints, or the cookie that the page behind
that link sets. Any other page open in the browser can also send requests here: the Host header must name this machine
(DNS rebinding could lead another name here), other sites do not have the cookie, and headers keep them from using the
answers. Addresses hold only numbers, never a path. The server answers only GET and HEAD.
"""

import json
import re
import secrets
import socket
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from inspect import signature
from pathlib import Path, PurePath
from typing import IO, Any, Final
from urllib.parse import parse_qs, urlsplit

from raypipe.dataset import Dataset
from raypipe.errors import ConfigError, RaypipeError, suggest
from raypipe.mixture import Mixture, open_dataset
from raypipe.plan import WorldPlan
from raypipe.storage import take_login
from raypipe.views.batch import view_batch
from raypipe.views.card import view_dataset
from raypipe.views.episode import EpisodeView, open_viewer, save_recording, view_episode
from raypipe.views.mixture import view_mixture
from raypipe.views.plan import view_pipeline, view_world
from raypipe.views.run import Recording, view_run
from raypipe.views.site import HEIGHTS, BatchQuery, Site
from raypipe.views.view import View


def show(thing: Any, **options: Any) -> View:
    """Return a view of `thing`: at the end of a notebook cell it shows itself; ``.save(path)`` writes it to a file.

    ::

        rp.show(ds)                  a card: episodes, cameras, tasks, ranges, what is odd
        rp.show(ds, episode=3)       one episode, playable
        rp.show(mixture)             its members, and what an epoch takes of each
        rp.show(pipe)                the plan of an epoch; world_size=8, epoch=1
        rp.show(batch)               pictures and actions of a batch; num_samples=16
        rp.show(loader)              its speed, and what it waits for; over time: views.record

    Args:
        thing: a dataset, a mixture, the root of either, a batch, a `Pipeline`, a plan, a loader or its recording.
        options: passed to the function in `raypipe.views` that makes the view.
    """
    if isinstance(thing, View):
        return thing
    if isinstance(thing, str | Path):
        opened = open_dataset(str(thing))
        if isinstance(opened, Mixture):
            options = {"name": str(thing), **options}
        thing = opened
    for kind, make in _makers(options):
        if isinstance(thing, kind):
            known = list(signature(make).parameters)[1:]
            for name in options:
                if name not in known:
                    raise ConfigError(f"show has no option {name!r} for a {type(thing).__name__}{suggest(name, known)}")
            return make(thing, **options)
    raise ConfigError(
        f"nothing to show of a {type(thing).__name__}: give a dataset, a mixture, the root of one, a batch, a "
        f"Pipeline, a plan, a loader, or a recording of one"
    )


def _makers(options: Mapping[str, Any]) -> Iterator[tuple[type, Callable[..., View]]]:
    """Yield what can be shown, with the function that makes its view."""
    yield Dataset, _view_one_episode if "episode" in options else view_dataset
    yield Mixture, view_mixture
    yield Recording, Recording.view
    yield WorldPlan, view_world
    yield Mapping, view_batch
    # Only now: their classes load torch and Ray.
    from raypipe.loader import RankLoader
    from raypipe.pipeline import Pipeline

    yield Pipeline, view_pipeline
    yield RankLoader, view_run


def _view_one_episode(dataset: Dataset, episode: int, num_frames: int = 8) -> View:
    return view_episode(dataset, episode, num_frames=num_frames)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowRequest:
    """What to show, and where to write it."""

    root: str
    member: str = ""
    episode: int | None = None
    """None: the whole dataset or mixture."""
    out: str = ""
    """The file to write; empty for a page in a new temporary folder."""
    with_rerun: bool = False
    port: int | None = None
    """Serve a page to browse the dataset on this port until Ctrl-C; None serves no page."""

    def __post_init__(self) -> None:
        if self.episode is not None and self.episode < 0:
            raise ConfigError(f"the episode must be at least 0, got {self.episode}")
        if self.port is not None and (self.out or self.with_rerun or self.episode is not None):
            raise ConfigError("--serve shows the whole dataset in the browser: leave out --out, --rerun and --episode")
        # Before anything is read.
        suffix, whole = Path(self.out).suffix, (".html", ".png")
        allowed = (".rrd",) if self.with_rerun else whole if self.episode is None else (*whole, ".mp4")
        if self.out and suffix not in allowed:
            hints = {
                ".mp4": "a video is of one episode, say which with --episode; ",
                ".rrd": "a recording for Rerun wants --rerun; ",
            }
            hint = "" if self.with_rerun else hints.get(suffix, "")
            raise ConfigError(f"cannot write {self.out!r}: {hint}give a file that ends in {', '.join(allowed)}")


def show_root(request: ShowRequest, tell: Callable[[str], object]) -> None:
    """Show what the request asks for, and tell in one line which file was written, or where the page is."""
    with warnings.catch_warnings():
        # The card lists what is left out.
        warnings.simplefilter("ignore", UserWarning)
        opened = _member(open_dataset(request.root), request)
    if request.port is not None:
        _serve(_single(opened, request), request.port, tell)
    elif request.with_rerun:
        tell(_show_in_rerun(opened, request))
    else:
        tell(_save(opened, request))


def _serve(dataset: Dataset, port: int, tell: Callable[[str], object]) -> None:
    with warnings.catch_warnings():
        # The page shows what is odd.
        warnings.simplefilter("ignore", UserWarning)
        server = make_server(Site(dataset), port)
        try:
            tell(f"{dataset.meta.root} is at {server.url} until Ctrl-C")
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            pass
        finally:
            server.close()


def _save(opened: Dataset | Mixture, request: ShowRequest) -> str:
    view: View
    if request.episode is not None:
        view = view_episode(_single(opened, request), request.episode)
    else:
        view = view_mixture(opened, request.root) if isinstance(opened, Mixture) else view_dataset(opened)
    path = view.save(request.out or _new_page(request))
    made = f" ({view.clip.told})" if isinstance(view, EpisodeView) and path.suffix == ".mp4" else ""
    return f"wrote {path}: {view.title}{made}"


def _member(opened: Dataset | Mixture, request: ShowRequest) -> Dataset | Mixture:
    if not request.member:
        return opened
    if isinstance(opened, Dataset):
        raise ConfigError(f"--member {request.member!r} is of a mixture, and {request.root!r} is one dataset")
    for member in opened.members:
        if member.name == request.member:
            return member.dataset
    raise ConfigError(f"{request.root!r} has no member {request.member!r}{suggest(request.member, opened.names)}")


def _single(opened: Dataset | Mixture, request: ShowRequest) -> Dataset:
    if isinstance(opened, Dataset):
        return opened
    raise ConfigError(
        f"{request.root!r} is a mixture, and an episode is of one dataset: say which with --member, one of "
        f"{', '.join(map(repr, opened.names[:20]))}"
    )


def _show_in_rerun(opened: Dataset | Mixture, request: ShowRequest) -> str:
    dataset = _single(opened, request)
    # Rerun shows one episode: by default the first.
    episode = int(dataset.meta.episodes.episode_index[0]) if request.episode is None else request.episode
    if request.out:
        told = save_recording(dataset, episode, request.out)
        return f"wrote {request.out}: {told}; open it: rerun {request.out}"
    return f"the Rerun viewer shows {open_viewer(dataset, episode)}"


def _new_page(request: ShowRequest) -> Path:
    name = Path(take_login(request.root).rstrip("/")).stem or "dataset"
    # The name of a member may be OWNER/NAME.
    member = request.member.replace("/", "-")
    parts = [name, member, "" if request.episode is None else f"episode-{request.episode}"]
    return Path(tempfile.mkdtemp(prefix="raypipe-")) / f"{'-'.join(filter(None, parts))}.html"


ADDRESS: Final = "127.0.0.1"

_HOSTS: Final = frozenset({"127.0.0.1", "localhost", "[::1]"})
"""Names of this machine; the port may differ, for example behind an ssh tunnel."""

_KINDS: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_FILES: Final = ("browse.css", "browse.js", "icon.svg", "player.js", "plots.js", "theme.js")
"""The files of the page, besides ``index.html``."""

_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "media-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # The next server at this address may serve another dataset.
    "Cache-Control": "no-store",
}
_PIECE: Final = 1 << 18
_IDLE_S: Final = 60.0
_MOST_DIGITS: Final = 12


class _BadRequestError(Exception):
    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


class BrowseServer(ThreadingHTTPServer):
    """Serves a `Site`; `close` ends all connections, and returns when no request is running any more."""

    # A thread that decodes while Python exits could crash it: `close` waits for all of them.
    daemon_threads = False
    block_on_close = True

    def __init__(self, site: Site, port: int) -> None:
        self.site = site
        self.token = secrets.token_urlsafe(32)
        self._connections: set[socket.socket] = set()
        self._connections_lock = threading.Lock()
        super().__init__((ADDRESS, port), _Handler)

    @property
    def url(self) -> str:
        """The link to the page, with the token that gives access."""
        return f"http://{ADDRESS}:{self.server_port}/?token={self.token}"

    def close(self) -> None:
        """End the server, after `serve_forever` has returned."""
        self.site.checks.close()
        with self._connections_lock:
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self.server_close()

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a connection; register it meanwhile."""
        with self._connections_lock:
            self._connections.add(request)
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._connections_lock:
                self._connections.discard(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing if the browser closed the connection: it does so whenever it has enough of a video."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


def make_server(site: Site, port: int) -> BrowseServer:
    """Return a server that listens; call `serve_forever` to answer requests.

    Raises:
        ConfigError: the port is taken or not allowed.
    """
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"a port is a number from 0 to 65535, got {port}")
    try:
        return BrowseServer(site, port)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {ADDRESS}:{port} ({error.strerror or error}): give another port with --port, or 0 for "
            f"any free one"
        ) from error


class _Handler(BaseHTTPRequestHandler):
    server: BrowseServer
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the page shows what is wrong."""

    def do_GET(self) -> None:
        try:
            self._check_host()
            self._check_token()
            self._route()
        except _BadRequestError as refused:
            self._send_json({"error": str(refused)}, refused.status)
        except ConfigError as error:
            self._send_json({"error": str(error)}, HTTPStatus.NOT_FOUND)
        except RaypipeError as error:
            self._send_json({"error": str(error)}, HTTPStatus.UNPROCESSABLE_ENTITY)

    do_HEAD = do_GET  # noqa: N815

    def _check_host(self) -> None:
        host = self.headers.get("Host", "")
        if re.sub(r":\d+$", "", host).lower() not in _HOSTS:
            raise _BadRequestError(HTTPStatus.FORBIDDEN, f"this page is for {', '.join(sorted(_HOSTS))} alone")
        # A page of another site cannot read answers, and must not start work here either.
        is_page = urlsplit(self.path).path in ("/", "/index.html")
        if not is_page and self.headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none"):
            raise _BadRequestError(HTTPStatus.FORBIDDEN, "another site asks for this page")

    def _check_token(self) -> None:
        name = self._cookie_name()
        cookies = (part.strip().partition("=") for part in self.headers.get("Cookie", "").split(";"))
        if not self._has_link() and not any(self._is_token(text) for key, _, text in cookies if key == name):
            raise _BadRequestError(
                HTTPStatus.FORBIDDEN, "this page opens by the link that raypipe show --serve printed: open that one"
            )

    def _has_link(self) -> bool:
        return any(map(self._is_token, parse_qs(urlsplit(self.path).query).get("token", [])))

    def _is_token(self, text: str) -> bool:
        # Take the same time for any guess, so that timing does not reveal how much of it is right.
        return secrets.compare_digest(text.encode(errors="replace"), self.server.token.encode())

    def _cookie_name(self) -> str:
        # A browser shares cookies between all ports of a machine. Use the port that it sees, which may be a tunnel's.
        port = re.search(r":(\d+)$", self.headers.get("Host", ""))
        return f"raypipe-{port[1] if port else 80}"

    def _route(self) -> None:
        address = urlsplit(self.path)
        query, site = parse_qs(address.query), self.server.site
        name = address.path.removeprefix("/") or "index.html"
        if name in ("index.html", *_FILES):
            self._send_file(name)
        elif address.path == "/api/about":
            self._send_json(site.about)
        elif address.path == "/api/episodes":
            self._send_json(site.episodes)
        elif address.path == "/api/episode":
            self._send_json(site.episode(_number(query, "episode")))
        elif address.path == "/api/batch":
            wanted = {one.name: _number(query, one.name) for one in fields(BatchQuery) if one.name in query}
            self._send_json(site.batch(BatchQuery(**wanted)))
        elif address.path == "/api/findings":
            self._send_json(site.checks.told(is_asked="start" in query))
        elif address.path == "/frame":
            episode, camera, frame = (_number(query, name) for name in ("episode", "camera", "frame"))
            self._send(site.still(episode, camera, frame, _size(query)), "image/jpeg")
        elif address.path == "/video":
            self._send_video(*site.open_video(_number(query, "episode"), _number(query, "camera")))
        else:
            raise _BadRequestError(HTTPStatus.NOT_FOUND, "there is no such page")

    def _send_file(self, name: str) -> None:
        content = files("raypipe.views").joinpath("page", name).read_bytes()
        cookie = f"{self._cookie_name()}={self.server.token}; Path=/; HttpOnly; SameSite=Strict"
        headers = {"Set-Cookie": cookie} if self._has_link() else {}
        self._send(content, _KINDS[PurePath(name).suffix], headers=headers)

    def _send_json(self, content: Mapping[str, Any], status: HTTPStatus = HTTPStatus.OK) -> None:
        text = json.dumps(content, allow_nan=False, separators=(",", ":"))
        self._send(text.encode(), "application/json; charset=utf-8", status)

    def _send(
        self, data: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK, headers: Mapping[str, str] | None = None
    ) -> None:
        self._start(status, kind, len(data), headers)
        if self.command != "HEAD":
            self.wfile.write(data)

    def _start(self, status: HTTPStatus, kind: str, length: int, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, text in {**_HEADERS, **(headers or {})}.items():
            self.send_header(name, text)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def _send_video(self, stream: IO[bytes], size: int) -> None:
        with stream:
            ends = parse_range(self.headers.get("Range", ""), size)
            start, stop = ends or (0, size)
            headers = {"Content-Range": f"bytes {start}-{stop - 1}/{size}"} if ends else {}
            status = HTTPStatus.PARTIAL_CONTENT if ends else HTTPStatus.OK
            self._start(status, "video/mp4", stop - start, {"Accept-Ranges": "bytes", **headers})
            if self.command == "HEAD":
                return
            stream.seek(start)
            while start < stop:
                piece = stream.read(min(_PIECE, stop - start))
                if not piece:
                    # The file became shorter meanwhile: the browser must not wait for the rest.
                    self.close_connection = True
                    return
                self.wfile.write(piece)
                start += len(piece)


def parse_range(text: str, size: int) -> tuple[int, int] | None:
    """Return the bytes ``[start, stop)`` that a Range header asks for; None for all, also if it asks for several.

    Raises:
        _BadRequestError: the file has no such bytes.
    """
    match = re.fullmatch(r"bytes=(\d{0,18})-(\d{0,18})", text.strip())
    if match is None or not any(match.groups()):
        return None
    first, last = match.groups()
    start = int(first) if first else max(0, size - int(last))
    stop = min(size, int(last) + 1) if first and last else size
    if first and last and int(last) < start:
        return None
    if start >= size:
        raise _BadRequestError(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, f"the file has {size} bytes")
    return start, stop


def _number(query: Mapping[str, list[str]], name: str) -> int:
    text = query.get(name, [""])[-1]
    if not text.isdecimal() or not text.isascii() or len(text) > _MOST_DIGITS:
        raise _BadRequestError(HTTPStatus.BAD_REQUEST, f"{name} must be a whole number, got {text[:40]!r}")
    return int(text)


def _size(query: Mapping[str, list[str]]) -> str:
    size = query.get("size", ["large"])[-1]
    if size not in HEIGHTS:
        raise _BadRequestError(HTTPStatus.BAD_REQUEST, f"size is {size[:40]!r}{suggest(size, tuple(HEIGHTS))}")
    return size
