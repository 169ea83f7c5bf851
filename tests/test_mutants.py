"""The mutants of ``make mutants`` are whole: each still applies, and each promise of the README has some.

Whether the tests kill them takes minutes, and is for ``make mutants`` to tell.
"""

from collections import Counter

import pytest
from mutant_cases import MUTANTS
from mutants import ROOT, mutated_text, promises_of_readme

HELD_BY = promises_of_readme()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_changes_one_place_and_names_tests_of_its_promise(mutant):
    compile(mutated_text(mutant), mutant.file, "exec")

    assert mutant.old != mutant.new
    for test in mutant.tests:
        path, _, function = test.partition("::")
        assert path.startswith(HELD_BY[mutant.promise]), f"the README does not name {path} for {mutant.promise!r}"
        assert f"def {function}(" in (ROOT / path).read_text() if function else (ROOT / path).exists()


def test_every_promise_has_mutants_and_no_two_are_of_one_name():
    numbers = Counter(mutant.promise for mutant in MUTANTS)

    assert len(HELD_BY) >= 12
    assert {name: numbers[name] for name in HELD_BY if numbers[name] < 3} == {}
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_mutant_whose_text_is_gone_is_an_error(tmp_path):
    (tmp_path / "raypipe/plan").mkdir(parents=True)
    (tmp_path / "raypipe" / MUTANTS[0].file).write_text("nothing = 1\n")

    with pytest.raises(LookupError, match=r"has .* 0 times, expected once"):
        mutated_text(MUTANTS[0], tmp_path)
