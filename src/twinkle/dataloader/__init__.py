"""Batches of rows, by rank, resumable to the row."""
