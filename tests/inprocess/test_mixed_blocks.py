"""Blocks and batches of several unlike datasets: every sample is that of its own dataset, mapped by hand."""

import json
import pickle
import shutil
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from batches import local_loader

from raypipe.dataset import Dataset, MemberMap, Schema, open_dataset, schema_of
from raypipe.decode.spec import DecodeSpec
from raypipe.errors import DatasetError
from raypipe.feed import (
    BadDataSpec,
    BlockContext,
    FeedSpec,
    LocalSource,
    Meeting,
    SpanRequest,
    open_block,
    read_block,
)
from raypipe.feed.agreement import RAISE
from raypipe.format import INDEX_FEATURES, Feature
from raypipe.loader import LoaderSpec, RankJob, RankLoader, span_columns
from raypipe.pipeline import Pipeline
from raypipe.plan import (
    BatchSpec,
    OrderSpec,
    SelectionSpec,
    first_leg,
    index_episodes,
    mix_indexes,
    plan_epoch,
    plan_world,
)
from raypipe.testing import CameraSpec, SynthSpec, write_dataset

TOP, WRIST = "observation.images.top", "observation.images.wrist"
CAM, HAND, SIDE, UNUSED = (f"observation.images.{name}" for name in ("cam", "hand", "side", "unused"))

SKIP = BadDataSpec(on_bad_episode="skip", max_bad_episodes=8)
ORDER = OrderSpec(seed=5, live_spans=4)
BATCH = BatchSpec(size=5)

ACTION_WIDTH, STATE_WIDTH = 5, 3


@dataclass(frozen=True)
class Member:
    """A made dataset, its windows, and under which own names it has what the mixture has; "" is what it lacks."""

    spec: SynthSpec
    offsets: dict
    action: str = "action"
    flag: str = ""
    grid: str = ""
    note: str = ""
    top: str = ""
    wrist: str = ""


def camera(name, height, width, **options):
    return CameraSpec(name=name, height=height, width=width, **options)


MEMBERS = {
    "aloha": Member(
        SynthSpec(
            lengths=(7, 1, 12, 5),
            fps=10,
            cameras=(camera(CAM, 32, 48, gop=4, b_frames=1), camera(HAND, 36, 32, kind="image")),
            state_dim=3,
            action_dim=4,
            extra_features=("next.done", "observation.grid", "note"),
            two_tasks=True,
            robot_type="aloha",
        ),
        {"action": [0, 1, 2], "observation.state": [-1, 0], "next.done": [0], "note": [-1, 0], CAM: [-2, 0], HAND: [0]},
        flag="next.done",
        grid="observation.grid",
        note="note",
        top=CAM,
        wrist=HAND,
    ),
    # Its `hand` is of another size and place than that of `aloha`, and its state is a scalar.
    "so101": Member(
        SynthSpec(
            version="v2.1",
            lengths=(9, 4, 6),
            fps=20,
            cameras=(camera(HAND, 32, 48),),
            state_dim=1,
            action_dim=2,
            robot_type="so101",
        ),
        {"action": [0, 2, 4], "observation.state": [-2, 0], HAND: [-4, 0]},
        top=HAND,
    ),
    "umi": Member(
        SynthSpec(
            version="v2.0",
            lengths=(3, 8),
            fps=5,
            cameras=(camera(TOP, 32, 48, kind="image"), camera(SIDE, 36, 32), camera(UNUSED, 64, 64)),
            state_dim=2,
            action_dim=3,
            extra_features=("next.done", "observation.grid", "note"),
            robot_type="umi",
        ),
        {
            "joint_targets": [0, 0, 1],
            "observation.state": [-1, 0],
            "next.done": [0],
            "note": [-1, 0],
            TOP: [-1, 0],
            SIDE: [0],
        },
        action="joint_targets",
        flag="next.done",
        note="note",
        top=TOP,
        wrist=SIDE,
    ),
    "blind": Member(
        SynthSpec(lengths=(4, 4), fps=30, cameras=(), state_dim=3, action_dim=4, robot_type="blind"),
        {"action": [0, 3, 6], "observation.state": [-3, 0]},
    ),
}

