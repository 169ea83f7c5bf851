"""Which settings a bench tries and advises, and how two benches compare."""

import io
import json
from dataclasses import asdict, replace

import pytest
from rich.console import Console

from raypipe.bench import BenchReport, BenchSpec, Setting, bench_table, compare, read_report
from raypipe.bench.loaders import Request, differing, grid, parse_setting
from raypipe.bench.report import describe_marks, with_cores
from raypipe.bench.run import describe
from raypipe.decode.spec import DecodeSpec
from raypipe.errors import ConfigError
from raypipe.plan import OrderSpec

DEFAULT = Setting(where="rank", threads=4, clip_frames=2, span_frames=128, live_spans=128)
ROWS_ONLY = Setting(where="none")
FIGURES = {"first_batch_s": 2.0, "peak_mb": 900.0, "distinct_episodes": 60.0}


def make_row(setting, samples_per_s, cpu_s_per_1k, **others):
    figures = {**FIGURES, "samples_per_s": samples_per_s, "cpu_s_per_1k": cpu_s_per_1k, **others}
    return {"name": setting.name, "setting": asdict(setting), **figures}


def make_report(*rows, machine=None, **conditions):
    return BenchReport(
        machine={"processor": "made", "cores": 4, "versions": {"ray": "2"}, **(machine or {})},
        conditions={"batch_size": 64, **conditions},
        floor={"samples_per_s": 2000.0, "cpu_s_per_1k": 1.0},
        rows=rows,
    )


def test_setting_is_called_by_what_it_changes():
    whole = Setting(where="rank", threads=2, clip_frames=2, live_spans=512)

    assert whole.name == "rank, 2 threads, clips of 2, whole episodes, 512 live"
    assert replace(whole, where="cluster", clip_frames="span").name == "cluster, no clips, whole episodes, 512 live"
    assert Setting(where="none", span_frames=64).name == "spans of 64, 128 live"


def test_grid_starts_with_the_default_and_changes_one_thing_at_a_time():
    tried = grid(DEFAULT, lambda setting: True, num_cpus=4, keyframe_interval=6)

    own = asdict(DEFAULT)
    changes = [{name: value for name, value in asdict(one).items() if value != own[name]} for one in tried]
    assert changes == [
        {},
        {"where": "cluster"},
        *({"clip_frames": length} for length in (4, 6, 8, 1)),
        *({"threads": count} for count in (1, 2, 8)),
        *({"live_spans": count} for count in (64, 256)),
    ]


@pytest.mark.parametrize(("own", "others"), [(1024, {512}), (128, {64, 256}), (48, {96})])
def test_grid_tries_no_fewer_live_spans_than_mix_and_no_more_than_mix_better(own, others):
    tried = grid(replace(DEFAULT, live_spans=own), lambda setting: True, num_cpus=4)

    assert {one.live_spans for one in tried} == {own, *others}


def test_grid_leaves_out_what_does_not_fit():
    tried = grid(DEFAULT, lambda setting: setting.live_spans <= 128, num_cpus=4)

    assert max(one.live_spans for one in tried) == 128


@pytest.mark.parametrize(("longest", "other"), [(250, 4), (2, 1)])
def test_quick_grid_has_the_other_executor_and_the_nearest_clip_length_that_fits(longest, other):
    tried = grid(DEFAULT, lambda setting: setting.clip_frames <= longest, num_cpus=4, is_quick=True)

    assert tried == [DEFAULT, replace(DEFAULT, where="cluster"), replace(DEFAULT, clip_frames=other)]


def test_grid_without_cameras_has_no_decode_settings():
    tried = grid(ROWS_ONLY, lambda setting: True, num_cpus=4)

    assert len(tried) > 1
    assert all(one.parts().keys() == {"order"} and "clip_frames" not in one.parts()["order"] for one in tried)
    assert grid(ROWS_ONLY, lambda setting: True, num_cpus=4, is_quick=True) == [ROWS_ONLY]


def test_settings_that_are_the_same_on_few_episodes_are_tried_once():
    whole = replace(DEFAULT, span_frames="episode")
    many = [replace(whole, live_spans=count) for count in (128, 64, 256, 32)]
    long_spans = replace(DEFAULT, span_frames=300)
    short_spans = replace(DEFAULT, span_frames=64)

    kept = differing([*many, long_spans, short_spans], [200] * 50)

    assert kept == [many[0], many[3], short_spans]
    assert differing(many, [200] * 300) == many


def test_clips_longer_than_all_episodes_are_tried_once():
    clips = [replace(DEFAULT, clip_frames=length) for length in ("span", 8, 200, 250, 300)]

    assert differing(clips, [200, 150]) == clips[:3]


