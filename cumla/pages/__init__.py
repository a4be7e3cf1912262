"""Caches as page groups: what the pages of a model hold, what a request needs of them, and copies of all groups at
once."""

from .copies import copy_pages, swap_in, swap_out
from .describe import describe
from .description import Description, Group, Hit, Missing, PagedCache, Part
from .host import HostPool, host_pool
from .packing import pack, packed_size, spans, unpack, verify
from .pools import FreePages, Pools, pools_of
from .residency import Residency
from .tables import check_tables, missing

__all__ = [
    "Description",
    "FreePages",
    "Group",
    "Hit",
    "HostPool",
    "Missing",
    "PagedCache",
    "Part",
    "Pools",
    "Residency",
    "check_tables",
    "copy_pages",
    "describe",
    "host_pool",
    "missing",
    "pack",
    "packed_size",
    "pools_of",
    "spans",
    "swap_in",
    "swap_out",
    "unpack",
    "verify",
]