NAMES = tuple(f"the {name}" for name in MEMBERS)

SHARES = (40, 10, 11, 20)
"""Frames of an epoch. Of 25 and of 8 frames these are more than one lap."""


def mixed_schema():
    def rows(one):
        names = {"action": one.action, "proprio": "observation.state"}
        names |= {"flag": one.flag, "grid": one.grid, "note": one.note}
        return {name: own for name, own in names.items() if own} | {name: name for name in INDEX_FEATURES}

    def vector(name, dtype, shape):
        return Feature(name=name, kind="vector", dtype=dtype, shape=shape)

    features = [
        vector("action", "float32", (ACTION_WIDTH,)),
        vector("proprio", "float32", (STATE_WIDTH,)),
        vector("flag", "float32", (1,)),
        vector("grid", "float32", (2, 3)),
        Feature(name="note", kind="string", dtype="string", shape=(1,)),
        *(vector(name, dtype, (1,)) for name, dtype in INDEX_FEATURES.items()),
        Feature(name=TOP, kind="video", dtype="uint8", shape=(3, 32, 48)),
        Feature(name=WRIST, kind="video", dtype="uint8", shape=(3, 36, 32)),
    ]
    return Schema(
        features={feature.name: feature for feature in features},
        members=tuple(
            MemberMap(rows=rows(one), cameras={k: own for k, own in ((TOP, one.top), (WRIST, one.wrist)) if own})
            for one in MEMBERS.values()
        ),
        widths={"action": (4, 2, 3, 4), "proprio": (3, 1, 2, 3)},
        windows={"action": 3, "proprio": 2, "flag": 1, "note": 2, TOP: 2, WRIST: 1},
        time_axes=(TOP,),
    )


def rename_feature(root, old, new):
    """Give a row feature of a v2.x dataset another name."""
    path = root / "meta/info.json"
    info = json.loads(path.read_text())
    info["features"] = {new if name == old else name: feature for name, feature in info["features"].items()}
    path.write_text(json.dumps(info))
    for file in (root / "data").rglob("*.parquet"):
        table = pq.read_table(file)
        pq.write_table(table.rename_columns([new if name == old else name for name in table.column_names]), file)


def write_members(folder, change=lambda spec: spec):
    for name, member in MEMBERS.items():
        root = write_dataset(folder / name, change(member.spec))
        if member.action != "action":
            rename_feature(root, "action", member.action)
    return folder


def open_members(folder) -> tuple[Dataset, ...]:
    return tuple(open_dataset(str(folder / name)).windowed(offsets=one.offsets) for name, one in MEMBERS.items())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_members(tmp_path_factory.mktemp("members"))


@pytest.fixture(scope="module")
def members(folder):
    return open_members(folder)


def make_context(members, bad_data=RAISE, **options):
    decode = DecodeSpec(**options.pop("decode", {}))
    return BlockContext(members, decode, bad_data, mixed_schema(), **{"names": NAMES, **options})


def mixed_index(members):
    indexes = [
        index_episodes(
            name,
            dataset.meta.episodes.episode_index,
            dataset.meta.episodes.length,
            fingerprint=name,
            selection=SelectionSpec(),
        )
        for name, dataset in zip(MEMBERS, members, strict=True)
    ]
    return mix_indexes(indexes, SHARES)


def mixed_loader(context, order=ORDER, *, spans_per_block=1):
    job = RankJob(
        context=context,
        index=mixed_index(context.datasets),
        order=order,
        batch=BATCH,
        rank=0,
        world_size=1,
        selection=SelectionSpec(),
        live_bytes=1 << 30,
    )
    meeting = Meeting(context.bad_data, job.index, num_ranks=1)
    source = LocalSource(context, meeting, FeedSpec(spans_per_block=spans_per_block), "one")
    return RankLoader(job, source, LoaderSpec())


