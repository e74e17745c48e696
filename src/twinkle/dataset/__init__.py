"""Rows from files and hubs: chosen, mapped, encoded, packed."""
