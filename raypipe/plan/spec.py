"""What a user decides about the order: the specs of the plan, and the legs of an epoch.

The specs only check which values are possible. `OrderSpec` identifies an order, so the state stores it. The state does
not store `BatchSpec`, since a run may resume with another batch size.
"""

import operator
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, get_args

from raypipe.errors import ConfigError, suggest
from raypipe.text import MOST_LANES, counted, either

Tail = Literal["short", "drop", "wrap"]
BatchScope = Literal["rank", "global"]
SpanLength = int | Literal["episode"]
ClipLength = int | tuple[int, ...] | Literal["span"]

WHOLE_EPISODE: Final = "episode"
"""Value of `span_frames` that makes a span a whole episode (or a whole segment of one)."""

WHOLE_SPAN: Final = "span"
"""Value of `clip_frames` that shuffles the frames of a span one by one, as if the span were one clip."""

WORLD_SIZE: Final = "world_size"
"""Value of `lanes` that gives as many lanes as the run's first start has ranks."""

_MAX_COUNT: Final = 1 << 31
"""Beyond any real count; keeps the arithmetic of keys within 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderSpec:
    """The order of every epoch of a run, given its frames."""

    seed: int

    shuffle: bool = True
    """False is for evaluation: every lane reads one contiguous run of the files, in file order."""

    live_spans: int = 128
    """Spans that are live at once in a lane. Twice a lane's batch gives 97% of the distinct episodes of a full
    shuffle; with more, later batches share fewer episodes. Without `shuffle` one span is live, whatever this says."""

    span_frames: int | Literal["episode"] = WHOLE_EPISODE
    """Longest span. Cuts lie at multiples of it, counted from the episode's first frame: a multiple of the
    videos' keyframe interval makes every cut fall on a keyframe."""

    clip_frames: int | tuple[int, ...] | Literal["span"] = WHOLE_SPAN
    """Frames of a clip: one number for all datasets, or one for each. The frames of a clip follow each other in the
    order of their span, so a rank decodes them together and holds them briefly. Clips are cut at multiples of this
    number, counted from the episode's first frame, so spans, selections and legs never move a clip."""

    tail: Tail = "short"
    """The end of an epoch: "short" emits every frame in shorter batches, "drop" only full batches, "wrap" fills the
    last batch with the frames that its lane has just emitted, marked as repeats."""

    lanes: int | Literal["world_size"] = WORLD_SIZE
    """Lanes of an epoch, if the number of ranks at its start divides them. A number with many divisors (24, 48) keeps
    the global batches equal on many world sizes."""

    def __post_init__(self) -> None:
        store_whole(self, "seed", 0, (1 << 64) - 1)
        store_whole(self, "live_spans", 1, _MAX_COUNT)
        store_whole(self, "span_frames", 1, _MAX_COUNT, WHOLE_EPISODE)
        store_whole(self, "lanes", 1, MOST_LANES, WORLD_SIZE)
        self._store_clips()
        _check_choice("tail", self.tail, get_args(Tail))
        if not isinstance(self.shuffle, bool):
            raise ConfigError(f"shuffle must be True or False, got {self.shuffle!r}")

    def _store_clips(self) -> None:
        if isinstance(self.clip_frames, Sequence) and not isinstance(self.clip_frames, str):
            sizes = tuple(check_whole("clip_frames", size, 1, _MAX_COUNT) for size in self.clip_frames)
            if not sizes:
                raise ConfigError("clip_frames is empty; give a number, one for each dataset, or 'span'")
            # If all datasets have the same length, one number says it and keeps the state short.
            object.__setattr__(self, "clip_frames", sizes if len(set(sizes)) > 1 else sizes[0])
        else:
            store_whole(self, "clip_frames", 1, _MAX_COUNT, WHOLE_SPAN)

    def clip_sizes(self, num_datasets: int) -> tuple[int, ...]:
        """Return the clip length of every dataset; empty if a clip is a whole span, or without `shuffle`.

        Raises:
            ConfigError: the number of lengths differs from the number of datasets.
        """
        if isinstance(self.clip_frames, str) or not self.shuffle:
            return ()
        if isinstance(self.clip_frames, int):
            return (self.clip_frames,) * num_datasets
        if len(self.clip_frames) != num_datasets:
            raise ConfigError(
                f"clip_frames={self.clip_frames} is for {counted(len(self.clip_frames), 'dataset')}, and there "
                f"{either(num_datasets, 'is', 'are')} {num_datasets}; give one number for all, or one for each"
            )
        return self.clip_frames

    def to_dict(self) -> dict[str, Any]:
        """Return the spec as a JSON object; omits `clip_frames` of whole spans, as orders from before clips do."""
        fields = asdict(self)
        if self.clip_frames == WHOLE_SPAN:
            del fields["clip_frames"]
        elif isinstance(self.clip_frames, tuple):
            fields["clip_frames"] = list(self.clip_frames)
        return fields


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """How many frames a step takes."""

    size: int
    """Frames of a full batch: of each rank, or of all ranks together, as `scope` says."""

    scope: BatchScope = "rank"
    """With "global" the global batches are the same sets on every world size that divides the lanes."""

    def __post_init__(self) -> None:
        _check_choice("batch scope", self.scope, get_args(BatchScope))
        store_whole(self, "size", 1, _MAX_COUNT, label="batch_size" if self.scope == "rank" else "global_batch_size")

    def per_lane(self, lanes: int, world_size: int) -> int:
        """Return the frames that a full step takes from every lane.

        Raises:
            ConfigError: the lanes cannot share the batch equally; the message names the nearest sizes that work.
        """
        shares = lanes // world_size if self.scope == "rank" else lanes
        per_lane, rest = divmod(self.size, shares)
        if rest:
            near = [str(size) for size in (per_lane * shares, (per_lane + 1) * shares) if size]
            name = "batch_size" if self.scope == "rank" else "global_batch_size"
            raise ConfigError(
                f"{name}={self.size} does not share out over {counted(shares, 'lane')} ({counted(lanes, 'lane')} on "
                f"{counted(world_size, 'rank')}); the nearest that does: {' or '.join(near)}. Or set "
                f"lanes={world_size} at the next epoch."
            )
        return per_lane


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """A part of an epoch on a fixed number of lanes: the frames left at its start, shared out over them."""

    lanes: int
    live_spans: int
    frames_per_lane: int = 0
    """Frames that every lane has handed to the trainer in this leg."""

    def __post_init__(self) -> None:
        store_whole(self, "lanes", 1, MOST_LANES)
        store_whole(self, "live_spans", 1, _MAX_COUNT)
        store_whole(self, "frames_per_lane", 0, (1 << 63) - 1)


