"""Compose the stages of the flow: their settings, and where each stage runs.

The modules, from the bottom up (each may use those above it)::

    config.py    the specs of all stages, and which order fits the memory budget  PipelineConfig
    pipeline.py  composes the stages, and alone decides where each runs           Pipeline
"""

from typing import TYPE_CHECKING

from raypipe import lazy_names

if TYPE_CHECKING:
    from raypipe.pipeline.config import (
        PipelineParts,
        datasets_of,
        index_frames,
        measure_members,
        open_with_order,
        schema_for,
    )
    from raypipe.pipeline.pipeline import Pipeline, Transport
else:
    __all__, __getattr__ = lazy_names(__name__)
