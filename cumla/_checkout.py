"""In a checkout, kernels/ and interop/ lie beside cumla/; where it is installed, inside.

A checkout has links in the place where they would be installed; on systems without links they are looked for here.
"""

import pathlib
import sys

_package = sys.modules[__package__]
_folder = pathlib.Path(__file__).parent
if not (_folder / "kernels").is_dir():
    _package.__path__.append(str(_folder.parent))