def planned(context, order=ORDER):
    """The (dataset, episode, frame) of every batch, and the lap of each."""
    epoch = plan_epoch(mixed_index(context.datasets), order, epoch=0, legs=(first_leg(order, world_size=1),))
    world = plan_world(epoch, world_size=1, batch=BATCH)
    steps = [world.frames_at(step, 0) for step in range(world.num_steps)]
    frames = [list(zip(*(x.tolist() for x in (s.dataset, s.episode, s.frame)), strict=True)) for s in steps]
    return frames, [step.lap.tolist() for step in steps]


def frames_of(batch):
    columns = (batch[key].tolist() for key in ("dataset_index", "episode_index", "frame_index"))
    return list(zip(*columns, strict=True))


def padded(values, width):
    """The vectors with zeros behind, scalars as vectors of one number."""
    values = values if values.ndim == 2 else values[:, None]
    return torch.nn.functional.pad(values, (0, width - values.shape[1]))


def is_pad(width, total):
    return torch.arange(total) >= width


def mapped(number, sample):
    """What a batch must hold of a sample of one dataset."""
    name, member = list(MEMBERS.items())[number]
    spec = member.spec
    wanted = {key: sample[key] for key in (*INDEX_FEATURES, "task")}
    wanted |= {"dataset_index": torch.tensor(number), "dataset": NAMES[number], "robot_type": name}
    wanted |= {
        "action": padded(sample[member.action], ACTION_WIDTH),
        "action_is_pad": sample[f"{member.action}_is_pad"],
    }
    wanted["proprio"] = padded(sample["observation.state"], STATE_WIDTH)
    wanted["proprio_is_pad"] = sample["observation.state_is_pad"]
    wanted["action_dim_is_pad"] = is_pad(spec.action_dim, ACTION_WIDTH)
    wanted["proprio_dim_is_pad"] = is_pad(spec.state_dim, STATE_WIDTH)
    for key, own in (("flag", member.flag), ("grid", member.grid), ("note", member.note)):
        wanted[f"{key}_is_missing"] = torch.tensor(not own)
    wanted["flag"] = sample["next.done"].float() if member.flag else torch.zeros(1)
    wanted["flag_is_pad"] = sample["next.done_is_pad"] if member.flag else torch.ones(1, dtype=torch.bool)
    wanted["grid"] = sample["observation.grid"] if member.grid else torch.zeros(2, 3)
    wanted["note"] = sample["note"] if member.note else ["", ""]
    wanted["note_is_pad"] = sample["note_is_pad"] if member.note else torch.ones(2, dtype=torch.bool)
    return wanted | mapped_cameras(member, sample, (32, 48), (36, 32))


def mapped_cameras(member, sample, top_size, wrist_size):
    wanted = {f"{TOP}_is_missing": torch.tensor(not member.top), f"{WRIST}_is_missing": torch.tensor(not member.wrist)}
    wanted[TOP] = sample[member.top] if member.top else torch.zeros(2, 3, *top_size, dtype=torch.uint8)
    wanted[f"{TOP}_is_pad"] = sample[f"{member.top}_is_pad"] if member.top else torch.ones(2, dtype=torch.bool)
    # A window of one frame of a video has no time axis in LeRobot, one of images has.
    wrist = sample[member.wrist] if member.wrist else torch.zeros(3, *wrist_size, dtype=torch.uint8)
    wanted[WRIST] = wrist[0] if wrist.ndim == 4 else wrist
    wanted[f"{WRIST}_is_pad"] = sample[f"{member.wrist}_is_pad"] if member.wrist else torch.ones(1, dtype=torch.bool)
    return wanted


def assert_sample(batch, i, wanted, added=("augment_seed", "is_repeat")):
    assert set(batch) - set(added) == set(wanted)
    for key, value in wanted.items():
        place = f"{key} of sample {i}"
        if not isinstance(value, torch.Tensor):
            assert batch[key][i] == value, place
            continue
        found = torch.from_numpy(np.asarray(batch[key][i]).copy())
        assert found.dtype == value.dtype, f"{place}: {found.dtype}, not {value.dtype}"
        assert found.shape == value.shape, f"{place}: {found.shape}, not {value.shape}"
        np.testing.assert_array_equal(found.numpy(), value.numpy(), err_msg=place)


