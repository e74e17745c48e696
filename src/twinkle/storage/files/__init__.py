"""Tenants' files, their uploads, and the rows that were made of them."""
