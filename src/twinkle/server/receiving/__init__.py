"""What comes in, within bounds: bodies, forms, files, and what a request says beside its fields."""
