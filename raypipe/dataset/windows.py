"""The frames around a frame, and how the actions among them are represented. Pure arithmetic on arrays.

A window never leaves its episode: a slot outside repeats the nearest frame of the episode and is marked as padding.

::

    episode of 5 frames, offsets (-1, 0, +2)        rows          padding
      frame 0                                       0 0 2         x . .
      frame 3                                       2 3 4         . . x

Actions can be relative to the state, or to the action before. `ActionMap.encode` starts from the window as a sample
holds it without `actions`, padding included, so `decode` gives that window back.

::

    state of frame t           s                          what a sample holds without `actions`
    window of the action       a0      a1      a2      a2      the last slot is padding: it repeats
      relative                 a0-s    a1-s    a2-s    a2-s
      delta                    a0-s    a1-a0   a2-a1   0

The state is always that of the sample's own frame, whatever the offsets of the window. A sample has float32 values;
`encode` subtracts them in float64 and rounds once to float32.
"""

import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import ConfigError, suggest
from raypipe.format import Feature
from raypipe.text import MOST_COUNT, check_choice

TOLERANCE_S = 1e-4
"""How far a delta may be from a multiple of 1/fps, in seconds: LeRobot's default."""

ActionMode = Literal["relative", "delta"]
Dimension = str | int
"""One number of a vector: its name, a pattern of names such as ``*gripper*``, or its position."""

REPRESENTATION: Final = "_representation"
"""Suffix to the action's name: the batch key that says how each sample represents its actions."""

ABSOLUTE: Final = "absolute"
"""The representation of actions as the dataset stores them."""

_WILD: Final = frozenset("*?[")


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSpec:
    """The frames that a sample holds for each feature, relative to the sample's own frame."""

    offsets: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Relative frame numbers by feature. A feature that is not listed gives its own frame only, unpadded."""

    def __post_init__(self) -> None:
        for key, offsets in self.offsets.items():
            if not offsets:
                raise ConfigError(f"the window of {key!r} is empty; give at least one offset, or leave it out")
            wrong = [
                offset
                for offset in offsets
                if isinstance(offset, bool) or not isinstance(offset, int) or abs(offset) > MOST_COUNT
            ]
            if wrong:
                raise ConfigError(
                    f"the window of {key!r} has offsets that are not frame numbers: {wrong}; give integers, or "
                    f"seconds as delta_timestamps"
                )

    def check_features(self, known: Sequence[str]) -> None:
        """Raise a `ConfigError` for a window on a feature that is not in `known`."""
        for key in self.offsets:
            if key not in known:
                raise ConfigError(f"the window names an unknown feature {key!r}{suggest(key, known)}")

    def reach(self, keys: Sequence[str]) -> tuple[int, int]:
        """Return the smallest and the largest offset over `keys` and 0."""
        used = [offset for key in keys for offset in self.offsets.get(key, ())]
        return min([0, *used]), max([0, *used])


def window_from_timestamps(
    delta_timestamps: Mapping[str, Sequence[float]], *, fps: float, tolerance_s: float = TOLERANCE_S
) -> WindowSpec:
    """Return the window with slots `delta_timestamps` seconds away.

    Raises:
        ConfigError: a delta is further than `tolerance_s` from a multiple of 1/fps; the message lists all of them.
    """
    seconds = as_seconds(delta_timestamps)
    wrong = between_frames(seconds, fps, tolerance_s)
    if wrong:
        raise ConfigError(
            f"delta_timestamps must be multiples of 1/fps = {1 / fps:.6g} s, within {tolerance_s:g} s, and these "
            f"are not: {wrong}. Round them to the frame rate, or give frame offsets instead."
        )
    return WindowSpec(offsets={key: tuple(round(delta * fps) for delta in deltas) for key, deltas in seconds.items()})


def as_seconds(given: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Return windows given in seconds as plain numbers; raise a `ConfigError` for any that are not finite numbers."""
    _check_windows("delta_timestamps", given, "seconds")
    seconds = {}
    for key, deltas in given.items():
        try:
            is_finite = all(map(math.isfinite, deltas))
        except TypeError:
            is_finite = False
        if not is_finite:
            raise ConfigError(f"the window of {key!r} is {deltas!r}; give a list of seconds, all finite numbers")
        seconds[key] = [float(delta) for delta in deltas]
    return seconds


def _check_windows(name: str, given: Any, values: str) -> None:
    if not isinstance(given, Mapping):
        raise ConfigError(f"{name} is {given!r}; give a dict of features with lists of {values}")


