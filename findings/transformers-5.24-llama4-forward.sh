#!/usr/bin/env bash
# transformers 5.24.0: every forward of Llama4ForConditionalGeneration raises AttributeError.
#
# Seen on Linux x86-64 with Python 3.11, torch 2.13.0: a small random Llama 4 with text and vision configuration,
# asked for four tokens of text. 5.23.0 answers with logits of shape [1, 4, 99]. 5.24.0 raises
#   AttributeError: 'MoeCausalLMOutputWithPast' object has no attribute 'image_outputs'
# in forward and in generate. The outer class reads a field that the output of its language model does not have.
# Llama4ForCausalLM, made from the text configuration, works in both. Exits 1 once this is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
cat > "$folder/ask.py" <<'PYTHON'
import sys

import torch
import transformers

transformers.logging.set_verbosity_error()
text = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 32, "intermediate_size_mlp": 32}
text |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
text |= {"num_local_experts": 2}
vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
vision |= {"image_size": 28, "patch_size": 14, "vision_output_dim": 32}
vision |= {"projector_input_dim": 32, "projector_output_dim": 32}
config = transformers.Llama4Config(text_config=text, vision_config=vision)
whole = transformers.Llama4ForConditionalGeneration(config).eval()
alone = transformers.Llama4ForCausalLM(config.text_config).eval()
ids = torch.ones(1, 4, dtype=torch.int64)
with torch.no_grad():
    print("Llama4ForCausalLM:", list(alone(ids).logits.shape))
    for name, ask in (("forward", lambda: whole(ids)), ("generate", lambda: whole.generate(ids, max_new_tokens=2))):
        try:
            ask()
        except AttributeError as error:
            print(f"Llama4ForConditionalGeneration, {name}: AttributeError: {error}")
            if "image_outputs" not in str(error):
                sys.exit(1)
        else:
            print(f"Llama4ForConditionalGeneration, {name}: works")
            sys.exit(1)
PYTHON
"$folder/env/bin/python" "$folder/ask.py"
