"""Train the small bundled language model on the running interpreter's standard library, then measure it.

The defaults make the shipped model: run `python scripts/train_model.py` (under an hour on two CPU cores).
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from muon import Muon
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from kvloom.models import bundled_model_path
from kvloom.models.corpus import HELDOUT_ONE_IN, SourceFile, corpus_digest, corpus_files

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"

# A word takes the space, dot or underscore before it; a run of punctuation takes the line ends after it and
# the indentation of the next line but for one space, which stays with the next word.
WORD_PATTERN = r"[ ._]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+(?:\n+(?: +(?= ))?)?|\s+(?!\S)|\s+"


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of `vocab_size` entries: every text is encodable, and decodes to exactly itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files that `AutoTokenizer` reads; the chat template is the shipped one, written by hand."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        # The generic class, a name that both transformers 4 and 5 load without rebuilding the tokenizer.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    template = "chat_template.jinja"
    (folder / template).write_bytes((bundled_model_path() / template).read_bytes())


def encode_files(tokenizer: Tokenizer, texts: list[str]) -> list[Tensor]:
    """Token ids of each text between a start and an end token, one int64 vector each."""
    bos, eos = tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)
    return [torch.tensor([bos, *e.ids, eos]) for e in tokenizer.encode_batch(texts, add_special_tokens=False)]


def train_batches(
    files: list[Tensor], tokens: int, length: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (inputs, targets), each (tokens // length, length).

    Every epoch joins the files in a new order, cuts windows from a new offset, and shuffles them.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = tokens // length
    while True:
        order = torch.randperm(len(files), generator=generator).tolist()
        start = int(torch.randint(length, (), generator=generator))
        stream = torch.cat([files[i] for i in order])[start:]
        count = (len(stream) - 1) // length
        inputs = stream[: count * length].view(count, length)
        targets = stream[1 : count * length + 1].view(count, length)
        for chosen in torch.randperm(count, generator=generator)[: count // rows * rows].view(-1, rows):
            yield inputs[chosen], targets[chosen]


@dataclass(frozen=True)
class HeldOut:
    """Held-out tokens: `stream` is joined files, its every token after the first is a target."""

    stream: Tensor
    target_bytes: int

    @classmethod
    def join(cls, files: list[Tensor], tokenizer: Tokenizer, multiple: int) -> HeldOut:
        """Join `files`, cut so that the number of targets is a multiple of `multiple` tokens."""
        stream = torch.cat(files)
        stream = stream[: (len(stream) - 1) // multiple * multiple + 1]
        special = {tokenizer.token_to_id(token) for token in (BOS, EOS, PAD)}
        # A byte-level entry is spelt with one character per byte; special tokens stand for no bytes.
        widths = [
            0 if i in special else len(tokenizer.id_to_token(i)) for i in range(tokenizer.get_vocab_size())
        ]
        return cls(stream, int(torch.tensor(widths)[stream[1:]].sum()))

    def measures(self, nats: float) -> dict[str, float]:
        """Report a mean loss of `nats` per token also as perplexity and as bits per byte of text."""
        targets = len(self.stream) - 1
        return {
            "nats_per_token": round(nats, 4),
            "perplexity": round(math.exp(nats), 3),
            "bits_per_byte": round(nats * targets / math.log(2) / self.target_bytes, 4),
        }


def next_token_loss(model: nn.Module, inputs: Tensor, targets: Tensor, mixed: bool) -> Tensor:
    """Mean cross-entropy in nats per token; `mixed` runs the layers in bfloat16, never the softmax."""
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        logits = model(input_ids=inputs, use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def heldout_loss(
    model: nn.Module, stream: Tensor, length: int, mixed: bool = False, windows: int | None = None
) -> float:
    """Mean nats per token over windows of `length` tokens that see nothing before them.

    With `windows`, only about that many are used, evenly spaced.
    """
    inputs, targets = stream[:-1].view(-1, length), stream[1:].view(-1, length)
    stride = 1 if windows is None else max(1, len(inputs) // windows)
    inputs, targets = inputs[::stride], targets[::stride]
    total = 0.0
    for x, y in zip(inputs.split(8), targets.split(8), strict=True):
        total += float(next_token_loss(model, x, y, mixed)) * len(x)
    return total / len(inputs)


def count_model_losses(train: Tensor, heldout: Tensor, vocab_size: int) -> tuple[float, float, float]:
    """Held-out nats per token of a unigram and of a bigram model, and the bigram's prior strength.

    The bigram is interpolated with the unigram, with weight n / (n + strength) after a token seen n times;
    the strength is the best of a grid on the last 5 % of the training tokens, then all are counted.
    """

    def count(stream: Tensor) -> tuple[Tensor, Tensor]:
        ones = torch.bincount(stream, minlength=vocab_size).double() + 1  # add one: no token is impossible
        pairs = torch.bincount(stream[:-1] * vocab_size + stream[1:], minlength=vocab_size**2)
        return ones / ones.sum(), pairs.double().view(vocab_size, vocab_size)

    def bigram(unigram: Tensor, pairs: Tensor, text: Tensor, strength: float) -> float:
        before, after = text[:-1], text[1:]
        seen = pairs.sum(1)[before]
        likelihood = (pairs[before, after] + strength * unigram[after]) / (seen + strength)
        return float(-likelihood.log().mean())

    cut = len(train) * 19 // 20
    early = count(train[:cut])
    strength = min((2.0**i for i in range(-2, 12)), key=lambda s: bigram(*early, train[cut:], s))
    unigram, pairs = count(train)
    return float(-unigram[heldout[1:]].log().mean()), bigram(unigram, pairs, heldout, strength), strength


def build_model(args: argparse.Namespace, tokenizer: Tokenizer) -> LlamaForCausalLM:
    """A freshly initialized Llama; each block starts as the identity, its two output matrices zero."""
    config = LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=args.kv_heads,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(EOS),
        pad_token_id=tokenizer.token_to_id(PAD),
    )
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def build_optimizers(model: LlamaForCausalLM, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    scales = [p for p in model.parameters() if p.ndim == 1]
    embedding = [model.get_input_embeddings().weight]
    groups = [
        {"params": embedding, "weight_decay": args.weight_decay},
        {"params": scales, "weight_decay": 0.0},
    ]
    return [
        Muon(matrices, lr=args.muon_lr, momentum=0.95, weight_decay=args.weight_decay),
        torch.optim.AdamW(groups, lr=args.adam_lr, betas=(0.9, 0.95)),
    ]


def learning_rate_factor(step: int, steps: int, warmup: int) -> float:
    """Linear warm-up, then half a cosine down to 1 % of the peak."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def save_model(model: LlamaForCausalLM, folder: Path, dtype: torch.dtype) -> None:
    """Save a copy of `model` in `dtype`, leaving the model itself in float32."""
    copy.deepcopy(model).to(dtype).save_pretrained(folder)


