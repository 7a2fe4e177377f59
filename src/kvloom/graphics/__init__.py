"""Pictures that are written by hand, as SVG. Imports no torch."""
