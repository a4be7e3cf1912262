"""The truth, in NumPy and float64: written to be read, compared against, and never to be fast."""
