"""The Tinker dialect."""