def test_typed_setting_changes_what_it_says():
    assert parse_setting("where=cluster,span_frames=64", DEFAULT) == replace(DEFAULT, where="cluster", span_frames=64)
    assert parse_setting("span_frames=episode", DEFAULT).span_frames == "episode"
    assert parse_setting("clip_frames=8", DEFAULT).clip_frames == 8
    assert parse_setting("clip_frames=span", DEFAULT).clip_frames == "span"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("thread=2", "did you mean 'threads'"),
        ("threads", "write threads=VALUE"),
        ("foo=1", "has no field 'foo'"),
        ("threads=many", "threads must be a whole number, got 'many'"),
        ("where=moon", "'moon'"),
        ("where=none", "where is 'rank' or 'cluster'"),
        ("clip_frames=episode", "clip_frames must be a whole number or 'span', got 'episode'"),
        ("clip_frames=0", "clip_frames"),
    ],
)
def test_typed_setting_that_is_impossible_is_an_error(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_setting(text, DEFAULT)


@pytest.mark.parametrize("text", ["threads=2", "where=rank", "clip_frames=2"])
def test_typed_decode_setting_needs_cameras(text):
    with pytest.raises(ConfigError, match="there are no cameras: use span_frames, live_spans"):
        parse_setting(text, ROWS_ONLY)


def test_best_is_the_fastest_and_of_equally_fast_ones_the_cheapest():
    fast, cheap, slow = (replace(DEFAULT, threads=count) for count in (1, 2, 3))
    report = make_report(make_row(slow, 500, 0.5), make_row(fast, 1000, 2.0), make_row(cheap, 970, 1.2))

    best = report.find_best()

    assert best["name"] == cheap.name
    assert report.tell_faster() == ""
    assert [row["samples_per_s"] for row in report.ranked] == [1000, 970, 500]
    assert report.advice() == (
        "Pipeline(..., batch_size=64, decode={'where': 'rank', 'num_threads': 2}, "
        "order={'span_frames': 128, 'live_spans': 128, 'clip_frames': 2})"
    )


def test_advice_names_the_memory_that_it_was_measured_with():
    row = make_row(DEFAULT, 1000, 1.0)

    assert "live_bytes" not in make_report(row, live_bytes=1 << 30).advice()
    assert "batch_size=64, live_bytes=2147483648, decode=" in make_report(row, live_bytes=2 << 30).advice()


@pytest.mark.parametrize("setting", [DEFAULT, replace(DEFAULT, where="cluster"), ROWS_ONLY])
def test_advice_is_arguments_of_a_pipeline(setting):
    parts = eval(f"dict({setting.advice()})")

    assert parts == setting.parts()
    assert OrderSpec(seed=0, **parts["order"]).live_spans == setting.live_spans
    assert DecodeSpec(**parts.get("decode", {})).where in (setting.where, "auto")


@pytest.mark.parametrize(("cpu_s", "cores", "exact"), [(2.51, 4, 3.012), (2.5, 3, 3.0), (0.01, 1, 0.012)])
def test_cores_that_feed_a_gpu_are_whole_ones(cpu_s, cores, exact):
    row = with_cores(make_row(DEFAULT, 500, cpu_s), 1200.0)

    assert (row["cores"], row["cores_exact"]) == (cores, exact)


def test_cores_are_told_of_what_was_measured_where_a_rate_was_given():
    row = make_row(DEFAULT, 500, 2.5)

    assert with_cores(row, 0.0) == row
    assert with_cores({"error": "no codec"}, 1200.0) == {"error": "no codec"}


def test_best_does_not_trade_mixing_for_speed():
    narrow = replace(DEFAULT, live_spans=32)
    report = make_report(make_row(narrow, 3000, 0.5, distinct_episodes=30.0), make_row(DEFAULT, 1000, 1.0))

    assert report.find_best()["name"] == DEFAULT.name
    assert report.tell_faster() == (
        f"{narrow.name} is 3 times as fast, but mixes less: 30 episodes a batch, not 60. Take it if that is enough"
    )


def test_best_may_mix_as_a_full_shuffle_does_where_others_mix_more():
    # With all episodes live a batch has more of them than chance would give it.
    narrow = make_row(replace(DEFAULT, live_spans=64), 3000, 0.5, distinct_episodes=36.1)
    rows = narrow, make_row(DEFAULT, 1000, 1.0, distinct_episodes=48.4)

    assert make_report(*rows, full_shuffle_episodes=36.3).find_best() is narrow
    assert make_report(*rows, full_shuffle_episodes=36.3).tell_faster() == ""
    assert make_report(*rows, full_shuffle_episodes=40.0).find_best() is not narrow


@pytest.mark.parametrize(("used", "episodes", "live"), [(4, 500, 128), (300, 500, 64), (4, 4, 64)])
def test_best_has_fewer_live_spans_only_where_their_mixing_was_seen(used, episodes, live):
    rows = make_row(DEFAULT, 1000, 1.0), make_row(replace(DEFAULT, live_spans=64), 3000, 0.5)
    report = make_report(*rows, used_episodes=used, episodes=episodes)

    assert report.find_best()["setting"]["live_spans"] == live
    assert ("whose mixing these few episodes do not show" in report.tell_faster()) == (live == 128)


def test_best_is_none_where_all_failed():
    report = make_report({"name": "rank", "setting": {}, "error": "no codec"})

    assert report.find_best() is None
    assert report.advice() == "no setting could be measured"


def test_report_is_read_back_as_it_was_written(tmp_path):
    report = make_report(make_row(DEFAULT, 1000, 1.0))
    (tmp_path / "a.json").write_text(json.dumps(report.to_json()))

    assert read_report(tmp_path / "a.json") == report


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[]", "was not written by"),
        ('{"raypipe_bench": 0}', "was not written by"),
        ('{"raypipe_bench": 2, "rows": []}', "was not written by"),
    ],
)
def test_other_files_are_no_reports(tmp_path, content, message):
    (tmp_path / "a.json").write_text(content)

    with pytest.raises(ConfigError, match=message):
        read_report(tmp_path / "a.json")


