"""Where base models come from; for now, tiny ones made on the spot."""
