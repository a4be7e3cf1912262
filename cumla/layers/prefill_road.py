"""The old name of `prefill_path`, kept for one more release."""

from ..dispatch.deprecated import renamed_names
from . import prefill_path

__getattr__ = renamed_names(
    __name__,
    prefill_path,
    {
        "ROADS": "PATHS",
        "cheaper_road": "cheaper_path",
        "chunk_roads": "chunk_paths",
        "COSTS": "COSTS",
        "Costs": "Costs",
    },
)
