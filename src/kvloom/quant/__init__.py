"""What int8, int4 and int2 mean: scales, codes and their bytes."""
