"""The places where strangers' bytes come in, and what must come out: right data, or an error that names the file.

A site draws a damage from a random generator, applies it to one file of something sound, uses the whole, and compares.
A damage is plain data, so that a past failure can be kept and applied again.
"""

import json
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow.parquet as pq
from fuzz_mutations import ODD_VALUES, find_boxes, mutate_bytes, mutate_json, mutate_mp4, mutate_table, mutate_value

from raypipe.errors import RaypipeError
from raypipe.testing import CameraSpec, SynthSpec, write_dataset

TOP, IMAGE = "observation.images.top", "observation.images.still"
VIDEO_KEYS: Final = (TOP,)
LENGTHS: Final = (3, 2, 4)

RIGHT, CHANGED = "right", "changed"
"""Equal to the undamaged data; or what the files say now."""


class WrongData(Exception):  # noqa: N818
    """A site got data that is neither the undamaged nor what the files say now."""


@dataclass(frozen=True)
class Damage:
    """One input: a file of a site with other content, and what is done with it then."""

    file: str
    content: bytes
    use: str


class Site:
    """Something sound in a folder of its own."""

    weight = 1
    """How many inputs of a mixed run are of this site, relative to others."""

    folder: Path

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def draw(self, rng: random.Random) -> Damage:
        """Return a damage; nothing is changed yet."""
        raise NotImplementedError

    def use(self, damage: Damage) -> str:
        """Use the damaged whole; return `RIGHT` or `CHANGED`, raise `WrongData`, or what the product raises."""
        raise NotImplementedError

    def names(self, error: RaypipeError, damage: Damage) -> bool:
        """Return whether an error tells where it is: the damaged file, or another that the damage leads to."""
        told = "\n".join([str(error), *getattr(error, "__notes__", ())])
        return any(name in told for name in (damage.file, str(self.folder), f"dataset {self.folder.name!r}"))

    def apply(self, damage: Damage) -> str:
        """Damage the file, use the whole, and mend the file."""
        with self.damaged(damage):
            return self.use(damage)

    @contextmanager
    def damaged(self, damage: Damage) -> Iterator[None]:
        """Have the damaged file in place while the body runs."""
        path = self.folder / damage.file
        sound = path.read_bytes()
        path.write_bytes(damage.content)
        try:
            yield
        finally:
            path.write_bytes(sound)


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
    from raypipe.info import describe

    describe(str(root)).to_json()
    return CHANGED


def _use_validate(root: Path, _: Path, *, deep: bool = False) -> str:
    from raypipe.validate import validate_dataset

    json.dumps(validate_dataset(str(root), where="process", deep=deep).to_json())
    return CHANGED


def _use_stats(root: Path, _: Path) -> str:
    from raypipe.stats_report import report_stats

    report_stats(str(root), None, 0).stats.to_json()
    return CHANGED


def _use_plan(root: Path, _: Path) -> str:
    from raypipe.plan import BatchSpec, parse_order
    from raypipe.views import view_plan

    order = parse_order(seed=0, live_spans=None, span_frames="", lanes="world_size", clip_frames="")
    view_plan(str(root), order, BatchSpec(size=2), world_size=1, epoch=0, live_bytes=None, selection={})
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


