"""Adapters as bytes: PEFT files for tenants and tools, snapshots for recovery."""
