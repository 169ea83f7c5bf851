"""Views for people: they show a dataset, an episode, a batch, a plan or a run.

::

    choose.py       finds the view for anything                              show
    card.py         a dataset: frames, lengths, tasks, ranges, findings      view_dataset -> DatasetCard
    checked.py      what the card checks, and what it leaves to `validate`   Checked
    mixture.py      a mixture: its members and their shares                  view_mixture -> MixtureCard
    episode.py      one episode: strips, curves, tasks, with a video         view_episode -> EpisodeView
    clip.py         the video of an episode, small enough for a page         Clip
    batch.py        a batch: pictures, action chunks, padding, missing data  view_batch -> BatchView
    plan.py         an epoch before it runs, as a table and as a picture     view_plan, view_pipeline -> PlanView
    run.py          speed and waiting over time                              record, view_run -> RunView
    view.py         what all views can do: show themselves, be saved         View
    plain.py        figures that show texts literally
    pixels.py, ranges.py, tasks.py, plan_figure.py                           parts of the above
    rerun_log.py    an episode for the Rerun viewer                          save_recording, open_viewer
    info/           answers of `raypipe info`, `stats`, `account`, `where`   DatasetInfo
    browse/         a page in the browser to look through a dataset          ``raypipe show --serve``
    command.py      the command ``raypipe show``

A view never affects a run. Each reads no more than it shows, and none uses pyplot.
"""

from typing import TYPE_CHECKING

from raypipe import lazy_names

if TYPE_CHECKING:
    from raypipe.views.batch import BatchView, view_batch
    from raypipe.views.card import DatasetCard, view_dataset
    from raypipe.views.choose import show
    from raypipe.views.clip import Clip
    from raypipe.views.command import WHOLE as WHOLE
    from raypipe.views.command import ShowRequest as ShowRequest
    from raypipe.views.command import show_root as show_root
    from raypipe.views.episode import EpisodeView, view_episode
    from raypipe.views.info.account import check_run as check_run
    from raypipe.views.info.account_tables import step_table as step_table
    from raypipe.views.info.account_tables import verdict_table as verdict_table
    from raypipe.views.info.dataset import describe as describe
    from raypipe.views.info.dataset import info_table as info_table
    from raypipe.views.info.dataset import lacking_error as lacking_error
    from raypipe.views.info.mixture import describe_mixture as describe_mixture
    from raypipe.views.info.mixture import mixture_table as mixture_table
    from raypipe.views.info.stats import parse_actions as parse_actions
    from raypipe.views.info.stats import report_stats as report_stats
    from raypipe.views.info.stats import stats_tables as stats_tables
    from raypipe.views.info.where import PlannedRun as PlannedRun
    from raypipe.views.info.where import StepQuery as StepQuery
    from raypipe.views.info.where import locate_planned as locate_planned
    from raypipe.views.info.where import locate_recorded as locate_recorded
    from raypipe.views.mixture import MixtureCard, view_mixture
    from raypipe.views.plan import PlanView, check_picture, plan_table, plot_plan, view_pipeline, view_plan, view_world
    from raypipe.views.run import Recording, RunView, record, view_run
    from raypipe.views.view import Picture, View
else:
    _, __getattr__ = lazy_names(
        __name__,
        {
            "batch": "BatchView view_batch",
            "card": "DatasetCard view_dataset",
            "choose": "show",
            "clip": "Clip",
            "command": "ShowRequest WHOLE show_root",
            "episode": "EpisodeView view_episode",
            "info.account": "check_run",
            "info.account_tables": "step_table verdict_table",
            "info.dataset": "describe info_table lacking_error",
            "info.mixture": "describe_mixture mixture_table",
            "info.stats": "parse_actions report_stats stats_tables",
            "info.where": "PlannedRun StepQuery locate_planned locate_recorded",
            "mixture": "MixtureCard view_mixture",
            "plan": "PlanView check_picture plan_table plot_plan view_pipeline view_plan view_world",
            "run": "Recording RunView record view_run",
            "view": "Picture View",
        },
    )

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
