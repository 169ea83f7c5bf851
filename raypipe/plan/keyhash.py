"""The keyed hashes behind the order, in numpy integers, and `ColumnTable`, tables of such integers.

Computes one number for every span and every frame from (seed, lap, dataset name, episode, frame) and nothing else. A
lap is one pass over a dataset; for a single dataset it is the epoch. NumPy's Generator is not used: its streams may
change between releases, and a resumed run must see the order it started with. The hash absorbs the parts one after the
other and never adds them: seed 1 at epoch 1 is not seed 2 at epoch 0.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from raypipe.plan.rates import Rates

ORDER_VERSION: Final = 1
"""Any change that moves a frame for the same seed raises it. Golden files hold one order per version."""

Ints = NDArray[np.int64]
Hashes = NDArray[np.uint64]

GOLDEN: Final = 0x9E3779B97F4A7C15
_HIGH_HALF: Final = np.uint64(0xFFFFFFFF00000000)


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnTable:
    """A table: every field of a subclass is a column, all of equal length."""

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))

    @classmethod
    def columns_of(cls, table: "ColumnTable") -> dict[str, Any]:
        """Return those columns of `table` that this class has."""
        return {field.name: getattr(table, field.name) for field in fields(cls)}

    def take(self, rows: Any) -> Self:
        """Return the given rows, in that order: by their numbers, a slice or a mask."""
        return type(self)(**{name: column[rows] for name, column in self.columns_of(self).items()})

    @classmethod
    def concat(cls, tables: Sequence[Self], axis: int = 0) -> Self:
        """Return the rows of several tables, one table after the other; `axis` is for columns of two dimensions."""
        if len(tables) == 1:
            return tables[0]
        columns = {field.name: [getattr(table, field.name) for table in tables] for field in fields(cls)}
        return cls(**{name: np.concatenate(parts, axis=axis) for name, parts in columns.items()})


def mix(values: Hashes) -> Hashes:
    """Return the splitmix64 finaliser of `values`: a bijection of 64 bits in which every bit moves every other."""
    mixed = values ^ (values >> np.uint64(30))
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def name_key(name: str) -> int:
    """Return a 64-bit number for a dataset's name; Python's own `hash` differs between processes."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderKeys:
    """The hashes of one seed, with the epoch and everything else that orders the frames of a span.

    ``shuffle=False`` keeps file order: a frame's order key is its number, and spans are not hashed.
    """

    seed: int
    epoch: int
    shuffle: bool
    dataset_names: tuple[str, ...]

    clip_frames: tuple[int, ...] = ()
    """Clip length of every dataset; empty if a clip is a whole span."""

    rates: "Rates | None" = field(default=None, compare=False)
    """How often laps have each frame; None: once."""

    def phases(self, dataset: NDArray[np.int32], lap: Ints) -> Hashes:
        """Return the phase of each lap's marks, of 2**64: a hash of (seed, dataset) plus the golden ratio per lap."""
        numbers = np.arange(len(self.dataset_names))
        none = np.zeros(len(numbers), dtype=np.int64)
        first = self._episode_keys(numbers.astype(np.int32), none, none, purpose="phase")
        return first[dataset] + lap.view(np.uint64) * np.uint64(GOLDEN)

    def span_keys(
        self, dataset: NDArray[np.int32], lap: Ints, episode: Ints, start: Ints, *, purpose: str = "span"
    ) -> Hashes:
        """Return one hash per span, which decides its place in the order and the jitter of its frames.

        With the purpose "run", one per anchor run: a lap over a dataset of a mixture goes through its runs in this
        order.
        """
        return _absorb(self._episode_keys(dataset, lap, episode, purpose=purpose), start.view(np.uint64))

    def frame_keys(self, dataset: NDArray[np.int32], lap: Ints, episode: Ints, owner: Ints, frame: Ints) -> Hashes:
        """Return the order keys of frames: distinct within an episode, and ascending in the order of emission.

        Without clips the upper half is a hash of (seed, lap, dataset, episode, frame), the lower half the frame's
        number. With clips the upper half is a permutation of the clips of the episode, the lower half a permutation of
        its frames: no two clips have the same upper half, so the frames of a clip stay together. The span is not part
        of the key, so a cut of a span or a new leg never changes the order of two frames: the consumed part of an
        episode's run stays "every key below a floor". `dataset`, `lap` and `episode` are of the spans, and `owner` is
        the span of every frame.
        """
        number = frame.view(np.uint64)
        if not self.shuffle:
            return number
        bases = self._episode_keys(dataset, lap, episode, purpose="frame")[owner]
        if self.clip_frames:
            clip_frames = np.array(self.clip_frames, dtype=np.int64)[dataset][owner]
            clip = _permute((frame // clip_frames).astype(np.uint32), bases >> np.uint64(32))
            return (clip.astype(np.uint64) << np.uint64(32)) | _permute(frame.astype(np.uint32), bases)
        hashed = number * np.uint64(GOLDEN)
        hashed += bases
        hashed = mix(hashed)
        hashed &= _HIGH_HALF
        hashed |= number
        return hashed

    def augment_seeds(self, dataset: Ints, lap: Ints, episode: Ints, frame: Ints) -> Ints:
        """Return a seed per frame for a user's augmentation, at least 0; independent of ranks, legs and batches."""
        keys = self.span_keys(dataset.astype(np.int32), lap, episode, frame, purpose="augment")
        return (keys >> np.uint64(1)).view(np.int64)

    def _episode_keys(self, dataset: NDArray[np.int32], lap: Ints, episode: Ints, *, purpose: str) -> Hashes:
        if len(lap) > 0 and lap.min() == lap.max():
            # Usually all spans are of one lap: then each dataset is hashed once, not once for every span.
            owners = _dataset_keys(self.seed, int(lap[0]), purpose, self.dataset_names)[dataset]
        else:
            owners = _absorb(_purpose_keys(self.seed, lap, purpose), _name_keys(self.dataset_names)[dataset])
        return _absorb(owners, episode.view(np.uint64))


@lru_cache(maxsize=256)
def _dataset_keys(seed: int, lap: int, purpose: str, dataset_names: tuple[str, ...]) -> Hashes:
    return _absorb(_purpose_keys(seed, np.array([lap], dtype=np.int64), purpose), _name_keys(dataset_names))


def _name_keys(dataset_names: Sequence[str]) -> Hashes:
    return np.array([name_key(name) for name in dataset_names], dtype=np.uint64)


def _purpose_keys(seed: int, lap: Ints, purpose: str) -> Hashes:
    seeded = _absorb(np.zeros(1, dtype=np.uint64), np.array([seed], dtype=np.uint64))
    return _absorb(_absorb(seeded, lap.view(np.uint64)), np.array([name_key(purpose)], dtype=np.uint64))


def _permute(number: NDArray[np.uint32], key: Hashes) -> NDArray[np.uint32]:
    """Return a permutation of 32 bits, another one per key: two rounds of an invertible mixer, keyed before each."""
    low = key.astype(np.uint32)
    mixed = _mix32(number ^ low)
    mixed += (low >> np.uint32(7)) * np.uint32(0x9E3779B1)
    return _mix32(mixed)


def _mix32(values: NDArray[np.uint32]) -> NDArray[np.uint32]:
    mixed = values ^ (values >> np.uint32(16))
    mixed *= np.uint32(0x7FEB352D)
    mixed ^= mixed >> np.uint32(15)
    mixed *= np.uint32(0x846CA68B)
    mixed ^= mixed >> np.uint32(16)
    return mixed


def _absorb(state: Hashes, part: Hashes) -> Hashes:
    return mix(state ^ mix(part + np.uint64(GOLDEN)))
