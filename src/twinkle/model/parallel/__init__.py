"""One model on several ranks: gradients summed, layers, sequences and experts shared."""