class Mp4Site(Site):
    """One mp4, all frames of which are decoded: the frames that the damage does not touch are as they were."""

    weight = 6
    codec = "h264"
    gop = 2
    b_frames = 0
    kind = "video"

    def __init__(self, folder: Path) -> None:
        from raypipe.decode import open_video
        from raypipe.metadata import read_metadata
        from raypipe.storage import open_storage
        from raypipe.video import read_video_index

        super().__init__(folder / "dataset")
        size = 64 if self.codec in ("hevc", "av1") or self.kind == "depth" else 32
        options: dict[str, Any] = {"codec": self.codec, "gop": self.gop, "b_frames": self.b_frames, "kind": self.kind}
        camera = CameraSpec(name=TOP, height=size, width=size, **options)
        write_dataset(self.folder, SynthSpec(lengths=(12,), cameras=(camera,), pixels="textured"))
        self.file = f"videos/{TOP}/chunk-000/file-000.mp4"
        self.content = (self.folder / self.file).read_bytes()
        self.codes = read_metadata(str(self.folder)).features[TOP].depth_codes
        self.storage, self._open = open_storage(str(self.folder)), open_video
        self.index = read_video_index(self.storage, self.file)
        self.pixels = self._read()

    def _read(self) -> np.ndarray:
        video = self._open(self.storage, self.file, self.codes)
        # Not a million frames, where a table says so.
        count = min(len(video.index), 16)
        if not count:
            raise_empty(self.file)
        return video.read_frames(np.arange(count)).numpy()

    def draw(self, rng: random.Random) -> Damage:
        if rng.random() < 0.35:
            return Damage(self.file, self._damage_frames(rng), "frames")
        return Damage(self.file, mutate_mp4(self.content, rng), "file")

    def _damage_frames(self, rng: random.Random) -> bytes:
        """Damage some bytes of frames alone, so that no byte moves."""
        _, start, stop = next(box for box in find_boxes(self.content) if box[0] == b"mdat")
        content = bytearray(self.content)
        for _ in range(rng.choice((1, 1, 2, 4))):
            place = rng.randrange(start + 8, stop)
            run = min(rng.choice((1, 1, 2, 4, 16, 64)), stop - place)
            content[place : place + run] = rng.choice((bytes(run), b"\xff" * run, rng.randbytes(run)))
        return bytes(content)

    def use(self, damage: Damage) -> str:
        pixels = self._read()
        if pixels.shape == self.pixels.shape and np.array_equal(pixels, self.pixels):
            return RIGHT
        if damage.use == "frames":
            count = min(len(pixels), len(self.pixels))
            different = {int(one) for one in np.flatnonzero((pixels[:count] != self.pixels[:count]).any((1, 2, 3)))}
            wrong = sorted(different - self._touched(damage.content))
            if wrong:
                raise WrongData(f"frames {wrong} differ, and none of their bytes was touched")
        return CHANGED

    def _touched(self, content: bytes) -> set[int]:
        """Return the frames that decoding damaged packets may change: to the end of the group of pictures."""
        packets = self.index.packets
        assert packets is not None
        places = np.flatnonzero(np.frombuffer(content, np.uint8) != np.frombuffer(self.content, np.uint8))
        inside = (packets.offset[:, None] <= places) & (places < (packets.offset + packets.size)[:, None])
        damaged = np.flatnonzero(inside.any(axis=1))
        ends = np.append(packets.keyframes, len(packets.offset))
        # With B-frames a picture may lean on the keyframe behind it.
        reach = 2 if self.b_frames else 1
        touched: set[int] = set()
        for place in damaged:
            group = int(np.searchsorted(packets.keyframes, place, side="right")) - 1
            first = packets.keyframes[max(0, group - (reach - 1))]
            touched |= set(range(int(first), int(ends[min(group + reach, len(ends) - 1)])))
        return {frame for frame, place in enumerate(packets.place.tolist()) if place in touched}


def raise_empty(file: str) -> None:
    """Raise as a reader does that wants a frame of a video without any."""
    from raypipe.errors import DecodeError

    raise DecodeError(f"{file} holds no frame")


class Av1Site(Mp4Site):
    """As LeRobot records."""

    weight = 2
    codec = "av1"


class HevcSite(Mp4Site):
    """HEVC."""

    weight = 2
    codec = "hevc"
    gop = 4


class ReorderedSite(Mp4Site):
    """H.264 with B-frames, whose frames are stored in another order than they are shown."""

    weight = 2
    gop = 6
    b_frames = 2


class DepthSite(Mp4Site):
    """Depth: HEVC of 12 bits, decoded by PyAV."""

    weight = 2
    kind = "depth"


