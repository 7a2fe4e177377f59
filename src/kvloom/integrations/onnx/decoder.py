"""One step of a Llama-like decoder with its caches as inputs, ready to export."""

from typing import Any

import torch
from torch import Tensor, nn

from kvloom.core.layouts import CacheLayout
from kvloom.core.specs import CODE_DTYPE
from kvloom.dialects import pmx
from kvloom.errors import ArgumentError

_OPERATOR = "opmx.dynamic_batching.MultiHeadCacheAttention"


class DecoderStep(nn.Module):
    """Module from the new tokens of a ragged batch to their logits; every layer has its own cache.

    With a cache per layer a runtime can update it in place. A cache of all layers would be copied by each.

    Args:
        model: A Llama-like causal language model of Hugging Face, whose submodules this step uses:
            ``model.embed_tokens``, ``model.layers`` (norms, ``self_attn`` whose projections have no norms,
            ``mlp``), ``model.rotary_emb``, ``model.norm`` and ``lm_head``.
        quant_bit: 0, 8 or 4.
        quant_group: Elements that share a scale.
        cache_layout: 0 to 3, as the opmx documents number them.

    Raises:
        ArgumentError: ``model`` does not have one of these.
    """

    def __init__(
        self, model: Any, *, quant_bit: int = 0, quant_group: int = 8, cache_layout: int = 3
    ) -> None:
        super().__init__()
        parts: Any = getattr(model, "model", None)
        if any(not hasattr(parts, name) for name in ("embed_tokens", "layers", "rotary_emb", "norm")):
            raise ArgumentError(
                f"model must be a Llama-like causal language model, got {type(model).__name__}"
            )
        config = model.config
        self.embed, self.layers, self.norm = parts.embed_tokens, parts.layers, parts.norm
        self.rotary, self.head = parts.rotary_emb, model.lm_head
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = config.num_key_value_heads
        self.head_dim: int = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        self.quant_bit, self.quant_group, self.cache_layout = quant_bit, quant_group, cache_layout

    def empty_caches(
        self, num_slots: int, *, scale_dtype: torch.dtype = torch.float32
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Caches and scales of ``num_slots`` token slots for each layer; no scales without ``quant_bit``."""
        layout = CacheLayout.of(_OPERATOR, self.cache_layout)
        sizes = {"L": 1, "T": num_slots, "H": self.num_kv_heads}
        stored = self.head_dim // 2 if self.quant_bit == 4 else self.head_dim
        dtype = CODE_DTYPE[self.quant_bit] if self.quant_bit else self.embed.weight.dtype
        count = range(len(self.layers))
        caches = [torch.zeros(layout.shape(**sizes, D=stored), dtype=dtype) for _ in count]
        if not self.quant_bit:
            return caches, []
        shape = layout.shape(**sizes, D=self.head_dim // self.quant_group)
        return caches, [torch.zeros(shape, dtype=scale_dtype) for _ in count]

    def forward(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        seqstarts: Tensor,
        kvstarts: Tensor,
        cachestarts: Tensor,
        start_pos: Tensor,
        decoding_batches: Tensor,
        caches: list[Tensor],
        scales: list[Tensor],
    ) -> Tensor:
        """Logits ``[T, vocabulary]`` of the new tokens.

        Args:
            token_ids: ``[T]`` int64, the new tokens of all sequences in a row.
            position_ids: ``[T]`` int64, their positions.
            seqstarts, kvstarts, cachestarts, start_pos, decoding_batches: As the operator takes them;
                ``cachestarts`` is ``[B]``, the first slot of each sequence.
            caches: Written in place, one for each layer, as ``empty_caches`` makes them.
            scales: The same, empty without ``quant_bit``.
        """
        hidden = self.embed(token_ids)
        cos, sin = (x[0].unsqueeze(1) for x in self.rotary(hidden.unsqueeze(0), position_ids.unsqueeze(0)))
        for i, layer in enumerate(self.layers):
            attention = layer.self_attn
            x = layer.input_layernorm(hidden)
            query, key, value = (
                projection(x).unflatten(-1, (-1, self.head_dim))
                for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            out = pmx.dynamic_batching.multi_head_cache_attention(
                _rotated(query, cos, sin),
                _rotated(key, cos, sin),
                value,
                seqstarts,
                kvstarts,
                cachestarts,
                start_pos,
                decoding_batches,
                0,
                0,
                caches[i],
                scales[i] if self.quant_bit else None,
                num_heads=self.num_heads,
                head_dim=self.head_dim,
                is_causal=True,
                num_kv_heads=self.num_kv_heads,
                quant_bit=self.quant_bit,
                quant_group=self.quant_group,
                cache_layout=self.cache_layout,
                spec="opmx",
            )
            hidden = hidden + attention.o_proj(out.flatten(-2))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin
