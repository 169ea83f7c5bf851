"""``raypipe plan``: what an epoch costs and gives, as a table, as JSON and as a picture."""

import json
import shutil
import warnings

import pytest
from program import run_program

import raypipe as rp
from raypipe.plan import BatchSpec
from raypipe.views import view_pipeline, view_plan
from raypipe.views.plan import plan_lines


def run(*arguments):
    return run_program("plan", *arguments)


def test_plan_json_has_the_promised_keys(tiny_dataset):
    printed = json.loads(run(tiny_dataset, "--world-size", 2, "--batch-size", 4, "--json").stdout)

    assert (printed["steps"], printed["frames"]) == (5, 34)
    assert printed["spans"] >= 5
    assert printed["live_bytes"] == printed["live_row_bytes"] + printed["live_pixel_bytes"]
    assert printed["live_pixel_bytes"] == printed["live_frames"] * 2 * 64 * 64 * 3
    assert sorted(printed["distinct_episodes"]) == ["first", "last", "mean", "min"]
    assert printed["distinct_episodes_full_shuffle"] > 1
    assert len(printed["fingerprint"]) == 32


def test_plan_prints_a_table_and_draws_a_picture(tiny_dataset, tmp_path):
    picture = tmp_path / "plan.png"

    done = run(tiny_dataset, "--world-size", 1, "--batch-size", 8, "--lanes", 2, "--plot", picture)

    assert done.returncode == 0, done.stderr
    assert "5 of 8 frames on each of 1 ranks" in done.stdout
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


def test_plan_of_the_command_line_is_the_plan_of_the_library(tiny_dataset):
    order = {"seed": 3, "live_spans": 2, "span_frames": 4, "lanes": 4}
    view = view_plan(str(tiny_dataset), order, BatchSpec(size=4), world_size=2, epoch=5)

    options = ("--seed", 3, "--live-spans", 2, "--span-frames", 4, "--lanes", 4, "--epoch", 5)
    printed = json.loads(run(tiny_dataset, "--world-size", 2, "--batch-size", 4, *options, "--json").stdout)

    assert printed["fingerprint"] == view.report.fingerprint
    assert printed == json.loads(json.dumps(view.report.to_json()))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("live_bytes", "order", "when"),
    [
        (8 << 30, {}, "block"),
        (100_000, {}, "exit"),
        (100_000, {"live_spans": 4}, "exit"),
        (100_000, {"live_spans": 4, "span_frames": "episode"}, "block"),
    ],
)
def test_plan_says_what_a_pipeline_of_these_live_bytes_does(tiny_dataset, live_bytes, order, when, world_size):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*decoding each batch as it leaves")
        pipe = rp.Pipeline(rp.open_dataset(str(tiny_dataset)), batch_size=4, seed=0, live_bytes=live_bytes, order=order)

    batch = BatchSpec(size=4)
    report = view_plan(
        str(tiny_dataset), {"seed": 0, **order}, batch, world_size=world_size, live_bytes=live_bytes
    ).report

    shown = view_pipeline(pipe, world_size=world_size).report
    assert pipe.config.decode.when == when
    assert (report.live_bytes, report.is_decode_on_exit) == (pipe.live_bytes(world_size=world_size), when == "exit")
    assert dict(plan_lines(report))["live"] == dict(plan_lines(shown))["live"]


def test_plan_says_that_frames_are_decoded_as_a_batch_leaves_where_they_are(tiny_dataset):
    enough = run(tiny_dataset, "--world-size", 1, "--batch-size", 4).stdout
    little = run(tiny_dataset, "--world-size", 1, "--batch-size", 4, "--live-bytes", 100_000).stdout

    assert "of pixels if decoded per span" in enough
    assert "as a batch leaves" not in enough
    assert "cameras are decoded as a batch leaves" in " ".join(little.split())


def test_plan_names_the_field_that_an_order_does_not_have(tiny_dataset):
    with pytest.raises(rp.ConfigError, match="order has no field 'sed'; did you mean 'seed'"):
        view_plan(str(tiny_dataset), {"sed": 0}, BatchSpec(size=4), world_size=1)


def test_plan_says_what_an_order_lacks(tiny_dataset):
    with pytest.raises(rp.ConfigError, match=r"order=.* is not complete: .*'seed'"):
        view_plan(str(tiny_dataset), {}, BatchSpec(size=4), world_size=1)


def test_plan_without_cameras_says_nothing_of_decoding_as_a_batch_leaves(tiny_dataset):
    blind = rp.open_dataset(str(tiny_dataset), cameras=[])
    pipe = rp.Pipeline(blind, batch_size=4, seed=0, decode={"when": "exit"})

    assert "as a batch leaves" not in dict(plan_lines(view_pipeline(pipe).report))["live"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--batch-size", 3, "--lanes", 4), "batch_size=3 does not share out over 2 lanes"),
        (("--batch-size", 4, "--span-frames", "some"), "span_frames must be an integer of at least 1 or 'episode'"),
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
