"""Programs of NVRTC, compiled once for each text and kept in the folder of the emulator's builds.

Only developers need NVRTC: the extra `dev` brings it.
"""

import functools
import hashlib
import pickle
import zlib

import pytest

from cumla.export import compiled as compiler_of_exports
from cumla.kernels.cuda import compile as compiler
from emulation import builds


@functools.cache
def nvrtc():
    """NVRTC's bindings; a test module that needs them is skipped if the library is missing."""
    why = "NVRTC is not installed (pip install -e '.[dev]')"
    bindings = pytest.importorskip("cuda.bindings.nvrtc", reason=why)
    try:
        bindings.nvrtcVersion()
    except RuntimeError:  # only the bindings, as numba-cuda installs them
        pytest.skip(why, allow_module_level=True)
    return bindings


def text_of(file, macros):
    """csrc/<file> with these macros."""
    return "".join(f"#define {name} {value}\n" for name, value in macros.items()) + compiler.source(file)


def compiled(file, macros, target):
    """The compiler's log of csrc/<file>, with a report of each kernel's resources, and the program.

    Fails the test with the log if compilation fails. The program is PTX for a target like compute_90.
    """
    text = text_of(file, macros)
    options = (*compiler.OPTIONS, *compiler_of_exports.CUPYS_OPTIONS, f"-arch={target}", "--ptxas-options=-v")
    digest = hashlib.sha256("\0".join((str(nvrtc().nvrtcVersion()), file, *options, text)).encode()).hexdigest()
    kept = builds.folder() / f"{digest[:24]}.nvrtc"
    with builds.alone(kept):
        if not kept.exists():
            program = zlib.compress(pickle.dumps(compiler_of_exports.compiled(text, file, options)))
            with builds.result(kept) as place:
                place.write_bytes(program)
    return pickle.loads(zlib.decompress(kept.read_bytes()))
