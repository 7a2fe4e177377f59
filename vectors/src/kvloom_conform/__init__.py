"""The published vectors of ``kvloom conform``: a safetensors file and a JSON manifest of each dialect."""

from pathlib import Path

VECTORS: Path = Path(__file__).parent / "vectors"
"""Folder of the set, whose ``index.json`` has its version and the hashes of all files."""
SCHEMA: Path = Path(__file__).parent / "schema.json"
"""JSON schema of every manifest."""
