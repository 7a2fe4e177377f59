"""Legal calls of each operator, drawn at random."""
