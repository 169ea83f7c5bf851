"""The dashboard of the examples asks for metrics that raypipe exports, all of them, by labels that they have."""

import json
import re
from itertools import combinations
from pathlib import Path

import pytest

from raypipe.feed.metrics import COUNTERS, GAUGES, TAGS

DASHBOARD = json.loads((Path(__file__).parents[1] / "examples" / "grafana.json").read_text())
EXPORTED = {*(f"ray_{name}_total" for name in COUNTERS), *(f"ray_{name}" for name in GAUGES)}
"""As `tests/e2e/test_metrics_port.py` finds them on Ray's port."""
FUNCTIONS = {"sum", "max", "count", "rate", "by", "or", "label_values"}
PANELS = {panel["title"]: panel for panel in DASHBOARD["panels"]}
QUERIES = [target["expr"] for panel in PANELS.values() for target in panel["targets"]]
QUERIES += [one["query"]["query"] for one in DASHBOARD["templating"]["list"] if one["type"] == "query"]


def words(query):
    """Return the names in a query that are neither functions, labels nor variables."""
    without_texts = re.sub(r'"[^"]*"|\[[^\]]*\]', "", query)
    return set(re.findall(r"[a-zA-Z_]\w*", without_texts)) - FUNCTIONS - set(TAGS)


@pytest.mark.parametrize("query", QUERIES)
def test_query_asks_for_metrics_and_labels_that_are_exported(query):
    assert words(query) <= EXPORTED
    # A counter is asked for its rate, or for its sum where that is the figure.
    for name in set(re.findall(r"rate\((\w+)", query)):
        assert name.endswith("_total")


def test_dashboard_shows_every_metric():
    assert set().union(*map(words, QUERIES)) == EXPORTED


def test_queries_use_the_variables_that_the_dashboard_has():
    used = {name for query in QUERIES for name in re.findall(r"\$\{?(\w+)", query)} - {"__rate_interval"}
    known = {one["name"] for one in DASHBOARD["templating"]["list"]}

    assert used | {"datasource"} == known
    sources = [panel["datasource"]["uid"] for panel in PANELS.values()]
    assert set(sources) == {"${datasource}"}


def test_panels_fill_the_width_and_do_not_overlap():
    assert len(PANELS) == len(DASHBOARD["panels"]) == len({panel["id"] for panel in PANELS.values()})
    places = [panel["gridPos"] for panel in PANELS.values()]
    cells = [
        {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])} for at in places
    ]
    assert not any(one & other for one, other in combinations(cells, 2))
    height = max(at["y"] + at["h"] for at in places)
    assert set().union(*cells) == {(x, y) for x in range(24) for y in range(height)}


def test_every_panel_says_what_it_shows():
    assert all(panel["description"] and panel["fieldConfig"]["defaults"]["unit"] for panel in PANELS.values())
