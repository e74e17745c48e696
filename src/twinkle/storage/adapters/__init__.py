"""The training runs there are, and their recovery points."""
