"""Faster products for a model, where a library that has them is installed."""
