"""Which roots raypipe opens: a local path, or a URI of a protocol that it knows to read data and nothing else.

A root may come from a stranger: in a mixture file, an account, a state. fsspec knows some thirty protocols, and some do
more than read what they name: ``reference`` runs templates out of the file that it reads, a chain (``a::b://``) builds
one filesystem from the text of another, ``ssh`` opens a shell. So a protocol is one of a list, which the user can make
longer by `VARIABLE`, and a chain is none at all.
"""

import os
from typing import Any, Final

import fsspec
from fsspec.implementations.local import LocalFileSystem

from raypipe.errors import ConfigError

LOCAL: Final = ("file", "local")

PROTOCOLS: Final = (*LOCAL, "http", "https", "s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "hf")
"""What is opened without a word of the user's."""

VARIABLE: Final = "RAYPIPE_PROTOCOLS"
"""Names further protocols, with commas. Of the environment, not of a spec: what a file says shall not widen it."""


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


def open_filesystem_of(root: str) -> tuple[Any, str]:
    """Return the fsspec filesystem of a root that `check_root` lets pass, and the path on it."""
    protocol, found, _ = root.partition("://")
    if not found or protocol in LOCAL:
        # Not by `url_to_fs`: it would take a path with :: for a chain.
        return LocalFileSystem(), str(LocalFileSystem._strip_protocol(root))
    try:
        filesystem, path = fsspec.url_to_fs(root)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"cannot open {root!r}: {error}. Give a local path, or a URI of a protocol whose fsspec package is "
            f"installed (s3fs for s3://, gcsfs for gs://, adlfs for abfs://)."
        ) from error
    return filesystem, str(path)


def is_plain_path(root: str) -> bool:
    """Return whether a root is an absolute path of this machine: what may be looked at on a stranger's word."""
    return "://" not in root and os.path.isabs(root)


def _more_protocols() -> list[str]:
    return [name.strip() for name in os.environ.get(VARIABLE, "").split(",") if name.strip()]
