"""Texts of datasets in pictures are shown as they stand: dollar signs, and letters that the font lacks."""

import copy
import io
import pickle
import warnings
from dataclasses import replace

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.text import Text

import raypipe as rp
from raypipe.testing import CameraSpec, SynthSpec, write_dataset
from raypipe.text import figure_png, has_letters, new_figure
from raypipe.views import plot_plan, view_batch, view_dataset, view_episode, view_mixture, view_world

BAD_MATH = "price $5% off $10"
CHINESE = "把杯子放在桌上"
HEBREW = "רובוט"
"""DejaVu Sans has it, DejaVu Sans Mono does not."""


def open_odd(folder, *tasks, name="odd"):
    spec = SynthSpec(cameras=(CameraSpec(name="observation.images.$top_$"),), tasks=tasks, robot_type="a$_b$")
    return rp.open_dataset(str(write_dataset(folder / name, spec)))


def drawn_text(text: str, **settings) -> np.ndarray:
    """The pixels of one text, in a figure of its own."""
    figure = new_figure(4, 1)
    figure.text(0.1, 0.5, text, **settings)
    figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba()).copy()


def test_text_between_dollar_signs_is_no_formula():
    math, shown = drawn_text("pay $5 and $10"), drawn_text("pay $5 and $10", parse_math=False)

    np.testing.assert_array_equal(math, shown)
    # A formula has no spaces and no signs: it is narrower.
    widths = [np.ptp(np.flatnonzero((one[..., 0] < 128).any(axis=0))) for one in (math, drawn_text("pay 5 and 10"))]
    assert widths[0] > widths[1]


@pytest.mark.parametrize("view", [view_dataset, lambda dataset: view_episode(dataset, 0)], ids=["card", "episode"])
def test_views_of_a_dataset_with_dollar_signs_are_drawn(view, tmp_path):
    made = view(open_odd(tmp_path, BAD_MATH, "pay $5 and $10", name="cost_$5%_$"))

    made.save(tmp_path / "view.png")
    made.save(tmp_path / "view.html")
    figure = made.figure()
    for kind in ("svg", "pdf"):
        figure.savefig(io.BytesIO(), format=kind, bbox_inches="tight")
    texts = figure.findobj(Text)
    assert any("$" in text.get_text() for text in texts)
    assert not any(text.get_parse_math() for text in texts)


def test_names_of_numbers_with_dollar_signs_are_drawn_in_scales_and_legends(tmp_path):
    dataset = open_odd(tmp_path, "pick")
    card, episode = view_dataset(dataset), view_episode(dataset, 0)
    names = tuple(f"$x_{{{number}%$" for number in range(6))

    figure_png(replace(card, ranges=tuple(replace(one, names=names) for one in card.ranges)).figure())
    figure_png(replace(episode, curves=tuple(replace(one, names=names) for one in episode.curves)).figure())


def test_batch_with_dollar_signs_is_drawn():
    numbers = torch.arange(2)
    cameras = {"observation.images.$a%$": torch.zeros((2, 3, 16, 16), dtype=torch.uint8)}
    texts = {"task": [BAD_MATH] * 2, "dataset": ["$%$"] * 2}

    view = view_batch({"episode_index": numbers, "frame_index": numbers, **cameras, **texts})

    assert figure_png(view.figure()).startswith(b"\x89PNG")


def test_mixture_and_its_plan_with_dollar_signs_are_drawn(tmp_path):
    roots = [write_dataset(tmp_path / name, SynthSpec(cameras=(), seed=seed)) for seed, name in enumerate("ab")]
    members = [rp.MemberSpec(name=f"${root.name}%$", root=str(root)) for root in roots]
    mixture = rp.Mixture(members, progress=False)
    plan = view_world(rp.Pipeline(mixture, batch_size=4, seed=0).plan())

    view_mixture(mixture, BAD_MATH).save(tmp_path / "mixture.png")
    for kind in ("png", "svg", "pdf"):
        plot_plan(plan, tmp_path / f"plan.{kind}")

    # Letters are paths in the file; the text is a comment beside them.
    assert "<!-- $a%$ -->" in (tmp_path / "plan.svg").read_text()


