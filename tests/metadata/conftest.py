import pytest

from support.lab import Lab


@pytest.fixture(params=["reference", "cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request):
    """As `lab`, for the backends that have the kernels of both builders."""
    return Lab(request.param, on_device=request.node.get_closest_marker("gpu") is not None)
