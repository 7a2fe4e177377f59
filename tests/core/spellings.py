"""What does not say how keys and values are kept."""

BAD = [
    8, 8.0, True, b"int8", ["int8"], ("int8", 64), "", ":", "int", "int3", "int16", "8", "INT8",
    "float64", " int8", "int8 ", "int8\n", "int8:", "int8:g", "int8:g0", "int8:g00", "int8:g-1", "int8:g+8",
    "int8:g8.0", "int8:g08", "int8:g 8", "int8:g8\n", "int8:G8", "int8:g\u0663", "int8:g" + "9" * 5000,
    "int8:32", "int8g32", "int8:g16:g16", "int8:g16:", "g32", ":g32", "auto:g16", "float32:g16",
    "float16:g16", "bfloat16:", "torch.int8",
]  # fmt: skip
"""Texts that are none of its spellings, and things that are no texts."""
ODD = ["int4:g7", "int4:g1", "int2:g2", "int2:g6"]
"""Groups of codes, two or four to a byte, that are no whole bytes."""