class ImageSite(Site):
    """Images as rows hold them: PNG, JPEG, TIFF."""

    weight = 10

    def __init__(self, folder: Path) -> None:
        import io

        from PIL import Image

        from raypipe.metadata import Feature

        super().__init__(folder / "images")
        self.folder.mkdir()
        values = np.arange(32 * 48, dtype=np.uint16).reshape(32, 48)
        picture = Image.fromarray(np.stack([values % 251, values % 83, values % 7], 2).astype(np.uint8))
        options: dict[str, Any] = {"name": IMAGE, "kind": "image", "dtype": "uint8"}
        color = Feature(**options, shape=(3, 32, 48))
        depth = Feature(**options, shape=(1, 32, 48), is_depth=True)
        free = Feature(**options, shape=(3, 0, 0))
        self.features = {"color": color, "depth": depth, "free": free}
        made = {"png": picture, "jpeg": picture, "tiff": picture}
        for name, one in {**made, "depth.png": Image.fromarray(values), "depth.tiff": Image.fromarray(values)}.items():
            content = io.BytesIO()
            one.save(content, name.split(".")[-1].upper())
            (self.folder / name).write_bytes(content.getvalue())
        self.files = sorted(path.name for path in self.folder.iterdir())

    def draw(self, rng: random.Random) -> Damage:
        file = rng.choice(self.files)
        use = "depth" if file.startswith("depth") else rng.choice(("color", "free"))
        return Damage(file, mutate_bytes((self.folder / file).read_bytes(), rng), use)

    def use(self, damage: Damage) -> str:
        from raypipe.decode import decode_image

        stored = rng_free_wrap(damage)
        pixels = decode_image(stored, self.features[damage.use], f"frame 0 of {damage.file}")
        if damage.use != "free" and pixels.shape[0] * pixels.shape[1] > 32 * 48:
            raise WrongData(f"an image of {tuple(pixels.shape)}")
        return CHANGED


def rng_free_wrap(damage: Damage) -> Any:
    """Return image bytes as rows hold them: plain, or with their path."""
    return damage.content if len(damage.content) % 2 else {"bytes": damage.content, "path": None}


class AccountSite(Site):
    """The account of a run, as a checkpoint has it: files of ranks, and the state."""

    weight = 3

    def __init__(self, folder: Path) -> None:
        from account_cases import HandRun

        from raypipe.audit.frames import read_frames
        from raypipe.plan import OrderSpec, SelectionSpec

        super().__init__(folder / "checkpoint")
        root = write_dataset(folder / "dataset", SynthSpec(cameras=(), lengths=LENGTHS))
        index, axis = read_frames(str(root), SelectionSpec())
        run = HandRun(index, OrderSpec(seed=3, live_spans=2), axis=axis, bad={2})
        run.root = str(root)
        run.start(2, 1)
        run.steps(run.world.num_steps + 1)
        run.write_checkpoint(self.folder)
        files = (path for path in self.folder.rglob("*") if path.is_file())
        self.files = sorted(path.relative_to(self.folder).as_posix() for path in files)
        self.sound = {name: (self.folder / name).read_bytes() for name in self.files}

    def draw(self, rng: random.Random) -> Damage:
        file = rng.choice(self.files)
        content, kind = self.sound[file], rng.random()
        if file.endswith(".json"):
            return Damage(file, mutate_json(content, rng), rng.choice(("check", "where")))
        damaged = mutate_table(content, rng) if kind < 0.5 else _other_header(content, rng)
        return Damage(file, damaged, rng.choice(("check", "check", "where")))

    def use(self, damage: Damage) -> str:
        from raypipe.audit.check import check_run
        from raypipe.audit.where import StepQuery, locate_recorded

        if damage.use == "where":
            json.dumps(locate_recorded(str(self.folder), StepQuery(step=2, rank=0, epoch=None)).to_json())
            return CHANGED
        checked = check_run(str(self.folder))
        json.dumps(checked.to_json())
        return RIGHT if checked.is_exact else CHANGED

    def names(self, error: RaypipeError, damage: Damage) -> bool:
        # The account may name another dataset now.
        return super().names(error, damage) or "account" in str(error)


def _other_header(content: bytes, rng: random.Random) -> bytes:
    """Return an account whose JSON is another one, in half of the cases with its seal made anew."""
    import io

    table = pq.read_table(io.BytesIO(content))
    key = b"raypipe.account"
    told = json.loads(table.schema.metadata[key])
    changed = table.replace_schema_metadata({key: json.dumps(mutate_value(told, rng)).encode("utf-8", "replace")})
    sink = io.BytesIO()
    pq.write_table(changed, sink)
    return _sealed(sink.getvalue()) if rng.random() < 0.5 else sink.getvalue()


def _sealed(content: bytes) -> bytes:
    """Return an account with the digests of what it says now, as a forger would make them; as it is where none can."""
    from unittest.mock import patch

    from raypipe.account.file import dump_account, load_account
    from raypipe.account.seal import seal_account

    try:
        with patch("raypipe.account.file.find_break", lambda _: ""):
            account = load_account(content, "forged")
        return dump_account(seal_account(account.header, account.parts))
    except Exception:
        return content


