import pytest

from support.lab import Lab


@pytest.fixture(params=["reference", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request):
    """Host and device: what the backend is does not matter before it is called."""
    return Lab(request.param, on_device=request.param == "cuda")
