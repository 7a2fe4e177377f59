"""Pictures and pages that are written by hand: SVG, and what the pages of HTML share. Imports no torch."""
