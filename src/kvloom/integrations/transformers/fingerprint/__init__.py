"""What decides what a model computes, read so that any change of it is seen."""
