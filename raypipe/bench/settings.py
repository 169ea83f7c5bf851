"""Which settings of a pipeline are tried: a small grid around what `live_bytes` gives. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from raypipe.decode.spec import DecodeSpec
from raypipe.errors import ConfigError, suggest
from raypipe.plan import WHOLE_EPISODE, OrderSpec

_SHORT_SPAN: Final = 64
"""What short spans are tried with: 64 frames that follow each other decode 2 to 3 times faster than single ones."""
_MIXING_LIVE_SPANS: Final = 32
"""Fewer live spans mix so badly that they are not tried."""

_SHORTEST_SPAN: Final = 32
"""Shorter spans cost more blocks than they save memory."""

_FIELDS: Final = ("where", "when", "threads", "span_frames", "live_spans")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One way to run a pipeline; what it yields differs only in the order."""

    where: Literal["rank", "cluster", "none"]
    """``none``: there is nothing to decode."""
    when: Literal["block", "exit"] = "block"
    threads: int = 1
    """Decoding threads of a rank; without meaning on the cluster."""
    span_frames: int | Literal["episode"] = WHOLE_EPISODE
    live_spans: int = 128

    def __post_init__(self) -> None:
        OrderSpec(seed=0, span_frames=self.span_frames, live_spans=self.live_spans)
        if self.where != "none":
            DecodeSpec(where=self.where, when=self.when, num_threads=self.threads)

    @property
    def name(self) -> str:
        """What the table calls it."""
        span = "whole episodes" if self.span_frames == WHOLE_EPISODE else f"spans of {self.span_frames}"
        order = f"{span}, {self.live_spans} live"
        if self.where == "none":
            return order
        threads = f", {self.threads} thread{'s' * (self.threads > 1)}" if self.where == "rank" else ""
        return f"{self.where}/{self.when}{threads}, {order}"

    def parts(self) -> dict[str, Any]:
        """Return the parts of a `Pipeline` that say it."""
        parts: dict[str, Any] = {"order": {"span_frames": self.span_frames, "live_spans": self.live_spans}}
        if self.where != "none":
            parts["decode"] = {"where": self.where, "when": self.when}
            if self.where == "rank":
                parts["decode"]["num_threads"] = self.threads
        return parts

    def advice(self) -> str:
        """Return the parts as the arguments to paste into ``Pipeline(...)``."""
        return ", ".join(f"{name}={value!r}" for name, value in sorted(self.parts().items()))


def grid(default: Setting, fits: Callable[[Setting], bool], *, num_cpus: int, is_quick: bool = False) -> list[Setting]:
    """Return the settings to try: the default first, then one thing changed at a time, then what only the cluster has.

    A full product would be some hundred settings of which most say nothing new: threads matter on a rank only, and
    spans are cut for memory.

    Args:
        default: what a `Pipeline` resolves from its memory.
        fits: whether the live spans of a setting fit in the memory; what does not is left out.
        num_cpus: of this machine.
        is_quick: only where and when to decode.
    """
    if default.where == "none":
        tried = [] if is_quick else _orders(default)
    else:
        tried = [replace(default, where="cluster", when="block"), replace(default, when="exit")]
        if default.when == "exit" and not fits(tried[0]):
            tried += _fewer_live(replace(default, when="block"), fits)
        if not is_quick:
            threads = {1, max(1, num_cpus // 2), num_cpus, min(2 * num_cpus, 16)}
            tried += [replace(default, threads=count) for count in sorted(threads)]
            orders = _orders(default)
            tried += [*orders, *(replace(setting, where="cluster", when="block") for setting in orders[:1])]
    return [default, *(each for each in dict.fromkeys(tried) if each != default and fits(each))]


def differing(settings: Iterable[Setting], lengths: Sequence[int]) -> list[Setting]:
    """Return the settings that differ on episodes of these lengths, of equal ones the first.

    More live spans than there are spans are no more, and spans longer than the longest episode are whole episodes.
    """
    first: dict[Setting, Setting] = {}
    for setting in settings:
        span = setting.span_frames
        size = max(lengths) if span == WHOLE_EPISODE else min(span, max(lengths))
        num_spans = sum(-(-length // size) for length in lengths)
        effective = replace(setting, span_frames=size, live_spans=min(setting.live_spans, num_spans))
        first.setdefault(effective, setting)
    return list(first.values())


def parse_setting(text: str, default: Setting) -> Setting:
    """Return the setting that a person typed as ``where=rank,threads=2``; what it does not say is the default's."""
    changes: dict[str, Any] = {}
    for word in text.split(","):
        name, _, value = word.strip().partition("=")
        if name not in _FIELDS:
            raise ConfigError(f"setting {text!r} has no field {name!r}{suggest(name, _FIELDS)}")
        if not value:
            raise ConfigError(f"setting {text!r} has {word.strip()!r} without a value; write {name}=VALUE")
        if name in ("where", "when") or value == WHOLE_EPISODE:
            changes[name] = value
        elif value.isdecimal():
            changes[name] = int(value)
        else:
            raise ConfigError(f"setting {text!r}: {name} must be a whole number, got {value!r}")
    if default.where == "none" and set(changes) & {"where", "when", "threads"}:
        raise ConfigError(f"setting {text!r} is of decoding, and there are no cameras: use span_frames, live_spans")
    if changes.get("where") == "none":
        raise ConfigError(f"setting {text!r}: where is 'rank' or 'cluster'")
    return replace(default, **changes)


def setting_of(row: Mapping[str, Any]) -> Setting:
    """Return the setting of a row of a report."""
    return Setting(**{name: row["setting"][name] for name in _FIELDS})


def _fewer_live(setting: Setting, fits: Callable[[Setting], bool]) -> list[Setting]:
    """Return the same with fewer and shorter live spans that fit, on the rank and on the cluster; none if none does.

    Where the memory does not hold the decoded frames of all live spans, they are decoded as they leave. Fewer mix less,
    and may cost far less.
    """
    live_spans = setting.live_spans // 2
    while live_spans >= _MIXING_LIVE_SPANS:
        for span_frames in (_SHORT_SPAN, _SHORTEST_SPAN):
            fewer = replace(setting, live_spans=live_spans, span_frames=span_frames)
            if fits(fewer):
                return [fewer, replace(fewer, where="cluster")]
        live_spans //= 2
    return []


def _orders(default: Setting) -> list[Setting]:
    choices: Iterable[Setting] = (
        replace(default, span_frames=_SHORT_SPAN),
        replace(default, span_frames=WHOLE_EPISODE),
        replace(default, live_spans=max(_MIXING_LIVE_SPANS, default.live_spans // 2)),
        replace(default, live_spans=2 * default.live_spans),
    )
    return [setting for setting in choices if setting != default]