def test_scales_are_numbers_in_a_style_that_writes_them_as_formulas():
    with mpl.rc_context({"axes.formatter.use_mathtext": True}):
        figure = new_figure(3, 2)
        axes = figure.subplots()
        axes.plot([0, 1])
        figure.canvas.draw()

    assert [label.get_text() for label in axes.get_xticklabels()][1] == "0.0"


def test_figure_of_a_view_can_be_copied():
    figure = new_figure(2, 1)
    figure.suptitle(BAD_MATH)

    for copied in (pickle.loads(pickle.dumps(figure)), copy.deepcopy(figure)):
        copied.savefig(io.BytesIO(), format="png")


def test_setting_of_matplotlib_is_as_before_after_a_figure_is_drawn():
    figure_png(new_figure(2, 1))

    assert mpl.rcParams["text.parse_math"] is True


@pytest.mark.parametrize("task", [CHINESE, "カップを取る", "컵을 집어"])
def test_tasks_whose_letters_the_font_lacks_are_text_on_the_page_of_a_card(task, tmp_path):
    card = view_dataset(open_odd(tmp_path, task))

    page = card.page()

    assert f"<td>{task}</td>" in page
    titles = [text.get_text() for text in card.figure().findobj(Text)]
    assert "1 task; boxes are letters that the font lacks" in titles


def test_tasks_whose_letters_the_font_has_are_in_the_picture_alone(tmp_path):
    card = view_dataset(open_odd(tmp_path, "Öffne die Schublade"))

    assert "Schublade" not in card.page()
    assert "1 task" in [text.get_text() for text in card.figure().findobj(Text)]


def test_no_letter_that_is_lacking_warns(tmp_path):
    dataset = open_odd(tmp_path, CHINESE, name=CHINESE)
    numbers = torch.arange(2)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for view in (view_dataset(dataset), view_episode(dataset, 0)):
            view.save(tmp_path / "view.png")
            view.page()
            for kind in ("png", "svg", "pdf"):
                view.figure().savefig(io.BytesIO(), format=kind, bbox_inches="tight")
        view_batch({"episode_index": numbers, "frame_index": numbers, "task": [CHINESE] * 2}).page()


def test_pictures_of_an_episode_and_a_batch_say_what_boxes_are(tmp_path):
    dataset, numbers = open_odd(tmp_path, CHINESE, "pick up"), torch.arange(2)
    batch = {"episode_index": numbers, "frame_index": numbers}
    views = (view_episode(dataset, 0), view_batch({**batch, "task": [CHINESE] * 2}))
    others = (view_episode(dataset, 1), view_batch({**batch, "task": ["pick up"] * 2}))

    told = [
        "boxes are letters that the font lacks" in "".join(text.get_text() for text in view.figure().findobj(Text))
        for view in (*views, *others)
    ]

    assert told == [True, True, False, False]


def test_tasks_of_a_batch_whose_letters_the_font_lacks_are_text_on_its_page():
    numbers = torch.arange(2)

    view = view_batch({"episode_index": numbers, "frame_index": numbers, "task": [CHINESE, "pick up"]})

    assert f"<td>episode 0, frame 0</td><td>{CHINESE}</td>" in view.page()


def test_letters_are_looked_for_in_every_font_that_is_set():
    assert has_letters("pick up\nthe cube: ä, 5 $")
    assert not has_letters(CHINESE)
    with mpl.rc_context({"font.family": ["no such font", "DejaVu Sans"]}):
        assert has_letters("pick")


def test_letters_are_looked_for_in_the_family_that_draws_them():
    assert has_letters(HEBREW)
    assert not has_letters(HEBREW, family="monospace")
    assert has_letters("pick up: ä", family="monospace")


def test_card_says_what_boxes_are_where_its_own_font_lacks_letters(tmp_path):
    card = view_dataset(open_odd(tmp_path, "pick up"))
    named = replace(card, lines=(("robot", HEBREW),))

    told = [
        "boxes are letters that the font lacks" in "".join(text.get_text() for text in view.figure().findobj(Text))
        for view in (named, card)
    ]

    assert told == [True, False]
