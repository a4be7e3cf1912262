"""One attention layer, one step, between its projections."""
