"""What a cache is: axis orders, indices into slots, specifications, canonical views."""
