"""Adapters on the device: brought there by restore and replay, kept current, stored, evicted."""
