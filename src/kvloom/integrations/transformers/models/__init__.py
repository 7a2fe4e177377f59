"""What a model is: its configuration, positions, inputs, and what its layers keep."""
