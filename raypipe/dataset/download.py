"""Fetch a dataset from the Hub to disk: all of it, or the files that some episodes and cameras need.

This module decides which files those are; `raypipe.storage.hub` fetches, verifies and puts each in place.
"""

import posixpath
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from rich.filesize import decimal

from raypipe.errors import ConfigError, DownloadError, suggest
from raypipe.format import DatasetMeta, read_metadata
from raypipe.storage import (
    Client,
    HubFile,
    HubSource,
    Storage,
    cache_place,
    fetch_files,
    folder_place,
    list_files,
    locked,
    resolve,
)
from raypipe.text import count_bar, counted, either, first_of, span_text

_LARGE: Final = ("data/", "videos/")
"""The folders with the large files. A partial download fetches all others, which are small and needed to open it."""

_SHOWN_FILES: Final = 3

_MOST_EPISODES: Final = 10_000_000
"""In one run of a text. A larger one is a typing error, and as a list it would fill the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadSpec:
    """Which files of a dataset to fetch, and where to put them."""

    revision: str = ""
    """A tag, branch or commit; empty for the newest tag of a format that raypipe reads, else ``main``."""
    episodes: tuple[int, ...] | Literal["all"] = "all"
    cameras: tuple[str, ...] | Literal["all"] = "all"
    out: str = ""
    """A folder of its own; empty for the cache of huggingface_hub, where `open_dataset` finds it."""
    is_fresh: bool = False
    """Ask the Hub where a format tag points to, even if the cache knows it."""
    progress: bool = True
    """Show a bar at a terminal or in a notebook."""

    @property
    def is_whole(self) -> bool:
        """Whether the download has every episode and camera."""
        return self.episodes == "all" and self.cameras == "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadReport:
    """What was fetched, and where it is."""

    repo_id: str
    revision: str
    commit: str
    folder: str
    is_whole: bool
    """Whether the spec asked for all files of the commit."""
    num_files: int
    size_bytes: int
    num_fetched: int
    fetched_bytes: int
    num_skipped: int
    """Files that were already complete on disk."""
    num_requests: int

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return asdict(self)


def download_dataset(root: str, spec: DownloadSpec | None = None) -> DownloadReport:
    """Fetch the dataset `root` from the Hub, or a part of it, and return a report.

    Files that are complete on disk cost no request, so a second call continues where the first was interrupted. One
    process at a time downloads to a place; the others wait, and find the files there.

    Args:
        root: ``owner/name`` or ``hf://datasets/owner/name``, optionally with ``@revision``.

    Raises:
        ConfigError: the dataset, revision, episode or camera does not exist, or you have no permission to read it.
        DownloadError: a file could not be fetched, or differs from what the Hub lists.
    """
    spec = spec or DownloadSpec()
    client = Client()
    source = resolve(root, spec.revision, is_fresh=spec.is_fresh, client=client)
    if source.folder:
        raise ConfigError(f"{root!r} names the folder {source.folder!r} of a repo; give the repo alone")
    place = folder_place(source, spec.out) if spec.out else cache_place(source)

    def fetch(files: Mapping[str, HubFile]) -> list[int]:
        total = sum(one.size_bytes for one in files.values())
        with count_bar(source.repo_id, total, is_on=spec.progress, of_bytes=True) as advance:
            return fetch_files(client, source, place, files, advance)

    with locked(place):
        files = listing = list_files(client, source, place)
        if not spec.is_whole:
            files = {name: one for name, one in listing.items() if not name.startswith(_LARGE)}
        fetched = fetch(files)
        if not spec.is_whole:
            # After the small files: their metadata says which large ones are needed.
            large = _large_files(read_metadata(Storage(str(place.folder))), spec, source, listing)
            fetched += fetch(large)
            files = {**files, **large}
    return DownloadReport(
        repo_id=source.repo_id,
        revision=source.revision,
        commit=source.commit,
        folder=str(place.folder),
        is_whole=spec.is_whole,
        num_files=len(files),
        size_bytes=sum(one.size_bytes for one in files.values()),
        num_fetched=len(fetched),
        fetched_bytes=sum(fetched),
        num_skipped=len(files) - len(fetched),
        num_requests=client.num_requests,
    )


def parse_episodes(text: str) -> tuple[int, ...] | Literal["all"]:
    """Return the episodes that a text such as ``0-9,12`` lists; an empty text means ``all``."""
    if not text.strip():
        return "all"
    found: dict[int, None] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,18})\s*(?:-\s*([0-9]{1,18})\s*)?", part)
        first = int(match[1]) if match else 0
        last = int(match[2] or match[1]) if match else -1
        if last < first:
            raise ConfigError(f"episodes are {text!r}, and {part.strip()!r} is no number and no run; write 0-9,12")
        if last - first >= _MOST_EPISODES:
            raise ConfigError(f"episodes are {text!r}, and no dataset has as many as {part.strip()!r}")
        found |= dict.fromkeys(range(first, last + 1))
    return tuple(found)


def report_lines(report: DownloadReport) -> list[str]:
    """Return a report as lines of text."""
    what = "the whole dataset" if report.is_whole else "a part of the dataset"
    opened = report.repo_id if report.is_whole else report.folder
    return [
        f"{report.repo_id}, revision {report.revision}, commit {report.commit}: {what}",
        f"{counted(report.num_files, 'file')}, {decimal(report.size_bytes)}: fetched {report.num_fetched} "
        f"({decimal(report.fetched_bytes)}) with {counted(report.num_requests, 'request')}, "
        f"{report.num_skipped} {either(report.num_skipped, 'was', 'were')} complete",
        f"in {report.folder}; see: raypipe info {opened}",
    ]


def _large_files(
    meta: DatasetMeta, spec: DownloadSpec, source: HubSource, listing: Mapping[str, HubFile]
) -> dict[str, HubFile]:
    """Return the data and video files of the chosen episodes and cameras; images are stored in the rows."""
    known = {int(number): row for row, number in enumerate(meta.episodes.episode_index)}
    episodes = list(known) if spec.episodes == "all" else spec.episodes
    cameras = meta.cameras if spec.cameras == "all" else spec.cameras
    for number in episodes:
        if number not in known:
            raise ConfigError(
                f"{source} has no episode {number}; it has {counted(len(known), 'episode')}, "
                f"{span_text(min(known), max(known))}"
            )
    for name in cameras:
        if name not in meta.cameras:
            raise ConfigError(f"{source} has no camera {name!r}{suggest(name, meta.cameras)}")
    rows = [known[number] for number in episodes]
    names = [meta.data_file(row) for row in rows]
    names += [meta.video_file(row, name) for name in cameras if name in meta.episodes.videos for row in rows]
    wanted = dict.fromkeys(map(posixpath.normpath, names))
    missing = [name for name in wanted if name not in listing]
    if missing:
        raise DownloadError(
            f"{source} does not have the files that its meta/ names: {first_of(missing, _SHOWN_FILES)}. Choose other "
            f"episodes or cameras, or another revision."
        )
    return {name: listing[name] for name in wanted}
