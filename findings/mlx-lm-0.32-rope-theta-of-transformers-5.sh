#!/usr/bin/env bash
# mlx-lm 0.32.2: the base of RoPE in a config.json as transformers 5 saves it is not found, and its default is used.
#
# Seen on Linux x86-64 with Python 3.11, mlx-cpu 0.32.4, transformers 5.24.0: version 5 saves the base in
# "rope_parameters", without "rope_theta". A Qwen2 of base 12,345 has layers of base 1,000,000, a Llama of 10,000,
# without a word. So have the arguments of the architectures that the script names, by the base that they get instead:
# the defaults of these classes. Where a class has no default, from_dict() raises a TypeError; Qwen3, for one, reads it.
# Exits 1 once Llama and Qwen2 have their base.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet mlx-lm==0.32.2 "mlx[cpu]==0.32.4" transformers==5.24.0
cat > "$folder/ask.py" <<'PYTHON'
import sys
from pathlib import Path

import transformers
from mlx_lm.utils import _get_classes, load_config

BASE = 12345.0
NAMES = """afmoe bitnet cohere cohere2 deepseek_v2 deepseek_v3 deepseek_v32 falcon_h1 gemma gemma2 gemma3_text glm
glm4_moe_lite gpt_oss hunyuan_v1_dense internlm3 llama minicpm3 mixtral nanochat nemotron olmo2 olmoe phi phi3 phimoe
qwen2 qwen2_moe qwen3 seed_oss smollm3 starcoder2"""
SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 32}


def saved(name, **sizes):
    rope = {"rope_type": "default", "rope_theta": BASE}
    transformers.CONFIG_MAPPING[name](rope_parameters=rope, **sizes).save_pretrained(sys.argv[1])
    config = load_config(Path(sys.argv[1]))
    assert config["rope_parameters"]["rope_theta"] == BASE and "rope_theta" not in config
    return config


found = {}
for name in NAMES.split():
    config = saved(name)
    found.setdefault(_get_classes(config)[1].from_dict(config).rope_theta, []).append(name)
for base, names in sorted(found.items()):
    print(f"{base:,.0f}: {', '.join(names)}")
bases = {}
for name in ("llama", "qwen2", "qwen3"):
    config = saved(name, **SIZES, num_attention_heads=2, num_key_value_heads=2)
    model, arguments = _get_classes(config)
    bases[name] = model(arguments.from_dict(config)).layers[0].self_attn.rope.base
print("layers:", bases)
if bases["llama"] == BASE or bases["qwen2"] == BASE:
    sys.exit(1)
PYTHON
"$folder/env/bin/python" "$folder/ask.py" "$folder/model"
