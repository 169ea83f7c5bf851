"""``raypipe plan``: what an epoch costs and gives, as a table, as JSON and as a picture."""

import json
import shutil

import pytest
from program import run_program

import raypipe as rp
from raypipe.plan import BatchSpec, measure_mixing
from raypipe.testing import SynthSpec, write_dataset
from raypipe.views import view_pipeline, view_plan, view_world
from raypipe.views.plan import plan_lines


def run(*arguments):
    return run_program("plan", *arguments)


def test_plan_json_has_the_promised_keys(tiny_dataset):
    printed = json.loads(run(tiny_dataset, "--world-size", 2, "--batch-size", 4, "--json").stdout)

    assert (printed["steps"], printed["frames"]) == (5, 34)
    assert printed["spans"] >= 5
    assert printed["live_bytes"] == printed["live_row_bytes"] + printed["live_pixel_bytes"]
    assert 0 < printed["live_pixel_bytes"] <= 34 * 2 * 64 * 64 * 3
    assert sorted(printed["distinct_episodes"]) == ["first", "last", "mean", "min"]
    assert printed["distinct_episodes_full_shuffle"] > 1
    assert 0 < printed["near_repeats"] <= 1
    assert 0 < printed["near_repeats_full_shuffle"] <= 1
    # Of 4 full batches a rank, the first has 3 after it.
    assert printed["near_repeats_batches"] == 3
    assert len(printed["fingerprint"]) == 32
    assert printed["decoded_bytes"] == 34 * 2 * 64 * 64 * 3


def test_plan_prints_a_table_and_draws_a_picture(tiny_dataset, tmp_path):
    picture = tmp_path / "plan.png"

    done = run(tiny_dataset, "--world-size", 1, "--batch-size", 8, "--lanes", 2, "--plot", picture)

    assert done.returncode == 0, done.stderr
    assert "5 of 8 frames on one rank" in done.stdout
    assert "34 in 6 spans on 2 lanes" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert done.stderr == f"wrote {picture}\n"


def test_plan_that_cannot_be_drawn_says_so_before_it_plans(tiny_dataset, tmp_path):
    done = run(tiny_dataset, "--world-size", 1, "--batch-size", 8, "--plot", tmp_path / "no" / "plan.png")

    assert (done.returncode, done.stdout) == (2, "")
    assert f"there is no folder {str(tmp_path / 'no')!r}; make it first" in done.stderr


def test_plan_of_one_batch_says_that_there_is_no_later_one(tiny_dataset):
    lines = dict(plan_lines(view_plan(str(tiny_dataset), {"seed": 0}, BatchSpec(size=34), world_size=1).report))

    assert lines["shared episodes"].startswith("there are too few full batches to tell; a full shuffle")
    assert lines["near repeats"] == "there are too few full batches to tell"


def test_plan_counts_half_a_second_by_the_frame_rate_of_every_dataset(tmp_path):
    lengths, rates = (40,) * 6, {"slow": 2, "fast": 20}
    for name, fps in rates.items():
        write_dataset(tmp_path / name, SynthSpec(lengths=lengths, fps=fps, cameras=()))
    mixture = tmp_path / "mixture.yaml"
    mixture.write_text("datasets:\n  - {root: slow}\n  - {root: fast}\n")

    def report(root):
        return view_plan(str(root), {"seed": 0}, BatchSpec(size=4), world_size=1).report

    shown = report(mixture)
    alone = rp.Pipeline(rp.open_dataset(str(tmp_path / "fast")), batch_size=4, seed=0)

    world = rp.Pipeline(rp.Mixture(str(mixture), progress=False), batch_size=4, seed=0).plan()
    assert shown.mixing == measure_mixing(world, near_frames=(1, 10))
    assert view_pipeline(alone).report.mixing == measure_mixing(alone.plan(), near_frames=(10,))
    slow, fast = (report(tmp_path / name).mixing.near_repeats for name in rates)
    assert slow.full_shuffle < fast.full_shuffle


