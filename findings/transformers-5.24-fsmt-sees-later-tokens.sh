#!/usr/bin/env bash
# transformers 5.24.0: the decoder of FSMT attends to later tokens where it is given encoder_outputs and no input_ids.
#
# Seen on Linux x86-64 with Python 3.11, torch 2.13.0: a small random FSMT, 8 states of an encoder, 12 tokens of the
# decoder, use_cache=False. Logits of the first 6 tokens change with the 6 after them. With input_ids beside the same
# encoder_outputs, which are then not read otherwise, they do not: the causal mask is made only where input_ids are.
# Who scores given texts from stored encoder states gets wrong numbers without an error. Exits 1 once this is not so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 sacremoses==0.1.1
cat > "$folder/ask.py" <<'PYTHON'
import sys

import torch
import transformers
from transformers.modeling_outputs import BaseModelOutput

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
sizes = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "d_model": 32}
heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "init_std": 0.3}
config = transformers.FSMTConfig(src_vocab_size=99, tgt_vocab_size=99, **sizes, **heads)
model = transformers.FSMTForConditionalGeneration(config).eval()
states = BaseModelOutput(last_hidden_state=torch.randn(1, 8, 32))
one = torch.randint(5, 90, (1, 12))
other = torch.cat([one[:, :6], one[:, 6:].flip(1)], dim=1)
ids = torch.randint(5, 90, (1, 8))


def change(**inputs):
    with torch.no_grad():
        a, b = (
            model(encoder_outputs=states, decoder_input_ids=x, use_cache=False, **inputs).logits for x in (one, other)
        )
    return float((a - b)[:, :6].abs().max())


alone, beside = change(), change(input_ids=ids)
print("largest change of the first 6 tokens:", alone, "without input_ids,", beside, "with")
if alone < 1e-2 or beside > 1e-4:
    sys.exit(1)
PYTHON
"$folder/env/bin/python" "$folder/ask.py"
