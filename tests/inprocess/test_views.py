"""What views show is true: the frames, the curves, the counts and the marks, in the pictures themselves."""

import base64
import io
import json
import re
import warnings
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from batches import TOP, WRIST, local_loader
from damages import edit_episodes, edit_info
from matplotlib.axes import Axes
from matplotlib.text import Text
from PIL import Image
from torchcodec.decoders import VideoDecoder

import raypipe as rp
from raypipe.format import tables
from raypipe.testing import CameraSpec, Stamp, SynthSpec, read_stamp, write_dataset
from raypipe.validate import run as run_module
from raypipe.views import describe, view_batch, view_dataset, view_episode, view_pipeline, view_world
from raypipe.views import pixels as pixels_module
from raypipe.views import rows as rows_module


@pytest.fixture(scope="module")
def sized_dataset(tmp_path_factory):
    """Videos, images and depth, of a size at which stamps can be read from a picture."""
    spec = SynthSpec(
        lengths=(40, 7, 26),
        cameras=(
            CameraSpec(name=TOP, height=96, width=128, gop=4, b_frames=1),
            CameraSpec(name=WRIST, height=64, width=64, kind="image"),
            CameraSpec(name="observation.images.depth", height=64, width=64, kind="depth-image"),
        ),
        two_tasks=True,
        extra_features=("next.done",),
    )
    return rp.open_dataset(str(write_dataset(tmp_path_factory.mktemp("sized") / "dataset", spec)))


