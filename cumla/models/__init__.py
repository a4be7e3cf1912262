"""Attention layers of whole models, from hidden states to their output, weights by their published names."""
