"""`as_damage`: which errors are the fault of a file's content, and which pass."""

import pyarrow as pa
import pytest

from raypipe.errors import ConfigError, DatasetError, as_damage

OF_CONTENT = (
    *(ValueError("x"), KeyError("x"), TypeError("x"), OverflowError("x"), RecursionError("x"), IndexError("x")),
    *(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "x"), pa.ArrowInvalid("x"), pa.ArrowNotImplementedError("x")),
    OSError("pyarrow says so of bytes that it cannot parse"),
)
NOT_OF_CONTENT = (
    *(MemoryError(), AssertionError("raypipe is wrong"), ImportError("x"), OSError(5, "the disk failed")),
    *(ConfigError("x"), NotImplementedError("a sound file of another kind"), KeyboardInterrupt()),
)


def _name_the_file(error):
    return DatasetError(f"info.json: {error}")


@pytest.mark.parametrize("error", OF_CONTENT, ids=lambda one: type(one).__name__)
def test_what_content_makes_a_library_raise_becomes_the_error_of_the_file(error):
    with pytest.raises(DatasetError, match=r"^info\.json: ") as told, as_damage(_name_the_file):
        raise error

    assert told.value.__cause__ is error


@pytest.mark.parametrize("error", NOT_OF_CONTENT, ids=lambda one: type(one).__name__)
def test_what_is_not_the_fault_of_content_passes(error):
    with pytest.raises(type(error)) as told, as_damage(lambda one: DatasetError(f"info.json: {one}")):
        raise error

    assert told.value is error
