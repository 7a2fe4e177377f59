"""SVG, and the common parts of HTML pages. Imports no torch."""
