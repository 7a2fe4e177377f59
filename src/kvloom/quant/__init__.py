"""What codes mean: scales, numbers and bytes."""