def assert_equals_members(batch, members):
    for i, (number, episode, frame) in enumerate(frames_of(batch)):
        assert_sample(batch, i, mapped(number, members[number].sample_of(episode, frame)))


@pytest.mark.parametrize("spans_per_block", [1, 3])
def test_batches_of_an_epoch_hold_the_mapped_samples_in_the_planned_order(members, spans_per_block):
    context = make_context(members)

    batches = list(mixed_loader(context, spans_per_block=spans_per_block))

    assert [frames_of(batch) for batch in batches] == planned(context)[0]
    assert Counter(number for batch in batches for number, _, _ in frames_of(batch)) == dict(enumerate(SHARES))
    for batch in batches:
        assert_equals_members(batch, members)


def test_cameras_of_other_sizes_are_those_of_the_members_alone_after_a_resize(tmp_path):
    sizes = iter((64, 40, 50, 36, 44))
    folder = write_members(
        tmp_path,
        lambda spec: replace(
            spec, cameras=tuple(replace(one, height=next(sizes, 48), width=48) for one in spec.cameras)
        ),
    )
    members = open_members(folder)
    context = make_context(members, decode={"resize": (20, 16)})

    batches = list(mixed_loader(context, spans_per_block=2))

    alone = [resized_samples(dataset) for dataset in members]
    for batch in batches:
        for i, (number, episode, frame) in enumerate(frames_of(batch)):
            member = list(MEMBERS.values())[number]
            sample = alone[number][episode, frame]
            wanted = mapped_cameras(member, sample, (20, 16), (20, 16))
            assert_sample({key: batch[key] for key in wanted}, i, wanted)


def resized_samples(dataset):
    """Every sample of a dataset that stands alone, decoded at the size of the mixture."""
    pipe = Pipeline(dataset, batch_size=4, seed=0, decode={"where": "rank", "resize": (20, 16)})
    return {
        (episode, frame): {key: values[i] for key, values in batch.items()}
        for batch in local_loader(pipe)
        for i, (_, episode, frame) in enumerate(frames_of(batch))
    }


@pytest.mark.filterwarnings("ignore:rank . left out")
def test_bad_data_of_any_member_is_left_out_and_the_rest_is_whole(folder, members, tmp_path):
    context = make_context(open_members(damaged_members(folder, tmp_path / "bad")), bad_data=SKIP)
    bad = {(0, 2), (1, 0), (2, 1)}

    loader = mixed_loader(context, spans_per_block=3)
    batches = list(loader)

    found = [
        [f for f, is_repeat in zip(frames_of(b), b["is_repeat"].tolist(), strict=True) if not is_repeat]
        for b in batches
    ]
    assert found == [[f for f in batch if f[:2] not in bad] for batch in planned(context)[0]]
    assert {(span.dataset, span.episode) for span in loader.skipped} == bad
    for batch in batches:
        assert_equals_members(batch, members)


def damaged_members(sound, folder):
    """A broken image, a missing video, and values that are no numbers under a name that only the mixture knows."""
    # Copied, not written again: two encodings of the same frames may differ by a bit.
    shutil.copytree(sound, folder)
    change_column(folder / "aloha/data/chunk-000/file-000.parquet", HAND, break_image)
    (folder / f"so101/videos/chunk-000/{HAND}/episode_000000.mp4").unlink()
    change_column(
        folder / "umi/data/chunk-000/episode_000001.parquet", "joint_targets", lambda rows: [[np.nan] * 3, *rows[1:]]
    )
    return folder


def break_image(images):
    # Episodes of 7, 1 and 12 frames share the file.
    images[12]["bytes"] = images[12]["bytes"][:40]
    return images


def change_column(path, name, change):
    table = pq.read_table(path)
    field = table.schema.field(name)
    values = pa.array(change(table.column(name).to_pylist()), field.type)
    sizes = [pq.ParquetFile(path).metadata.row_group(i).num_rows for i in range(pq.ParquetFile(path).num_row_groups)]
    changed = table.set_column(table.column_names.index(name), field, values)
    with pq.ParquetWriter(path, changed.schema) as writer:
        for size, stop in zip(sizes, np.cumsum(sizes).tolist(), strict=True):
            writer.write_table(changed.slice(stop - size, size))


