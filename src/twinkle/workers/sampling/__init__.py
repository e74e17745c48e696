"""Samples beside the training: claimed, drawn in slices, told as they grow."""