class StateSite(Site):
    """The state of a loader: from a stranger, or of another run."""

    weight = 3
    is_mixture = False

    def __init__(self, folder: Path) -> None:
        from raypipe.pipeline import Pipeline

        super().__init__(folder / "dataset")
        options = {"batch_size": 2, "seed": 0, "selection": {}} if not self.is_mixture else {"batch_size": 2, "seed": 0}
        if self.is_mixture:
            root: Any = write_mixture(self.folder)
        else:
            root = write_dataset(self.folder, SynthSpec(cameras=(), lengths=LENGTHS))
        self.loader = Pipeline(str(root), **options).loader()  # type: ignore[arg-type]
        for _ in self.loader.steps(2):
            pass
        self.state = json.loads(json.dumps(self.loader.state_dict()))

    def draw(self, rng: random.Random) -> Damage:
        return Damage(
            "state", json.dumps(mutate_value(self.state, rng)).encode(), rng.choice(("load", "load", "go on"))
        )

    @contextmanager
    def damaged(self, _: Damage) -> Iterator[None]:
        # A value, not a file.
        yield

    def use(self, damage: Damage) -> str:
        self.loader.load_state_dict(json.loads(damage.content))
        if damage.use == "go on":
            for _ in self.loader.steps(2):
                pass
            json.dumps(self.loader.state_dict())
        return CHANGED

    def names(self, error: RaypipeError, _: Damage) -> bool:
        return "state" in str(error) or "epoch" in str(error)


class MixedStateSite(StateSite):
    """The state of a loader of a mixture."""

    weight = 2
    is_mixture = True


def write_mixture(folder: Path) -> Path:
    """Write two datasets and the file of a mixture of them, with all that such a file may say."""
    for name, lengths in (("small", (3, 2)), ("large", (4, 3))):
        write_dataset(folder / name, SynthSpec(cameras=(), lengths=lengths, extra_features=("next.done",)))
    path = folder / "mix.yaml"
    path.write_text(
        "datasets:\n"
        "  small: {root: small, selection: {exclude: [1], every: 1}}\n"
        "  large: {root: large, weight: 2.5, rename: {next.done: done}, robot_type: arm, max_laps: 3}\n"
        "temperature: 2\n"
    )
    return path


class MixtureSite(Site):
    """A mixture file, as YAML or TOML."""

    weight = 5

    def __init__(self, folder: Path) -> None:
        import yaml

        from raypipe.mixture.spec import MemberSpec, MixtureSpec  # noqa: F401

        super().__init__(folder / "mixture")
        self.folder.mkdir()
        write_mixture(self.folder)
        self._make_sound()
        self.value = yaml.safe_load((self.folder / "mix.yaml").read_text())
        toml = '[datasets.small]\nroot = "small"\n[datasets.large]\nroot = "large"\nweight = 2.5\n'
        (self.folder / "mix.toml").write_text(toml)

    def _make_sound(self) -> None:
        from raypipe.mixture.file import read_mixture_file

        path = self.folder / "mix.yaml"
        for line in (", max_laps: 3", ", robot_type: arm", ", rename: {next.done: done}"):
            try:
                read_mixture_file(str(path))
            except RaypipeError:
                path.write_text(path.read_text().replace(line, ""))
        read_mixture_file(str(path))

    def draw(self, rng: random.Random) -> Damage:
        import yaml

        use = rng.choice(("read", "read", "open", "info"))
        file = rng.choice(("mix.yaml", "mix.yaml", "mix.toml"))
        content = (self.folder / file).read_bytes()
        if file == "mix.yaml" and rng.random() < 0.7:
            changed = mutate_value(self.value, rng) if rng.random() < 0.9 else rng.choice(ODD_VALUES)
            text = yaml.safe_dump(changed) if rng.random() < 0.5 else json.dumps(changed)
            return Damage(file, text.encode("utf-8", "surrogatepass"), use)
        if rng.random() < 0.15:
            return Damage(file, rng.choice(_ODD_YAML), use)
        return Damage(file, mutate_bytes(content, rng), use)

    def use(self, damage: Damage) -> str:
        from raypipe.mixture import Mixture
        from raypipe.mixture.file import read_mixture_file
        from raypipe.mixture_info import describe_mixture

        path = str(self.folder / damage.file)
        if damage.use == "read":
            read_mixture_file(path)
        elif damage.use == "info":
            json.dumps(describe_mixture(path).to_json())
        else:
            Mixture(path).index()
        return CHANGED


