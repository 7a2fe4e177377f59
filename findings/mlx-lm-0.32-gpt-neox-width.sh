#!/usr/bin/env bash
# mlx-lm 0.32.2: a GPT-NeoX has MLPs of four times its hidden size, whatever intermediate_size its configuration says.
#
# Seen on Linux x86-64 with Python 3.11, mlx-cpu 0.32.4: weights of another width are refused when they are loaded. Models
# of EleutherAI have four times the hidden size, others of the class need not. Exits 1 once the width is that said.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet mlx-lm==0.32.2 "mlx[cpu]==0.32.4"
cat > "$folder/ask.py" <<'PYTHON'
import sys

from mlx_lm.models.gpt_neox import Model, ModelArgs

said = ModelArgs.from_dict(
    {
        "model_type": "gpt_neox",
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "max_position_embeddings": 64,
        "layer_norm_eps": 1e-5,
        "vocab_size": 96,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.25,
    }
)
width = Model(said).layers[0].mlp.dense_h_to_4h.weight.shape[0]
print("width:", width, "said: 192")
sys.exit(width == 192)
PYTHON
"$folder/env/bin/python" "$folder/ask.py"
