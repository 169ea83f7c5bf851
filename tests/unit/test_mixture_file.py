import pytest

from raypipe.errors import ConfigError
from raypipe.mixture.spec import MemberSpec, MixtureSpec, is_mixture_file, read_mixture_file
from raypipe.plan import SelectionSpec

YAML = """
datasets:
  - data/aloha
  - [/abs/koch, 2]
  - root: s3://bucket/so101
    weight: 3
    cameras: {observation.images.top: observation.images.laptop}
    selection: {episodes: [0, 1], drop_last_frames: 5}
temperature: 2
tolerance_s: 1e-3
resize: [240, 320]
widths: {action: 14}
"""

TOML = """
temperature = 2
tolerance_s = 1e-3
resize = [240, 320]
widths = {action = 14}

[[datasets]]
root = "data/aloha"
[[datasets]]
root = "/abs/koch"
weight = 2
[[datasets]]
root = "s3://bucket/so101"
weight = 3
cameras = {"observation.images.top" = "observation.images.laptop"}
selection = {episodes = [0, 1], drop_last_frames = 5}
"""


@pytest.fixture
def write(tmp_path):
    def write_text(text, name="mix.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write_text


@pytest.mark.parametrize(("text", "name"), [(YAML, "mix.yaml"), (YAML, "mix.YML"), (TOML, "mix.toml")])
def test_a_file_is_the_spec_that_it_describes(write, tmp_path, text, name):
    (tmp_path / "data" / "aloha").mkdir(parents=True)

    spec = read_mixture_file(write(text, name))

    expected = MixtureSpec(
        members=[
            str(tmp_path / "data" / "aloha"),
            ("/abs/koch", 2),
            MemberSpec(
                root="s3://bucket/so101",
                weight=3,
                cameras={"observation.images.top": "observation.images.laptop"},
                selection=SelectionSpec(episodes=(0, 1), drop_last_frames=5),
            ),
        ],
        temperature=2,
        tolerance_s=1e-3,
        resize=(240, 320),
        widths={"action": 14},
    )
    assert spec == expected
    assert spec.weights == "given"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("datasets:\n  left: {root: /d/a, weight: 2}\n  right: /d/b\n", "m.yaml"),
        ('[datasets.left]\nroot = "/d/a"\nweight = 2\n[datasets.right]\nroot = "/d/b"\n', "m.toml"),
    ],
)
def test_a_mapping_names_its_members(write, text, name):
    spec = read_mixture_file(write(text, name))

    assert [(one.name, one.root, one.weight) for one in spec.members] == [("left", "/d/a", 2.0), ("right", "/d/b", 1.0)]


def test_roots_alone_are_weighted_by_frames(write):
    assert read_mixture_file(write("datasets: [/d/a, /d/b]")).weights == "frames"


@pytest.mark.parametrize(
    "root", ["s3://bucket/x", "/abs/x", "~/x", "simplecache::s3://b/x", "owner/name", "o-1/n_2.v3"]
)
def test_a_root_that_is_no_path_beside_the_file_stays(write, root):
    assert read_mixture_file(write(f"datasets: ['{root}']")).members[0].root == root


@pytest.mark.parametrize("root", ["x", "./x/y", "../x", "a/b/c", "owner/there", "./owner"])
def test_a_relative_root_counts_from_the_folder_of_the_file(write, tmp_path, root, monkeypatch):
    (tmp_path / "owner" / "there").mkdir(parents=True)
    path = write(f"datasets: ['{root}']")
    monkeypatch.chdir(tmp_path.parent)

    spec = read_mixture_file(f"{tmp_path.name}/{path.rpartition('/')[2]}")

    assert spec.members[0].root == str((tmp_path / root).resolve())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("datasets: [a]\ntemprature: 2", r"unknown key 'temprature'; did you mean 'temperature'"),
        ("datasets: [a]\nmembers: [b]", r"unknown key 'members'.*'datasets'"),
        ("datasets:\n - a\n - {root: b, wieght: 2}", r"unknown key 'datasets\[1\]\.wieght'; did you mean 'weight'"),
        ("datasets:\n  x: {root: a, selection: {exlude: [1]}}", r"'datasets\.x\.selection\.exlude'.*'exclude'"),
        ("datasets:\n - {weight: 2}", r"datasets\[0\]\.root is missing"),
        ("datasets:\n - {root: a, weight: -2}", r"datasets\[0\]: weight of member '.*/a' is -2"),
        ("datasets:\n - 3", r"datasets\[0\] is 3"),
        ("datasets:\n x: {root: a, name: y}", r"datasets\.x\.name is 'y'"),
        ("datasets: 3", r"'datasets' is 3"),
        ("datasets: []", r"at least one dataset"),
        ("temperature: 2", r"'datasets' is missing"),
        ("datasets: [a]\non_missing: zero", r"on_missing is 'zero'"),
        ("", r"holds missing; a mixture file has keys"),
        ("- a", r"holds \['a'\]"),
        ("datasets: [a\nresize: 3", r"not valid YAML, line 2"),
        ("datasets: [a]\nrate: 3\nrate: 4", r"line 3, column 1: the key 'rate' stands twice"),
        ("datasets: [\x07]", r"not valid YAML"),
        ("datasets: !!python/object:os.x {}", r"not valid YAML, line 1"),
    ],
)
def test_a_wrong_file_says_where_and_what(write, text, message):
    path = write(text)

    with pytest.raises(ConfigError, match=message) as caught:
        read_mixture_file(path)

    assert path in str(caught.value)


def test_a_damaged_toml_file_says_its_line(write):
    with pytest.raises(ConfigError, match=r"not valid TOML: .*line 2"):
        read_mixture_file(write("rate = 3\nrate = = 4", "m.toml"))


def test_text_that_is_not_utf8_is_an_error(tmp_path):
    (tmp_path / "m.toml").write_bytes(b"rate = '\xff'")

    with pytest.raises(ConfigError, match=r"m\.toml' is not valid"):
        read_mixture_file(str(tmp_path / "m.toml"))


@pytest.mark.parametrize(("name", "message"), [("gone.yaml", "No such file"), ("mix.json", r"\.yaml, \.yml, \.toml")])
def test_a_file_that_cannot_be_one_is_an_error(tmp_path, name, message):
    with pytest.raises(ConfigError, match=message):
        read_mixture_file(str(tmp_path / name))


def test_anchors_may_be_shared_and_overridden(write):
    text = "datasets:\n  a: &arm {root: /d/a, drop: [x], weight: 2}\n  b: {<<: *arm, root: /d/b}\n"

    spec = read_mixture_file(write(text))

    assert [(one.root, one.drop, one.weight) for one in spec.members] == [("/d/a", ("x",), 2), ("/d/b", ("x",), 2)]


def test_a_mixture_file_is_told_by_its_suffix(tmp_path):
    (tmp_path / "folder.yaml").mkdir()

    assert is_mixture_file("mix.yaml")
    assert is_mixture_file("a/mix.TOML")
    assert not is_mixture_file("data/aloha")
    assert not is_mixture_file("s3://bucket/mix.yaml")
    assert not is_mixture_file(str(tmp_path / "folder.yaml"))
