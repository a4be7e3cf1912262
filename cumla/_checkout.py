"""In a checkout, kernels/ and interop/ lie beside cumla/; where it is installed, inside.

Python started in a checkout imports cumla/ from there, whatever is installed: the others are then looked for beside it.
"""

import pathlib
import sys

_package = sys.modules[__package__]
_folder = pathlib.Path(__file__).parent
if not (_folder / "kernels").is_dir():
    _package.__path__.append(str(_folder.parent))
