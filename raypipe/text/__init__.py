"""Text in and out: settings, limits, messages, progress bars, the terminal, pages.

The modules, from the bottom up (each may use those above it)::

    limits.py    what comes in: the largest sizes accepted, specs from dicts  parse_json, read_lines, make_spec
    terminal.py  words of messages, what the program prints, progress bars    counted, echo, progress_bar
    figures.py   figures whose labels are never read as formulas              boxes_told
    pages.py     pages of HTML by templates/, and figures as pictures         page_part, make_page, new_figure
"""

from typing import TYPE_CHECKING

from raypipe import lazy_names

if TYPE_CHECKING:
    from raypipe.text.figures import boxes_told, has_letters
    from raypipe.text.limits import (
        BODY_CODES,
        FREE_BYTES,
        MOST_ALIKE_FRAMES,
        MOST_COUNT,
        MOST_INDEX_BYTES,
        MOST_JSON_BYTES,
        MOST_LANES,
        MOST_NUMBERS,
        MOST_PIXELS,
        MOST_RATIO,
        MOST_TEXT_BYTES,
        MOST_VIDEO_FRAMES,
        MOST_YAML_NODES,
        check_choice,
        check_keys,
        field_names,
        join_within,
        make_mapping,
        make_spec,
        parse_bytes,
        parse_json,
        read_lines,
    )
    from raypipe.text.pages import (
        MAX_INCHES,
        count_whole,
        encode_pixels,
        figure_png,
        make_page,
        new_figure,
        page_part,
        page_table,
    )
    from raypipe.text.terminal import (
        Bar,
        constant_text,
        count_bar,
        counted,
        cut_inside,
        echo,
        either,
        first_of,
        frames_text,
        how_to_install,
        is_shown,
        lines_table,
        plural,
        print_table,
        progress_bar,
        rows_table,
        run_to_an_end,
        span_text,
    )
else:
    __all__, __getattr__ = lazy_names(__name__)
