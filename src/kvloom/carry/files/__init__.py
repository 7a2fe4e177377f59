"""Files as bytes and as tensors, read where they lie and written whole, and what is said beside them."""
