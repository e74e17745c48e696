"""A package, so that the services which its files share end with it."""
