"""The commands of `cumla`, a file each."""
