"""How sparse attention is put to work on a device: which kernel, in which sizes, who does what."""
