"""Fine-tunings: which rows are trained when and under which numbers, and what is said of it."""
