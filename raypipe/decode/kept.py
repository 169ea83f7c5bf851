"""Frames kept between epochs: decoded pixels on the node's disk, each frame whole or absent.

::

    FOLDER/frames.1/DATASET/VIDEO-KEY    one sparse file for one video of one camera
        header    what the file holds, for `raypipe kept`
        checks    16 bytes a frame, written after its pixels; zeros: the frame is absent
        pixels    raw, as they are after `resize`

The key covers everything that the pixels depend on, so a changed video or another decoder gets another file. A check
covers the key, the number of the frame and its pixels. A frame that a killed process, a power cut or a damaged disk
left half written fails its check, and raypipe decodes it again. Threads, processes and jobs of one user share the
folder without locks, because all of them write the same bytes for a frame.

Nothing is evicted. A fixed hash selects the frames to keep, so half the space gives half the hits in any order of
frames. Files are read into memory and never mapped: a file that another process truncates must not end this one.

Decides what to keep and where. Does not decode, and raises nothing: after an error it warns once and returns no frame.
"""

import hashlib
import io
import json
import os
import re
import stat
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from raypipe.decode.clips import FramePool, Pixels
from raypipe.decode.journal import make_private_folder
from raypipe.decode.spec import ON_DISK, DecodeSpec, KeepSpec, size_of
from raypipe.errors import RaypipeError
from raypipe.format import DatasetMeta
from raypipe.text import counted

LAYOUT: Final = 1
"""Version of the files and of how their keys are made."""

GROUP_FRAMES: Final = 16
"""Neighbouring frames that are kept together or not at all, so that most clips are of one kind."""

FREE_SHARE: Final = 2
"""Kept frames take at most half of what would be free without them."""

_HEADER_BYTES: Final = 1 << 14
_CHECK_BYTES: Final = 16
_PAGE_BYTES: Final = 4096
_ABSENT: Final = bytes(_CHECK_BYTES)
_SAFE_SHARE: Final = 0.98
"""Leaves a margin: hashing chooses a little more or less than its share."""
_LOOKS: Final = 64
"""A process looks at the folder again after writing one part in this many of the bound, since others write too."""
_MOST_FOUND: Final = 4096
_NOT_KNOWN: Final = -1.0
_FILE_NAME: Final = re.compile(r"[0-9a-f]+-[0-9a-f]+")

FrameNumbers = NDArray[np.int64]
Bytes = NDArray[np.uint8]

_DRAWN: Final = hashlib.shake_128(b"raypipe kept frames").digest(_PAGE_BYTES)
# Odd, so that every change of a single word changes the sum.
_WEIGHTS: Final = np.frombuffer(_DRAWN, dtype="<u8") | np.uint64(1)


def check_of(key: bytes, slot: int, pixels: Bytes) -> bytes:
    """Return the check that proves that these bytes are frame `slot` of the file `key`.

    A keyed hash over a weighted sum of every 4 KiB: 0.05 ms for 640x480, where CRC-32 takes 0.24. It finds every change
    of one word, and misses 1 in 2**64 of the others.
    """
    whole = len(pixels) // _PAGE_BYTES * _PAGE_BYTES
    sums = np.einsum("pk,k->p", pixels[:whole].view("<u8").reshape(-1, len(_WEIGHTS)), _WEIGHTS)
    digest = hashlib.blake2b(sums.tobytes(), key=key, salt=slot.to_bytes(8, "little"), digest_size=_CHECK_BYTES)
    digest.update(pixels[whole:].tobytes())
    return digest.digest()