def test_plan_alone_says_that_it_does_not_know_the_frame_rate(tiny_dataset):
    world = rp.Pipeline(rp.open_dataset(str(tiny_dataset)), batch_size=4, seed=0).plan()

    view = view_world(world)

    assert dict(plan_lines(view.report))["near repeats"].startswith("not known")
    assert view.report.to_json()["near_repeats"] is None
    assert view.figure().axes[1].get_title(loc="right") == ""


def test_plan_shows_near_repeats_and_clips_in_words_and_in_the_picture(tiny_dataset):
    order = {"seed": 0, "clip_frames": 2}

    view = view_plan(str(tiny_dataset), order, BatchSpec(size=4), world_size=1)

    lines, near = dict(plan_lines(view.report)), view.report.mixing.near_repeats
    assert lines["order"].endswith("clip_frames=2")
    assert lines["near repeats"].startswith(f"of {near.share:.1%} of a rank's frames")
    assert lines["near repeats"].endswith(f"in its next 7 batches; a full shuffle {near.full_shuffle:.1%}")
    assert f"{near.share:.1%} of frames, a full shuffle" in view.figure().axes[1].get_title(loc="right")
    assert "clips of 2" in view.title


def test_plan_of_the_command_line_is_the_plan_of_the_library(tiny_dataset):
    order = {"seed": 3, "live_spans": 2, "span_frames": 4, "lanes": 4, "clip_frames": 2}
    view = view_plan(str(tiny_dataset), order, BatchSpec(size=4), world_size=2, epoch=5)

    options = ("--seed", 3, "--live-spans", 2, "--span-frames", 4, "--lanes", 4, "--clip-frames", 2, "--epoch", 5)
    printed = json.loads(run(tiny_dataset, "--world-size", 2, "--batch-size", 4, *options, "--json").stdout)

    assert printed["fingerprint"] == view.report.fingerprint
    assert printed == json.loads(json.dumps(view.report.to_json()))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("live_bytes", "order"),
    [(8 << 30, {}), (300_000, {}), (300_000, {"live_spans": 4}), (300_000, {"live_spans": 4, "clip_frames": "span"})],
)
def test_plan_says_what_a_pipeline_of_these_live_bytes_does(tiny_dataset, live_bytes, order, world_size):
    pipe = rp.Pipeline(rp.open_dataset(str(tiny_dataset)), batch_size=4, seed=0, live_bytes=live_bytes, order=order)

    batch = BatchSpec(size=4)
    report = view_plan(
        str(tiny_dataset), {"seed": 0, **order}, batch, world_size=world_size, live_bytes=live_bytes
    ).report

    shown = view_pipeline(pipe, world_size=world_size).report
    assert report.clip_frames == pipe.config.order.clip_frames
    assert report.live_bytes == pipe.live_bytes(world_size=world_size)
    assert dict(plan_lines(report))["live"] == dict(plan_lines(shown))["live"]


@pytest.mark.parametrize("given", ["300kB", "300000", "0.3e6", "0.3 MB"])
@pytest.mark.parametrize("command", ["plan", "where"])
def test_bytes_on_the_command_line_are_sizes_as_a_pipeline_takes_them(tiny_dataset, command, given):
    def told(live_bytes: object) -> str:
        options = ("--world-size", 1, "--batch-size", 4, "--live-bytes", live_bytes, "--json")
        step = (0, 0, "--root") if command == "where" else ()
        done = run_program(command, *step, tiny_dataset, *options)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert told(given) == told(300_000) != told("1 GiB")


def test_the_bytes_that_a_command_takes_where_none_are_given_are_those_of_a_pipeline(tiny_dataset):
    options = ("--world-size", 1, "--batch-size", 4, "--json")

    assert run(tiny_dataset, *options).stdout == run(tiny_dataset, *options, "--live-bytes", 1 << 30).stdout
    assert view_plan(str(tiny_dataset), {"seed": 0}, BatchSpec(size=4), world_size=1, live_bytes="300kB").report == (
        view_plan(str(tiny_dataset), {"seed": 0}, BatchSpec(size=4), world_size=1, live_bytes=300_000).report
    )


