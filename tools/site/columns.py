"""An extension of mkdocstrings that converts docstrings to Markdown."""

import pathlib
import sys
from typing import Any

import griffe

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from docstrings import as_markdown


class Columns(griffe.Extension):
    """Rewrites every docstring that is loaded."""

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