_ODD_YAML: Final = (
    *(
        b"",
        b"---",
        b"--- a\n--- b\n",
        b"a: &a [*a]",
        b"&a [*a]",
        b"? [a]\n: b\n",
        b"? {a: b}\n: c\n",
        b"!!python/none x",
    ),
    *(b"datasets: !!set {a, b}", b"datasets: !!binary aGk=", b"datasets: 2020-01-01", b"datasets: 2020-13-99"),
    *(b"datasets: !!float x", b"datasets: !!int x", b"datasets: !!timestamp x", b"datasets: !!bool x", b"? \n? \n"),
    *(b"[" * 3000, b"{" * 3000, b"- " * 3000, b"a: " * 50, b"&a a: *a", b"<<: 1", b"<<: [1]", b"{<<: {a: b}}"),
    *(b"datasets: 0x", b"datasets: 0o9", b"datasets: 1:99:99", b"datasets: 0b", b"1: 2", b"null: 1", b"[1]: 2"),
    *(
        b"datasets: !!omap [a]",
        b"datasets: !!pairs [a]",
        b"%YAML 9.9\n---\na",
        b"%TAG ! !\n--- !x",
        b"\x00",
        b"\xff\xfe",
    ),
    *(b"datasets: {small: &a {root: small, selection: *a}}", b"datasets: &a {a: *a}", b"datasets: 9" + b"9" * 5000),
)


class StatsSite(Site):
    """Statistics and a normaliser, as JSON files."""

    weight = 4

    def __init__(self, folder: Path) -> None:
        from raypipe.dataset import open_dataset
        from raypipe.normalise import Normaliser
        from raypipe.normalise.mixture_stats import single_stats

        super().__init__(folder / "stats")
        root = write_dataset(folder / "dataset", SynthSpec(cameras=(), lengths=LENGTHS))
        self.folder.mkdir()
        stats = single_stats(open_dataset(str(root)).stats)
        stats.save(self.folder / "stats.json")
        Normaliser(stats).save(self.folder / "normaliser.json")

    def draw(self, rng: random.Random) -> Damage:
        file = rng.choice(("stats.json", "normaliser.json"))
        return Damage(file, mutate_json((self.folder / file).read_bytes(), rng), "load")

    def use(self, damage: Damage) -> str:
        from raypipe.normalise import MixtureStats, Normaliser

        kind: Any = MixtureStats if damage.file == "stats.json" else Normaliser
        repr(kind.load(self.folder / damage.file))
        return CHANGED


