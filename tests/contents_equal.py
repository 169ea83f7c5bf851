"""Comparing what two ways of opening a dataset have found, field by field."""

from dataclasses import fields

import numpy as np
import torch

from raypipe.format import DatasetMeta, EpisodeTable, VideoColumns


def assert_same_meta(one: DatasetMeta, other: DatasetMeta) -> None:
    """Require equal values and types in every field, of the episode table too."""
    for field in fields(DatasetMeta):
        if field.name != "episodes":
            left, right = getattr(one, field.name), getattr(other, field.name)
            assert left == right, field.name
            assert type(left) is type(right), field.name
    # Mappings are equal in any order: features are used in the dataset's.
    assert [*one.features] == [*other.features]
    assert [*one.tasks.texts.items()] == [*other.tasks.texts.items()]
    assert_same_episodes(one.episodes, other.episodes)
    assert one.order_fingerprint == other.order_fingerprint
    assert one.source == other.source


def assert_same_episodes(one: EpisodeTable, other: EpisodeTable) -> None:
    for field in fields(EpisodeTable):
        if field.name not in ("tasks", "videos"):
            assert_same_array(getattr(one, field.name), getattr(other, field.name))
    assert one.tasks.type == other.tasks.type
    assert one.tasks.to_pylist() == other.tasks.to_pylist()
    assert [*one.videos] == [*other.videos]
    for camera, places in one.videos.items():
        for field in fields(VideoColumns):
            assert_same_array(getattr(places, field.name), getattr(other.videos[camera], field.name))


def assert_same_array(one: np.ndarray, other: np.ndarray) -> None:
    assert one.dtype == other.dtype
    np.testing.assert_array_equal(one, other)


def assert_same_sample(one: dict, other: dict) -> None:
    """Require the same keys in the same order, with equal values."""
    assert [*one] == [*other]
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == other[name].dtype, name
            assert torch.equal(value, other[name]), name
        else:
            assert value == other[name], name