def test_comparison_has_ratios_of_what_both_measured_and_names_the_rest():
    other = replace(DEFAULT, threads=1)
    first = make_report(make_row(DEFAULT, 1000, 2.0), make_row(other, 1, 1), used_frames=100)
    second = make_report(make_row(DEFAULT, 1500, 1.0), used_frames=100, machine={"versions": {"ray": "3"}})

    compared = compare(first, second)

    assert compared.ratios[DEFAULT.name]["samples_per_s"] == 1.5
    assert compared.ratios[DEFAULT.name]["cpu_s_per_1k"] == 0.5
    assert compared.ratios["floor"]["cpu_s_per_1k"] == 1.0
    assert compared.ratios["floor"]["peak_mb"] is None
    assert compared.only_first == (other.name,)
    assert compared.only_second == ()
    assert compared.differences == ("versions: ray 2 against ray 3",)


def test_comparison_names_a_package_that_only_one_machine_has():
    first = make_report(machine={"versions": {"ray": "2"}})
    second = make_report(machine={"versions": {"ray": "2", "lerobot": "3"}})

    assert compare(first, second).differences == ("versions: lerobot none against lerobot 3",)
    assert compare(second, first).differences == ("versions: lerobot 3 against lerobot none",)


def test_spec_refuses_what_cannot_be_measured():
    with pytest.raises(ConfigError, match="batch_size must be at least 1, got 0"):
        BenchSpec(root="x", batch_size=0)
    with pytest.raises(ConfigError, match="seconds must be more than 0"):
        BenchSpec(root="x", seconds=0)
    with pytest.raises(ConfigError, match="and not endless, got inf"):
        BenchSpec(root="x", seconds=float("inf"))
    with pytest.raises(ConfigError, match="gpu_samples_per_s must be a number from 0 on, got nan"):
        BenchSpec(root="x", gpu_samples_per_s=float("nan"))


class Sampled:
    """A process tree that takes one CPU all the time."""

    peak_mb = 100.0

    def cpu_between(self, begin_s, end_s):
        return end_s - begin_s


def make_result(*is_partial):
    times = {"begin_s": 0.0, "end_s": 10.0, "first_batch_s": 1.0, "batch_ms": [10.0], "num_samples": 500}
    figures = {"decoded_frames": 600.0, "emitted_frames": 500.0}
    epochs = [{**times, "distinct_episodes": 3.0, "figures": figures, "is_partial": each} for each in is_partial]
    return {"epochs": epochs, "settings": {}}


@pytest.mark.parametrize(
    ("is_partial", "marked", "ratio"),
    [
        ((False, False), False, 1.2),
        ((True, False), True, None),
        ((False, True), True, None),
        ((True, True), True, None),
    ],
)
def test_row_is_marked_where_either_epoch_was_broken_off(is_partial, marked, ratio):
    row = describe(make_result(*is_partial), Sampled())

    assert row["is_partial"] is marked
    assert row["decoded_per_emitted"] == ratio


