"""``raypipe show``: pages, pictures, videos and Rerun recordings of datasets, mixtures and episodes."""

import os
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytest
from depth_cases import DEPTH, wall_of, write_deepening
from mixture_cases import write_unlike
from program import run_program
from torchcodec.decoders import VideoDecoder

import raypipe as rp
from raypipe.testing import read_stamp
from raypipe.views.episode import open_viewer, save_recording

REAL = Path(__file__).parents[2] / "shared" / "data"
REAL_NAMES = ("cr5_v21", "groot_simpnp_v20", "piper_v30", "so_front_v30", "so101_wrist_v30", "pusht_v30_novid")


def run(*arguments):
    return run_program("show", *arguments)


def test_show_writes_a_page_and_says_where(tiny_dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    done = run(tiny_dataset)

    assert done.returncode == 0, done.stderr
    path, _, shown = done.stdout.strip().removeprefix("wrote ").partition(": ")
    assert shown == str(tiny_dataset)
    assert Path(path).is_relative_to(tmp_path)
    page = Path(path).read_text()
    assert page.startswith("<!doctype html>")
    assert "lengths of episodes" in page


def test_show_writes_a_video_of_an_episode_and_says_what_it_is(tiny_dataset, tmp_path):
    done = run(tiny_dataset, "--episode", 2, "--out", tmp_path / "episode.mp4")

    assert done.returncode == 0, done.stderr
    assert "(top, wrist: all frames, 12 at 10 fps, 128x64 h264," in done.stdout
    frames = VideoDecoder(str(tmp_path / "episode.mp4"), dimension_order="NHWC")[:].numpy()
    assert [read_stamp(frame[:, :64]).frame for frame in frames] == list(range(12))


@pytest.mark.parametrize("suffix", [".png", ".html"])
def test_show_writes_an_episode_in_the_form_that_the_name_says(tiny_dataset, tmp_path, suffix):
    done = run(tiny_dataset, "--episode", 1, "--out", tmp_path / f"episode{suffix}")

    assert done.returncode == 0, done.stderr
    assert (tmp_path / f"episode{suffix}").read_bytes()[:4] == {".png": b"\x89PNG", ".html": b"<!do"}[suffix]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--out", "card.gif"), "cannot write 'card.gif': give a file that ends in .html, .png"),
        (("--out", "card.mp4"), "a video is of one episode, say which with --episode"),
        (("--out", "a.rrd"), "a recording for Rerun wants --rerun"),
        (("--rerun", "--out", "a.png"), "give a file that ends in .rrd"),
        (("--episode", 5), "there is no episode 5; the dataset has 5 episodes, numbered 0 to 4"),
        (("--episode", -1), "the episode must be at least 0, got -1"),
        (("--episode", -3), "the episode must be at least 0, got -3"),
        (("--member", "arm"), "--member 'arm' is of a mixture, and"),
        (("--out", "none/card.png"), "there is no folder 'none'"),
    ],
)
def test_show_explains_what_is_impossible(tiny_dataset, options, message):
    done = run(tiny_dataset, *options)

    assert done.returncode == 2
    assert message in done.stderr


def test_show_of_a_mixture_is_its_card_or_an_episode_of_a_member(tmp_path):
    mixture = write_unlike(tmp_path)

    card = run(mixture, "--out", tmp_path / "card.html")
    episode = run(mixture, "--member", "so101", "--episode", 0, "--out", tmp_path / "episode.png")
    unnamed, unknown = run(mixture, "--episode", 0), run(mixture, "--member", "so100")

    assert card.returncode == episode.returncode == 0, card.stderr + episode.stderr
    assert "<td>so101</td>" in (tmp_path / "card.html").read_text()
    assert "say which with --member, one of 'aloha', 'cr5', 'so101', 'umi'" in unnamed.stderr
    assert "has no member 'so100'; did you mean 'so101'?" in unknown.stderr


def test_show_of_a_member_with_a_slash_in_its_name_makes_a_page(tiny_dataset, tmp_path):
    mixture = tmp_path / "robots.yaml"
    mixture.write_text(f"datasets: [{{root: '{tiny_dataset}', name: lab/arm}}]\n")

    done = run(mixture, "--member", "lab/arm")

    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.removeprefix("wrote ").partition(": ")[0])
    assert path.name == "robots-lab-arm.html"
    assert path.read_text().startswith("<!doctype html>")


