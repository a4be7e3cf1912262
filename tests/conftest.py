"""Every test that takes `lab` runs on each backend; device backends are marked gpu.

Without a device, numba_cuda runs in Numba's simulator on host arrays, which must be asked for before Numba
is imported, and cuda on devices that the tests emulate (tests/emulation). The simulator is slow: `lab.tiny` says that
a test should make do with a few tokens. A test marked `attention` is for devices there: tests/kernels/
test_simulated_attention.py has small cases. `nowhere(when)` marks combinations of parameters that have no test,
`thorough(when)` marks combinations that only slow tests cover, where there is no device. A run of all tests
leaves five sixths of the emulated and simulated combinations, and of those of tests marked `sampled`, to the slow
tests; a run of named files has them all.

No folder has a conftest.py of its own: pytest 9.1 silently ignores the fixtures of a folder whose files are not named
one after another (issue 14964 of pytest).
"""

import collections
import gc
import os
import signal
import sys
import zlib

import pytest

# NumPy's threads of each process would wait for cores that other processes use. Set before it is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# A shell's background jobs ignore interrupts, and so would processes that the tests start to interrupt them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, default=0, help="another number, other random numbers in all tests (0)")


def pytest_report_header(config):
    return f"random numbers: --seed {config.getoption('--seed')}"


def wants_gpu(config):
    expression = config.getoption("-m") or ""
    return "gpu" in expression and "not gpu" not in expression


def pytest_configure(config):
    config.addinivalue_line("markers", "attention: takes Numba's simulator too long")
    config.addinivalue_line("markers", "nowhere(when): combinations, as Combination, that are no tests")
    config.addinivalue_line("markers", "sampled: a run of all tests leaves five sixths to the slow tests")
    config.addinivalue_line("markers", "thorough(when): combinations, as Combination, that are slow tests")
    # Otherwise JAX takes most of a device's memory for itself, and several test processes would not fit on it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    # Tests of JAX have two devices of the CPU. JAX reads it when it starts.
    if "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    os.environ.setdefault("CUMLA_TEST_KERNELS", "0")  # otherwise results of faults that tests inject would be recorded
    if not wants_gpu(config):
        os.environ.setdefault("NUMBA_ENABLE_CUDASIM", "1")
    if not config.getoption("numprocesses", None):  # a process that starts others runs no tests: it begins sooner
        prepare(config)