def printed(report, width=200):
    out = io.StringIO()
    Console(width=width, file=out).print(bench_table(report))
    return out.getvalue()


TABLE_CONDITIONS = dict.fromkeys(("used_episodes", "episodes", "used_frames", "action_frames", "observation_frames"), 1)


def test_table_tells_why_the_floor_failed():
    report = make_report(make_row(DEFAULT, 1000, 1.0), machine={"load_average": 0}, **TABLE_CONDITIONS)
    failed = replace(report, floor={"error": "Traceback\nDecodeError: no such codec"})

    shown = printed(failed)

    (line,) = [line for line in shown.splitlines() if "all frames in file order" in line]
    assert line.split()[-1] == "failed"
    assert "failed: the floor: DecodeError: no such codec" in shown


def test_table_names_cameras_that_are_left_out():
    left_out = {"left_out_cameras": {"no video file is there": ["wrist"]}}
    report = make_report(make_row(DEFAULT, 1, 1), machine={"load_average": 0}, **TABLE_CONDITIONS, **left_out)

    assert "left out: wrist: no video file is there" in printed(report)


def test_table_shows_all_figures_on_a_narrow_terminal():
    report = make_report(make_row(DEFAULT, 12345, 67.8), machine={"load_average": 0}, **TABLE_CONDITIONS)

    shown = printed(report, width=80).split()

    assert {"12,345", "67.8", "900", "60", *DEFAULT.name.split()} <= set(shown)


def test_table_has_a_column_of_cores_only_where_a_rate_was_given():
    conditions = {"machine": {"load_average": 0}, **TABLE_CONDITIONS}
    row, failed = with_cores(make_row(DEFAULT, 500, 2.51), 1200.0), {"name": "other", "error": "no codec"}

    told = printed(make_report(row, failed, gpu_samples_per_s=1200.0, **conditions))
    untold = printed(make_report(make_row(DEFAULT, 500, 2.51), failed, **conditions))

    assert "1,200/s" in told
    (line,) = [line for line in told.splitlines() if DEFAULT.name in line]
    assert line.split()[-2:] == ["4", "(3.0)"]
    assert "cores for" not in untold


def test_table_tells_why_the_fastest_is_not_advised():
    narrow = make_row(replace(DEFAULT, live_spans=32), 3000, 0.5, distinct_episodes=30.0)
    report = make_report(narrow, make_row(DEFAULT, 1000, 1.0), machine={"load_average": 0}, **TABLE_CONDITIONS)

    assert report.tell_faster() in printed(report)


def test_table_marks_a_row_that_was_broken_off():
    report = make_report(make_row(DEFAULT, 1000, 1.0, is_partial=True), machine={"load_average": 0}, **TABLE_CONDITIONS)

    shown = printed(report)

    assert "~1,000" in shown
    assert "~ an epoch was broken off" in shown


@pytest.mark.parametrize(
    ("floor", "full_shuffle", "told"),
    [
        (
            {"samples_per_s": 2000.0, "cpu_s_per_1k": 1.0},
            41.0,
            ["dotted: the floor, which only decodes, and a full shuffle"],
        ),
        ({"samples_per_s": 2000.0, "cpu_s_per_1k": 1.0}, None, ["dotted: the floor, which only decodes"]),
        ({"error": "no decoder"}, 41.0, ["dotted: a full shuffle"]),
        ({"error": "no decoder"}, None, []),
    ],
)
def test_a_picture_says_of_the_dotted_lines_what_is_drawn(floor, full_shuffle, told):
    report = replace(make_report(full_shuffle_episodes=full_shuffle), floor=floor)

    assert describe_marks(report) == told


def make_request(**others):
    return Request(root="x", batch_size=64, num_cpus=2, **others)


def test_raypipe_is_told_nothing_that_was_not_asked_for():
    assert make_request().pipeline_parts() == {}


@pytest.mark.parametrize(
    ("asked", "is_needed"),
    [
        ({}, False),
        ({"parts": {"decode": {"where": "cluster"}}}, True),
        ({"parts": {"decode": {"where": "rank"}}}, False),
        ({"starts_ray": True}, True),
        ({"num_floor": 2}, False),
    ],
)
def test_ray_is_started_only_for_what_uses_it(asked, is_needed):
    assert make_request(**asked).needs_ray == is_needed


def test_parts_of_a_request_go_to_the_pipeline_with_its_episodes():
    parts = {"decode": {"where": "rank", "num_threads": 3}, "live_bytes": 9}

    assert make_request(parts=parts, episodes=[0, 4]).pipeline_parts() == {**parts, "selection": {"episodes": [0, 4]}}
