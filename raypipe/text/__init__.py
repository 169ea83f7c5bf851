"""Text in and out: settings, limits, messages, progress bars, the terminal.

::

    limits.py     how much a file, an answer or a state may claim          parse_json, read_lines
    wording.py    specs from dicts; plurals, ranges, shortened texts       make_spec, counted
    terminal.py   what the program prints, progress bars, exit codes       echo, progress_bar, run_to_an_end
"""

from typing import TYPE_CHECKING

from raypipe import lazy_names

if TYPE_CHECKING:
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
        join_within,
        parse_json,
        read_lines,
    )
    from raypipe.text.terminal import (
        Bar,
        count_bar,
        echo,
        is_shown,
        open_console,
        print_table,
        progress_bar,
        run_to_an_end,
    )
    from raypipe.text.wording import (
        check_choice,
        check_keys,
        constant_text,
        counted,
        cut_inside,
        either,
        field_names,
        first_of,
        frames_text,
        how_to_install,
        make_mapping,
        make_spec,
        parse_bytes,
        plural,
        span_text,
    )
else:
    __all__, __getattr__ = lazy_names(
        __name__,
        {
            "limits": (
                "BODY_CODES FREE_BYTES MOST_ALIKE_FRAMES MOST_COUNT MOST_INDEX_BYTES MOST_JSON_BYTES MOST_LANES "
                "MOST_NUMBERS MOST_PIXELS MOST_RATIO MOST_TEXT_BYTES MOST_VIDEO_FRAMES MOST_YAML_NODES "
                "join_within parse_json read_lines"
            ),
            "terminal": "Bar count_bar echo is_shown open_console print_table progress_bar run_to_an_end",
            "wording": (
                "check_choice check_keys constant_text counted cut_inside either field_names first_of frames_text "
                "how_to_install make_mapping make_spec parse_bytes plural span_text"
            ),
        },
    )
