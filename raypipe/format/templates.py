"""The path templates of ``info.json``: the usual ones, whether one can be filled in, and which one fits the files."""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from string import Formatter
from typing import Final

DATA_TEMPLATES: Final = {
    True: "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
    False: "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
}
VIDEO_TEMPLATES: Final = {
    True: "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    False: "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
}
"""LeRobot's own templates, by whether a file may hold several episodes."""

_MOST_CANDIDATES: Final = 8

_NUMBER: Final = re.compile(r"0?\d{0,2}d?")
_NOTHING: Final = re.compile("(?!)")
_FIELDS: Final = {
    **dict.fromkeys(("chunk_index", "file_index", "episode_chunk", "episode_index"), _NUMBER),
    "video_key": re.compile(""),
}
"""The format that each field allows: a width of at most two digits, or a few letters could ask for gigabytes."""

_OUTSIDE: Final = re.compile(r"^/|^[A-Za-z]:|://|\\|[\x00-\x1f]|(^|/)\.\.(/|$)")


def why_unfit(template: str) -> str:
    """Return why a template cannot name files: it cannot be filled in, or leads out of the dataset; empty if it can.

    Only plain fields are filled in, so that only the text between them can be a path.
    """
    try:
        fields = [(name, spec, form) for _, name, spec, form in Formatter().parse(template) if name is not None]
        strange = [name for name, spec, form in fields if form or not _FIELDS.get(name, _NOTHING).fullmatch(spec or "")]
        if strange:
            raise KeyError(*strange)
        name = template.format(chunk_index=0, file_index=0, episode_chunk=0, episode_index=0, video_key="key")
    except (KeyError, ValueError, IndexError) as error:
        return (
            f"cannot be filled in: {error!r}. It may use chunk_index, file_index, episode_chunk and episode_index, as "
            f"{{file_index:03d}}, and {{video_key}}"
        )
    if _OUTSIDE.search(name):
        return "leads out of the dataset: a path there is relative, with '/' and without '..'"
    return ""


def find_template(
    files: Iterable[str], fill: Callable[[str], Iterable[str]], camera: str, *, is_packed: bool
) -> str | None:
    """Return a template that finds all data files of a dataset, or all files of a camera; None if there is none.

    Args:
        files: the files that exist.
        fill: returns the files of the dataset under a template.
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
    """Return a template for the name of a file, with fields in place of its camera and numbers."""
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