@pytest.mark.parametrize(
    "command",
    [
        ("plan", "--world-size", 1, "--batch-size", 4),
        ("where", 0, 0, "--batch-size", 4, "--root"),
        ("bench",),
    ],
    ids=lambda one: one[0],
)
def test_bytes_that_are_none_are_an_error_that_shows_them(tiny_dataset, command):
    done = run_program(*command, tiny_dataset, "--live-bytes", "2 apples")

    assert done.returncode == 2
    assert "live_bytes must be a number of bytes such as 200e9 or '200GB', at least 1; got '2 apples'" in done.stderr


def test_plan_says_what_decoding_costs_against_file_order(tiny_dataset):
    printed = " ".join(run(tiny_dataset, "--world-size", 1, "--batch-size", 4).stdout.split())

    assert "clip_frames=4" in printed
    assert "of decoded frames, at 1.10 times the CPU of decoding in file order" in printed


def test_plan_names_the_field_that_an_order_does_not_have(tiny_dataset):
    with pytest.raises(rp.ConfigError, match="order has no field 'sed'; did you mean 'seed'"):
        view_plan(str(tiny_dataset), {"sed": 0}, BatchSpec(size=4), world_size=1)


def test_plan_says_what_an_order_lacks(tiny_dataset):
    with pytest.raises(rp.ConfigError, match=r"order=.* is not complete: .*'seed'"):
        view_plan(str(tiny_dataset), {}, BatchSpec(size=4), world_size=1)


def test_plan_without_cameras_says_nothing_of_decoding(tiny_dataset):
    blind = rp.open_dataset(str(tiny_dataset), cameras=[])
    pipe = rp.Pipeline(blind, batch_size=4, seed=0)

    assert "decoded frames" not in dict(plan_lines(view_pipeline(pipe).report))["live"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--batch-size", 3, "--lanes", 4), "batch_size=3 does not share out over 2 lanes"),
        (("--batch-size", 4, "--span-frames", "some"), "span_frames must be an integer of at least 1 or 'episode'"),
        (("--batch-size", 4, "--clip-frames", "some"), "clip_frames must be an integer of at least 1 or 'span'"),
        (("--batch-size", 4, "--lanes", 100), "34 frames cannot be shared out over 100 lanes"),
        (("--batch-size", 4, "--world-size", 0), "world_size must be an integer of at least 1, got 0"),
    ],
)
def test_plan_explains_what_is_impossible(tiny_dataset, options, message):
    done = run(tiny_dataset, "--world-size", 2, *options)

    assert done.returncode == 2
    assert message in done.stderr


def test_plan_of_a_mixture_shows_what_every_dataset_gives(tiny_dataset, tmp_path):
    shutil.copytree(tiny_dataset, tmp_path / "other")
    mixture = tmp_path / "mixture.yaml"
    mixture.write_text(
        f"datasets:\n  - {{root: {tiny_dataset}, name: tiny, weight: 3}}\n  - {{root: other, weight: 1}}\n"
    )
    picture = tmp_path / "plan.png"

    done = run(mixture, "--world-size", 2, "--batch-size", 4, "--plot", picture)
    printed = json.loads(run(mixture, "--world-size", 2, "--batch-size", 4, "--json").stdout)

    assert done.returncode == 0, done.stderr
    # 34 frames each, 68 an epoch: three quarters of them of the first.
    assert [line.split()[:5] for line in done.stdout.splitlines()[-2:]] == [
        ["tiny", "34", "51", "75.00%", "1.50"],
        ["other", "34", "17", "25.00%", "0.50"],
    ]
    assert "distinct datasets" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [(one["name"], one["epoch_frames"], one["laps"]) for one in printed["members"]] == [
        ("tiny", 51, 1.5),
        ("other", 17, 0.5),
    ]
    assert 1 <= printed["distinct_datasets"]["mean"] <= 2
