"""Where a script sends its figures and its failures."""
