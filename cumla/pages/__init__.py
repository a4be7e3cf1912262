"""Caches as page groups: what the pages of a model hold, and what a request needs of them to go on."""

from .describe import describe
from .description import Description, Group, Hit, Missing, PagedCache, Part
from .tables import check_tables, missing

__all__ = ["Description", "Group", "Hit", "Missing", "PagedCache", "Part", "check_tables", "describe", "missing"]
