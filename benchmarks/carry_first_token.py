"""Time to the first token in llama.cpp behind a carried prompt, over its own prefill.

    make build/engines/llama/.ready
    python benchmarks/carry_first_token.py [--tokens 8192] [--rounds 3]

A random Llama of 20 million weights (8 layers, 4 key/value heads of 64) with a cache in float16 computes
the prompt in llama.cpp with one thread, and saves it. The file goes to one of mlx-lm and back, and is loaded
into a new context, which computes the last token of the prompt. Prints one line of JSON: seconds, the CPU's
and by the clock, of the prefill and of loading and one token, medians of the rounds; their ratio by the
CPU's; and whether the token is the same.

Prediction: a prefill of T tokens is T forwards in batches, loading a copy of 8 KiB a token: below 0.02.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvloom.carry import geometry_of, read_llama, read_mlx, write_llama, write_mlx

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "tests" / "carry" / "engines"


def saved_model(folder: Path, tokens: int) -> LlamaForCausalLM:
    """A random model in a folder, as the scripts of engines read it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2 * tokens,
    )
    model = LlamaForCausalLM(config)
    config.save_pretrained(folder)
    np.savez(folder / "weights.npz", **{name: x.numpy() for name, x in model.state_dict().items()})
    return model


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", type=Path, default=ROOT / "build" / "engines")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = saved_model(folder, args.tokens)
        ids = torch.randint(3, 1000, (args.tokens + 1,), generator=torch.Generator().manual_seed(0)).tolist()

        def ask(script: str, **wanted: object) -> dict[str, float]:
            request = folder / "request.json"
            request.write_text(json.dumps({"folder": name, "tokens": ids, **wanted}))
            python = (args.engines / "llama" / "bin" / "python").absolute()
            done = subprocess.run(
                [python, SCRIPTS / script, request], capture_output=True, text=True, check=True
            )
            found: dict[str, float] = json.loads(done.stdout or "{}")
            return found

        ask("gguf_models.py")
        own, carried = folder / "own.bin", folder / "carried.bin"
        prefill = ask("llama_first_token.py", save=str(own))
        geometry = geometry_of(model)
        write_mlx(read_llama(own, geometry), folder / "prompt.safetensors")
        write_llama(read_mlx(folder / "prompt.safetensors", geometry), carried, geometry)
        rounds = [ask("llama_first_token.py", load=str(carried)) for _ in range(args.rounds)]
        found = {what: float(np.median([x[what] for x in rounds])) for what in ("cpu", "wall")}
        print(
            json.dumps(
                {
                    "tokens": args.tokens,
                    "bytes": carried.stat().st_size,
                    "prefill": {what: round(prefill[what], 3) for what in ("cpu", "wall")},
                    "carried": {what: round(x, 4) for what, x in found.items()},
                    "ratio": round(found["cpu"] / prefill["cpu"], 5),
                    "same token": {x["token"] for x in rounds} == {prefill["token"]},
                }
            )
        )


if __name__ == "__main__":
    main()
