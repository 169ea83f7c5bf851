"""What a person may write for ``keep_frames``, and the check that proves a kept frame."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.decode.kept import check_of
from raypipe.decode.spec import KeepSpec, make_keep
from raypipe.errors import ConfigError

KEY = bytes(range(16))


@pytest.mark.parametrize(
    ("given", "num_bytes"),
    [
        (200e9, 200 * 10**9),
        (5, 5),
        ("200GB", 200 * 10**9),
        ("1.5 gib", 3 << 29),
        ("7k", 7000),
        ("64", 64),
        ("200e9", 200 * 10**9),
        ("1.5E3", 1500),
    ],
)
def test_sizes_are_numbers_or_texts_with_a_unit(given, num_bytes):
    assert KeepSpec(max_bytes=given).max_bytes == num_bytes


@pytest.mark.parametrize("given", ["much", "-3GB", "0", 0, True, None, float("nan"), float("inf"), "1e9XB", [1]])
def test_a_size_that_is_none_is_an_error_that_shows_it(given):
    with pytest.raises(ConfigError, match="max_bytes of keep_frames must be a number of bytes"):
        make_keep({"max_bytes": given})


def test_keep_frames_is_off_on_or_says_what_differs():
    assert make_keep(False) is None
    assert make_keep(True) == KeepSpec()
    assert make_keep({"folder": "/scratch"}) == KeepSpec(folder="/scratch", max_bytes="disk")
    with pytest.raises(ConfigError, match="did you mean 'max_bytes'"):
        make_keep({"max_byte": 5})
    with pytest.raises(ConfigError, match="must be True, False or a dict"):
        make_keep("/scratch")
    with pytest.raises(ConfigError, match="a folder on a local disk"):
        make_keep({"folder": "s3://bucket/frames"})


@given(st.integers(1, 20_000), st.integers(0, 2**32), st.data())
def test_a_check_finds_changed_moved_and_misplaced_bytes(size, seed, data):
    pixels = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    check = check_of(KEY, 7, pixels)
    place = data.draw(st.integers(0, size - 1))
    changed, moved = pixels.copy(), np.roll(pixels, 1)
    changed[place] ^= data.draw(st.integers(1, 255))

    assert check_of(KEY, 7, pixels.copy()) == check
    assert check_of(KEY, 7, changed) != check
    assert np.array_equal(moved, pixels) or check_of(KEY, 7, moved) != check
    assert check_of(KEY, 8, pixels) != check
    assert check_of(KEY[::-1], 7, pixels) != check


def test_a_relative_folder_is_the_one_of_the_process_that_named_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert KeepSpec(folder="kept").folder == str(tmp_path / "kept")
    assert KeepSpec(folder="~/kept").folder == "~/kept"