def pictures_of(view) -> list[tuple[str, np.ndarray]]:
    """The captions and pixels of the images in a view's HTML."""
    found = re.findall(r"<img alt='([^']*)' src='data:image/png;base64,([^']*)'", view._repr_html_())
    return [(text, np.array(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"))) for text, data in found]


def drawn_images(figure) -> list[tuple[str, np.ndarray]]:
    """The titles and pixels of all images of a figure, cut out of the figure as it is saved."""
    figure.set_dpi(200)
    figure.canvas.draw()
    canvas = np.asarray(figure.canvas.buffer_rgba())[..., :3]
    images = []
    for axes in (axes for axes in figure.findobj(lambda artist: hasattr(artist, "get_images")) if axes.get_images()):
        box = axes.get_window_extent()
        rows = slice(round(canvas.shape[0] - box.y1), round(canvas.shape[0] - box.y0))
        images.append((axes.get_title(), canvas[rows, round(box.x0) : round(box.x1)]))
    return images


def test_strip_shows_the_frames_that_its_captions_name(sized_dataset):
    view = view_episode(sized_dataset, 2, num_frames=5)

    shown = [(text, pixels) for text, pixels in pictures_of(view) if text.startswith("frame")]
    assert view.frames == (0, 6, 12, 19, 25)
    numbers = [int(re.match(r"frame (\d+), ", text)[1]) for text, _ in shown]
    assert numbers == [*view.frames] * 3
    # TOP, then WRIST; of depth the last ones.
    for camera, start in enumerate((0, 5)):
        stamps = [read_stamp(pixels) for _, pixels in shown[start : start + 5]]
        assert stamps == [Stamp(episode=2, frame=frame, camera=camera) for frame in view.frames]
    assert shown[1][0] == "frame 6, 0.60 s"


def test_figure_of_an_episode_shows_the_frames_that_its_titles_name(sized_dataset):
    view = view_episode(sized_dataset, 0, num_frames=4)

    drawn = drawn_images(view.figure())
    stamps = [read_stamp(pixels) for _, pixels in drawn[:8]]
    assert len(drawn) == 12
    assert [(stamp.camera, stamp.frame) for stamp in stamps] == [(c, f) for c in (0, 1) for f in (0, 13, 26, 39)]
    assert [title for title, _ in drawn[:4]] == [
        "frame 0, 0.00 s",
        "frame 13, 1.30 s",
        "frame 26, 2.60 s",
        "frame 39, 3.90 s",
    ]


def test_curves_are_the_values_of_samples(sized_dataset):
    view = view_episode(sized_dataset, 1)

    curves = {one.feature: one for one in view.curves}
    samples = [sized_dataset.sample_of(1, frame) for frame in range(7)]
    for name in ("action", "observation.state"):
        np.testing.assert_array_equal(curves[name].values, torch.stack([one[name] for one in samples]).numpy())
        assert curves[name].names == sized_dataset.features[name].names
    lines = [
        line for axes in view.figure().findobj(lambda artist: hasattr(artist, "get_lines")) for line in axes.get_lines()
    ]
    drawn = [line.get_ydata() for line in lines if len(line.get_xdata()) == 7]
    np.testing.assert_array_equal(np.stack(drawn[:6], axis=1), curves["action"].values)


def test_tasks_of_an_episode_are_runs_of_frames(sized_dataset):
    view = view_episode(sized_dataset, 0)

    told = [(one.text, one.start, one.stop) for one in view.tasks]
    assert told == [("pick up the cube", 0, 20), ("open the drawer", 20, 40)]
    assert "open the drawer  (frames 20 to 39)" in view._repr_html_()


def test_episode_ignores_the_windows_of_its_dataset(sized_dataset):
    windowed = sized_dataset.windowed(offsets={TOP: [-1, 0], "action": [0, 1, 2]})

    view = view_episode(windowed, 1, num_frames=3)

    assert [read_stamp(one.pixels).frame for one in view.strips[TOP]] == [0, 3, 6]
    assert view.curves[0].values.shape == (7, 6)


def test_clip_has_every_frame_of_every_camera_side_by_side(sized_dataset, tmp_path):
    view = view_episode(sized_dataset, 2)

    path = view.save(tmp_path / "episode.mp4")

    decoded = VideoDecoder(str(path), dimension_order="NHWC")[:].numpy()
    assert decoded.shape == (26, 96, 128 + 64 + 64, 3)
    assert [read_stamp(frame[:, :128]) for frame in decoded] == [Stamp(2, frame, 0) for frame in range(26)]
    assert [read_stamp(frame[:64, 128:192]) for frame in decoded] == [Stamp(2, frame, 1) for frame in range(26)]
    assert view.clip.told.startswith("top, wrist, depth: all frames, 26 at 10 fps, 256x96 h264")
    assert base64.b64encode(path.read_bytes()).decode() in view._repr_html_()


def test_clip_of_a_long_episode_keeps_its_speed_and_says_what_was_left_out(sized_dataset, monkeypatch):
    monkeypatch.setattr(pixels_module, "MAX_FRAMES", 15)

    clip = view_episode(sized_dataset, 0).clip

    decoder = VideoDecoder(clip.mp4, dimension_order="NHWC")
    assert [read_stamp(frame[:, :128]).frame for frame in decoder[:].numpy()] == list(range(0, 40, 3))
    assert decoder.metadata.average_fps == pytest.approx(10 / 3, rel=1e-3)
    assert "one frame of 3, 14 at 3.33333 fps" in clip.told


def test_clip_is_encoded_again_until_it_is_small_enough(sized_dataset, monkeypatch):
    whole = view_episode(sized_dataset, 0).clip
    monkeypatch.setattr(pixels_module, "MAX_BYTES", len(whole.mp4) - 1)

    smaller = view_episode(sized_dataset, 0).clip

    assert len(smaller.mp4) < len(whole.mp4)


def test_clip_of_images_reads_the_rows_of_each_camera_once(sized_dataset, monkeypatch):
    monkeypatch.setattr(pixels_module, "_FRAMES_AT_ONCE", 5)
    columns, read = [], tables.BoundedParquet.read_row_groups

    def counted(self, groups, **options):
        columns.append(options["columns"])
        return read(self, groups, **options)

    monkeypatch.setattr(tables.BoundedParquet, "read_row_groups", counted)

    pixels_module.encode_clip(sized_dataset, 2)

    assert sorted(one[0] for one in columns) == ["observation.images.depth", WRIST]


def test_missing_episode_is_an_error_that_names_those_there_are(sized_dataset):
    with pytest.raises(rp.ConfigError, match="there is no episode 3; the dataset has 3 episodes"):
        rp.show(sized_dataset, episode=3)


def test_view_without_cameras_has_curves_and_no_video(tmp_path):
    root = write_dataset(tmp_path / "rows", SynthSpec(cameras=()))
    view = view_episode(rp.open_dataset(str(root)), 1)

    page = view._repr_html_()
    assert "<video" not in page
    assert "alt='numbers over the episode'" in page
    with pytest.raises(rp.ConfigError, match=r"no camera of the dataset can be read\. Save it as .png or .html"):
        view.save(tmp_path / "episode.mp4")


def test_card_tells_what_the_dataset_holds(sized_dataset):
    card = view_dataset(sized_dataset)

    lines = dict(card.lines)
    assert lines["episodes"] == "3 of 7 to 40 frames"
    assert lines["frames"] == "73 at 10 fps: 7.3 s"
    assert dict(card.tasks) == {"pick up the cube": 3, "open the drawer": 3}
    assert [(one.feature, one.source) for one in card.ranges][:1] == [("action", "stored statistics")]
    np.testing.assert_array_equal(card.ranges[0].low, sized_dataset.stats["action"]["min"])
    assert card.remarks == ()


def test_card_shows_the_frames_that_its_captions_name(sized_dataset):
    shown = [
        (text, pixels) for text, pixels in pictures_of(view_dataset(sized_dataset)) if "frame" in text.split(",")[-1]
    ]

    assert len(shown) == 9
    for (text, pixels), camera in zip(shown[:6], (0, 0, 0, 1, 1, 1), strict=True):
        stamp = read_stamp(pixels)
        assert text.splitlines() == [("top", "wrist")[camera], f"episode {stamp.episode}, frame {stamp.frame}"]
        assert stamp.camera == camera
    assert [read_stamp(pixels).frame for _, pixels in shown[:3]] == [20, 3, 13]


def test_card_without_statistics_computes_ranges_and_says_so(tmp_path):
    root = write_dataset(tmp_path / "bare", SynthSpec(lengths=(5,) * 20, cameras=(), with_stats=False))
    dataset = rp.open_dataset(str(root))

    (action, state) = view_dataset(dataset).ranges

    assert action.source == "computed here from the rows of 8 of 20 episodes; none are stored"
    rows = np.unique(np.linspace(0, 19, 8).round().astype(int)).tolist()
    values = np.stack([dataset.sample_of(row, frame)["action"] for row in rows for frame in range(5)])
    np.testing.assert_allclose(action.low, values.min(axis=0))
    np.testing.assert_allclose(action.high, values.max(axis=0))
    assert state.feature == "observation.state"


def edit_stats(root, change):
    path = root / "meta/stats.json"
    stats = json.loads(path.read_text())
    change(stats)
    path.write_text(json.dumps(stats))


def test_card_believes_no_statistics_that_its_rows_contradict(tmp_path):
    root = write_dataset(tmp_path / "wrong", SynthSpec(lengths=(5,) * 20, cameras=()))
    # As of a single frame: nothing seems ever to change.
    edit_stats(root, lambda stats: stats["action"].update(min=stats["action"]["max"]))

    card = view_dataset(rp.open_dataset(str(root)))

    action, state = card.ranges
    assert dict(card.lines)["episodes"] == "20 of 5 frames each"
    assert action.source == "computed here from the rows of 8 of 20 episodes; the stored statistics are wrong"
    assert (action.low < action.high).all()
    assert state.source == "stored statistics"
    (remark,) = card.remarks
    assert remark.severity == "warning"
    assert remark.text.startswith("stored statistics are not those of the rows: action: min of joint_")
    assert f"raypipe validate {root}" in remark.text


def test_card_names_the_numbers_that_never_change_in_statistics_and_rows(tmp_path):
    root = write_dataset(tmp_path / "still", SynthSpec(lengths=(5,) * 20, cameras=()))
    for path in root.glob("data/**/*.parquet"):
        table = pq.read_table(path)
        actions = [[0.5, *values[1:]] for values in table.column("action").to_pylist()]
        kind = table.schema.field("action").type
        pq.write_table(table.set_column(table.column_names.index("action"), "action", pa.array(actions, kind)), path)
    edit_stats(root, lambda stats: [stats["action"][end].__setitem__(0, 0.5) for end in ("min", "max")])

    texts = [one.text for one in view_dataset(rp.open_dataset(str(root))).remarks]

    assert "action: 1 of its 6 numbers never changes: joint_0" in texts


def test_card_tells_how_far_timestamps_are_from_their_frames(tmp_path):
    root = write_dataset(tmp_path / "late", SynthSpec(lengths=(5, 6), cameras=()))
    plain = dict(view_dataset(rp.open_dataset(str(root))).lines)["timestamps"]
    for path in root.glob("data/**/*.parquet"):
        table = pq.read_table(path)
        times = pa.array((table.column("timestamp").to_numpy() * 1.5).astype("float32"))
        pq.write_table(table.set_column(table.column_names.index("timestamp"), "timestamp", times), path)

    late = dict(view_dataset(rp.open_dataset(str(root))).lines)["timestamps"]

    assert plain == "up to 0 s from frame / fps"
    # Half as much again, of 6 frames at 10 a second.
    assert late == f"up to 0.25 s from frame / fps, more than half a frame: see raypipe validate {root}"


def test_card_with_statistics_and_broken_rows_claims_nothing_of_constant_numbers(tmp_path):
    root = write_dataset(tmp_path / "broken", SynthSpec(lengths=(5, 5), cameras=(), episodes_per_data_file=1))
    edit_stats(root, lambda stats: stats["action"].update(min=stats["action"]["max"]))
    sorted((root / "data").rglob("*.parquet"))[0].write_bytes(b"PAR1 and nothing more")

    card = view_dataset(rp.open_dataset(str(root)))

    assert [one.source for one in card.ranges] == ["stored statistics"] * 2
    assert not any("never change" in one.text for one in card.remarks)
    assert [one.severity for one in card.remarks].count("error") == 1


def test_card_counts_the_tasks_of_rows_and_tells_a_table_that_contradicts_them(tmp_path):
    root = write_dataset(tmp_path / "other", SynthSpec(lengths=(5,) * 4, cameras=(), episodes_per_data_file=2))
    edit_episodes(root, 2, {"tasks": ["open the drawer"]})

    card = view_dataset(rp.open_dataset(str(root)))

    assert dict(card.tasks) == {"pick up the cube": 2, "open the drawer": 2}
    assert [one.text for one in card.remarks if one.severity == "warning"] == [
        "the rows of episode 2 have a task that the episode table does not list for it: the card counts rows"
    ]


def test_card_of_rows_without_tasks_or_on_a_server_counts_the_table_and_says_so(tmp_path, monkeypatch):
    root = write_dataset(tmp_path / "bare", SynthSpec(lengths=(5,) * 4, cameras=(), drop_columns=("task_index",)))
    bare = view_dataset(rp.open_dataset(str(root)))
    monkeypatch.setattr(rows_module, "_MOST_FILES", 1)
    many = view_dataset(rp.open_dataset(str(root)))

    for card in (bare, many):
        assert dict(card.tasks) == {"pick up the cube": 2, "open the drawer": 2}
    titles = [[axes.get_title(loc="left") for axes in card.figure().axes] for card in (bare, many)]
    tasks = [[title for title in some if "tasks" in title] for some in titles]
    assert tasks == [["2 tasks"], ["2 tasks, as the episode table lists them"]]


def test_card_tells_what_was_checked_and_the_command_for_the_rest(sized_dataset, tmp_path, monkeypatch):
    root = sized_dataset.meta.root
    bare = write_dataset(tmp_path / "bare", SynthSpec(lengths=(5, 5), cameras=()))

    small, plain = view_dataset(sized_dataset), view_dataset(rp.open_dataset(str(bare)))
    monkeypatch.setitem(run_module._SMALL_FRAMES, False, 72)
    large = view_dataset(sized_dataset)

    deep = f"not every picture: raypipe validate {root} --deep"
    assert dict(small.lines)["checked"] == (
        f"meta/, the list of files and all rows; not videos: raypipe validate {root}; {deep}"
    )
    assert dict(large.lines)["checked"] == (
        f"meta/ and the list of files; not rows and videos: raypipe validate {root}; {deep}"
    )
    assert dict(plain.lines)["checked"] == "meta/, the list of files and all rows"
    assert "not videos: raypipe validate" in small._repr_html_()


def test_card_of_a_small_dataset_has_the_findings_of_its_rows(tmp_path, monkeypatch):
    root = write_dataset(tmp_path / "odd", SynthSpec(lengths=(5,) * 20, cameras=(), episodes_per_data_file=1))
    # An episode that neither ranges nor tasks look at.
    path = sorted((root / "data").rglob("*.parquet"))[9]
    table = pq.read_table(path)
    actions = [[float("nan")] * 6, *table.column("action").to_pylist()[1:]]
    kind = table.schema.field("action").type
    pq.write_table(table.set_column(table.column_names.index("action"), "action", pa.array(actions, kind)), path)

    small = view_dataset(rp.open_dataset(str(root)))
    monkeypatch.setitem(run_module._SMALL_FRAMES, False, 99)
    large = view_dataset(rp.open_dataset(str(root)))

    (remark,) = small.remarks
    assert (remark.severity, remark.text.split(", episode")[0]) == ("error", f"action, {path.relative_to(root)}")
    assert "episode 9" in remark.text
    assert large.remarks == ()


def test_card_tells_a_damaged_file_once(tmp_path):
    root = write_dataset(tmp_path / "odd", SynthSpec(lengths=(5, 5), cameras=(), episodes_per_data_file=1))
    edit_episodes(root, 1, {"length": 6})

    texts = [one.text for one in view_dataset(rp.open_dataset(str(root))).remarks if one.severity == "error"]

    (text,) = texts
    assert "episode 1" in text
    assert "promises 6" in text


@pytest.mark.parametrize("kind", ["card", "info"])
def test_codec_and_size_of_a_camera_are_those_of_its_file(tmp_path, kind):
    spec = SynthSpec(lengths=(3, 3), cameras=(CameraSpec(name=TOP, height=32, width=48),))
    root = write_dataset(tmp_path / "declared", spec)
    sound = dict(view_dataset(rp.open_dataset(str(root))).lines)["camera"]
    edit_info(root, lambda info: info["features"][TOP]["info"].update({"video.codec": "mpeg4"}))

    shown = (
        dict(view_dataset(rp.open_dataset(str(root))).lines)["camera"].split("  ")[1]
        if kind == "card"
        else describe(str(root)).cameras[TOP]
    )

    assert sound == f"{TOP}  48x32 h264"
    assert shown == "48x32 h264 (info.json says 48x32 mpeg4)"


def test_pictures_show_errors_with_what_to_do_about_them(tmp_path):
    root = write_dataset(tmp_path / ("long" * 20), SynthSpec(lengths=(3, 3), version="v2.1"))
    for path in root.glob("videos/**/*.mp4"):
        path.write_bytes(path.read_bytes()[:400])
    dataset = rp.open_dataset(str(root))

    for view in (view_dataset(dataset), view_episode(dataset, 0)):
        texts = " ".join(" ".join(text.get_text().split()) for text in view.figure().findobj(Text))
        assert "Fetch the file again" in texts
        assert " ... " not in texts


def test_card_of_a_damaged_dataset_tells_it_and_shows_the_rest(tmp_path):
    root = write_dataset(tmp_path / "damaged", SynthSpec(lengths=(7, 7), episodes_per_video_file=1))
    broken = sorted((root / "videos").rglob("*.mp4"))
    broken[0].write_bytes(broken[0].read_bytes()[:400])
    broken[-1].unlink()

    card = view_dataset(rp.open_dataset(str(root)))

    texts = [f"{one.severity}: {one.text}" for one in card.remarks]
    assert any("is not there" in text and text.startswith("error") for text in texts)
    assert any(broken[0].name in text and text.startswith("error") for text in texts)
    assert len(card.thumbnails) == 2
    assert "is not there" in card._repr_html_()


@pytest.mark.parametrize("num_broken", [1, 2])
def test_card_of_a_dataset_with_broken_rows_tells_it_and_shows_frames(tmp_path, num_broken):
    spec = SynthSpec(lengths=(7, 7), episodes_per_data_file=1, with_stats=False)
    root = write_dataset(tmp_path / "damaged", spec)
    for broken in sorted((root / "data").rglob("*.parquet"))[:num_broken]:
        broken.write_bytes(b"PAR1 and nothing more")

    card = view_dataset(rp.open_dataset(str(root)))

    texts = [one.text for one in card.remarks if one.severity == "error"]
    assert any("file-000.parquet" in text and "no readable parquet footer" in text for text in texts)
    assert (card.ranges, len(card.thumbnails)) == ((), 4)
    assert card.figure() is not None


def test_names_in_a_view_are_text_and_no_markup(tmp_path):
    root = write_dataset(tmp_path / "odd", SynthSpec(cameras=(), tasks=("<script>alert('x')</script> & more" * 2,)))
    dataset = rp.open_dataset(str(root))

    for view in (view_dataset(dataset), view_episode(dataset, 0)):
        assert "<script>" not in view.page()
        assert "&lt;script&gt;" in view.page()


def test_views_are_saved_as_pictures_and_pages(sized_dataset, tmp_path):
    for name, view in {"card": rp.show(sized_dataset), "episode": rp.show(sized_dataset, episode=1)}.items():
        picture, page = view.save(tmp_path / f"{name}.png"), view.save(str(tmp_path / f"{name}.html"))

        assert picture.read_bytes().startswith(b"\x89PNG")
        assert page.read_text().startswith("<!doctype html>")
        # A page needs nothing beside it.
        assert not re.findall(r"(?:src|href)='(?!data:)", page.read_text())


def test_saving_to_another_kind_of_file_names_those_that_can_be(sized_dataset, tmp_path):
    card = rp.show(sized_dataset)

    with pytest.raises(rp.ConfigError, match=r"give a file that ends in .png, .html$"):
        card.save(tmp_path / "card.mp4")
    with pytest.raises(rp.ConfigError, match="there is no folder"):
        card.save(tmp_path / "none" / "card.png")


def test_views_leave_pyplot_alone(sized_dataset):
    import matplotlib.pyplot as plt

    rp.show(sized_dataset, episode=0).figure()

    assert plt.get_fignums() == []


def test_batch_shows_its_own_frames_and_marks_padding(sized_dataset):
    offsets = {"action": range(8), TOP: [-2, -1, 0, 1]}
    pipe = rp.Pipeline(sized_dataset.windowed(offsets=offsets), batch_size=24, seed=1, decode={"where": "rank"})
    batch = next(iter(local_loader(pipe)))

    view = view_batch(batch, num_samples=24)

    assert len(view.samples) == 24
    for i, sample in enumerate(view.samples):
        episode, frame = int(batch["episode_index"][i]), int(batch["frame_index"][i])
        assert sample.label == f"episode {episode}\nframe {frame}"
        length = int(sized_dataset.meta.episodes.length[episode])
        # Of four slots the first, the third and the last are shown; then the image camera, and depth.
        for (picture, mark), offset in zip(sample.pictures, (-2, 0, 1), strict=False):
            assert (mark == "padding") == (not 0 <= frame + offset < length)
            assert read_stamp(picture.pixels).frame == np.clip(frame + offset, 0, length - 1)
        assert [picture.caption for picture, _ in sample.pictures] == [
            "top [0]",
            "top [2]",
            "top [3]",
            "wrist",
            "depth 800 to 2400",
        ]
        np.testing.assert_array_equal(sample.chunk.is_pad, batch["action_is_pad"][i].numpy())
        np.testing.assert_array_equal(sample.chunk.values, batch["action"][i].numpy())
    num_padded = int(batch["action_is_pad"].any(dim=1).sum())
    assert f"action has padding in {num_padded} samples: marked in action_is_pad" in view.totals


def test_figure_of_a_batch_shows_the_frames_of_its_labels(sized_dataset):
    pipe = rp.Pipeline(sized_dataset, batch_size=6, seed=1, decode={"where": "rank"})
    batch = next(iter(local_loader(pipe)))

    drawn = drawn_images(view_batch(batch, num_samples=4).figure())

    stamps = [read_stamp(pixels) for title, pixels in drawn if title == "top"]
    assert [(one.episode, one.frame) for one in stamps] == list(
        zip(batch["episode_index"][:4].tolist(), batch["frame_index"][:4].tolist(), strict=True)
    )


def test_batch_marks_repeats(sized_dataset):
    order = {"tail": "wrap", "live_spans": 3}
    pipe = rp.Pipeline(sized_dataset, batch_size=32, seed=0, order=order, decode={"where": "rank"})
    *_, last = local_loader(pipe)

    view = view_batch(last, num_samples=32)

    # 73 frames in batches of 32: the third has 9, and 23 that come again.
    assert [one.is_repeat for one in view.samples] == last["is_repeat"].tolist()
    assert sum(one.is_repeat for one in view.samples) == 23
    assert "23 samples repeated: marked in is_repeat" in view.totals
    texts = [text.get_text() for text in view.figure().findobj(lambda artist: hasattr(artist, "get_text"))]
    assert texts.count("repeat") == 23


def test_batch_of_floats_is_shown_as_the_pixels_that_it_stands_for(sized_dataset):
    pipe = rp.Pipeline(sized_dataset, batch_size=4, seed=1, decode={"where": "rank", "camera_dtype": "float32"})
    batch = next(iter(local_loader(pipe)))
    normalised = {**batch, TOP: (batch[TOP] - 0.5) / 0.25}
    halved = {**batch, TOP: batch[TOP].to(torch.bfloat16)}

    for one in (batch, normalised, halved):
        (picture, _) = view_batch(one).samples[0].pictures[0]

        assert read_stamp(picture.pixels).frame == int(batch["frame_index"][0])


def test_batch_of_arrays_is_shown_as_that_of_tensors(sized_dataset):
    pipe = rp.Pipeline(sized_dataset, batch_size=4, seed=1, decode={"where": "rank"})
    batch = next(iter(local_loader(pipe)))
    arrays = {key: value.numpy() if hasattr(value, "numpy") else value for key, value in batch.items()}

    assert view_batch(arrays).parts() == view_batch(batch).parts()


def test_batch_with_anything_that_a_transform_has_added_is_shown(sized_dataset):
    pipe = rp.Pipeline(sized_dataset, batch_size=4, seed=1, decode={"where": "rank"})
    batch = next(iter(local_loader(pipe)))
    added = {
        "number": 3,
        "nothing": None,
        "text": "left",
        "nested": {"a": torch.zeros(2)},
        "scalar": np.float32(2),
        "pair": (1, 2),
        "empty": [],
    }

    view = view_batch({**batch, **added})

    told = {key: (kind, shape) for key, kind, shape in view.keys}
    assert [told[key] for key in added] == [
        ("int", ""),
        ("NoneType", ""),
        ("str", ""),
        ("dict", ""),
        ("float32", "()"),
        ("list of int", "(2,)"),
        ("list of nothing", "(0,)"),
    ]
    assert view.parts()
    assert view.figure().axes


def test_something_else_is_no_batch():
    with pytest.raises(rp.ConfigError, match="this is no batch of a loader: it lacks episode_index"):
        rp.show({"action": torch.zeros(3)})


def test_plan_of_a_pipeline_counts_memory_as_the_pipeline_does(sized_dataset):
    pipe = rp.Pipeline(sized_dataset, batch_size=4, seed=0, order={"live_spans": 2}, decode={"resize": (32, 32)})

    view = view_pipeline(pipe)

    assert view.report.live_bytes == pipe.live_bytes()
    assert rp.show(pipe).report == view.report
    assert view.title == "epoch 0, rank 0 of 1, 1 lane, 2 live spans, clips of 4, seed 0"


def test_plan_draws_live_frames_up_to_the_peak_and_the_full_shuffle(tiny_dataset):
    pipe = rp.Pipeline(
        rp.open_dataset(str(tiny_dataset)), batch_size=4, seed=0, order={"live_spans": 2, "span_frames": 3}
    )
    view = view_world(pipe.plan())

    lives, distinct, memory = view.figure().axes

    world, plan = view.world, view.world.rank(0)
    admitted, retired = plan.lives()
    positions = [world.steps.position_after(step) for step in range(world.num_steps)]
    expected = [plan.queue.num_rows[(admitted <= p) & (p < retired)].sum() for p in positions]
    area = memory.collections[0].get_paths()[0].vertices
    assert sorted(set(expected)) == sorted(set(area[:, 1].astype(int)) - {0})
    assert max(expected) <= view.report.live_frames
    assert memory.get_lines()[0].get_ydata()[0] == view.report.live_frames
    assert distinct.get_lines()[1].get_ydata()[0] == pytest.approx(view.report.mixing.local_batch.full_shuffle)
    counts = [len(set(world.frames_at(step, 0).episode.tolist())) for step in range(world.num_steps)]
    assert distinct.get_lines()[0].get_ydata().tolist() == counts
    assert lives.get_ylabel() == "span, by arrival"


def test_show_finds_the_view_of_what_it_is_given(sized_dataset, tiny_dataset):
    pipe = rp.Pipeline(sized_dataset, batch_size=4, seed=0)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert type(rp.show(str(tiny_dataset))).__name__ == "DatasetCard"
        assert type(rp.show(pipe, world_size=2)).__name__ == "PlanView"
        assert type(rp.show(pipe.plan())).__name__ == "PlanView"
    with pytest.raises(rp.ConfigError, match="nothing to show of a int: give a dataset"):
        rp.show(3)
    with pytest.raises(rp.ConfigError, match="show has no option 'episodes' for a Dataset"):
        rp.show(sized_dataset, episodes=3)


def test_run_tells_speed_and_waiting_of_every_interval(sized_dataset):
    run = rp.views.record(local_loader(rp.Pipeline(sized_dataset, batch_size=8, seed=0)), every_s=0.0)

    batches = list(run)

    view = rp.show(run)
    assert len(view.snapshots) == len(batches) == 10
    first, last = view.snapshots[0], run.loader.stats()
    assert (view.snapshots[-1].samples, view.snapshots[-1].batches) == (73, 10)
    edges, speed, shares = rp.views.run.measure_intervals(view.snapshots)
    assert edges[-1] == pytest.approx(last.wait_s + last.step_s - first.wait_s - first.step_s)
    assert (speed * np.diff(edges)).sum() == pytest.approx(73 - 8)
    waiting = np.sum(list(shares.values()), axis=0)
    assert (waiting * np.diff(edges)).sum() == pytest.approx(last.wait_s - first.wait_s)
    assert (waiting <= 1 + 1e-9).all()


def test_run_names_the_worst_rank(sized_dataset):
    run = rp.views.record(local_loader(rp.Pipeline(sized_dataset, batch_size=8, seed=0)))
    list(run.steps(5))
    view, last = rp.show(run), run.loader.stats()

    three = replace(view, ranks={0: last, 1: replace(last, wait_share=0.999, wait_s=99.0, step_s=0.1), 2: last})

    assert "rank 1 waits 99.9% of the time" in three._repr_html_()
    labels = [text.get_text() for text in three.figure().axes[2].get_xticklabels()]
    assert labels == ["0", "1\nworst", "2"]


def test_run_asks_the_other_ranks(sized_dataset):
    loader = local_loader(rp.Pipeline(sized_dataset, batch_size=8, seed=0), rank=0, world_size=2)
    list(loader.steps(2))
    loader._source.publish("train", 1, replace(loader.stats(), wait_share=0.9))

    view = rp.show(loader)

    assert {rank: one.wait_share for rank, one in view.ranks.items()} == {0: loader.stats().wait_share, 1: 0.9}
    assert view.title == "rank 0 of 2: 2 batches, 16 samples"


def test_run_before_the_first_batch_says_to_iterate(sized_dataset):
    loader = local_loader(rp.Pipeline(sized_dataset, batch_size=8, seed=0))

    with pytest.raises(rp.ConfigError, match="the loader has given no batch yet"):
        rp.show(loader)


def axes_titled(figure, start):
    return [one for one in figure.findobj(Axes) if one.get_title(loc="left").startswith(start)]


def test_state_and_action_of_the_same_names_are_drawn_to_one_scale_and_below_each_other(sized_dataset):
    figure = rp.show(sized_dataset, episode=0).figure()
    action, state = axes_titled(figure, "action")[0], axes_titled(figure, "observation.state")[0]
    card = rp.show(sized_dataset).figure()
    action_range, state_range = axes_titled(card, "action")[0], axes_titled(card, "observation.state")[0]

    figure.canvas.draw()
    names = {one: sized_dataset.features[one].names for one in ("action", "observation.state")}
    assert names["action"] == names["observation.state"]
    assert action.get_ylim() == state.get_ylim()
    assert action.get_position().x0 == pytest.approx(state.get_position().x0)
    assert action.get_position().x1 == pytest.approx(state.get_position().x1)
    assert action_range.get_xlim() == state_range.get_xlim()


def test_action_chunks_of_a_batch_have_one_scale_and_a_legend(sized_dataset):
    pipe = rp.Pipeline(sized_dataset, batch_size=4, seed=0, delta_timestamps={"action": [0.0, 0.1, 0.2]})

    chunks = axes_titled(rp.show(pipe.batch_at(0)).figure(), "action")

    assert len(chunks) == 4
    assert len({one.get_ylim() for one in chunks}) == 1
    for one in chunks:
        low, high = one.get_ylim()
        assert all(low <= value <= high for line in one.lines for value in line.get_ydata())
    assert [bool(one.get_legend()) for one in chunks].count(True) == 1