class KeepFolder:
    """The folder of a node, as one process sees it: how much it holds, and whether it takes more frames."""

    def __init__(self, spec: KeepSpec, dataset_bytes: int) -> None:
        """Prepare; touches no disk yet. `dataset_bytes` is the size of all decoded frames of the run."""
        self.path = frames_folder(spec)
        self._spec = spec
        self._dataset_bytes = max(1, dataset_bytes)
        self._lock = threading.RLock()
        self.own: set[str] = set()
        """Names of the datasets of this run."""
        self._share = _NOT_KNOWN
        self._left_bytes = 0
        self._is_closed = False
        self._is_warned = False
        self.is_off = not hasattr(os, "O_NOFOLLOW")
        if self.is_off:
            self.warn("this operating system lacks what it needs")

    def reserve(self, key: bytes, slots: Sequence[int], frame_bytes: int) -> list[int]:
        """Return which of the frames to keep: those that the hash chooses, while there is room for them."""
        with self._lock:
            if self._is_closed:
                return []
            if self._share == _NOT_KNOWN:
                self._look(0)
            chosen = [slot for slot in slots if _place(key, slot // GROUP_FRAMES) < self._share]
            # The most that they take on disk: a new file, and partly filled pages of pixels and checks.
            size = _HEADER_BYTES + len(chosen) * (frame_bytes + 2 * _PAGE_BYTES) if chosen else 0
            if size > self._left_bytes:
                self._look(size)
            # No warning: reaching the bound is not an error.
            self._is_closed = self._is_closed or size > self._left_bytes
            self._left_bytes -= size
            return [] if self._is_closed else chosen

    def _look(self, wanted_bytes: int) -> None:
        """Measure the folder and the disk; decide the share (once) and how much may be written next."""
        try:
            make_private_folder(self.path)
            sizes = {name: sum(map(_disk_bytes, files)) for name, files in list_files(self.path)}
            disk = os.statvfs(self.path)
        except OSError as error:
            self.stop(error)
            return
        total = sum(sizes.values())
        bound = (disk.f_bavail * disk.f_frsize + total) // FREE_SHARE
        if self._spec.max_bytes != ON_DISK:
            bound = min(bound, self._spec.max_bytes)
        if self._share == _NOT_KNOWN:
            others = sum(size for name, size in sizes.items() if name not in self.own)
            self._share = max(0.0, _SAFE_SHARE * (bound - others) / self._dataset_bytes)
        self._left_bytes = min(bound - total, max(wanted_bytes, bound // _LOOKS))

    def stop(self, error: Exception) -> None:
        """Stop adding frames in this process, and say why once."""
        with self._lock:
            self._is_closed = True
            self.warn(f"{error}. No more frames are kept by this process")

    def warn(self, what: str) -> None:
        """Warn once that something is wrong with the folder."""
        if not self._is_warned:
            self._is_warned = True
            warnings.warn(
                f"keep_frames in {self.path!r}: {what}; decoding goes on. `raypipe kept` shows what is there, and "
                f"`raypipe kept --clear` removes it.",
                stacklevel=2,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptVideo:
    """Where the frames of one episode are kept, for the current content of its video."""

    folder: KeepFolder
    path: str
    key: bytes
    about: bytes
    """The header of the file."""
    num_slots: int
    """Frames of all episodes of the video."""
    first_slot: int
    """Slot of the episode's first frame."""
    shape: tuple[int, ...]
    """Shape of a frame."""
    dtype: Any = np.uint8

    @property
    def _frame_bytes(self) -> int:
        return int(np.prod(self.shape) * np.dtype(self.dtype).itemsize)

    @property
    def _pixels_at(self) -> int:
        return _HEADER_BYTES + -(-self.num_slots * _CHECK_BYTES // _PAGE_BYTES) * _PAGE_BYTES

    def has(self, frames: FrameNumbers) -> bool:
        """Return whether all these frames of the episode have a check; does not read the pixels."""
        with suppress(OSError), _open(self.path, os.O_RDONLY) as file:
            return all(check != _ABSENT for check in self._read_checks(file, frames))
        return False

    def read(self, frames: FrameNumbers, pool: FramePool) -> dict[int, Pixels]:
        """Return the frames of the episode that are there, of these, ascending, in memory of `pool`."""
        found = {}
        try:
            with _open(self.path, os.O_RDONLY) as file:
                for frame, check in zip(frames.tolist(), self._read_checks(file, frames), strict=True):
                    if check != _ABSENT and (pixels := self._read_frame(file, frame, check, pool)) is not None:
                        found[frame] = pixels
        except FileNotFoundError:
            pass
        except OSError as error:
            self.folder.warn(str(error))
        return found

    def _read_frame(self, file: io.FileIO, frame: int, check: bytes, pool: FramePool) -> Pixels | None:
        slot = self.first_slot + frame
        pixels, is_whole = pool.take(self.shape, self.dtype), False
        try:
            into = pixels.reshape(-1).view(np.uint8)
            file.seek(self._pixels_at + slot * self._frame_bytes)
            is_whole = file.readinto(into.data) == len(into) and check_of(self.key, slot, into) == check
        finally:
            if not is_whole:
                pool.give_back([pixels])
        if is_whole:
            return pixels
        self.folder.warn(f"frame {slot} of {self.path!r} is damaged, and is decoded anew")
        return None

    def _read_checks(self, file: io.FileIO, frames: FrameNumbers) -> list[bytes]:
        first, last = int(frames[0]), int(frames[-1])
        file.seek(_HEADER_BYTES + (self.first_slot + first) * _CHECK_BYTES)
        size = (last - first + 1) * _CHECK_BYTES
        content = file.read(size).ljust(size, b"\0")
        starts = ((frames - first) * _CHECK_BYTES).tolist()
        return [content[start : start + _CHECK_BYTES] for start in starts]

    def write(self, frames: FrameNumbers, pixels: NDArray[Any]) -> None:
        """Write the chosen ones of these frames of the episode, if there is room."""
        slots = {self.first_slot + frame: i for i, frame in enumerate(frames.tolist())}
        chosen = self.folder.reserve(self.key, list(slots), self._frame_bytes)
        if not chosen:
            return
        try:
            # Another process may have cleared the folders since.
            make_private_folder(self.folder.path)
            make_private_folder(os.path.dirname(self.path))
            with _open(self.path, os.O_RDWR | os.O_CREAT) as file:
                if os.fstat(file.fileno()).st_size < _HEADER_BYTES:
                    _write(file, 0, self.about.ljust(_HEADER_BYTES, b"\0"))
                    _remove_outdated(self.path)
                for slot in chosen:
                    flat = np.ascontiguousarray(pixels[slots[slot]]).reshape(-1).view(np.uint8)
                    _write(file, self._pixels_at + slot * self._frame_bytes, flat.data)
                    # The check follows the pixels: a process may be killed between the two.
                    _write(file, _HEADER_BYTES + slot * _CHECK_BYTES, check_of(self.key, slot, flat))
        except FileNotFoundError:
            # Another process cleared the folder between the two lines: the next epoch keeps the frames.
            return
        except OSError as error:
            self.folder.stop(error)


class KeptDataset:
    """The kept frames of one dataset under one way of decoding; threads may share it."""

    def __init__(self, folder: KeepFolder, meta: DatasetMeta, spec: DecodeSpec, decoder: str) -> None:
        """Name the files of the dataset; touches no disk. `decoder` is the name and version of the decoder."""
        self._folder = folder
        self._meta = meta
        self._spec = spec
        self._decoder = decoder
        resize = sorted(spec.resize.items()) if isinstance(spec.resize, Mapping) else spec.resize
        self._name = _digest(meta.storage.uri, decoder, resize, spec.fit).hex()[:16]
        self._found: dict[tuple[int, str, str], KeptVideo] = {}
        folder.own.add(self._name)

    def find(self, row: int, camera: str) -> KeptVideo | None:
        """Return where the frames of an episode are kept, for the current content of its video.

        None if the video is missing, or its storage cannot tell one content from another.
        """
        name = self._meta.video_file(row, camera)
        version = ""
        with suppress(RaypipeError, OSError):
            version = self._meta.storage.version(name)
        if not version or self._folder.is_off:
            return None
        found = self._found.get((row, camera, version))
        if found is None:
            if len(self._found) >= _MOST_FOUND:
                self._found.clear()
            found = self._found[row, camera, version] = self._locate(row, camera, name, version)
        return found

    def _locate(self, row: int, camera: str, name: str, version: str) -> KeptVideo:
        storage, episodes, columns = self._meta.storage, self._meta.episodes, self._meta.episodes.videos[camera]
        place = os.path.realpath(storage.locate(name)) if storage.is_local else f"{storage.uri}/{name}"
        same = columns.rows_of_file(row)
        # Together with the file, they decide where an episode begins in it.
        table = [columns.from_timestamp[same].tolist(), episodes.length[same].tolist()]
        feature = self._meta.features[camera]
        size, shape = size_of(self._spec.resize, camera), self._spec.frame_shape(feature)
        # info.json defines what the numbers of a depth video mean.
        codes = [astuple(feature.depth_codes)] if feature.depth_codes is not None else []
        key = _digest(LAYOUT, place, version, camera, table, size, shape, self._spec.fit, self._decoder, *codes)
        num_slots, first_slot = int(episodes.length[same].sum()), int(episodes.length[same[same < row]].sum())
        about = {
            "root": str(self._meta.root),
            "video": name,
            "camera": camera,
            "shape": shape,
            "decoder": self._decoder,
            "num_slots": num_slots,
        }
        file = f"{_digest(name, camera).hex()[:16]}-{key.hex()}"
        return KeptVideo(
            folder=self._folder,
            path=os.path.join(self._folder.path, self._name, file),
            key=key,
            about=json.dumps(about).encode()[:_HEADER_BYTES],
            num_slots=num_slots,
            first_slot=first_slot,
            shape=shape,
            dtype=np.float32 if feature.is_depth else np.uint8,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSurvey:
    """What a folder holds of one dataset."""

    root: str
    cameras: tuple[str, ...]
    decoder: str
    num_files: int
    num_frames: int
    size_bytes: int
    """On disk."""

    def describe(self) -> str:
        """Return it as two lines."""
        cameras = ", ".join(self.cameras) or "an unknown camera"
        return (
            f"{self.root}: {counted(self.num_frames, 'frame')} of {cameras}, {self.size_bytes / 1e9:,.2f} GB in "
            f"{counted(self.num_files, 'file')}\n  decoded by {self.decoder}"
        )


def survey_kept(spec: KeepSpec) -> list[KeptSurvey]:
    """Return what is kept, by dataset; empty if nothing is."""
    found = []
    for _, files in list_files(frames_folder(spec)):
        headers = [header for path in files if (header := _read_header(path))]
        found.append(
            KeptSurvey(
                root=headers[0]["root"] if headers else "unknown",
                cameras=tuple(sorted({header["camera"] for header in headers})),
                decoder=headers[0]["decoder"] if headers else "unknown",
                num_files=len(files),
                num_frames=sum(header["num_frames"] for header in headers),
                size_bytes=sum(map(_disk_bytes, files)),
            )
        )
    return sorted(found, key=lambda one: (one.root, one.size_bytes))


def clear_kept(spec: KeepSpec) -> int:
    """Remove all kept frames and return how many bytes they took. A process that reads them goes on by decoding."""
    num_bytes = 0
    for name, files in list_files(frames_folder(spec)):
        for path in files:
            num_bytes += _disk_bytes(path)
            with suppress(FileNotFoundError):
                os.remove(path)
        # A process that keeps frames at this moment may have made another file.
        with suppress(OSError):
            os.rmdir(os.path.join(frames_folder(spec), name))
    return num_bytes


def frames_folder(spec: KeepSpec) -> str:
    """Return the folder of this layout, which only raypipe uses."""
    return os.path.join(os.path.abspath(os.path.expanduser(spec.folder)), f"frames.{LAYOUT}")


def list_files(folder: str) -> list[tuple[str, list[str]]]:
    """Return the files of every dataset by its name, only those with names from raypipe. Does not follow links."""
    found = []
    with suppress(FileNotFoundError, NotADirectoryError):
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            return []
        for dataset in [entry for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]:
            with suppress(FileNotFoundError):
                entries = [entry for entry in os.scandir(dataset.path) if entry.is_file(follow_symlinks=False)]
                found.append((dataset.name, [entry.path for entry in entries if _FILE_NAME.fullmatch(entry.name)]))
    return found


def _disk_bytes(path: str) -> int:
    with suppress(FileNotFoundError):
        return os.lstat(path).st_blocks * 512
    return 0


def _read_header(path: str) -> dict[str, Any]:
    with suppress(OSError, ValueError, KeyError, TypeError), _open(path, os.O_RDONLY) as file:
        header: dict[str, Any] = json.loads(file.read(_HEADER_BYTES).rstrip(b"\0"))
        checks = np.frombuffer(file.read(header["num_slots"] * _CHECK_BYTES), dtype=np.uint8)
        told = {name: str(header[name]) for name in ("root", "camera", "decoder")}
        return {**told, "num_frames": int(checks.reshape(-1, _CHECK_BYTES).any(axis=1).sum())}
    return {}


def _open(path: str, flags: int) -> io.FileIO:
    """Open a file of this user, without a buffer."""
    # A pipe in place of the file must not block.
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    found = os.fstat(descriptor)
    if found.st_uid != os.getuid() or not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise PermissionError(f"{path!r} belongs to another user, or is no file")
    return io.FileIO(descriptor, "r+" if flags & os.O_RDWR else "r")


def _write(file: io.FileIO, offset: int, content: Any) -> None:
    file.seek(offset)
    left = memoryview(content)
    while left:
        left = left[file.write(left) :]


def _remove_outdated(path: str) -> None:
    """Remove the files of earlier contents of a video."""
    folder, name = os.path.split(path)
    with suppress(OSError):
        for other in os.listdir(folder):
            if other != name and other.split("-")[0] == name.split("-")[0]:
                os.remove(os.path.join(folder, other))


def _place(key: bytes, group: int) -> float:
    """Return the place of a group of frames in [0, 1]: raypipe keeps it if the place is below the share."""
    digest = hashlib.blake2b(group.to_bytes(8, "little"), key=key, digest_size=8).digest()
    return int.from_bytes(digest, "little") / (1 << 64)


def _digest(*parts: Any) -> bytes:
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).digest()
