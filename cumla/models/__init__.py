"""Attention layers of whole models, from hidden states to output, with weights under their published names."""
