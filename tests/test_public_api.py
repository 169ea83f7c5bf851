"""The names that users may rely on. A change here is a change for them: say it in the changelog."""

import pickle
import subprocess
import sys

import pytest

import raypipe
from raypipe import errors

PUBLIC = [
    "ActionSpec",
    "BatchSpec",
    "CacheSpec",
    "ConfigError",
    "Dataset",
    "DatasetError",
    "DatasetMeta",
    "DecodeError",
    "DecodeSpec",
    "DownloadError",
    "FeedSpec",
    "LoaderSpec",
    "MemberSpec",
    "Mixture",
    "MixtureSpec",
    "MixtureStats",
    "Normaliser",
    "OrderSpec",
    "Pipeline",
    "RankLoader",
    "RaypipeError",
    "ResumeError",
    "SelectionSpec",
    "WindowSpec",
    "open_dataset",
    "read_metadata",
    "show",
]


def test_the_public_names_are_these():
    assert raypipe.__all__ == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_loads_and_is_documented(name):
    assert getattr(raypipe, name).__doc__


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = raypipe.nothing


@pytest.mark.parametrize("name", [name for name in PUBLIC if name.endswith("Error")])
def test_an_error_survives_pickling_with_its_message_and_notes(name):
    error = getattr(errors, name)("what is wrong")
    error.add_note("where")

    again = pickle.loads(pickle.dumps(error))

    assert (type(again), str(again), again.__notes__) == (type(error), "what is wrong", ["where"])


def test_the_package_is_typed():
    check = "import importlib.resources as r; print(r.files('raypipe').joinpath('py.typed').is_file())"

    assert subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout == "True\n"


def test_names_that_messages_give_are_there_after_a_plain_import():
    code = (
        "import raypipe; raypipe.validate.read_exclude_file, raypipe.train.share_loader, raypipe.testing.write_dataset"
    )

    subprocess.run([sys.executable, "-c", code], check=True)
