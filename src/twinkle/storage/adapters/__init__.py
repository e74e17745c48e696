"""Where the states of adapters are kept: recovery points, and parking."""
