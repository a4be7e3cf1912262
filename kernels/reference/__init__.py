"""The reference, in NumPy and float64: written to be read and compared against, not to be fast."""
