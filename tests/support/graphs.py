"""CUDA graphs of calls."""


def graph_of(call):
    """A graph of a call, captured on a separate stream after all work that was queued before."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        call()
        return stream.end_capture()
