"""The reference in NumPy and float64: slow code that is easy to read, with which other backends are compared."""
