"""Types passed from the checked functions to the backends."""
