"""Views of mixtures: who is in it, with whose frames, and what a batch marks as missing."""

import numpy as np
import pytest
from batches import local_loader
from mixture_cases import MAIN, NAMES, UNLIKE, WRIST, needs_real_data, write_real_file, write_unlike

import raypipe as rp
from raypipe.testing import SynthSpec, read_stamp, write_dataset
from raypipe.views import view_batch, view_mixture


@pytest.fixture(scope="module")
def unlike(tmp_path_factory):
    return rp.Mixture(write_unlike(tmp_path_factory.mktemp("unlike")), progress=False)


def test_card_of_a_mixture_has_a_row_and_frames_of_every_member(unlike):
    card = view_mixture(unlike, "robots.yaml")

    page = card._repr_html_()
    assert sorted(card.thumbnails) == sorted(NAMES)
    for member in card.info.members:
        assert len(card.thumbnails[member.name]) == len(UNLIKE[member.name].cameras)
        assert f"<td>{member.name}</td>" in page
        assert f"{member.share:.1%}<div class='bar'" in page
    shares = [one.frames_per_epoch for one in card.members]
    assert shares == sorted(unlike.shares.values(), reverse=True)
    assert card.title.startswith(f"robots.yaml: {len(NAMES)} datasets, {len(unlike):,} frames an epoch")


def test_card_of_a_mixture_shows_the_frames_that_it_names(unlike):
    card = view_mixture(unlike)

    for name, pictures in card.thumbnails.items():
        frame = UNLIKE[name].spec.lengths[0] // 2
        for picture in pictures:
            stamp = read_stamp(picture.pixels)
            assert (stamp.episode, stamp.frame) == (0, frame)
            assert picture.caption.endswith(f"episode 0, frame {frame}")


def test_card_of_a_mixture_tells_which_frames_cannot_be_decoded(tmp_path):
    spec = SynthSpec(lengths=(5, 5))
    roots = [write_dataset(tmp_path / name, spec) for name in ("sound", "broken")]
    for path in (roots[1] / "videos").rglob("*wrist*/**/*.mp4"):
        path.write_bytes(path.read_bytes()[:100])

    card = view_mixture(rp.Mixture(list(map(str, roots)), progress=False))

    assert [len(card.thumbnails[name]) for name in ("sound", "broken")] == [2, 1]
    assert [name for name, _ in card.info.notes] == ["broken"]
    assert "<div class='note'>broken: damaged video" in card._repr_html_()


def test_bars_of_a_mixture_are_the_shares(unlike):
    card = view_mixture(unlike)

    (shares,) = [
        axes
        for axes in card.figure().findobj(lambda a: hasattr(a, "patches") and hasattr(a, "get_xlabel"))
        if axes.get_xlabel() == "percent of an epoch"
    ]

    widths = sorted(patch.get_width() for patch in shares.patches)
    np.testing.assert_allclose(widths, sorted(100 * frames / len(unlike) for frames in unlike.shares.values()))


def test_batch_of_a_mixture_marks_what_a_robot_lacks(unlike):
    pipe = rp.Pipeline(unlike.windowed(offsets={"action": range(4)}), batch_size=40, seed=0, decode={"where": "rank"})
    batch = next(iter(local_loader(pipe)))

    view = view_batch(batch, num_samples=40)

    assert len({sample.label.splitlines()[0] for sample in view.samples}) == len(NAMES)
    for sample in view.samples:
        member = UNLIKE[sample.label.splitlines()[0]]
        marks = {picture.caption: mark for picture, mark in sample.pictures}
        assert marks == {
            "main": "" if MAIN in member.cameras else "missing",
            "wrist": "" if WRIST in member.cameras else "missing",
        }
        assert sample.chunk.values.shape == (4, member.spec.action_dim)
        assert sample.chunk.num_padded == 5 - member.spec.action_dim
    lacking = int(batch[f"{WRIST}_is_missing"].sum())
    assert f"wrist is missing in {lacking} samples: marked in {WRIST}_is_missing" in view.totals


def test_plan_of_a_mixture_has_its_members_in_the_page(unlike):
    page = rp.show(rp.Pipeline(unlike, batch_size=8, seed=0))._repr_html_()

    assert all(f"<td>{name}</td>" in page for name in NAMES)


@needs_real_data
def test_card_of_the_real_datasets_as_one(tmp_path):
    mixture = rp.Mixture(write_real_file(tmp_path / "real.yaml"), progress=False)

    card = rp.show(mixture)

    assert len(card.info.members) == 6
    # The rows alone of one of them.
    assert sum(bool(pictures) for pictures in card.thumbnails.values()) == 5
    assert card.save(tmp_path / "mixture.png").read_bytes().startswith(b"\x89PNG")
