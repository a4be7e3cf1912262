"""Host side of sparse attention: choice of kernel and sizes, and division of the work."""
