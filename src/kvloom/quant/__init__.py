"""What int8 and int4 mean: scales, codes and their bytes."""
