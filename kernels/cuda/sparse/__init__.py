"""Host side of sparse attention: selects the kernel and its sizes, and divides the work."""
