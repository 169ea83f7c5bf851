"""Made datasets that are as unlike as robots are, as one mixture; and what a batch must hold of each, by hand."""

import io
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from PIL import Image
from torchcodec.decoders import VideoDecoder

from raypipe.dataset import open_dataset
from raypipe.format import INDEX_FEATURES
from raypipe.testing import CameraSpec, SynthSpec, write_dataset

MAIN, WRIST = "observation.images.main", "observation.images.wrist"
STATE, DONE = "observation.state", "next.done"
SIZE = (24, 32)
"""Height and width of every camera in the mixture."""

WIDTHS = {"action": 5, STATE: 4}


@dataclass(frozen=True, kw_only=True)
class Unlike:
    """A made dataset, its weight, and under which own names it has what the mixture has; what it lacks is not there."""

    spec: SynthSpec
    weight: float
    rows: dict
    cameras: dict
    robot_type: str
    """As the mixture calls it."""


def _camera(name, height, width, **options):
    return CameraSpec(name=f"observation.images.{name}", height=height, width=width, **options)


UNLIKE = {
    "aloha": Unlike(
        spec=SynthSpec(
            fps=50,
            lengths=(24, 20, 31),
            cameras=(_camera("cam_high", 48, 64, gop=4, b_frames=1), _camera("cam_left", 32, 48)),
            state_dim=4,
            action_dim=5,
            extra_features=("next.done",),
            two_tasks=True,
            robot_type="aloha",
        ),
        weight=1.7,
        rows={"action": "action", STATE: STATE, DONE: "next.done"},
        cameras={MAIN: "observation.images.cam_high", WRIST: "observation.images.cam_left"},
        robot_type="aloha",
    ),
    "cr5": Unlike(
        spec=SynthSpec(
            version="v2.1",
            fps=10,
            lengths=(20, 22),
            cameras=(_camera("top", 64, 64), _camera("unused", 32, 32)),
            state_dim=3,
            action_dim=3,
            tasks=("put the banana on the plate",),
            robot_type="cr5",
        ),
        weight=0.6,
        rows={"action": "joint_targets", STATE: STATE},
        cameras={MAIN: "observation.images.top"},
        robot_type="cr5",
    ),
    # Its camera `top` is the wrist of the mixture, and is stored in rows.
    "so101": Unlike(
        spec=SynthSpec(
            fps=30,
            lengths=(25, 28, 21),
            cameras=(_camera("front", 48, 36), _camera("top", 40, 40, kind="image")),
            state_dim=1,
            action_dim=2,
            episodes_per_video_file=2,
            robot_type="so101",
        ),
        weight=1.0,
        rows={"action": "action", STATE: STATE},
        cameras={MAIN: "observation.images.front", WRIST: "observation.images.top"},
        robot_type="so101",
    ),
    "umi": Unlike(
        spec=SynthSpec(
            version="v2.1",
            fps=15,
            lengths=(23, 35),
            cameras=(_camera("main", 36, 48), _camera("wrist", 32, 32)),
            state_dim=2,
            action_dim=4,
            extra_features=("next.done", "note"),
            robot_type="unknown",
        ),
        weight=0.45,
        rows={"action": "action", STATE: STATE, DONE: "next.done", "note": "note"},
        cameras={MAIN: MAIN, WRIST: WRIST},
        robot_type="umi-gripper",
    ),
}

NAMES = tuple(UNLIKE)

SECONDS = {"action": [0.0, 0.2, 0.4], STATE: [-0.2, 0.0], DONE: [0.0], "note": [-0.2, 0.0], MAIN: [-0.4, 0.0, 0.2]}
"""A fifth of a second is a whole number of frames at 10, 15, 30 and 50 frames per second. The wrist has no window."""

FRAMES = {"action": [0, 1, 2, 3], STATE: [-1, 0], DONE: [0], "note": [-1, 0], MAIN: [-2, 0, 3], WRIST: [0]}

OWN_OFFSETS = {
    "seconds": {
        "aloha": {"action": [0, 10, 20], STATE: [-10, 0], DONE: [0], MAIN: [-20, 0, 10]},
        "cr5": {"action": [0, 2, 4], STATE: [-2, 0], MAIN: [-4, 0, 2]},
        "so101": {"action": [0, 6, 12], STATE: [-6, 0], MAIN: [-12, 0, 6]},
        "umi": {"action": [0, 3, 6], STATE: [-3, 0], DONE: [0], "note": [-3, 0], MAIN: [-6, 0, 3]},
    },
    "frames": dict.fromkeys(NAMES, FRAMES),
    # Half a frame goes up: at 15 frames per second 0.1 s is frame 1.5, and so 2.
    "frames at 10 per second": {
        "aloha": {"action": [0, 5, 10, 15], STATE: [-5, 0], DONE: [0], MAIN: [-10, 0, 15], WRIST: [0]},
        "cr5": FRAMES,
        "so101": {"action": [0, 3, 6, 9], STATE: [-3, 0], MAIN: [-6, 0, 9], WRIST: [0]},
        "umi": {"action": [0, 2, 3, 5], STATE: [-1, 0], DONE: [0], "note": [-1, 0], MAIN: [-3, 0, 5], WRIST: [0]},
    },
}
"""By kind of window and member, worked out by hand: the frames of each window, by names in the mixture."""


