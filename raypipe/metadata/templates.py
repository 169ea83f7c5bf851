"""The path templates of ``info.json``: the usual ones, whether one can be filled in, and which one the files go by."""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

DATA_TEMPLATES: Final = {
    True: "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
    False: "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
}
VIDEO_TEMPLATES: Final = {
    True: "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    False: "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
}
"""LeRobot's own, by whether a file may hold several episodes."""

_MOST_CANDIDATES: Final = 8


def why_unfillable(template: str) -> str:
    """Return why a template cannot be filled in; empty where it can."""
    try:
        template.format(chunk_index=0, file_index=0, episode_chunk=0, episode_index=0, video_key="")
    except (KeyError, ValueError, IndexError) as error:
        return (
            f"cannot be filled in: {error!r}. It may use chunk_index, file_index, episode_chunk, episode_index and "
            f"video_key"
        )
    return ""


def find_template(
    files: Iterable[str], fill: Callable[[str], Iterable[str]], camera: str, *, is_packed: bool
) -> str | None:
    """Return the template by which all of a dataset's data files, or those of a camera, are there; None if none is.

    Args:
        files: the files that there are.
        fill: gives the files that the dataset has by a template.
        camera: empty for data files.
    """
    there = set(files)
    suffix = ".mp4" if camera else ".parquet"
    looks = Counter(_generalise(name, camera, is_packed=is_packed) for name in there if name.endswith(suffix))
    for template, _ in looks.most_common(_MOST_CANDIDATES):
        is_alike = camera or ("{episode_index" in template) != is_packed
        is_whole = ("{video_key}" in template) == bool(camera)
        if is_alike and is_whole and not template.startswith("meta/") and there.issuperset(fill(template)):
            return template
    return None


def _generalise(name: str, camera: str, *, is_packed: bool) -> str:
    """Return the template of which a file may be one: its camera and numbers are what changes."""
    template = name.replace("{", "{{").replace("}", "}}")
    if camera:
        template = "/".join("{video_key}" if part == camera else part for part in template.split("/"))
    fields = {
        "chunk": "chunk_index" if is_packed else "episode_chunk",
        "file": "file_index",
        "episode": "episode_index",
    }
    return re.sub(
        r"(chunk|file|episode)([-_]?)(\d+)",
        lambda match: f"{match[1]}{match[2]}{{{fields[match[1]]}:0{len(match[3])}d}}",
        template,
    )