def prepare(config):
    """What tests take from the run: its seed and its folder of builds of the emulation, which runs share."""
    from emulation import builds
    from support import properties

    properties.SEED = config.getoption("--seed")
    if hasattr(config, "cache"):
        builds.keep_in(config.cache.mkdir("emulation"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """Number of test processes (-n auto): each takes a gigabyte of memory, and one of the device's."""
    return min(os.cpu_count() or 1, 8 if wants_gpu(config) else 4)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """On a device, Numba's tests of a file run in one process, because each process compiles its kernels anew."""
    if not wants_gpu(config):
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByCompiler(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return nodeid.split("::")[0] if "numba_cuda-device" in nodeid else nodeid

    return ByCompiler(config, log)


def pytest_generate_tests(metafunc):
    if "lab" in metafunc.fixturenames:
        from support.lab import BACKENDS, DEVICES

        attention = metafunc.definition.get_closest_marker("attention") is not None
        backends = [x for x in BACKENDS if not (attention and x == "numba_cuda")]
        if wants_gpu(metafunc.config):  # otherwise half of the collected tests would not run
            backends += DEVICES
        metafunc.parametrize("lab", backends, indirect=True)


class Combination:
    """A test's name and its parameters by name; where it runs, if it has a `lab`.

    Attributes:
        backend: its name; "" if it has none
        device: whether it is a real device
        emulated, simulated: whether it is cuda without a device, or numba_cuda
    """

    def __init__(self, item):
        self.test, self.parameters = item.originalname, item.callspec.params
        self.backend = self.parameters.get("lab", "")
        self.device = item.get_closest_marker("gpu") is not None
        self.emulated = self.backend == "cuda" and not self.device
        self.simulated = self.backend == "numba_cuda" and not self.device

    def get(self, name, default=None):
        return self.parameters.get(name, default)


def is_said(item, mark):
    """Whether a mark applies to a test: its `when` is true or absent."""
    return hasattr(item, "callspec") and any(x.kwargs["when"](Combination(item)) for x in item.iter_markers(mark))


def is_of_all_tests(config):
    """Whether a run covers the whole folder: no file and no name was given."""
    return [config.rootpath / name for name in config.args] == [config.rootpath / "tests"] and not config.option.keyword


def without_a_device(item):
    """Whether a test's kernels are emulated or simulated, which takes most of the time of all tests."""
    if not hasattr(item, "callspec") or item.get_closest_marker("gpu") is not None:
        return False
    tried = Combination(item)
    return tried.emulated or tried.simulated or tried.get("device") == "cuda" or "emulated" in item.fixturenames


def leave_to_slow_tests(items):
    """Mark five sixths of each test that is sampled or without a device, chosen by their names, as slow."""
    tests = collections.defaultdict(list)
    for item in items:
        sampled = without_a_device(item) or item.get_closest_marker("sampled") is not None
        if sampled and item.get_closest_marker("slow") is None:
            tests[item.nodeid.split("[")[0]].append(item)
    for combinations in tests.values():
        combinations.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
        for item in combinations[max(2, -(-len(combinations) // 6)) :]:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    """Wraps all other hooks, some of which add marks; pytest's own hook deselects by -m."""
    for item in items:
        if is_said(item, "thorough") and item.get_closest_marker("gpu") is None:
            item.add_marker(pytest.mark.slow)
    if is_of_all_tests(config):
        leave_to_slow_tests(items)
    result = yield
    items[:] = [item for item in items if not is_said(item, "nowhere")]
    return result


def pytest_collection_finish():
    gc.freeze()  # otherwise each garbage collection would visit all tests


def pytest_runtest_logreport(report):
    """Write the names of skipped tests to the file SKIPPED_TESTS, if it is set. CI runs them with torch and JAX."""
    if report.skipped and "SKIPPED_TESTS" in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(os.environ["SKIPPED_TESTS"], "a") as names:
            names.write(report.nodeid + "\n")


pytest_collectreport = pytest_runtest_logreport  # also for files that are skipped as a whole


@pytest.fixture(autouse=True)
def calls_in_full():
    """A test's first call of a kind is made in full, with memory that no test has used before: other tests replace what
    chooses the launches, or leave launches out."""
    if "cumla.dispatch.launch_cache" in sys.modules:
        sys.modules["cumla.dispatch.launch_cache"].forget_calls()
        sys.modules["cumla.kernels.types.stream_workspace"].release_memory()


@pytest.fixture(autouse=True, scope="session")
def simulated_threads_take_turns():
    """This takes a fifth of the time (support/simulator.py)."""
    if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
        from support import simulator

        simulator.install()


@pytest.fixture
def lab(request):
    """A backend, and functions that move arrays to it and back."""
    from support.lab import lab_of

    yield from lab_of(request)


@pytest.fixture(params=["chosen", "portable", "exact"])
def kernel(request, lab):
    """Every sparse attention kernel of the cuda backend; each other backend has one."""
    if request.param == "chosen":
        yield request.param
        return
    from cumla.kernels.cuda.sparse import kernels as sparse_kernels

    with sparse_kernels.forced(request.param):
        yield request.param


@pytest.fixture(params=[pytest.param("cuda", id="emulated"), pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """The cuda backend's lab, on an emulated and on a real device."""
    from support.lab import lab_of

    yield from lab_of(request)


@pytest.fixture
def emulated():
    """Devices that the tests emulate, while a test runs."""
    import emulation

    if emulation.unavailable():
        pytest.skip(emulation.unavailable())
    with emulation.devices():
        yield


@pytest.fixture
def here(emulated):
    """The lab of kernels of `csrc/` on emulated devices."""
    from support.lab import Lab

    return Lab("cuda", on_device=True, emulated=True)


@pytest.fixture
def rng(request):
    """A generator seeded by the test's name and --seed: different numbers for each test, reproducible."""
    import numpy as np

    name, seed = request.node.nodeid, request.config.getoption("--seed")
    return np.random.default_rng(list(f"{name}{seed or ''}".encode()))


@pytest.fixture(autouse=True)
def current_streams_stay(request):
    """No test leaves another stream current: tests after it would read results too early."""
    yield
    if "emulation.queues" in sys.modules:
        queues = sys.modules["emulation.queues"]
        assert queues.current_stream() is queues.DEFAULT, "left another stream current"
    if request.node.get_closest_marker("gpu") is None:
        return
    cupy, torch = sys.modules.get("cupy"), sys.modules.get("torch")
    left = {}
    if cupy is not None and cupy.cuda.get_current_stream().ptr:
        left["CuPy"] = cupy.cuda.get_current_stream()
        cupy.cuda.Stream.null.use()
    if torch is not None and torch.cuda.is_initialized() and torch.cuda.current_stream().cuda_stream:
        left["torch"] = torch.cuda.current_stream()
        torch.cuda.set_stream(torch.cuda.default_stream())
    assert not left, f"left another stream current: {left}"


@pytest.fixture(params=["reference", pytest.param("cuda", marks=pytest.mark.gpu)])
def host_or_device(request):
    """Host and device, for errors: what the backend is does not matter before it is called."""
    from support.lab import Lab

    return Lab(request.param, on_device=request.param == "cuda")


@pytest.fixture
def calls(monkeypatch):
    """The names of the operations of XLA programs that call Python."""
    from cumla.interop.ops import Op

    calls, write = [], Op.write

    def counted(self, *args, **kwargs):
        calls.append(self.name)
        write(self, *args, **kwargs)

    monkeypatch.setattr(Op, "write", counted)
    return calls


@pytest.fixture
def need_gpus():
    """A function that skips the test if there are fewer GPUs than its argument."""
    import cupy

    def need(count):
        found = cupy.cuda.runtime.getDeviceCount()
        if found < count:
            pytest.skip(f"needs {count} GPUs, of which there are {found}")

    return need


@pytest.fixture
def two_gpus(need_gpus):
    need_gpus(2)


@pytest.fixture
def nccl():
    """The communicator's module, with a fake NCCL between threads on an emulated device."""
    from support import fake_nccl

    with fake_nccl.devices():
        from cumla.interop import nccl

        yield nccl
