"""How a line becomes texts that the model reads, and their translations a line."""
