"""Views for people: they show a dataset, an episode, a batch, a plan or a run.

The modules, from the top down (each may use those below it)::

    choose.py   the view for anything; ``raypipe show``, ``--serve`` too   show, show_root, make_server
    site.py     the data that its page requests; page/ is the page itself  Site
    mixture.py  a mixture: its members and their shares; ``raypipe info``  view_mixture -> MixtureCard
    card.py     a dataset: frames, lengths, tasks, ranges, findings        view_dataset -> DatasetCard
    episode.py  one episode: strips, curves, tasks; for Rerun too          view_episode -> EpisodeView
    batch.py    a batch: pictures, action chunks, padding, missing data    view_batch -> BatchView
    plan.py     an epoch before it runs, as a table and as a picture       view_plan, view_pipeline -> PlanView
    run.py      speed and waiting over time                                record, view_run -> RunView
    info.py     ``raypipe info`` of a dataset, and ``raypipe stats``       DatasetInfo, StatsReport
    account.py  a run's account, checked; the frames of a step             check_run, locate_recorded
    rows.py     ranges and tasks for the card, from meta/ and from rows    Range, TaskCounts
    pixels.py   frames for views, and an episode as a small video          FrameReader, Clip
    view.py     what all views can do: show themselves, be saved           View

A view never affects a run. Each reads no more than it shows, and none uses pyplot.
"""

from typing import TYPE_CHECKING

from raypipe import lazy_names

if TYPE_CHECKING:
    from raypipe.views.account import StepQuery, check_run, locate_planned, locate_recorded, step_table, verdict_table
    from raypipe.views.batch import BatchView, view_batch
    from raypipe.views.card import DatasetCard, view_dataset
    from raypipe.views.choose import ShowRequest, show, show_root
    from raypipe.views.episode import EpisodeView, view_episode
    from raypipe.views.info import describe, info_table, lacking_error, parse_actions, report_stats, stats_tables
    from raypipe.views.mixture import MixtureCard, describe_mixture, mixture_table, view_mixture
    from raypipe.views.pixels import Clip
    from raypipe.views.plan import PlanView, check_picture, plan_table, plot_plan, view_pipeline, view_plan, view_world
    from raypipe.views.run import Recording, RunView, record, view_run
    from raypipe.views.view import Picture, View
else:
    _, __getattr__ = lazy_names(__name__)

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