class HubSite(Site):
    """A server that speaks the Hub's API and answers one kind of request as it should not; and a forged cache."""

    weight = 1
    kinds = ("refs", "revision", "tree", "resolve", "lfs", "cache")

    def __init__(self, folder: Path) -> None:
        from hub_server import HubServer

        super().__init__(folder / "hub")
        self.root = write_dataset(folder / "arm", replace(SynthSpec(), cameras=(), lengths=LENGTHS))
        self.cache = folder / "cache"
        self.hub = HubServer()
        self.hub.__enter__()
        self.hub.add_repo("lab/arm", self.root, tags=("v3.0",))
        self.sound = self._record()

    def _record(self) -> dict[str, bytes]:
        from urllib.request import urlopen

        api = f"{self.hub.endpoint}/api/datasets/lab/arm"
        commit = self.hub.repos["lab/arm"].tags["v3.0"]
        told = {
            "refs": f"{api}/refs",
            "revision": f"{api}/revision/v3.0",
            "tree": f"{api}/tree/{commit}?recursive=true",
        }
        return {kind: urlopen(url).read() for kind, url in told.items()}

    def draw(self, rng: random.Random) -> Damage:
        kind = rng.choice(self.kinds)
        if kind in self.sound:
            return Damage(kind, mutate_json(self.sound[kind], rng), _odd_headers(rng))
        if kind == "cache":
            return Damage(rng.choice(("trees", "refs")), mutate_bytes(self._listing(rng), rng), kind)
        path = rng.choice(("meta/info.json", "meta/tasks.parquet", "data/chunk-000/file-000.parquet"))
        return Damage(path, mutate_bytes((self.root / path).read_bytes(), rng), _odd_headers(rng))

    def _listing(self, rng: random.Random) -> bytes:
        commit = self.hub.repos["lab/arm"].tags["v3.0"]
        told = {"format_version": 1, "files": {"meta/info.json": {"size": 1, "blob_id": commit}}}
        return json.dumps(mutate_value(told, rng)).encode() if rng.random() < 0.7 else commit.encode()

    @contextmanager
    def damaged(self, damage: Damage) -> Iterator[None]:
        from unittest.mock import patch

        from raypipe.hub.files import _open_files

        shutil.rmtree(self.cache, ignore_errors=True)
        self.hub.reset()
        if damage.use == "cache":
            self._forge(damage)
        else:
            told = json.loads(damage.use)
            asked = {"path": "" if damage.file in self.sound else damage.file, "times": 9, "headers": told["headers"]}
            kind = damage.file if damage.file in self.sound else ""
            self.hub.fail(**asked, kind=kind, status=told["status"], content=damage.content)
        waits = {"FIRST_WAIT_S": 0.0, "TRIES": 2, "MOST_WAIT_S": 0.05}
        with self.hub.as_hub(self.cache, timeout_s=5), patch.multiple("raypipe.hub.client", **waits):
            _open_files.cache_clear()
            yield

    def _forge(self, damage: Damage) -> None:
        repo = self.cache / "datasets--lab--arm"
        commit = self.hub.repos["lab/arm"].tags["v3.0"]
        name = f"trees/{commit}.json" if damage.file == "trees" else "refs/v3.0"
        for path, content in {
            f"trees/{commit}.json": b"{}",
            "refs/v3.0": commit.encode(),
            name: damage.content,
        }.items():
            (repo / path).parent.mkdir(parents=True, exist_ok=True)
            (repo / path).write_bytes(content)

    def use(self, damage: Damage) -> str:
        from raypipe.download import download_dataset
        from raypipe.hub import resolve as hub_resolve

        hub_resolve("lab/arm")
        download_dataset("lab/arm")
        got = {path.name: path.read_bytes() for path in self.cache.rglob("info.json")}
        want = (self.root / "meta/info.json").read_bytes()
        if got and got != {"info.json": want}:
            raise WrongData("another info.json than the Hub's came")
        return RIGHT

    def names(self, error: RaypipeError, _: Damage) -> bool:
        return "lab/arm" in str(error) or self.hub.endpoint in str(error)


def _odd_headers(rng: random.Random) -> str:
    odd = ("0", "1", "-1", "²", "1e999", "nan", "Wed, 99 Foo 9999 99:99:99 GMT", "Wed, 21 Oct 2015 07:28:00 GMT", "")
    waits = {"Retry-After": rng.choice(odd)} if rng.random() < 0.5 else {"RateLimit": f'"api";r=0;t={rng.choice(odd)}'}
    status = rng.choice((0, 0, 0, 0, 204, 206, 301, 302, 400, 403, 404, 410, 418, 429, 500, 503))
    headers = {key: value.encode("latin-1", "replace").decode("latin-1") for key, value in waits.items()}
    if rng.random() < 0.3:
        headers["Location"] = rng.choice(
            ("", "/", "//", "http://", "ftp://x", "/datasets/lab/arm/resolve/v3.0/x", "http://[", "\x80")
        )
    return json.dumps({"status": status, "headers": headers})


SITES: Final[dict[str, type[Site]]] = {
    "rows": RowsSite,
    "meta": MetaSite,
    "old-meta": OldMetaSite,
    "videos": VideoSite,
    "mp4": Mp4Site,
    "mp4-av1": Av1Site,
    "mp4-hevc": HevcSite,
    "mp4-reordered": ReorderedSite,
    "mp4-depth": DepthSite,
    "image": ImageSite,
    "account": AccountSite,
    "state": StateSite,
    "mixed-state": MixedStateSite,
    "mixture": MixtureSite,
    "stats": StatsSite,
    "hub": HubSite,
}

__all__ = ["CHANGED", "RIGHT", "SITES", "Damage", "Site", "WrongData", "struct"]
