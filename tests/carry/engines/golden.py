"""Makes the files of tests/carry/golden with the real engines; their README has the command."""

import tempfile
from pathlib import Path

import torch
from carry import test_engines as real
from carry.engines.llama_server import LlamaServer
from carry.models import text

GOLDEN = Path(__file__).parents[1] / "golden"
TOKENS = 5
LLAMA = {
    "llama_f32.seq": {"kind": "f32", "flash": False, "form": "sequence"},
    "llama_f16_flash.ctx": {"kind": "f16", "flash": True, "form": "context"},
    "llama_q8_0.state": {"kind": "q8_0", "flash": True, "form": "state"},
    "llama_q8_0_unrotated.state": {"kind": "q8_0", "flash": True, "form": "state", "disabled": True},
}


def main() -> None:
    """Make all files."""
    for name in ("llama", "deepseek"):
        with tempfile.TemporaryDirectory() as folder:
            given = real.given_of(name, Path(folder))
            given.ids = text(TOKENS + 1)[0].tolist()
            if name == "deepseek":
                real.run(
                    "llama", "llama_engine", given, save=GOLDEN / "deepseek_f32.seq", **LLAMA["llama_f32.seq"]
                )
                continue
            for file, how in LLAMA.items():
                real.run("llama", "llama_engine", given, save=GOLDEN / file, **how)
            for kind in ("q8_0", "q4_0"):
                with LlamaServer(real.ENGINES / "llama-server", given.folder, kind, 256) as server:
                    server.complete(given.held, 0)
                    server.slot("save", "saved.bin")
                (GOLDEN / f"server_{kind}.slot").write_bytes((given.folder / "saved.bin").read_bytes())
            for bits in (0, 8, 4):
                path = GOLDEN / f"mlx_{bits or 'f32'}.safetensors"
                real.run("mlx", "mlx_engine", given, save=path, bits=bits, step=8)


torch.set_num_threads(1)
main()
