"""The main job: a request trace through the paged cache and the layers.

In the order in which data flows:

    trace        requests as a file has them
    options      what a run is made of, checked
    blocks       the pool of cache blocks, with shared prefixes
    scheduler    which tokens of which requests run in a step
    step_batch   a step's tokens as the arrays that metadata and layers take
    activations  the rows that stand in for a model's: a function of seed, layer and token
    indexer      which compressed rows a token selects at ratio 4
    layers       the attention layers, their caches and inputs
    dense        the same for dense layers, with what verifies them
    whole        the same for whole attention layers, from hidden states to their output; whole_v41: V4.1's
    ranks        the layers on one of several ranks; dense_ranks and whole_ranks for the other two kinds
    engine       the loop: metadata once, then every layer
    traffic      bytes that each op has to move
    verify       a sample of each step against float64; whole_verify for whole layers, by whole_exact, whole_v41_exact
    summary      the numbers of a run; report prints them by tables, plot draws them
"""
