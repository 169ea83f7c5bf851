"""Views for people: what a dataset, an episode, a batch, a plan and a run look like.

::

    choose.py       whatever it is, its view                                 show
    card.py         a dataset: frames, lengths, tasks, ranges, findings      view_dataset -> DatasetCard
    mixture.py      many of them: who is in it, and the shares               view_mixture -> MixtureCard
    episode.py      one episode: strips, curves, tasks, with a video         view_episode -> EpisodeView
    clip.py         the video of an episode, small enough for a page         Clip
    batch.py        a batch: pictures, action chunks, padding, what lacks    view_batch -> BatchView
    plan.py         an epoch before it runs, as a table and as a picture     view_plan, view_pipeline -> PlanView
    run.py          speed and waiting over time                              record, view_run -> RunView
    view.py         what all of them can do: show themselves, be saved       View
    plain.py        figures that show texts as they stand
    pixels.py, ranges.py, tasks.py, checked.py, plan_figure.py               parts of the above
    rerun_log.py    an episode for the Rerun viewer                          save_recording, open_viewer
    browse/         a page in the browser to look through a dataset          ``raypipe show --serve``
    command.py      what ``raypipe show`` does

They decide nothing that a run depends on. Each reads no more than it shows, and none uses pyplot.
"""

from raypipe.views.batch import BatchView, view_batch
from raypipe.views.card import DatasetCard, view_dataset
from raypipe.views.choose import show
from raypipe.views.clip import Clip
from raypipe.views.episode import EpisodeView, view_episode
from raypipe.views.mixture import MixtureCard, view_mixture
from raypipe.views.plan import PlanView, check_picture, plan_table, plot_plan, view_pipeline, view_plan, view_world
from raypipe.views.run import Recording, RunView, record, view_run
from raypipe.views.view import Picture, View

__all__ = [
    "BatchView",
    "Clip",
    "DatasetCard",
    "EpisodeView",
    "MixtureCard",
    "Picture",
    "PlanView",
    "Recording",
    "RunView",
    "View",
    "check_picture",
    "plan_table",
    "plot_plan",
    "record",
    "show",
    "view_batch",
    "view_dataset",
    "view_episode",
    "view_mixture",
    "view_pipeline",
    "view_plan",
    "view_run",
    "view_world",
]