def parse_order(
    *, seed: int, live_spans: int | None, span_frames: str, lanes: str, clip_frames: str = ""
) -> dict[str, Any]:
    """Return the fields of an `OrderSpec` from what a person typed: numbers and named values are both text."""
    typed = {"span_frames": span_frames, "lanes": lanes, "clip_frames": clip_frames}
    fields: dict[str, Any] = {
        name: int(text) if text.isdecimal() else text for name, text in typed.items() if text != ""
    }
    return {"seed": seed, **fields, **({} if live_spans is None else {"live_spans": live_spans})}


def first_leg(spec: OrderSpec, *, world_size: int, batch: BatchSpec | None = None) -> Leg:
    """Return the leg that starts an epoch: the base lanes if `world_size` divides them, else one lane per rank.

    Args:
        batch: must share out over the base lanes too, else the epoch has one lane per rank. Pass None at the first
            start of a run: then the lanes that the user gave stay, and `plan_world` raises if the batch does not fit.
    """
    check_world_size(world_size)
    lanes = spec.lanes if isinstance(spec.lanes, int) and is_served(spec.lanes, world_size, batch) else world_size
    return Leg(lanes=lanes, live_spans=spec.live_spans)


def is_served(lanes: int, world_size: int, batch: BatchSpec | None) -> bool:
    """Return whether the ranks divide the lanes and the batch, if known, shares out over them."""
    if lanes % world_size:
        return False
    return batch is None or batch.size % (lanes // world_size if batch.scope == "rank" else lanes) == 0


def check_world_size(world_size: int) -> None:
    """Raise unless `world_size` is a possible number of ranks."""
    check_whole("world_size", world_size, 1, MOST_LANES)


def check_whole(name: str, value: Any, least: int, most: int, named_value: str = "") -> int:
    """Return a whole number of any integer type as a Python `int`, since the state must be plain JSON.

    Raises:
        ConfigError: `value` is not a whole number between `least` and `most`.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or not least <= number <= most:
        known = f" or {named_value!r}" if named_value else ""
        limit = f" and at most {most}" if number > most else ""
        raise ConfigError(f"{name} must be an integer of at least {least}{limit}{known}, got {value!r}")
    return number


def store_whole(spec: Any, name: str, least: int, most: int, named_value: str = "", *, label: str = "") -> None:
    """Check a field of a frozen spec by `check_whole` and store the result, unless it is `named_value`."""
    value = getattr(spec, name)
    if not (named_value and isinstance(value, str) and value == named_value):
        object.__setattr__(spec, name, check_whole(label or name, value, least, most, named_value))


def _check_choice(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(f"{name}={value!r} is not known{suggest(value, known)}")
