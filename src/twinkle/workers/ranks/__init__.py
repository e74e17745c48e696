"""A mesh of several ranks: one process takes the work, the others follow it call by call."""