def test_value_that_is_no_number_is_bad_data_by_its_name_in_the_mixture(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "bad")
    path = copy / "umi/data/chunk-000/episode_000001.parquet"
    change_column(path, "joint_targets", lambda rows: [*rows[:3], [np.inf] * 3, *rows[4:]])
    context = make_context(open_members(copy))

    (block,) = send(context, [request(2, 1, 8)])

    with pytest.raises(DatasetError, match=r"'joint_targets' of episode 1 .* first is frame 3"):
        block.check()


@pytest.mark.filterwarnings("ignore:rank . left out")
def test_batch_of_bad_data_alone_is_a_mapped_sample_with_the_same_keys(folder, members, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "bad")
    for path in (copy / "so101/data").rglob("*.parquet"):
        path.unlink()
    # In this order 40 frames of `aloha` are 8 batches, and the 10 of `so101`, all bad, are the next two.
    order = OrderSpec(seed=0, shuffle=False)
    context = make_context(readable_members(copy, members), bad_data=SKIP)

    batches = list(mixed_loader(context, order))

    stand_ins = [batch for batch in batches if batch["is_repeat"].all()]
    assert [frames_of(batch) for batch in stand_ins] == [[(0, 0, 0)]] * 2
    for batch in stand_ins:
        assert {key: value_type(batch[key]) for key in batch} == {key: value_type(batches[0][key]) for key in batch}
        assert set(batch) == set(batches[0])
        assert_equals_members(batch, members)


def readable_members(folder, members):
    """The members of `folder`, with what is known of the rows of the sound ones: of some, all files are gone."""
    lost = tuple(
        replace(one, meta=replace(one.meta, storage=replace(one.meta.storage, uri=str(folder / name))))
        for name, one in zip(MEMBERS, members, strict=True)
    )
    for one, sound in zip(lost, members, strict=True):
        one.__dict__["row_features"] = sound.row_features
    return lost


def value_type(value):
    return (value.dtype, value.shape[1:]) if isinstance(value, torch.Tensor) else type(value[0])


def request(dataset, episode, stop, lap=0):
    return SpanRequest(epoch=0, dataset=dataset, lap=lap, episode=episode, start=0, stop=stop, lane=0, place=0)


def send(context, requests):
    return list(open_block(context, read_block(context, requests)))


def test_columns_of_spans_are_alike_whichever_member_they_are_of(members):
    context = make_context(members)
    lengths = [(number, int(length)) for number, one in enumerate(members) for length in one.meta.episodes.length[:1]]

    spans = [span_columns(context, block) for block in send(context, [request(n, 0, stop) for n, stop in lengths])]

    kinds = [
        {key: (v.dtype, v.shape[1:]) if isinstance(v, np.ndarray) else type(v[0]) for key, v in span.items()}
        for span in spans
    ]
    assert kinds == [kinds[0]] * len(MEMBERS)
    for (number, length), columns in zip(lengths, spans, strict=True):
        for frame in range(length):
            assert_sample(columns, frame, mapped(number, members[number].sample_of(0, frame)))


def test_block_carries_nothing_that_its_member_lacks_or_the_mixture_leaves_out(members):
    context = make_context(members)

    carried = [set(read_block(context, [request(number, 0, 3)]).column_names) for number in range(len(MEMBERS))]

    for names, member in zip(carried, MEMBERS.values(), strict=True):
        wanted = {"flag": member.flag, "grid": member.grid, "note": member.note}
        assert {name for name in wanted if name in names} == {name for name, own in wanted.items() if own}
        assert not {UNUSED, "observation.grid", "observation.state", "joint_targets"} & names


def test_frames_of_cameras_are_counted_where_the_member_has_them(members):
    loader = mixed_loader(make_context(members))

    batches = list(loader)

    num_cameras = [sum(map(bool, (one.top, one.wrist))) for one in MEMBERS.values()]
    assert num_cameras == [2, 1, 2, 0]
    assert loader.stats().emitted_frames == sum(num_cameras[n] for batch in batches for n, _, _ in frames_of(batch))


