"""Which roots raypipe opens: a local path, or a URI of a protocol that it knows to read data and nothing else.

A root may come from a stranger: in a mixture file, an account, a state. fsspec knows some thirty protocols, and some do
more than read what they name: ``reference`` runs templates out of the file that it reads, a chain (``a::b://``) builds
one filesystem from the text of another, ``ssh`` opens a shell. So a protocol is one of a list, which the user can make
longer by `VARIABLE`, and a chain is none at all.
"""

import os
from base64 import b64encode
from typing import Any, Final
from urllib.parse import unquote

import fsspec
from fsspec.implementations.local import LocalFileSystem

from raypipe.errors import ConfigError, hide_logins

LOCAL: Final = ("file", "local")

PROTOCOLS: Final = (*LOCAL, "http", "https", "s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "hf")
"""What is opened without a word of the user's."""

VARIABLE: Final = "RAYPIPE_PROTOCOLS"
"""Names further protocols, with commas. Of the environment, not of a spec: what a file says shall not widen it."""


_logins: dict[str, str] = {}
"""Users and passwords by the root that was given with them, so that this process can open the root again without."""


def take_login(root: str) -> str:
    """Return a root without user and password, which `login_of` tells from now on in this process.

    So a root can be shown, compared and written to files wherever it is; only opening it needs the rest.
    """
    if hide_logins(root) == root:
        return root
    protocol, _, rest = root.partition("://")
    host, slash, path = rest.partition("/")
    login, _, host = host.rpartition("@")
    shown = f"{protocol}://{host}{slash}{path}"
    _logins[shown.rstrip("/")] = login
    return shown


def login_of(root: str) -> str:
    """Return ``user:password`` with which a root was given in this process; empty where it was given without."""
    return _logins.get(root.rstrip("/"), "")


def join_login(root: str, login: str) -> str:
    """Return a root as it was given: with user and password."""
    return root.replace("://", f"://{login}@", 1) if login else root


def check_root(root: str, also: tuple[str, ...] = ()) -> None:
    """Raise where a root is neither a local path nor a URI of a protocol that may be opened; opens nothing.

    Args:
        also: protocols that the caller opens by itself, beside `PROTOCOLS`.

    Raises:
        ConfigError: it names another protocol, or a chain of them.
    """
    protocol, found, _ = root.partition("://")
    if not found:
        return
    if "::" in root:
        raise ConfigError(
            f"the root {root!r} chains filesystems (::), and raypipe opens no chain: give the path or URI of the files "
            f"themselves. raypipe keeps remote files on the node by itself."
        )
    if protocol not in (*PROTOCOLS, *also, *_more_protocols()):
        raise ConfigError(
            f"the root {root!r} is of the protocol {protocol!r}, and raypipe opens {', '.join(PROTOCOLS)}. Copy the "
            f"files there; or, if you trust whoever wrote the root, set {VARIABLE}={protocol} (with its fsspec package "
            f"installed)."
        )


def open_filesystem_of(root: str, login: str = "") -> tuple[Any, str]:
    """Return the fsspec filesystem of a root that `check_root` lets pass, and the path on it, which has no `login`."""
    protocol, found, _ = root.partition("://")
    if not found or protocol in LOCAL:
        # Not by `url_to_fs`: it would take a path with :: for a chain.
        return LocalFileSystem(), str(LocalFileSystem._strip_protocol(root))
    try:
        if protocol in ("http", "https"):
            # With each request, not in the address: that stands in every error, and is the path of every file. aiohttp
            # sends the header to no other host that it is sent on to.
            headers = {"headers": {"Authorization": _basic_auth(login)}} if login else {}
            return _open_web(root, headers)
        filesystem, path = fsspec.url_to_fs(join_login(root, login))
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"cannot open {root!r}: {error}. Give a local path, or a URI of a protocol whose fsspec package is "
            f"installed (s3fs for s3://, gcsfs for gs://, adlfs for abfs://)."
        ) from error
    return filesystem, str(path)


def _open_web(root: str, headers: dict[str, Any]) -> tuple[Any, str]:
    from raypipe.storage.web import WebFiles

    return WebFiles(**headers), str(WebFiles._strip_protocol(root))


def _basic_auth(login: str) -> str:
    user, _, password = login.partition(":")
    return f"Basic {b64encode(f'{unquote(user)}:{unquote(password)}'.encode()).decode()}"


def is_plain_path(root: str) -> bool:
    """Return whether a root is an absolute path of this machine: what may be looked at on a stranger's word."""
    return "://" not in root and os.path.isabs(root)


def _more_protocols() -> list[str]:
    return [name.strip() for name in os.environ.get(VARIABLE, "").split(",") if name.strip()]