def write_unlike(folder: Path, **settings) -> Path:
    """Write the datasets and a mixture file of them with these further settings; return the file's path."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, member in UNLIKE.items():
        root = write_dataset(folder / name, member.spec)
        if member.rows["action"] != "action":
            _rename_feature(root, "action", member.rows["action"])
    return write_unlike_file(folder / "mixture.yaml", **settings)


def write_unlike_file(path: Path, **settings) -> Path:
    """Write a mixture file beside the datasets that `write_unlike` has written; return its path."""
    content = {"resize": list(SIZE), "on_missing": "fill", **settings}
    content["datasets"] = {
        name: {
            "root": name,
            "weight": member.weight,
            "rename": {own: new for new, own in member.rows.items() if own != new},
            "cameras": member.cameras,
            **({"robot_type": member.robot_type} if member.robot_type != member.spec.robot_type else {}),
        }
        for name, member in UNLIKE.items()
    }
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def _rename_feature(root: Path, old: str, new: str) -> None:
    """Give a row feature of a v2.1 dataset another name, in its rows, features and statistics."""
    info = json.loads((root / "meta/info.json").read_text())
    info["features"] = _renamed(info["features"], old, new)
    (root / "meta/info.json").write_text(json.dumps(info))
    stats = root / "meta/episodes_stats.jsonl"
    lines = [json.loads(line) for line in stats.read_text().splitlines()]
    stats.write_text("".join(json.dumps({**one, "stats": _renamed(one["stats"], old, new)}) + "\n" for one in lines))
    for file in (root / "data").rglob("*.parquet"):
        table = pq.read_table(file)
        pq.write_table(table.rename_columns([new if name == old else name for name in table.column_names]), file)


def _renamed(values: dict, old: str, new: str) -> dict:
    assert old in values
    return {new if name == old else name: value for name, value in values.items()}


def frames_of(batch) -> list[tuple[int, int, int]]:
    """The (dataset, episode, frame) of every sample of a batch."""
    columns = (np.asarray(batch[key]).tolist() for key in ("dataset_index", "episode_index", "frame_index"))
    return list(zip(*columns, strict=True))


def visits_of(batch) -> list[tuple[int, int, int, int]]:
    """The frames of a batch, each with its seed: the same frame in another lap of its dataset has another one."""
    return [(*frame, seed) for frame, seed in zip(frames_of(batch), batch["augment_seed"].tolist(), strict=True)]


def visits_of_ranks(ranks) -> list[tuple[int, int, int, int]]:
    """The frames of all batches of all ranks, sorted."""
    return sorted(visit for batches in ranks for batch in batches for visit in visits_of(batch))


def frames_of_plan(world, step, rank) -> list[tuple[int, int, int]]:
    """The (dataset, episode, frame) of a planned batch."""
    frames = world.frames_at(step, rank)
    return list(zip(frames.dataset.tolist(), frames.episode.tolist(), frames.frame.tolist(), strict=True))


class Reference:
    """What a batch of the mixture must hold, from each dataset alone; cameras straight from the files."""

    def __init__(self, folder: Path, windows: str) -> None:
        self._folder = folder
        self._offsets = OWN_OFFSETS[windows]
        self._datasets = {name: self._open(name) for name in NAMES}
        # A window of one frame of a video has no time axis, as in LeRobot, and so in a mixture that has videos.
        self._lengths = {name: len(offsets) for own in self._offsets.values() for name, offsets in own.items()}

    def _open(self, name):
        own = UNLIKE[name].rows
        offsets = {own[key]: values for key, values in self._offsets[name].items() if key in own}
        return open_dataset(str(self._folder / name), cameras=()).windowed(offsets=offsets)

    def sample(self, number: int, episode: int, frame: int) -> dict:
        """Return a sample by the names of the mixture, with its masks."""
        name, member = NAMES[number], UNLIKE[NAMES[number]]
        own = self._datasets[name].sample_of(episode, frame)
        wanted = {key: own[key] for key in (*INDEX_FEATURES, "task")}
        wanted |= {"dataset_index": torch.tensor(number), "dataset": name, "robot_type": member.robot_type}
        wanted |= self._vectors(member, own) | self._others(member, own)
        for camera in (MAIN, WRIST):
            wanted |= self._camera(name, camera, episode, frame)
        return wanted

    def _vectors(self, member, own) -> dict:
        wanted = {}
        for key, width in (("action", member.spec.action_dim), (STATE, member.spec.state_dim)):
            values = own[member.rows[key]]
            # A scalar comes without an axis of its own.
            values = values[..., None] if values.ndim == 1 else values
            wanted[key] = torch.nn.functional.pad(values, (0, WIDTHS[key] - width))
            wanted[f"{key}_is_pad"] = own[f"{member.rows[key]}_is_pad"]
            wanted[f"{key}_dim_is_pad"] = torch.arange(WIDTHS[key]) >= width
        return wanted

    def _others(self, member, own) -> dict:
        """A flag that two members have, and a text that one has."""
        wanted = {}
        for key, blank in ((DONE, torch.zeros(1, dtype=torch.bool)), ("note", ["", ""])):
            has = key in member.rows
            wanted[key] = own[member.rows[key]] if has else blank
            ones = torch.ones(self._lengths[key], dtype=torch.bool)
            wanted[f"{key}_is_pad"] = own[f"{member.rows[key]}_is_pad"] if has else ones
            wanted[f"{key}_is_missing"] = torch.tensor(not has)
        return wanted

    def _camera(self, name, camera, episode, frame) -> dict:
        member = UNLIKE[name]
        own, offsets = member.cameras.get(camera), self._offsets[name].get(camera, [0])
        length = member.spec.lengths[episode]
        places = np.array([frame + offset for offset in offsets])
        is_pad = torch.from_numpy((places < 0) | (places >= length))
        wanted = {}
        if own is None:
            pixels, is_pad = torch.zeros(len(offsets), 3, *SIZE, dtype=torch.uint8), torch.ones_like(is_pad)
        else:
            pixels = torch.stack([self._pixels(name, own, episode, i) for i in places.clip(0, length - 1).tolist()])
        if camera in self._lengths:
            wanted[f"{camera}_is_pad"] = is_pad
        if camera == WRIST:
            wanted[f"{camera}_is_missing"] = torch.tensor(own is None)
        return {**wanted, camera: pixels if len(offsets) > 1 else pixels[0]}

    def _pixels(self, name, own, episode, frame):
        if next(one for one in UNLIKE[name].spec.cameras if one.name == own).kind == "image":
            return resized_image(self._folder / name, own, episode, frame)
        return resized_video(self._folder / name, own, UNLIKE[name].spec, episode)[frame]


@cache
def resized_video(root: Path, camera: str, spec: SynthSpec, episode: int) -> torch.Tensor:
    """The frames of an episode, decoded by torchcodec alone, at the size of the mixture by Pillow."""
    if spec.version == "v2.1":
        path, first = root / f"videos/chunk-000/{camera}/episode_{episode:06d}.mp4", 0
    else:
        number, place = divmod(episode, spec.episodes_per_video_file)
        path = root / f"videos/{camera}/chunk-000/file-{number:03d}.mp4"
        first = sum(spec.lengths[episode - place : episode])
    frames = _decoder(path).get_frames_in_range(first, first + spec.lengths[episode]).data
    return torch.stack([_fitted(Image.fromarray(frame.permute(1, 2, 0).numpy())) for frame in frames])


@cache
def _decoder(path: Path) -> VideoDecoder:
    return VideoDecoder(str(path))


@cache
def resized_image(root: Path, camera: str, episode: int, frame: int) -> torch.Tensor:
    """An image of a row, at the size of the mixture by Pillow."""
    with Image.open(io.BytesIO(_rows(root)[episode, frame][camera]["bytes"])) as image:
        return _fitted(image.convert("RGB"))


def _fitted(image: Image.Image) -> torch.Tensor:
    resized = image.resize((SIZE[1], SIZE[0]), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1)


def write_all(folder: Path, **settings) -> Path:
    """Write a mixture of the made datasets, and of the real ones where they are, at 10 frames per second.

    The made ones have most of the weight: of 240 frames some come from a second lap of theirs.
    """
    path = write_unlike(folder, rate=10, **settings)
    content = yaml.safe_load(path.read_text())
    if REAL_DATA.exists():
        content["datasets"] |= {name: one | {"weight": one["weight"] / 5} for name, one in real_members().items()}
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


REAL_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"

needs_real_data = pytest.mark.skipif(not REAL_DATA.exists(), reason="the real datasets are not part of the project")

REAL_CAMERAS = {
    "cr5_v21": {MAIN: "observation.images.top"},
    "groot_simpnp_v20": {MAIN: "observation.images.ego_view"},
    "piper_v30": {MAIN: "observation.images.top", WRIST: "observation.images.wrist"},
    "so_front_v30": {MAIN: "observation.images.front"},
    "so101_wrist_v30": {WRIST: "observation.images.wrist"},
    "pusht_v30_novid": {},
}
"""The real datasets, and under which own names they have the cameras of the mixture."""


def real_members() -> dict:
    """The real datasets as a mixture file lists them."""
    annotations = ["annotation.human.action.task_description", "annotation.human.validity"]
    members = {
        name: {"root": str(REAL_DATA / name), "weight": 1.5 if name == "cr5_v21" else 1, "cameras": cameras}
        for name, cameras in REAL_CAMERAS.items()
    }
    members["groot_simpnp_v20"]["drop"] = [*annotations, "next.reward", DONE]
    members["pusht_v30_novid"]["drop"] = ["next.reward", DONE, "next.success"]
    return members


def write_real_file(path: Path, **settings) -> Path:
    """Write the file of a mixture of all real datasets at 10 frames per second; return its path."""
    content = {"resize": list(SIZE), "on_missing": "fill", "rate": 10, **settings, "datasets": real_members()}
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def real_pixels(name: str, camera: str, episode: int, frame: int) -> torch.Tensor:
    """A frame of a real dataset, by torchcodec and Pillow alone; zeros where it lacks the camera."""
    own = REAL_CAMERAS[name].get(camera)
    if own is None:
        return torch.zeros(3, *SIZE, dtype=torch.uint8)
    if "v30" not in name:
        path = REAL_DATA / name / f"videos/chunk-000/{own}/episode_{episode:06d}.mp4"
        pixels = _decoder(path).get_frame_at(frame).data
    else:
        # Each of these cameras has one file with all episodes back to back.
        path = REAL_DATA / name / f"videos/{own}/chunk-000/file-000.mp4"
        pixels = _decoder(path).get_frame_at(sum(_real_lengths(name)[:episode]) + frame).data
    return _fitted(Image.fromarray(pixels.permute(1, 2, 0).numpy()))


@cache
def _real_lengths(name: str) -> list[int]:
    files = sorted((REAL_DATA / name / "data").rglob("*.parquet"))
    numbers = np.concatenate([pq.read_table(file, columns=["episode_index"])["episode_index"] for file in files])
    return np.bincount(numbers).tolist()


@cache
def _rows(root: Path) -> dict:
    rows = [row for file in (root / "data").rglob("*.parquet") for row in pq.read_table(file).to_pylist()]
    return {(row["episode_index"], row["frame_index"]): row for row in rows}


ADDED = {"augment_seed", "is_repeat"}
"""What a batch has beside the keys of samples."""


def assert_equals_reference(batch, reference: Reference, added=ADDED) -> None:
    """Require every key of every sample of a batch to be what the reference says."""
    for i, (number, episode, frame) in enumerate(frames_of(batch)):
        wanted = reference.sample(number, episode, frame)
        assert set(batch) - set(added) == set(wanted)
        for key, value in wanted.items():
            place = f"{key} of frame {frame} of episode {episode} of {NAMES[number]}"
            _assert_value(batch[key][i], value, place, is_image=key in (MAIN, WRIST))


def _assert_value(found, wanted, place, *, is_image) -> None:
    if not isinstance(wanted, torch.Tensor):
        assert (list(found) if isinstance(wanted, list) else found) == wanted, place
        return
    values = np.asarray(found)
    assert values.dtype == wanted.numpy().dtype, f"{place}: {values.dtype}, not {wanted.dtype}"
    assert values.shape == tuple(wanted.shape), f"{place}: {values.shape}, not {tuple(wanted.shape)}"
    if is_image:
        # Pillow and torch round apart.
        assert np.abs(values.astype(int) - wanted.numpy().astype(int)).max() <= 1, place
    else:
        np.testing.assert_array_equal(values, wanted.numpy(), err_msg=place)


def assert_equal_visits(visits) -> None:
    """Require every frame of every dataset to have come equally often, give or take one."""
    counts: dict[tuple[int, int, int], int] = {
        (number, episode, frame): 0
        for number, member in enumerate(UNLIKE.values())
        for episode, length in enumerate(member.spec.lengths)
        for frame in range(length)
    }
    for number, episode, frame, _ in visits:
        counts[number, episode, frame] += 1
    for number, name in enumerate(NAMES):
        mine = [count for (dataset, *_), count in counts.items() if dataset == number]
        assert max(mine) - min(mine) <= 1, name
        assert max(mine) > 0, name
