"""In a checkout, kernels/ and interop/ are next to cumla/; in an installation they are inside it.

A checkout has links in the place of the installed folders; on systems without links this module finds the folders.
"""

import pathlib
import sys

_package = sys.modules[__package__]
_folder = pathlib.Path(__file__).parent
if not (_folder / "kernels").is_dir():
    _package.__path__.append(str(_folder.parent))
