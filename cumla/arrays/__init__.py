"""What an array is here: DLPack in and out without a copy, dtype tables, and whose stream a call runs on."""
