"""ExecuTorch: a llama exported with its buffers, ``[B, S, H, D]``, and run by its runtime: see ``common.py``.

A program has its buffers within, so one that is carried takes and gives them: ``forward(token, position,
is_given, keys, values)`` puts those of a layer into its buffers if ``is_given``, computes one token, and
returns the scores and all buffers. A cache is ``.npz`` with ``k_cache.{layer}`` and ``v_cache.{layer}``.
"""

from pathlib import Path

import numpy as np
import torch
from common import go_on, request, weights_of
from executorch.exir import to_edge
from executorch.runtime import Runtime

SLOTS = 384


class Decoder(torch.nn.Module):
    """A llama of one row and one new token."""

    def __init__(self, folder):
        super().__init__()
        self.c, weights = weights_of(folder)
        self.w = {k: torch.from_numpy(weights[k]) for k in weights.files}
        self.layers = self.c["num_hidden_layers"]
        self.query_heads, self.heads = self.c["num_attention_heads"], self.c["num_key_value_heads"]
        self.dim = self.c.get("head_dim") or self.c["hidden_size"] // self.query_heads
        theta = float((self.c.get("rope_parameters") or self.c)["rope_theta"])
        angles = np.arange(SLOTS)[:, None] / theta ** (np.arange(0, self.dim, 2) / self.dim)
        self.cos, self.sin = (torch.from_numpy(f(angles)).float() for f in (np.cos, np.sin))
        for i in range(self.layers):
            for side in "kv":
                self.register_buffer(f"{side}_cache_{i}", torch.zeros(1, SLOTS, self.heads, self.dim))

    def linear(self, x, name):
        return torch.nn.functional.linear(x, self.w[f"{name}.weight"])

    def norm(self, x, name):
        return (
            x
            * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.c["rms_norm_eps"])
            * self.w[f"{name}.weight"]
        )

    def rope(self, x, position):
        cos, sin = (torch.index_select(t, 0, position)[:, None] for t in (self.cos, self.sin))
        one, two = x[..., : self.dim // 2], x[..., self.dim // 2 :]
        return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)

    def attention(self, x, i, position, is_given, given):
        at = f"model.layers.{i}.self_attn."
        q, k, v = (
            self.linear(x, f"{at}{n}_proj").view(1, 1, h, self.dim)
            for n, h in (("q", self.query_heads), ("k", self.heads), ("v", self.heads))
        )
        held = []
        for side, new, old in zip("kv", (self.rope(k, position), v), given, strict=True):
            buffer = getattr(self, f"{side}_cache_{i}")
            buffer.copy_(torch.where(is_given, old, buffer))
            buffer.index_copy_(1, position, new)
            held.append(buffer)
        keys, values = (y[0].permute(1, 0, 2) for y in held)
        queries = self.rope(q, position)[0, 0].view(self.heads, -1, self.dim)
        scores = queries @ keys.transpose(1, 2) * self.dim**-0.5
        scores = scores + torch.where(torch.arange(SLOTS) <= position, 0.0, -1e9)
        found = (torch.softmax(scores, -1) @ values).reshape(1, -1)
        return self.linear(found, f"{at}o_proj"), held

    def forward(self, token, position, is_given, *given):
        x, held = torch.index_select(self.w["model.embed_tokens.weight"], 0, token), []
        for i in range(self.layers):
            at = f"model.layers.{i}."
            y = self.norm(x, f"{at}input_layernorm")
            y, buffers = self.attention(y, i, position, is_given, given[2 * i : 2 * i + 2])
            held += buffers
            x = x + y
            y = self.norm(x, f"{at}post_attention_layernorm")
            gate = torch.nn.functional.silu(self.linear(y, f"{at}mlp.gate_proj"))
            x = x + self.linear(gate * self.linear(y, f"{at}mlp.up_proj"), f"{at}mlp.down_proj")
        head = self.w.get("lm_head.weight", self.w["model.embed_tokens.weight"])
        return torch.nn.functional.linear(self.norm(x, "model.norm"), head), *(x.clone() for x in held)


def main():
    wanted = request()
    path = Path(wanted["folder"], "model.pte")
    decoder = Decoder(wanted["folder"])
    # One tensor for each: the exporter takes arguments that are one tensor for one.
    nothing = [torch.zeros(1, SLOTS, decoder.heads, decoder.dim) for _ in range(2 * decoder.layers)]
    if not path.exists():
        exported = torch.export.export(
            decoder, (torch.tensor([1]), torch.tensor([0]), torch.tensor([False]), *nothing)
        )
        path.write_bytes(to_edge(exported).to_executorch().buffer)
    method = Runtime.get().load_program(path).load_method("forward")
    held = []

    def feed(token, position, given=None):
        scores, *held[:] = method.execute(
            [
                torch.tensor([token]),
                torch.tensor([position]),
                torch.tensor([given is not None]),
                *(given or nothing),
            ]
        )
        return scores[0].numpy().copy()

    names = [f"{side}_cache.{i}" for i in range(decoder.layers) for side in "kv"]
    if "load" in wanted:
        loaded = np.load(wanted["load"])
        first = [torch.from_numpy(loaded[x]) for x in names]
    else:
        first = None
        for position, token in enumerate(wanted["prompt"]):
            feed(token, position)
    if "save" in wanted:
        np.savez(wanted["save"], **{x: y.numpy() for x, y in zip(names, held, strict=True)})

    def step(token, position):
        return feed(token, position, first if position == wanted["start"] else None)

    go_on(step, wanted)


main()
