"""Objects that scripts name instead of making."""
