"""The tensors of a layer: where a token lies in them, how it is written and read."""
