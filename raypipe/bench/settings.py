"""What to measure: the `BenchSpec`, and the settings to try, a small grid around what `live_bytes` gives. Pure."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from raypipe.decode import DecodeSpec
from raypipe.errors import ConfigError, suggest
from raypipe.plan import DEFAULT_LIVE_BYTES, MOST_LIVE_SPANS, WHOLE_EPISODE, WHOLE_SPAN, OrderSpec
from raypipe.text import counted

_CLIP_LENGTHS: Final = (1, 2, 4, 8)
"""Tried besides one keyframe interval. Longer clips decode no cheaper, and put neighbouring frames in near batches."""
_MIXING_LIVE_SPANS: Final = 32
"""Fewer live spans mix too badly to be worth trying."""

_DECODE_FIELDS: Final = ("where", "threads", "clip_frames")
_ORDER_FIELDS: Final = ("span_frames", "live_spans")
_FIELDS: Final = (*_DECODE_FIELDS, *_ORDER_FIELDS)
_WORDS: Final = {"span_frames": WHOLE_EPISODE, "clip_frames": WHOLE_SPAN}
"""The words that may stand in place of a length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSpec:
    """What is the same for all settings."""

    root: str
    batch_size: int = 64
    action_frames: int = 16
    """Length of the action chunk; not used without a feature ``action``."""
    observation_frames: int = 1
    """Frames of every camera in a sample."""
    seconds: float = 20.0
    """Time of a setting's two epochs at the floor's speed: an epoch has the episodes that the floor decodes in half of
    it. A setting takes about three times as long. An epoch stops twice this time after its first batch."""
    live_bytes: int = DEFAULT_LIVE_BYTES
    gpu_samples_per_s: float = 0.0
    """How many samples a GPU takes per second. The table then shows for every setting how many cores feed it; 0: it
    does not."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "action_frames", "observation_frames", "live_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.seconds > 0:
            raise ConfigError(f"seconds must be more than 0, got {self.seconds}")
        if not 0 <= self.gpu_samples_per_s < math.inf:
            raise ConfigError(f"gpu_samples_per_s must be a number from 0 on, got {self.gpu_samples_per_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One way to run a pipeline. Settings differ only in the order of what they yield."""

    where: Literal["rank", "cluster", "none"]
    """``none``: there is nothing to decode."""
    threads: int = 1
    """Decoding threads of a rank; not used on the cluster."""
    clip_frames: int | Literal["span"] = WHOLE_SPAN
    """Frames that are decoded together; not used if there is nothing to decode."""
    span_frames: int | Literal["episode"] = WHOLE_EPISODE
    live_spans: int = 128

    def __post_init__(self) -> None:
        OrderSpec(seed=0, span_frames=self.span_frames, live_spans=self.live_spans, clip_frames=self.clip_frames)
        if self.where != "none":
            DecodeSpec(where=self.where, num_threads=self.threads)

    @property
    def name(self) -> str:
        """The setting's name in the table."""
        span = "whole episodes" if self.span_frames == WHOLE_EPISODE else f"spans of {self.span_frames}"
        order = f"{span}, {self.live_spans} live"
        if self.where == "none":
            return order
        threads = f", {counted(self.threads, 'thread')}" if self.where == "rank" else ""
        clips = "no clips" if self.clip_frames == WHOLE_SPAN else f"clips of {self.clip_frames}"
        return f"{self.where}{threads}, {clips}, {order}"

    def parts(self) -> dict[str, Any]:
        """Return the parts of a `Pipeline` that make this setting."""
        parts: dict[str, Any] = {"order": {"span_frames": self.span_frames, "live_spans": self.live_spans}}
        if self.where != "none":
            parts["order"]["clip_frames"] = self.clip_frames
            parts["decode"] = {"where": self.where}
            if self.where == "rank":
                parts["decode"]["num_threads"] = self.threads
        return parts

    def advice(self) -> str:
        """Return the parts as the arguments to paste into ``Pipeline(...)``."""
        return ", ".join(f"{name}={value!r}" for name, value in sorted(self.parts().items()))


