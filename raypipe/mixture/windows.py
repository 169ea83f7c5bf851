"""The windows of a mixture for each member, under its own names and at its own frame rate.

The user gives windows once, by names in the mixture. Frame rates differ, so seconds become another number of frames in
each dataset. Seconds that fall between two frames are an error, unless a common `rate` takes the nearest one.

::

    0.1 s     at 30 fps -> frame 3      at 50 fps -> frame 5      at 15 fps -> 1.5: no frame
    k = 3     at its own rate -> 3      with rate=10, at 50 fps: 0.3 s -> 15
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Context
from typing import Any

from raypipe.dataset import (
    ActionMap,
    ActionSpec,
    Dataset,
    MemberMap,
    Schema,
    WindowSpec,
    check_window,
    find_dims,
    is_pattern,
    map_actions,
    window_from_offsets,
)
from raypipe.errors import ConfigError, suggest
from raypipe.mixture.offer import list_by_value
from raypipe.mixture.spec import MixtureSpec
from raypipe.text import counted


def member_windows(
    schema: Schema,
    spec: MixtureSpec,
    members_fps: Sequence[float],
    *,
    delta_timestamps: Mapping[str, Sequence[float]] | None = None,
    offsets: Mapping[str, Sequence[int]] | None = None,
) -> tuple[WindowSpec, ...]:
    """Return the window of each member under its own names, from windows given by names in the mixture.

    Seconds become the frame of each member within its tolerance. Frames count at each member's own rate. With a common
    `spec.rate`, frame ``k`` is at ``k / rate`` seconds, and a slot takes the nearest frame, whatever its distance. A
    member has no window for a feature that it lacks.

    Args:
        spec: the mixture of exactly the members of `schema`, in their order.

    Raises:
        ConfigError: a name is unknown, or seconds fall between frames; the message lists all members and seconds.
    """
    assert len(spec.members) == len(schema.members) == len(members_fps), "the spec is of other members"
    if (delta_timestamps is None) == (offsets is None):
        raise ConfigError("give either delta_timestamps (seconds) or offsets (frames)")
    _check_names(delta_timestamps or offsets or {}, schema)
    if offsets is not None:
        frames = window_from_offsets(offsets).offsets
        if isinstance(spec.rate, str):
            return tuple(_own_window(one, frames) for one in schema.members)
        seconds = {name: [number / spec.rate for number in numbers] for name, numbers in frames.items()}
    else:
        seconds = _seconds(delta_timestamps or {})
    nearest = _nearest_frame
    if isinstance(spec.rate, str):
        _check_distances(schema, spec, members_fps, seconds)
        nearest = _promised_frame
    return tuple(
        _own_window(one, {name: tuple(nearest(delta, fps) for delta in deltas) for name, deltas in seconds.items()})
        for one, fps in zip(schema.members, members_fps, strict=True)
    )


def member_actions(
    spec: ActionSpec, schema: Schema, members: Sequence[tuple[str, Dataset]]
) -> tuple[ActionMap | None, ...]:
    """Return the action representation of each member; None for a member that has no action.

    Raises:
        ConfigError: a member lacks the state or a number, or a pattern fits no member.
    """
    _check_names({spec.feature: (), spec.to: ()}, schema)
    patterns = [one for one in (*spec.absolute, *spec.wrap) if is_pattern(one)]
    maps: list[ActionMap | None] = []
    for (name, dataset), own in zip(members, schema.members, strict=True):
        if spec.feature not in own.rows:
            maps.append(None)
            continue
        if spec.to not in own.rows:
            raise ConfigError(
                f"actions are {spec.mode} to {spec.to!r}, which member {name!r} does not have; drop its "
                f"{spec.feature!r}, or leave it out"
            )
        action, state = own.rows[spec.feature], own.rows[spec.to]
        place, features = f"member {name!r}", dataset.row_features
        maps.append(map_actions(spec, features, action=action, state=state, place=place, known=patterns))
        check_window(spec, action, dataset.window)
    having = [(one.action, dataset) for one, (_, dataset) in zip(maps, members, strict=True) if one is not None]
    for one in patterns:
        if not any(find_dims(one, data.row_features[own], "", is_needed=False) for own, data in having):
            names = {name for own, data in having for name in data.row_features[own].names}
            raise ConfigError(
                f"no member has a number of {spec.feature!r} that fits {one!r}{suggest(str(one), sorted(names))}"
            )
    return tuple(maps)


def add_windows(schema: Schema, windows: Sequence[tuple[str, WindowSpec]]) -> Schema:
    """Return the schema with the window lengths of its members; `windows` pairs each with its name for messages.

    Raises:
        ConfigError: the members with a feature do not agree on the length of its window.
    """
    lengths: dict[str, int] = {}
    for name in schema.features:
        found = {}
        for position, (own, (who, window)) in enumerate(zip(schema.members, windows, strict=True)):
            own_name = {**own.rows, **own.cameras}.get(name)
            if own_name is not None:
                found[f"member {position} ({who})"] = len(window.offsets.get(own_name, ()))
        if len(set(found.values())) > 1:
            who = list_by_value({member: counted(length, "frame") for member, length in found.items()})
            raise ConfigError(f"the windows of {name!r} differ in length: {who}; give every member the same number")
        if any(found.values()):
            lengths[name] = max(found.values())
    # As in one dataset: a window of one frame has a time axis only for images stored in rows, and then in all members.
    kept = [name for name in schema.cameras if name in lengths]
    time_axes = tuple(name for name in kept if lengths[name] > 1 or schema.features[name].kind == "image")
    return replace(schema, windows=lengths, time_axes=time_axes)


def _check_names(given: Mapping[str, Any], schema: Schema) -> None:
    unknown = [name for name in given if name not in schema.features]
    if unknown:
        raise ConfigError(
            f"the window names {', '.join(map(repr, unknown))}, which the mixture does not have"
            f"{suggest(unknown[0], schema.features)}"
        )


def _seconds(given: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    seconds = {}
    for name, deltas in given.items():
        try:
            seconds[name] = [float(delta) for delta in deltas]
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the window of {name!r} is {deltas!r}; give a list of seconds") from error
        if not all(map(math.isfinite, seconds[name])):
            raise ConfigError(f"the window of {name!r} is {deltas!r}; give seconds that are finite")
    return seconds


def _promised_frame(delta_s: float, fps: float) -> int:
    # Round as for the window of a single dataset.
    return round(delta_s * fps)


def _nearest_frame(delta_s: float, fps: float) -> int:
    # Halves go up, not to the even number as in round(), so that slots half a frame apart take each frame twice. The
    # inner rounding treats a float's 1.4999999 as a half too.
    return math.floor(round(delta_s * fps, 6) + 0.5)


def _own_window(member: MemberMap, frames: Mapping[str, tuple[int, ...]]) -> WindowSpec:
    own = {**member.rows, **member.cameras}
    return WindowSpec(offsets={own[name]: numbers for name, numbers in frames.items() if name in own})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Miss:
    """A member without frames where the window needs them."""

    text: str
    distance_s: float
    key: str
    """The place in the file of the tolerance that would allow it."""


def _check_distances(
    schema: Schema, spec: MixtureSpec, members_fps: Sequence[float], seconds: Mapping[str, Sequence[float]]
) -> None:
    misses = []
    for member, own, fps in zip(spec.members, schema.members, members_fps, strict=True):
        is_own = not isinstance(member.tolerance_s, str)
        tolerance_s = spec.tolerance_s if isinstance(member.tolerance_s, str) else member.tolerance_s
        wrong: dict[str, list[float]] = {}
        distance_s = 0.0
        for name, deltas in seconds.items():
            for delta in deltas if name in own.rows or name in own.cameras else ():
                away_s = abs(delta * fps - _promised_frame(delta, fps)) / fps
                if away_s > tolerance_s:
                    wrong.setdefault(name, []).append(delta)
                    distance_s = max(distance_s, away_s)
        if wrong:
            text = f"{member.name} at {fps:g} fps, within {tolerance_s:g} s: {wrong}"
            key = f"under {member.name}" if is_own else "for the whole mixture"
            misses.append(_Miss(text=text, distance_s=distance_s, key=key))
    if misses:
        raise ConfigError(_explain_misses(misses, max(members_fps)))


def _explain_misses(misses: Sequence[_Miss], fastest_fps: float) -> str:
    needed: dict[str, float] = {}
    for miss in misses:
        needed[miss.key] = max(needed.get(miss.key, 0.0), miss.distance_s)
    lines = ["delta_timestamps must fall on frames of every member, and these do not:"]
    lines += [f"  {miss.text}" for miss in misses]
    lines += ["Give other seconds, or write in the mixture file the smallest tolerance that takes them:"]
    lines += [f"  {key}:  tolerance_s: {_round_up(value):g}" for key, value in needed.items()]
    lines += [f"or let every slot go to the nearest frame, however far:  rate: {fastest_fps:g}"]
    return "\n".join(lines)


def _round_up(value: float) -> float:
    """Return `value` rounded up to two digits."""
    return float(Context(prec=2, rounding=ROUND_CEILING).create_decimal_from_float(value))
