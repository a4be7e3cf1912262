"""Replays a request trace through the paged cache and the attention layers.

In the order of the data flow:

    trace         requests of a file
    options       options of a run, checked
    blocks        the pool of cache blocks, with shared prefixes
    scheduler     the tokens of each step, by request
    step_batch    a step's tokens as the arrays that metadata and layers take
    activations   synthetic rows: a function of seed, layer and token
    indexer       the compressed rows that a token selects at ratio 4
    layers        sparse attention layers: caches, inputs, outputs in float64; dense: the same for dense layers
    models        configurations, weights and metadata of models
    model_layers  attention layers of models, from hidden states to output
    groups        page groups of the layers, and what prefix hits need of each
    offload       prefixes in host memory
    ranks         the layers on one of several ranks
    engine        the loop: metadata once a step, then every layer
    traffic       bytes that each op has to move
    verify        the tokens to check, errors and their bounds
    summary       the numbers of a run; report prints them in tables, plot draws them, page writes a page
"""
