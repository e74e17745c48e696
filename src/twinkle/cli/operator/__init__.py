"""What an operator sees and does, straight in the journal."""
