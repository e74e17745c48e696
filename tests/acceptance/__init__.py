"""A package, so that the service which its files share ends with it."""