def grid(
    default: Setting,
    fits: Callable[[Setting], bool],
    *,
    num_cpus: int,
    keyframe_interval: int = 1,
    is_quick: bool = False,
) -> list[Setting]:
    """Return the settings to try: the default first, then one thing changed at a time.

    A full product would give some hundred settings, most of which show nothing new.

    Args:
        default: what a `Pipeline` chooses for its memory; it decodes in the rank, or nothing.
        fits: returns whether a setting fits in memory; others are left out.
        num_cpus: CPUs of this machine.
        keyframe_interval: of the videos, in frames; also tried as a clip length.
        is_quick: only the other executor and one other clip length.
    """
    tried: list[Setting] = []
    if default.where == "rank":
        tried.append(replace(default, where="cluster"))
        clips = [each for each in _clips(default, keyframe_interval) if fits(each)]
        tried += clips[:1] if is_quick else clips
    if not is_quick:
        if default.where == "rank":
            counts = {1, max(1, num_cpus // 2), num_cpus, min(2 * num_cpus, 16)}
            tried += [replace(default, threads=count) for count in sorted(counts)]
        # Half the live spans, if those still mix, and up to twice as many.
        fewer, more = default.live_spans // 2, min(2 * default.live_spans, MOST_LIVE_SPANS)
        live = [*([fewer] if fewer >= _MIXING_LIVE_SPANS else []), more]
        tried += [replace(default, live_spans=count) for count in live]
    return [default, *(each for each in dict.fromkeys(tried) if each != default and fits(each))]


def differing(settings: Iterable[Setting], lengths: Sequence[int]) -> list[Setting]:
    """Return the settings that really differ on episodes of these lengths; among equal ones, the first.

    Live spans beyond the number of spans change nothing, nor do spans or clips longer than the longest episode.
    """
    first: dict[Setting, Setting] = {}
    longest = max(lengths)
    for setting in settings:
        span, clip = setting.span_frames, setting.clip_frames
        size = longest if span == WHOLE_EPISODE else min(span, longest)
        num_spans = sum(-(-length // size) for length in lengths)
        effective = replace(
            setting,
            span_frames=size,
            live_spans=min(setting.live_spans, num_spans),
            clip_frames=clip if clip == WHOLE_SPAN else min(clip, longest),
        )
        first.setdefault(effective, setting)
    return list(first.values())


def parse_setting(text: str, default: Setting) -> Setting:
    """Return the setting that a person typed as ``where=rank,threads=2``; missing fields come from the default."""
    changes: dict[str, Any] = {}
    for word in text.split(","):
        name, _, value = word.strip().partition("=")
        if name not in _FIELDS:
            raise ConfigError(f"setting {text!r} has no field {name!r}{suggest(name, _FIELDS)}")
        if not value:
            raise ConfigError(f"setting {text!r} has {word.strip()!r} without a value; write {name}=VALUE")
        if name == "where" or value == _WORDS.get(name):
            changes[name] = value
        elif value.isdecimal():
            changes[name] = int(value)
        else:
            choice = f" or {_WORDS[name]!r}" if name in _WORDS else ""
            raise ConfigError(f"setting {text!r}: {name} must be a whole number{choice}, got {value!r}")
    if default.where == "none" and set(changes) & set(_DECODE_FIELDS):
        raise ConfigError(f"setting {text!r} is of decoding, and there are no cameras: use {', '.join(_ORDER_FIELDS)}")
    if changes.get("where") == "none":
        raise ConfigError(f"setting {text!r}: where is 'rank' or 'cluster'")
    return replace(default, **changes)


def _clips(default: Setting, keyframe_interval: int) -> list[Setting]:
    """Return the default with other clip lengths: first longer ones, then shorter ones, each from the nearest on.

    The default is the shortest that should decode cheaply. So the first question is whether longer ones are cheaper.
    """
    lengths = sorted({*_CLIP_LENGTHS, keyframe_interval})
    own = 0 if default.clip_frames == WHOLE_SPAN else default.clip_frames
    ordered = [*(length for length in lengths if length > own), *(length for length in lengths[::-1] if length < own)]
    return [replace(default, clip_frames=length) for length in ordered]
