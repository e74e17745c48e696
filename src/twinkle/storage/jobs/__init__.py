"""Jobs: what was submitted, who runs it, what became of it."""
