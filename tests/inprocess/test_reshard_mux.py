"""Packets into an mp4 and out again: nothing is lost, and every frame is shown when it should be."""

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.errors import DatasetError
from raypipe.format import read_video_index
from raypipe.reshard.mp4 import Description, Track, TrackClip, packet_ranges, read_track, write_mp4
from raypipe.reshard.videos import clean_cuts
from raypipe.storage import open_storage

TICKS = 512
ENTRY = b"\0\0\0\x5eavc1" + bytes(78) + b"\0\0\0\x08avcC"
DESCRIPTION = Description(samples=b"\0\0\0\0\0\0\0\1" + ENTRY, timescale=15360, display=bytes(44))


def make_track(sizes, order, is_keyframe, start=0):
    """Packets back to back, packet i showing frame ``order[i]``."""
    size = np.array(sizes, dtype=np.int64)
    count = len(size)
    return Track(
        offset=start + np.cumsum(size) - size,
        size=size,
        duration=np.full(count, TICKS),
        pts=np.array(order, dtype=np.int64) * TICKS,
        is_keyframe=np.array(is_keyframe),
        description=DESCRIPTION,
        has_other_tracks=False,
    )


@st.composite
def groups(draw):
    """Tracks of closed groups of pictures: a keyframe, then its frames in any order."""
    sizes, order, is_keyframe = [], [], []
    for _ in range(draw(st.integers(1, 4))):
        length = draw(st.integers(1, 5))
        rest = draw(st.permutations(range(1, length)))
        order += [len(sizes) + frame for frame in (0, *rest)]
        is_keyframe += [True] + [False] * (length - 1)
        sizes += draw(st.lists(st.integers(1, 20), min_size=length, max_size=length))
    return make_track(sizes, order, is_keyframe)


@given(st.lists(groups(), min_size=1, max_size=4))
def test_joined_clips_keep_packets_and_follow_one_another(tmp_path_factory, tracks):
    folder = tmp_path_factory.mktemp("mux")
    storage = open_storage(folder)
    clips, expected = [], []
    for number, track in enumerate(tracks):
        content = bytes((number * 37 + i) % 251 for i in range(int(track.size.sum())))
        (folder / f"{number}.bin").write_bytes(content)
        clips.append(TrackClip(storage=storage, name=f"{number}.bin", track=track, start=0, stop=len(track)))
        expected += [content[o : o + s] for o, s in zip(track.offset.tolist(), track.size.tolist(), strict=True)]
    stream = io.BytesIO()

    write_mp4(stream, clips, TICKS)

    (folder / "out.mp4").write_bytes(stream.getvalue())
    joined = read_track(storage, "out.mp4")
    content = stream.getvalue()
    found = [content[o : o + s] for o, s in zip(joined.offset.tolist(), joined.size.tolist(), strict=True)]
    assert found == expected
    starts = np.cumsum([0, *(len(track) * TICKS for track in tracks)])
    assert joined.pts.tolist() == [int(s + p) for s, track in zip(starts, tracks, strict=False) for p in track.pts]
    assert joined.is_keyframe.tolist() == [bool(key) for track in tracks for key in track.is_keyframe]
    assert joined.description == DESCRIPTION
    index = read_video_index(storage, "out.mp4")
    np.testing.assert_array_equal(index.pts_s, np.arange(len(found)) * TICKS / 15360)


@given(groups(), st.data())
def test_a_video_is_cut_only_where_packets_before_are_frames_before(track, data):
    order = np.argsort(track.pts, kind="stable")

    is_clean = clean_cuts(track, order)

    for frame in range(len(track) + 1):
        before = set((track.pts[:frame] // TICKS).tolist())
        whole = before == set(range(frame))
        starts_here = frame == len(track) or bool(track.is_keyframe[frame])
        assert is_clean[frame] == (whole and starts_here)


def test_a_keyframe_whose_followers_are_shown_before_it_is_no_place_to_cut():
    # An open group: packet 3 is a keyframe, and packet 4 is shown before it.
    track = make_track([1] * 5, [0, 1, 2, 4, 3], [True, False, False, True, False])

    assert clean_cuts(track, np.argsort(track.pts)).tolist() == [True, False, False, False, False, True]


def test_a_keyframe_behind_frames_that_are_shown_after_it_is_no_place_to_cut():
    track = make_track([1] * 4, [0, 3, 2, 1], [True, False, True, False])

    assert clean_cuts(track, np.argsort(track.pts)).tolist() == [True, False, False, False, True]


def test_packets_that_lie_back_to_back_are_one_range():
    track = make_track([3, 4, 5], [0, 1, 2], [True] * 3, start=10)
    apart = Track(
        offset=np.array([10, 20, 24]),
        size=np.array([3, 4, 5]),
        duration=track.duration,
        pts=track.pts,
        is_keyframe=track.is_keyframe,
        description=DESCRIPTION,
        has_other_tracks=False,
    )

    assert list(packet_ranges(track, 0, 3)) == [(10, 22)]
    assert list(packet_ranges(apart, 0, 3)) == [(10, 13), (20, 29)]


def test_a_last_frame_without_a_duration_is_shown_for_one_frame(tmp_path):
    track = make_track([3], [0], [True])
    silent = Track(
        offset=track.offset,
        size=track.size,
        duration=np.array([0]),
        pts=track.pts,
        is_keyframe=track.is_keyframe,
        description=DESCRIPTION,
        has_other_tracks=False,
    )
    (tmp_path / "a.bin").write_bytes(b"abc")
    clip = TrackClip(storage=open_storage(tmp_path), name="a.bin", track=silent, start=0, stop=1)
    stream = io.BytesIO()

    write_mp4(stream, [clip, clip], TICKS)

    (tmp_path / "out.mp4").write_bytes(stream.getvalue())
    assert read_track(open_storage(tmp_path), "out.mp4").pts.tolist() == [0, TICKS]


def test_a_cut_off_source_is_told_by_name(tmp_path):
    (tmp_path / "a.mp4").write_bytes(b"\0\0\0\x10ftypisom\0\0\0\0")

    with pytest.raises(DatasetError, match=r"a\.mp4'.*no index"):
        read_track(open_storage(tmp_path), "a.mp4")
