import pytest


@pytest.fixture(params=["chosen", "portable", "exact"])
def kernel(request, lab):
    """Every sparse attention kernel of the cuda backend; each other backend has one."""
    if request.param == "chosen":
        yield request.param
        return
    from cumla.kernels.cuda.sparse import kernels as sparse_kernels

    with sparse_kernels.forced(request.param):
        yield request.param