def between_frames(seconds: Mapping[str, Sequence[float]], fps: float, tolerance_s: float) -> dict[str, list[float]]:
    """Return the deltas of each window that are further than `tolerance_s` from a multiple of 1/fps."""
    wrong = {
        key: [delta for delta in deltas if off_frame_s(delta, fps) > tolerance_s] for key, deltas in seconds.items()
    }
    return {key: deltas for key, deltas in wrong.items() if deltas}


def off_frame_s(delta_s: float, fps: float) -> float:
    """Return how far a delta is from the nearest multiple of 1/fps, in seconds."""
    return abs(delta_s * fps - round(delta_s * fps)) / fps


def window_from_offsets(offsets: Mapping[str, Sequence[int]]) -> WindowSpec:
    """Return the window of relative frame numbers, given as any sequences of integers."""
    _check_windows("offsets", offsets, "frame numbers")
    plain = {}
    for key, values in offsets.items():
        try:
            plain[key] = tuple(operator.index(value) for value in values)
        except TypeError as error:
            raise ConfigError(
                f"the window of {key!r} is {values!r}; give a list of frame numbers, or seconds as delta_timestamps"
            ) from error
    return WindowSpec(offsets=plain)


def window_rows(
    anchors: NDArray[np.int64], num_frames: int | NDArray[np.int64], offsets: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the frame in every window slot ``(len(anchors), len(offsets))``, and which slots are padding.

    Slot ``[i, j]`` is frame ``anchors[i] + offsets[j]`` of an episode of `num_frames` frames, ``(len(anchors), 1)`` if
    anchors are of unlike episodes.
    """
    wanted = anchors[:, None] + np.asarray(offsets, dtype=np.int64)
    rows = wanted.clip(0, num_frames - 1)
    return rows, rows != wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionSpec:
    """How the actions of a window are represented."""

    mode: ActionMode
    """``relative``: subtract the state of the sample's frame from every action of the window. ``delta``: subtract the
    action of the slot before; from the first, subtract that state."""

    to: str = "observation.state"
    """The feature that actions are relative to."""

    feature: str = "action"

    absolute: tuple[Dimension, ...] = ()
    """Numbers of the action that stay as they are, such as a gripper's: names, patterns of names, or positions."""

    wrap: Mapping[Dimension, float] = field(default_factory=dict)
    """Angles, with the period of each: 360, or 6.283185307179586. Their differences go the short way round: from minus
    half a period to half a period."""

    match: Mapping[Dimension, Dimension] = field(default_factory=dict)
    """Number of the action -> the number of `to` that it is relative to. By default that is the one with the same name,
    or with the same position if both vectors are equally wide."""

    def __post_init__(self) -> None:
        check_choice("the mode of actions", self.mode, get_args(ActionMode))
        for name in ("to", "feature"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"actions has {name}={getattr(self, name)!r}; give the name of a feature")
        if isinstance(self.absolute, str) or not isinstance(self.absolute, Iterable):
            raise ConfigError(f"actions has absolute={self.absolute!r}; give a list of names, as [{self.absolute!r}]")
        for name, meaning in (("wrap", "period"), ("match", f"number of {self.to!r}")):
            given = getattr(self, name)
            if not isinstance(given, Mapping):
                raise ConfigError(f"actions has {name}={given!r}; give a mapping of names -> {meaning}")
            object.__setattr__(self, name, dict(given))
        object.__setattr__(self, "absolute", tuple(self.absolute))
        for one in (*self.absolute, *self.wrap, *self.match, *self.match.values()):
            if isinstance(one, bool) or not isinstance(one, str | int):
                raise ConfigError(f"actions names {one!r}; give the name or the position of a number")
        for one, period in self.wrap.items():
            if isinstance(period, bool) or not isinstance(period, int | float) or not 0 < period < math.inf:
                raise ConfigError(f"actions has wrap={{{one!r}: {period!r}}}; give the period, 360 or 2 * math.pi")

    def __str__(self) -> str:
        """Return the representation as one line, the same for equal ones: batches, states and statistics carry it."""
        told = {
            "absolute": [str(one) for one in self.absolute],
            "wrap": [f"{one} at {period:.12g}" for one, period in self.wrap.items()],
            "match": [f"{one} to {other}" for one, other in self.match.items()],
        }
        listed = [f"{name} {', '.join(sorted(values))}" for name, values in told.items() if values]
        return "; ".join([f"{self.mode} to {self.to}", *listed])


@dataclass(frozen=True, kw_only=True)
class ActionMap:
    """An `ActionSpec` applied to one dataset: which numbers of the action change, and relative to what."""

    spec: ActionSpec
    """As the user gave it; in a mixture it has the mixture's names."""

    action: str
    """The dataset's own name of the action."""
    state: str
    dims: tuple[int, ...]
    """The numbers of the action that change."""
    state_dims: tuple[int, ...]
    """For each of `dims`, the number of the state that it is relative to."""
    periods: tuple[float, ...]
    """For each of `dims`, its period; 0 if it does not wrap."""
    is_number: bool = False
    """Whether the action is one number; batches have no axis for it then."""
    is_state_number: bool = False

    def among(self, names: Collection[str], owner: str) -> "ActionMap | None":
        """Return this map if `names`, as in the spec, include the action; else None.

        Raises:
            ConfigError: `names` include the action, but not the feature that it is relative to.
        """
        if self.spec.feature in names and self.spec.to not in names:
            raise ConfigError(
                f"the features to select of {owner} have {self.spec.feature!r}, which is {self.spec.mode} to "
                f"{self.spec.to!r}, and not that; name it too"
            )
        return self if self.spec.feature in names else None

    def encode(self, actions: NDArray[Any], state: NDArray[Any], *, has_window: bool) -> NDArray[Any]:
        """Return actions in this representation.

        Args:
            actions: ``(N, [T,] [D])``; a window has the time axis, a scalar lacks the last one.
            state: ``(N, [S])``, of the samples' own frames.
        """
        num_slots = actions.shape[1] if has_window else 1
        window = actions.reshape(len(actions), num_slots, -1)
        moved = window[..., self.dims].astype(np.float64)
        base = state.reshape(len(state), 1, -1)[..., self.state_dims].astype(np.float64)
        before = np.concatenate([base, moved[:, :-1]], axis=1) if self.spec.mode == "delta" else base
        difference = moved - before
        if any(self.periods):
            # Angles go the short way round.
            period = np.array(self.periods)
            whole = np.where(period > 0, period, 1.0)
            difference -= np.where(period > 0, np.floor(difference / whole + 0.5), 0.0) * whole
        encoded = window.copy()
        encoded[..., self.dims] = difference
        return encoded.reshape(actions.shape)

    def decode(self, actions: Any, state: Any) -> Any:
        """Return actions as the dataset stores them: turn a policy's output, unnormalised, into actions for the robot.

        It computes in the dtype of `actions`. An angle that wraps comes back without a jump, so it may lie outside its
        period.

        Args:
            actions: ``(..., [T,] D)``, numpy or torch; an action of one number may lack its axis, as in batches.
            state: ``(..., S)``, likewise, of the frame that the actions are for: one axis fewer than a window.
        """
        # Batches have no axis for an action of one number; policies may have one.
        is_bare = self.is_number and actions.shape[-1:] != (1,)
        actions = actions[..., None] if is_bare else actions
        if self.is_state_number and (is_bare or state.shape[-1:] != (1,) or actions.ndim == state.ndim + 2):
            state = state[..., None]
        has_window = actions.ndim == state.ndim + 1
        if not has_window and actions.ndim != state.ndim:
            raise ConfigError(
                f"actions of the shape {tuple(actions.shape)} need a state ([B,] S) of one frame each, got "
                f"{tuple(state.shape)}"
            )
        dims, decoded = list(self.dims), actions + 0
        base = state[..., list(self.state_dims)]
        moved = actions[..., dims]
        if has_window:
            base = base[..., None, :]
            moved = moved.cumsum(-2) if self.spec.mode == "delta" else moved
        decoded[..., dims] = moved + base
        return decoded[..., 0] if is_bare else decoded


def map_actions(
    spec: ActionSpec,
    features: Mapping[str, Feature],
    *,
    action: str,
    state: str,
    place: str,
    known: Sequence[Dimension] = (),
) -> ActionMap:
    """Return the spec applied to the actions of one dataset.

    Args:
        features: of the dataset's rows, by its own names.
        action: the dataset's own name of `spec.feature`.
        state: the dataset's own name of `spec.to`.
        place: the dataset, for messages.
        known: entries of `spec.absolute` and keys of `spec.wrap` that this dataset may lack, because others have them.

    Raises:
        ConfigError: a feature or a number is missing, or action and state do not fit; the message names both.
    """
    own, base = _vector(features, action, place), _vector(features, state, place)
    if np.dtype(own.dtype).kind != "f":
        raise ConfigError(f"{action!r} of {place} is {own.dtype}; only actions of floats can be {spec.mode}")
    absolute = [dim for one in spec.absolute for dim in find_dims(one, own, place, is_needed=one not in known)]
    periods = {
        dim: float(period)
        for one, period in spec.wrap.items()
        for dim in find_dims(one, own, place, is_needed=one not in known)
    }
    for dim in sorted(periods.keys() & set(absolute)):
        raise ConfigError(f"actions has {_name(own, dim)!r} of {place} in absolute and in wrap; say one of them")
    dims = tuple(dim for dim in range(own.shape[0]) if dim not in absolute)
    return ActionMap(
        spec=spec,
        action=action,
        state=state,
        dims=dims,
        state_dims=_matched(spec, own, base, dims, place),
        periods=tuple(periods.get(dim, 0.0) for dim in dims),
        is_number=own.shape[0] == 1,
        is_state_number=base.shape[0] == 1,
    )


def check_window(spec: ActionSpec, action: str, window: WindowSpec) -> None:
    """Raise a `ConfigError` if differences of consecutive slots would not go forward in time."""
    offsets = window.offsets.get(action, (0,))
    if spec.mode == "delta" and any(later <= earlier for earlier, later in pairwise(offsets)):
        raise ConfigError(
            f"actions are {spec.mode}, each less the one before, and the window of {action!r} is {list(offsets)}; give "
            f"offsets that ascend"
        )


def find_dims(one: Dimension, feature: Feature, place: str, *, is_needed: bool = True) -> tuple[int, ...]:
    """Return the positions in a feature that a name, a pattern or a position selects."""
    width = feature.shape[0]
    if isinstance(one, int):
        if not 0 <= one < width:
            raise ConfigError(f"{feature.name!r} of {place} has no number {one}; it has {width}, counted from 0")
        return (one,)
    names = feature.names[:width]
    exact = [dim for dim, name in enumerate(names) if name == one]
    found = exact or [dim for dim, name in enumerate(names) if _WILD & set(one) and fnmatchcase(name, one)]
    if not found and is_needed:
        known = suggest(one, names) if names else "; it names none: give positions, counted from 0"
        raise ConfigError(f"{feature.name!r} of {place} has no number {one!r}{known}")
    return tuple(found)


def is_pattern(one: Dimension) -> bool:
    """Return whether `one` is a pattern; some datasets of a mixture may have no name that fits it."""
    return isinstance(one, str) and bool(_WILD & set(one))


def _vector(features: Mapping[str, Feature], name: str, place: str) -> Feature:
    if name not in features:
        vectors = [key for key, feature in features.items() if feature.kind == "vector"]
        raise ConfigError(f"actions names {name!r}, which {place} does not have{suggest(name, vectors)}")
    feature = features[name]
    if feature.kind != "vector" or len(feature.shape) != 1:
        raise ConfigError(
            f"actions names {name!r}, which is {feature.kind} {list(feature.shape)} in {place}; give a vector"
        )
    return feature


def _name(feature: Feature, dim: int) -> Dimension:
    return feature.names[dim] if len(feature.names) == feature.shape[0] else dim


def _matched(spec: ActionSpec, own: Feature, base: Feature, dims: Sequence[int], place: str) -> tuple[int, ...]:
    """Return the position in the state for each of `dims`."""
    given: dict[int, int] = {}
    for one, other in spec.match.items():
        to = find_dims(other, base, place)
        if len(to) != 1:
            raise ConfigError(f"actions matches {one!r} to {other!r}, which is {len(to)} numbers of {base.name!r}")
        given.update(dict.fromkeys(find_dims(one, own, place), to[0]))
    rest = [dim for dim in dims if dim not in given]
    names, state_names = [_name(own, dim) for dim in range(own.shape[0])], base.names[: base.shape[0]]
    if all(state_names.count(str(names[dim])) == 1 for dim in rest):
        return tuple(given.get(dim, -1) if dim in given else state_names.index(str(names[dim])) for dim in dims)
    moved = [dim for dim in rest if names[dim] in state_names and state_names[dim : dim + 1] != (names[dim],)]
    if own.shape[0] != base.shape[0] or moved:
        raise ConfigError(
            f"actions cannot be {spec.mode} to {spec.to!r}: in {place} {_tell(own)}, and {_tell(base)}. Say which "
            f"number belongs to which, as match={{{names[rest[0]]!r}: {(state_names or (0,))[0]!r}}}, or name those "
            f"that stay as they are in absolute=[...]."
        )
    return tuple(given.get(dim, dim) for dim in dims)


def _tell(feature: Feature) -> str:
    names = f" ({', '.join(feature.names)})" if feature.names else ""
    return f"{feature.name!r} has {feature.shape[0]} numbers{names}"
