"""Datasets as sites: rows, ``meta/`` of both layouts, and videos, as `Dataset`, the loader and the tools read them."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow.parquet as pq
from fuzz_mutations import mutate_json, mutate_mp4, mutate_table
from fuzz_site import CHANGED, IMAGE, LENGTHS, RIGHT, TOP, Damage, Site, WrongData

from raypipe.testing import CameraSpec, SynthSpec, write_dataset

VIDEO_KEYS: Final = (TOP,)


def _cameras(codec: str = "h264") -> tuple[CameraSpec, ...]:
    size = 64 if codec in ("hevc", "av1") else 32
    return (
        CameraSpec(name=TOP, height=size, width=size, codec=codec),  # type: ignore[arg-type]
        CameraSpec(name=IMAGE, height=32, width=32, kind="image"),
    )


class DatasetSite(Site):
    """A dataset of three episodes in two files, of which one file of `wanted` is damaged."""

    version = "v3.0"
    wanted: tuple[str, ...] = ()
    uses: tuple[str, ...] = (
        *("rows",) * 12,
        "samples",
        "samples",
        *("info", "validate") * 2,
        "deep",
        "stats",
        "plan",
        "loader",
    )
    with_stats = False

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "dataset")
        spec = SynthSpec(
            version=self.version,  # type: ignore[arg-type]
            lengths=LENGTHS,
            cameras=_cameras(),
            episodes_per_data_file=2,
            episodes_per_video_file=2,
            extra_features=("next.done", "observation.grid", "note"),
            with_stats=self.with_stats,
        )
        write_dataset(self.folder, spec)
        self.out = folder / "out"
        self.files = sorted(
            path.relative_to(self.folder).as_posix()
            for path in self.folder.rglob("*")
            if path.is_file() and path.relative_to(self.folder).parts[0] in self.wanted
        )
        self.sound = {name: (self.folder / name).read_bytes() for name in self.files}
        self.samples = {**_read_samples(self.folder, has_pixels=False), **_read_samples(self.folder)}

    def draw(self, rng: random.Random) -> Damage:
        file = rng.choice(self.files)
        mutate = _mutator(file)
        return Damage(file, mutate(self.sound[file], rng), rng.choice(self.uses))

    def use(self, damage: Damage) -> str:
        if damage.use in ("samples", "rows"):
            return self.compare(damage, _read_samples(self.folder, has_pixels=damage.use == "samples"))
        return _USES[damage.use](self.folder, self.out)

    def compare(self, damage: Damage, samples: dict[tuple[int, int], dict[str, Any]]) -> str:
        """Return whether samples are as they were; raise where one is, and may not be, another."""
        different = [
            (key, name)
            for key, sample in self.samples.items()
            for name in (_DATA if damage.use == "samples" else _DATA[:-2])
            if key in samples and not _is_equal(samples[key].get(name), sample[name])
        ]
        wrong = [one for one in different if not self.may_differ(damage, *one, samples)]
        if wrong:
            raise WrongData(f"{wrong[:3]} of {len(wrong)} values differ")
        return CHANGED if different or samples.keys() != self.samples.keys() else RIGHT

    def may_differ(self, damage: Damage, key: tuple[int, int], name: str, samples: dict[Any, Any]) -> bool:
        """Return whether this feature of a frame may be another one after the damage."""
        raise NotImplementedError


_DATA: Final = ("action", "observation.state", "observation.grid", "next.done", TOP, IMAGE)
"""What is compared; tasks and times may be what ``meta/`` says now."""


def _mutator(file: str) -> Callable[[bytes, random.Random], bytes]:
    kinds = {".json": mutate_json, ".parquet": mutate_table, ".mp4": mutate_mp4}
    if file.endswith(".jsonl"):
        return lambda content, rng: mutate_json(content, rng, is_lines=True)
    return kinds[Path(file).suffix]


def _read_samples(root: Path, *, has_pixels: bool = True) -> dict[tuple[int, int], dict[str, Any]]:
    """Return samples by episode and frame: all of a few episodes without pixels, or with pixels the last of each."""
    from raypipe.dataset import open_dataset

    dataset = open_dataset(str(root), cameras="all" if has_pixels else [])
    lengths = dataset.meta.episodes.length.tolist()
    numbers = dataset.meta.episodes.episode_index.tolist()
    # Not billions of samples, where a length says so.
    frames = {int(number): range(min(int(length), 5)) for number, length in zip(numbers, lengths, strict=True)}
    return {
        (number, frame): dataset.sample_of(number, frame)
        for number, ones in list(frames.items())[:4]
        for frame in (ones[-1:] if has_pixels else ones)
    }


def _is_equal(one: Any, other: Any) -> bool:
    if one is None or other is None or isinstance(one, str | list) or isinstance(other, str | list):
        return bool(one is other or one == other)
    one, other = np.asarray(one).ravel(), np.asarray(other).ravel()
    return one.shape == other.shape and np.array_equal(one.astype(np.float64), other.astype(np.float64), equal_nan=True)


def _use_info(root: Path, _: Path) -> str:
    from raypipe.views import describe

    describe(str(root)).to_json()
    return CHANGED


def _use_validate(root: Path, _: Path, *, deep: bool = False) -> str:
    from raypipe.validate import validate_dataset

    json.dumps(validate_dataset(str(root), where="process", deep=deep).to_json())
    return CHANGED


def _use_stats(root: Path, _: Path) -> str:
    from raypipe.views import report_stats

    report_stats(str(root), None, 0).stats.to_json()
    return CHANGED


def _use_plan(root: Path, _: Path) -> str:
    from raypipe.plan import BatchSpec, parse_order
    from raypipe.views import view_plan

    order = parse_order(seed=0, live_spans=None, span_frames="", lanes="world_size", clip_frames="")
    view_plan(str(root), order, BatchSpec(size=2), world_size=1, epoch=0, live_bytes=1 << 30, selection={})
    return CHANGED


def _use_loader(root: Path, _: Path) -> str:
    from raypipe.pipeline import Pipeline

    pipeline = Pipeline(str(root), batch_size=2, seed=0, on_bad_episode="skip", max_bad_episodes=1.0)
    with pipeline.loader() as loader:
        for number, _batch in enumerate(loader):
            if number == 8:
                break
    return CHANGED


def _use_reshard(root: Path, out: Path) -> str:
    from raypipe.reshard import reshard_dataset

    try:
        reshard_dataset(str(root), out, where="process", allow_findings=True)
    finally:
        for path in out.parent.glob(f"*{out.name}*"):
            shutil.rmtree(path, ignore_errors=True)
    return CHANGED


_USES: Final[dict[str, Callable[[Path, Path], str]]] = {
    "info": _use_info,
    "validate": _use_validate,
    "deep": lambda root, out: _use_validate(root, out, deep=True),
    "stats": _use_stats,
    "plan": _use_plan,
    "loader": _use_loader,
    "reshard": _use_reshard,
}


class RowsSite(DatasetSite):
    """Parquet files of rows, images inside them too."""

    weight = 1
    wanted = ("data",)
    uses = (*("rows",) * 12, "samples", "samples", "info", "validate", "validate", "deep", "loader", "reshard")

    def may_differ(self, damage: Damage, key: tuple[int, int], name: str, samples: dict[Any, Any]) -> bool:
        # Rows of the other file are as they were. Those of this one are what pyarrow reads, if that can tell.
        if _data_file(key[0]) != damage.file or name in VIDEO_KEYS:
            return _data_file(key[0]) == damage.file and name in VIDEO_KEYS and not _has_row(self.folder, damage, key)
        stored = _stored(self.folder / damage.file, key, name)
        return stored is None or _is_equal(samples[key][name], stored) or name == IMAGE


def _data_file(episode: int) -> str:
    return f"data/chunk-000/file-{0 if episode < 2 else 1:03d}.parquet"


def _has_row(folder: Path, damage: Damage, key: tuple[int, int]) -> bool:
    return _stored(folder / damage.file, key, "frame_index") is not None


def _stored(path: Path, key: tuple[int, int], name: str) -> Any:
    """Return the value of a frame as pyarrow reads it; None where it cannot tell, or two rows say they are it."""
    try:
        table = pq.read_table(path, columns=["episode_index", "frame_index", name])
        numbers = zip(table.column(0).to_pylist(), table.column(1).to_pylist(), strict=True)
        places = [place for place, one in enumerate(numbers) if one == key]
        value = table.column(2)[places[0]].as_py() if len(places) == 1 else None
        return np.asarray(value, np.float64).astype(np.float32) if value is not None else None
    except Exception:
        return None


class MetaSite(DatasetSite):
    """The files of ``meta/`` in v3.0."""

    weight = 1
    wanted = ("meta",)
    with_stats = True
    uses = (*DatasetSite.uses, "reshard")

    def may_differ(self, damage: Damage, key: tuple[int, int], name: str, samples: dict[Any, Any]) -> bool:
        # What a video or a column is, and in which file, is what meta/ says; a row of the right number is that row.
        if damage.file.startswith("meta/info") and name in samples[key]:
            return name in VIDEO_KEYS or _is_narrowed(samples[key][name], self.samples[key][name])
        return name not in samples[key] or (name in VIDEO_KEYS and "episodes" in damage.file)


def _is_narrowed(one: Any, other: Any) -> bool:
    """Return whether values are as they were but for the dtype that ``info.json`` declares now."""
    if isinstance(one, list | str) or one is None:
        return True
    return np.asarray(one).size != np.asarray(other).size or np.asarray(one).dtype != np.asarray(other).dtype


class OldMetaSite(MetaSite):
    """The files of ``meta/`` in v2.1, which are lines of JSON."""

    weight = 1
    version = "v2.1"


class VideoSite(DatasetSite):
    """The mp4 files of a dataset: read by the decoder, by `validate`, and copied by `reshard`."""

    weight = 1
    wanted = ("videos",)
    uses = ("samples", *("info", "validate") * 3, "deep", "loader", "reshard")

    def may_differ(self, damage: Damage, key: tuple[int, int], name: str, samples: dict[Any, Any]) -> bool:
        return name == TOP and (key[0] < 2) == damage.file.endswith("file-000.mp4")
