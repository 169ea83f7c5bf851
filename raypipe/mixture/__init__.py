"""Many unlike datasets as one: members with weights, and a schema that holds all of them.

::

    spec.py          what a user says                                           MixtureSpec, MemberSpec
    file.py          the same as a YAML or TOML file                            read_mixture_file
    open_members.py  all datasets at once; every one that is bad is named       Opened
    offer.py         what each member offers, in the names of the mixture
    unify.py         unlike features as one, or one error with a table          Unified
    windows.py       seconds or frames at each member's own rate
    dataset.py       all of that                                                Mixture
    open_any.py      a dataset or a mixture, by its root                        open_dataset
"""

from raypipe.mixture.dataset import Member, Mixture
from raypipe.mixture.file import is_mixture_file, read_mixture_file
from raypipe.mixture.open_any import open_dataset
from raypipe.mixture.open_members import BadMember, MemberNote
from raypipe.mixture.spec import MemberSpec, MixtureSpec

__all__ = [
    "BadMember",
    "Member",
    "MemberNote",
    "MemberSpec",
    "Mixture",
    "MixtureSpec",
    "is_mixture_file",
    "open_dataset",
    "read_mixture_file",
]
