"""The figures of the peers as a table, a plot and a page. Measures nothing."""

from typing import Any

from machine import markdown_table


def print_table(written: dict[str, Any]) -> None:
    print("\n".join(markdown_table(rows(written), list(rows(written)[0]))))


def rows(written):
    return [{"name": n, **{k: v for k, v in f.items() if k not in ("versions",)}} for n, f in written["peers"].items()]


def write_page(written, path, plot):
    pass


def write_plot(written, path):
    pass
