"""Programs of NVRTC, compiled once for each text and kept in the folder of the emulator's builds.

Only developers need NVRTC: the extra `dev` brings it.
"""

import functools
import hashlib
import pickle
import zlib

import pytest

from cumla.kernels.cuda import compile as compiler
from emulation import builds

CUPYS_OPTIONS = ("--device-as-default-execution-space", "-ftz=true")


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
    options = (*compiler.OPTIONS, *CUPYS_OPTIONS, f"-arch={target}", "--ptxas-options=-v")
    digest = hashlib.sha256("\0".join((str(nvrtc().nvrtcVersion()), file, *options, text)).encode()).hexdigest()
    kept = builds.folder() / f"{digest[:24]}.nvrtc"
    with builds.alone(kept):
        if not kept.exists():
            program = zlib.compress(pickle.dumps(compiled_anew(text, file, options)))
            with builds.result(kept) as place:
                place.write_bytes(program)
    return pickle.loads(zlib.decompress(kept.read_bytes()))


def compiled_anew(text, file, options):
    _, program = nvrtc().nvrtcCreateProgram(text.encode(), file.encode(), 0, None, None)
    (status,) = nvrtc().nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    log = read(program, "ProgramLog").decode().rstrip("\0 ")
    assert status == nvrtc().nvrtcResult.NVRTC_SUCCESS, log
    result = log, read(program, "PTX" if "-arch=compute" in " ".join(options) else "CUBIN")
    nvrtc().nvrtcDestroyProgram(program)
    return result


def read(program, kind):
    _, size = getattr(nvrtc(), f"nvrtcGet{kind}Size")(program)
    data = bytearray(size)
    getattr(nvrtc(), f"nvrtcGet{kind}")(program, data)
    return bytes(data)