def test_show_saves_a_recording_for_rerun_with_every_frame_and_number(tiny_dataset, tmp_path):
    path = tmp_path / "episode.rrd"

    done = run(tiny_dataset, "--episode", 2, "--rerun", "--out", path)

    assert done.returncode == 0, done.stderr
    assert f"wrote {path}: episode 2: 12 frames, 2 cameras" in done.stdout
    logged = read_recording(path)
    dataset = rp.open_dataset(str(tiny_dataset))
    samples = [dataset.sample_of(2, frame) for frame in range(12)]
    for name in ("action", "observation.state"):
        assert sorted(logged[name]) == list(range(12))
        for frame, sample in enumerate(samples):
            np.testing.assert_allclose(logged[name][frame], sample[name].numpy())
    for camera in ("observation.images.top", "observation.images.wrist"):
        stamps = {frame: read_stamp(pixels) for frame, pixels in logged[camera].items()}
        assert {frame: stamp.frame for frame, stamp in stamps.items()} == {frame: frame for frame in range(12)}
    assert logged["task"] == {0: "pick up the cube"}


def read_recording(path):
    """What a recording holds: by entity and frame, read by Rerun's own reader."""
    import io

    from PIL import Image
    from rerun.chunk import RrdReader

    logged = {}
    for chunk in RrdReader(str(path)).stream():
        batch = chunk.to_record_batch()
        columns = {name: batch.column(name).to_pylist() for name in batch.schema.names}
        if "frame" not in columns:
            continue
        entity = chunk.entity_path.removeprefix("/").replace("\\", "")
        for kind, read in {
            "Scalars:scalars": lambda value: value,
            "EncodedImage:blob": lambda value: np.array(Image.open(io.BytesIO(bytes(value[0])))),
            "TextLog:text": lambda value: value[0],
        }.items():
            if kind in columns:
                pairs = zip(columns["frame"], columns[kind], strict=True)
                logged.setdefault(entity, {}).update({frame: read(value) for frame, value in pairs})
    return logged


def test_recording_of_depth_has_one_brightness_from_its_first_to_its_last_frame(tmp_path):
    dataset = rp.open_dataset(str(write_deepening(tmp_path / "deep")))

    save_recording(dataset, 0, tmp_path / "episode.rrd")

    walls = [wall_of(pixels) for pixels in read_recording(tmp_path / "episode.rrd")[DEPTH].values()]
    assert len(walls) == 70
    assert max(walls) - min(walls) < 4


def test_rerun_that_is_not_installed_is_an_error_that_names_the_package(tiny_dataset, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "rerun", None)

    done = run(tiny_dataset, "--rerun", "--out", tmp_path / "episode.rrd")

    assert done.returncode == 2
    assert "pip install rerun-sdk" in done.stderr
    assert not (tmp_path / "episode.rrd").exists()


def test_rerun_viewer_is_started_for_the_first_episode(tiny_dataset, monkeypatch):
    started = []
    monkeypatch.setattr("rerun.spawn", lambda **options: started.append(options))
    # The environment is not activated: the program is found all the same.
    monkeypatch.setenv("PATH", "/usr/bin:/bin")

    told = open_viewer(rp.open_dataset(str(tiny_dataset)), 0)

    assert [Path(one["executable_path"]).name for one in started] == ["rerun"]
    assert os.access(started[0]["executable_path"], os.X_OK)
    assert told == "episode 0: 7 frames, 2 cameras"


@pytest.mark.parametrize(
    ("text", "told"), [("no screen\nand more", "no screen"), ("", "RuntimeError"), (" \n", "RuntimeError")]
)
@pytest.mark.parametrize("step", ["rerun.spawn", "rerun.RecordingStream.flush"])
def test_rerun_viewer_that_does_not_start_is_an_error_that_tells_of_recordings(
    step, text, told, tiny_dataset, monkeypatch
):
    def fail(*_, **__):
        raise RuntimeError(text)

    monkeypatch.setattr("rerun.spawn", lambda **_: None)
    monkeypatch.setattr(step, fail)

    with pytest.raises(rp.ConfigError, match=rf"viewer does not start here \({told}\): .*--out FILE\.rrd"):
        open_viewer(rp.open_dataset(str(tiny_dataset)), 0)


@pytest.mark.skipif(not REAL.is_dir(), reason="the real datasets are not here")
@pytest.mark.parametrize("name", REAL_NAMES)
def test_show_works_on_real_datasets(name, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dataset = rp.open_dataset(str(REAL / name))
    episode = int(dataset.meta.episodes.episode_index[-1])

    card = run(REAL / name, "--out", tmp_path / "card.html")
    one = run(REAL / name, "--episode", episode, "--out", tmp_path / "episode.html")

    assert card.returncode == one.returncode == 0, card.stderr + one.stderr
    page = (tmp_path / "episode.html").read_text()
    assert ("<video " in page) == bool(dataset.spec.cameras)
    assert "class='error'" not in page
    assert dataset.sample_of(episode, 0)["task"] in page