def test_frame_of_two_laps_has_two_seeds_and_two_numbers(members):
    context = make_context(members)
    frames, laps = planned(context)

    loader = mixed_loader(context)
    seeds = [seed for batch in loader for seed in batch["augment_seed"].tolist()]

    assert max(Counter(frame for batch in frames for frame in batch).values()) > 1
    assert len(set(seeds)) == len(seeds) == sum(SHARES)
    (part,) = loader.account().parts
    runs = zip(part.emitted.start.tolist(), part.emitted.stop.tolist(), part.emitted.times.tolist(), strict=True)
    came = [number for start, stop, times in runs for number in list(range(start, stop)) * times]
    lengths = [one.spec.lengths for one in MEMBERS.values()]
    wanted = [
        (number << 40) + lap * sum(lengths[number]) + sum(lengths[number][:episode]) + frame
        for batch, of_laps in zip(frames, laps, strict=True)
        for (number, episode, frame), lap in zip(batch, of_laps, strict=True)
    ]
    assert sorted(came) == sorted(wanted)


def test_numbers_of_laps_follow_those_of_the_whole_dataset(members):
    context = make_context(members)
    columns = ([0, 0, 1, 1], [2, 2, 1, 0], [3, 3, 0, 5], [0, 2, 1, 0])

    numbers = context.frame_numbers(*map(np.array, columns))

    assert numbers.tolist() == [8 + 3, 2 * 25 + 8 + 3, (1 << 40) + 19 + 9, (1 << 40) + 5]


def test_robot_types_that_are_given_take_the_place_of_those_of_the_datasets(members):
    names = ("a", "b", "c", "d")

    batch = next(iter(mixed_loader(make_context(members, robot_types=names))))

    assert batch["robot_type"] == [names[number] for number, _, _ in frames_of(batch)]


def test_mixture_of_one_names_its_dataset_and_a_dataset_that_stands_alone_names_nothing(members):
    alone = BlockContext(members[3:], DecodeSpec(where="rank"))
    mixture = replace(alone, schema=schema_of(members[3]), robot_types=("arm",), names=("mine",))

    (named,) = (span_columns(mixture, block) for block in send(mixture, [request(0, 0, 2)]))
    (nameless,) = (span_columns(alone, block) for block in send(alone, [request(0, 0, 2)]))

    assert (named["dataset"], named["robot_type"]) == (["mine"] * 2, ["arm"] * 2)
    assert set(named) - set(nameless) == {"dataset", "robot_type"}


def test_context_takes_its_schema_to_another_process_and_leaves_its_files_behind(members):
    context = make_context(members, robot_types=("a", "b", "c", "d"))
    send(context, [request(0, 0, 7)])

    copied = pickle.loads(pickle.dumps(context))

    assert copied.batch_schema == context.batch_schema
    assert copied.robots == ("a", "b", "c", "d")
    fields = {"datasets", "decode", "bad_data", "schema", "robot_types", "names", "keep", "decoded_bytes"}
    assert set(copied.__dict__) == fields | {"batch_schema", "robots"}


def test_context_of_one_dataset_has_the_schema_of_that_dataset_without_sending_it(members):
    context = BlockContext(members[:1], DecodeSpec())
    assert set(context.batch_schema.cameras) == {CAM, HAND}

    copied = pickle.loads(pickle.dumps(context))

    assert copied.schema is None
    assert "batch_schema" not in copied.__dict__
    assert copied.batch_schema == context.batch_schema


@pytest.mark.parametrize(("windows", "wanted"), [({}, []), ({"events": 2}, [[], []])])
def test_language_that_a_member_lacks_is_an_empty_list_of_its_own(members, windows, wanted):
    schema = mixed_schema()
    events = Feature(name="events", kind="language", dtype="language", shape=(1,))
    schema = replace(schema, features={**schema.features, "events": events}, windows={**schema.windows, **windows})
    context = replace(make_context(members), schema=schema)

    (block,) = send(context, [request(3, 0, 4)])

    assert block.columns["events"] == [wanted] * 4
    assert block.columns["events"][0] is not block.columns["events"][1]
