"""The main job: a request trace through the paged cache and the layers.

In the order in which data flows:

    trace         requests of a file
    options       options of a run, checked
    blocks        the pool of cache blocks, with shared prefixes
    scheduler     which tokens of which requests run in a step
    step_batch    a step's tokens as the arrays that metadata and layers take
    activations   rows in place of a model's activations: a function of seed, layer and token
    indexer       which compressed rows a token selects at ratio 4
    layers        sparse attention layers: caches, inputs, outputs in float64; dense: the same for dense layers
    models        configurations, weights and metadata of models
    model_layers  their attention layers, from hidden states to output
    ranks         the layers on one of several ranks
    engine        the loop: metadata once a step, then every layer
    traffic       bytes that each op has to move
    verify        which tokens are checked, errors and their bounds
    summary       the numbers of a run; report prints them by tables, plot draws them
"""
