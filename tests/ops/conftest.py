import pytest


@pytest.fixture(params=["chosen", "portable", "exact"])
def kernel(request, lab):
    """Every kernel of sparse attention of the cuda backend; the other backends have one each."""
    if request.param == "chosen":
        yield request.param
        return
    from cumla.kernels.cuda.sparse import kernels as sparse_kernels

    with sparse_kernels.forced(request.param):
        yield request.param
