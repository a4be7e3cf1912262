"""What crosses the seam between the checked functions and the backends."""
