"""Arrays of all frameworks: DLPack in and out without a copy, dtype tables, and the stream of a call."""