def train(
    model: LlamaForCausalLM,
    files: list[Tensor],
    heldout: HeldOut,
    args: argparse.Namespace,
    dtype: torch.dtype,
) -> list[dict[str, float]]:
    """Train `model`, save it at every evaluation, and return the loss curve."""
    optimizers = build_optimizers(model, args)
    peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    long_from = args.steps - int(args.steps * args.long_share)
    batches = train_batches(files, args.batch_tokens, args.length, args.seed)
    curve: list[dict[str, float]] = []
    began, recent = time.perf_counter(), []
    bar = tqdm(
        total=args.steps * args.batch_tokens, unit="tok", unit_scale=True, mininterval=args.log_seconds
    )
    for step in range(args.steps):
        if step == long_from:
            batches = train_batches(files, args.batch_tokens, 2 * args.length, args.seed + 1)
        factor = learning_rate_factor(step, args.steps, args.warmup)
        for optimizer, lrs in zip(optimizers, peaks, strict=True):
            for group, lr in zip(optimizer.param_groups, lrs, strict=True):
                group["lr"] = lr * factor
        loss = next_token_loss(model, *next(batches), mixed=args.mixed)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        recent.append(loss.item())
        bar.update(args.batch_tokens)
        if (step + 1) % args.eval_every == 0 or step + 1 == args.steps:
            point = {
                "step": step + 1,
                "tokens": (step + 1) * args.batch_tokens,
                "train_nats": round(sum(recent) / len(recent), 4),
                "heldout_nats": round(heldout_loss(model, heldout.stream, args.length, args.mixed, 64), 4),
                "seconds": round(time.perf_counter() - began, 1),
            }
            curve.append(point)
            recent = []
            save_model(model, args.out, dtype)
            bar.set_postfix(train=point["train_nats"], heldout=point["heldout_nats"], refresh=False)
            bar.write(json.dumps(point))
    bar.close()
    return curve


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=bundled_model_path(), help="the model's folder")
    parser.add_argument("--steps", type=int, default=2000, help="optimizer steps")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="tokens per step")
    parser.add_argument("--length", type=int, default=512, help="tokens per training window")
    parser.add_argument(
        "--long-share", type=float, default=0.2, help="last share of steps at twice the length"
    )
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=256, help="width; there is one query head per 64")
    parser.add_argument("--intermediate", type=int, default=704, help="width inside the SwiGLU")
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--muon-lr", type=float, default=0.02, help="peak rate for the layers' matrices")
    parser.add_argument("--adam-lr", type=float, default=3e-3, help="peak rate for the embedding and norms")
    parser.add_argument("--weight-decay", type=float, default=0.2)
    parser.add_argument("--warmup", type=int, default=100, help="steps of linear warm-up")
    parser.add_argument("--eval-every", type=int, default=100, help="steps between held-out losses")
    parser.add_argument(
        "--dtype", choices=["float16", "bfloat16"], default="float16", help="of the saved file"
    )
    parser.add_argument(
        "--mixed", action=argparse.BooleanOptionalAction, default=True, help="bfloat16 layers"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-seconds", type=float, default=1.0, help="seconds between progress lines")
    return parser.parse_args()


def byte_count(files: list[SourceFile]) -> int:
    """Bytes of the files' text as UTF-8."""
    return sum(len(file.read().encode()) for file in files)


def main() -> None:
    args = parse_args()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    dtype: torch.dtype = getattr(torch, args.dtype)
    sources = {split: corpus_files(split) for split in ("train", "heldout")}
    texts = {split: [file.read() for file in files] for split, files in sources.items()}
    tokenizer = train_tokenizer(texts["train"], args.vocab_size)
    save_tokenizer(tokenizer, args.out)
    train_files = encode_files(tokenizer, texts["train"])
    # 2048 is a multiple of every window length measured below, so all see the same targets.
    heldout = HeldOut.join(encode_files(tokenizer, texts["heldout"]), tokenizer, multiple=2048)
    unigram, bigram, strength = count_model_losses(torch.cat(train_files), heldout.stream, args.vocab_size)
    print(
        f"{sum(map(len, train_files)):,} training tokens; held-out unigram {unigram:.3f}, bigram {bigram:.3f}"
    )

    model = build_model(args, tokenizer)
    print(f"{model.num_parameters():,} parameters")
    began = time.perf_counter()
    curve = train(model, train_files, heldout, args, dtype)
    seconds = time.perf_counter() - began

    saved = LlamaForCausalLM.from_pretrained(args.out, dtype=torch.float32)
    by_length = {length: heldout_loss(saved, heldout.stream, length) for length in (512, 1024, 2048)}
    before = heldout_loss(model, heldout.stream, 1024)
    losses = {
        "unigram": heldout.measures(unigram),
        "bigram": heldout.measures(bigram),
        "model": heldout.measures(by_length[1024]),
    }
    report: dict[str, Any] = {
        "losses": losses,
        "model_nats_by_window_tokens": {str(length): round(nats, 4) for length, nats in by_length.items()},
        "model_nats_before_rounding_to_saved_dtype": round(before, 4),
        "heldout": {"target_tokens": len(heldout.stream) - 1, "target_bytes": heldout.target_bytes},
        "bigram_prior_strength_tokens": strength,
        "corpus": {
            "heldout_one_file_in": HELDOUT_ONE_IN,
            "digest_of_names_sha256": corpus_digest(corpus_files()),
            "train": {"files": len(sources["train"]), "bytes": byte_count(sources["train"])},
            "heldout": {"files": len(sources["heldout"]), "bytes": byte_count(sources["heldout"])},
            "train_tokens": sum(map(len, train_files)),
        },
        "settings": {key: value for key, value in vars(args).items() if key not in ("out", "log_seconds")},
        "parameters": model.num_parameters(),
        "tokens_seen": args.steps * args.batch_tokens,
        "seconds": round(seconds, 1),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "curve": curve,
    }
    (args.out / "training.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"{'held-out':10}{'nats/token':>12}{'perplexity':>12}{'bits/byte':>12}")
    for name, row in losses.items():
        print(
            f"{name:10}"
            + "".join(f"{row[k]:12.3f}" for k in ("nats_per_token", "perplexity", "bits_per_byte"))
        )


if __name__ == "__main__":
    main()
