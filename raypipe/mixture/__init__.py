"""Many unlike datasets as one: members with weights, a schema that holds all of them, and their statistics.

::

    spec.py         what a user says                                           MixtureSpec, MemberSpec
    file.py         the same as a YAML or TOML file                            read_mixture_file
    members.py      all datasets at once; every one that is bad is named       Opened
    offer.py        what each member offers, in the names of the mixture
    unify.py        unlike features as one, or one error with unify_table.py   Unified
    windows.py      seconds or frames at each member's own rate
    mixture.py      all of that                                                Mixture
    open_any.py     a dataset or a mixture, by its root                        open_dataset
    stats.py        stats of every member in the mixture's names, and pooled   MixtureStats
    normaliser.py   batch -> batch: each sample by the stats of its dataset    Normaliser
    stats_json.py   statistics as JSON, every number as it was

Statistics are values: numpy, saved as JSON. Only what is given to a `Normaliser` is torch.
"""

from typing import TYPE_CHECKING

from raypipe import lazy_names

if TYPE_CHECKING:
    from raypipe.mixture.file import is_mixture_file, read_mixture_file
    from raypipe.mixture.members import NUM_THREADS, MemberNote, Opened, open_members
    from raypipe.mixture.mixture import Member, Mixture, only_members, with_weight
    from raypipe.mixture.normaliser import Normaliser
    from raypipe.mixture.open_any import open_dataset
    from raypipe.mixture.spec import MemberSpec, MixtureSpec
    from raypipe.mixture.stats import MemberStats, MixtureStats, mixture_stats
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "file": "is_mixture_file read_mixture_file",
            "members": "MemberNote NUM_THREADS Opened open_members",
            "mixture": "Member Mixture only_members with_weight",
            "normaliser": "Normaliser",
            "open_any": "open_dataset",
            "spec": "MemberSpec MixtureSpec",
            "stats": "MemberStats MixtureStats mixture_stats",
        },
    )

__all__ = [
    "NUM_THREADS",
    "Member",
    "MemberNote",
    "MemberSpec",
    "MemberStats",
    "Mixture",
    "MixtureSpec",
    "MixtureStats",
    "Normaliser",
    "Opened",
    "is_mixture_file",
    "mixture_stats",
    "only_members",
    "open_dataset",
    "open_members",
    "read_mixture_file",
    "with_weight",
]
