"""What both Numba backends share: plain functions that each compiles for its own target."""
