"""Which roots raypipe opens: a local path, or a URI of a protocol that only reads data.

A root may come from a stranger: in a mixture file, an account, a state. fsspec knows about thirty protocols, and some
do more than read: ``reference`` runs templates from the file that it reads, a chain (``a::b://``) builds one filesystem
from the text of another, ``ssh`` opens a shell. So raypipe opens only the protocols of a list, never a chain. The user
can extend the list with `VARIABLE`.
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
"""Opened without the user allowing them."""

VARIABLE: Final = "RAYPIPE_PROTOCOLS"
"""Names further protocols, separated by commas. An environment variable, not a spec: no file may extend the list."""


_logins: dict[str, str] = {}
"""``user:password`` by root, so that this process can open the root again from its name alone."""


def take_login(root: str) -> str:
    """Return a root without user and password; from now on `login_of` returns those in this process.

    The result is safe to show, compare and write to files; only opening the root needs the login.
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
    """Return the ``user:password`` that a root was given with in this process; empty if it had none."""
    return _logins.get(root.rstrip("/"), "")


def join_login(root: str, login: str) -> str:
    """Return a root as the user gave it, with user and password."""
    return root.replace("://", f"://{login}@", 1) if login else root


def check_root(root: str, also: tuple[str, ...] = ()) -> None:
    """Raise unless a root is a local path or a URI of an allowed protocol; `also` are those that the caller opens."""
    protocol, found, _ = root.partition("://")
    if not found:
        return
    if "::" in root:
        raise ConfigError(
            f"the root {root!r} chains filesystems (::), and raypipe opens no chain: give the path or URI of the files "
            f"themselves. raypipe keeps remote files on the node by itself."
        )
    more = {name.strip() for name in os.environ.get(VARIABLE, "").split(",")} - {""}
    if protocol not in {*PROTOCOLS, *also, *more}:
        raise ConfigError(
            f"the root {root!r} is of the protocol {protocol!r}, and raypipe opens {', '.join(PROTOCOLS)}. Copy the "
            f"files there; or, if you trust whoever wrote the root, set {VARIABLE}={protocol} (with its fsspec package "
            f"installed)."
        )


def open_filesystem_of(root: str, login: str = "") -> tuple[Any, str]:
    """Return the fsspec filesystem of a root that passed `check_root`, and the path on it, without `login`."""
    protocol, found, _ = root.partition("://")
    if not found or protocol in LOCAL:
        # Not `url_to_fs`: it takes a path with :: for a chain.
        return LocalFileSystem(), str(LocalFileSystem._strip_protocol(root))
    try:
        if protocol in ("http", "https"):
            # A header, not part of the address: errors and file paths contain the address. aiohttp does not send the
            # header to another host after a redirect.
            user, _, password = login.partition(":")
            given = b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
            headers = {"headers": {"Authorization": f"Basic {given}"}} if login else {}
            # Here: it loads aiohttp.
            from raypipe.storage.bodies import WebFiles

            return WebFiles(**headers), str(WebFiles._strip_protocol(root))
        filesystem, path = fsspec.url_to_fs(join_login(root, login))
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"cannot open {root!r}: {error}. Give a local path, or a URI of a protocol whose fsspec package is "
            f"installed (s3fs for s3://, gcsfs for gs://, adlfs for abfs://)."
        ) from error
    return filesystem, str(path)


def is_plain_path(root: str) -> bool:
    """Return whether a root is an absolute local path, which is safe to look at even if a stranger named it."""
    return "://" not in root and os.path.isabs(root)
