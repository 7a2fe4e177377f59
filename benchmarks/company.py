"""What company changes: requests of a session, alone and among others, and their tokens beside ``generate``.

Attention of a request has the same bits in any batch, and the linear layers of a model have not: they round
by the number of rows. Floats differ then by a rounding. A code differs by a step, where the number before it
was rounded the other way.

``codes``: prompts of the bundled model in float32, each in a session of its own and all in one. ``texts`` are
those that differ, ``by`` the largest change of a log probability of a token, up to where its text differs.

``half``: prompts of random Llamas in bfloat16. ``same`` are texts that are those of ``generate`` with
``sdpa``, and ``exact`` is the share of tokens that the same weights choose in float32 behind the same text.

Prediction: of floats no text changes, of int8 and int4 one in some dozens. In bfloat16 stock sessions, which
have the attention of ``sdpa``, have more of its texts than ours, and neither is nearer to float32.

Prints one JSON line.
"""

import argparse
import copy
import json
import logging
import random
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

from kvloom.integrations.quality import windows_of
from kvloom.integrations.transformers import continuous_batching, load_model
from kvloom.models import bundled_model_path, iter_texts

KINDS = ("auto", "int8", "int4,recent=0", "int4")
STOCK, OURS, SDPA, EAGER = "stock session", "kvloom session", "generate, sdpa", "generate, eager"


def batched(model: Any, prompts: list[list[int]], new: int) -> list[Any]:
    """Outputs of one session, in the order of the prompts."""
    config = ContinuousBatchingConfig(
        page_size=16, num_blocks=8192, max_batch_tokens=2048, return_logprobs=True
    )
    greedy = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    return [*model.generate_batch(prompts, greedy, config).values()]


def codes(num_prompts: int, new: int) -> list[dict[str, Any]]:
    """Requests alone and in company, of each kind."""
    model, tokenizer = load_model(bundled_model_path(), progress=False)
    model = model.float()
    draw = random.Random(0)
    texts = windows_of(tokenizer, iter_texts("heldout"), 256 * num_prompts, window=256).tolist()
    prompts = [text[: draw.randrange(32, 256)] for text in texts]
    rows = []
    for kind in KINDS:
        continuous_batching(model, kind, share=False)
        apart = [batched(model, [prompt], new)[0] for prompt in prompts]
        changed, by = 0, 0.0
        for one, other in zip(apart, batched(model, prompts, new), strict=True):
            pairs = zip(one.generated_tokens, other.generated_tokens, strict=True)
            same = next((i for i, (x, y) in enumerate(pairs) if x != y), new)
            changed += same < new
            pairs = zip(one.logprobs[:same], other.logprobs[:same], strict=True)
            by = max([by, *(abs(x - y) for x, y in pairs)])
        rows.append({"kind": kind, "texts": changed, "of": len(prompts), "by": by})
    return rows


def half(num_models: int, num_prompts: int, new: int) -> list[dict[str, Any]]:
    """Texts of random models in bfloat16, each way."""
    rows = {way: {"way": way, "same": 0, "of": num_models * num_prompts, "exact": 0.0} for way in WAYS}
    for seed in range(num_models):
        torch.manual_seed(seed)
        shape = {"hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3, "head_dim": 16}
        heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 199}
        config = LlamaConfig(**shape, **heads, initializer_range=0.25, pad_token_id=0, eos_token_id=2)
        model: Any = LlamaForCausalLM(config).bfloat16().eval()
        exact = copy.deepcopy(model).float()
        draw = random.Random(seed)
        prompts = [[draw.randrange(3, 199) for _ in range(draw.randrange(4, 90))] for _ in range(num_prompts)]
        found = {way: WAYS[way](model, prompts, new) for way in WAYS}
        for way, row in rows.items():
            row["same"] += sum(x == y for x, y in zip(found[way], found[SDPA], strict=True))
            for prompt, text in zip(prompts, found[way], strict=True):
                chosen = exact(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1].argmax(-1)
                row["exact"] += float((chosen == torch.tensor(text)).float().mean()) / row["of"]
    return [*rows.values()]


def in_session(kv: str | None) -> Any:
    """All prompts at once; ``None`` for transformers as it is."""

    def texts(model: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
        model.set_attn_implementation("sdpa")
        continuous_batching(model, kv)
        return [x.generated_tokens for x in batched(model, prompts, new)]

    return texts


def by_generate(attention: str) -> Any:
    """Each prompt alone."""

    def texts(model: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
        model.set_attn_implementation(attention)
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "eos_token_id": None}
        inputs = [torch.tensor([prompt]) for prompt in prompts]
        return [model.generate(x, **options)[0, x.shape[1] :].tolist() for x in inputs]

    return texts


WAYS = {
    SDPA: by_generate("sdpa"),
    EAGER: by_generate("eager"),
    STOCK: in_session(None),
    OURS: in_session("auto"),
}


@torch.no_grad()
def main() -> None:
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few prompts and tokens, to see that it runs")
    quick = parser.parse_args().quick
    logging.disable(logging.WARNING)
    of_codes = codes(2, 3) if quick else codes(50, 64)
    of_half = half(1, 2, 3) if quick else half(3, 30, 16)
    print(json.dumps({"figure": "company", "codes": of_codes, "half": of_half}))


if __name__ == "__main__":
    main()
