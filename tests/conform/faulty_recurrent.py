"""The recurrent ONNX operators once more, in vectorized torch, with bugs that can be switched on."""

from __future__ import annotations

import torch
from torch import Tensor


def linear_attention(
    bug: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_state: Tensor | None = None,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    q_num_heads: int,
    kv_num_heads: int,
    scale: float = 0.0,
    update_rule: str = "gated_delta",
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """Token by token, for all sequences and heads at once."""

    def heads(x: Tensor, count: int) -> Tensor:
        return (
            x.float().unflatten(2, (-1, count)).mT
            if bug == "interleaved"
            else x.float().unflatten(2, (count, -1))
        )

    q, k, v = heads(query, q_num_heads), heads(key, kv_num_heads), heads(value, kv_num_heads)
    state = torch.zeros(len(q), kv_num_heads, k.shape[3], v.shape[3])
    if past_state is not None and not (bug == "ignored by prompts" and q.shape[1] > 1):
        state = (
            past_state.float().mT
            if bug == "transposed" and state.shape[2] == state.shape[3]
            else past_state.float()
        )
    factor = scale or (v if bug == "by values" else q).shape[3] ** -0.5
    outputs = []
    for t in range(q.shape[1]):
        before = state
        if decay is not None:
            g = heads(decay, kv_num_heads)[:, t].unsqueeze(3)  # [B, H, K or 1, 1]
            if bug != "decayed late":
                state = state * {"no exponential": g, "negated": (-g).exp()}.get(bug, g.exp())
        new = v[:, t]
        if beta is not None:
            rate, source = beta[:, t].float().unsqueeze(2), before if bug == "corrected early" else state
            seen = (source * k[:, t].unsqueeze(3)).sum(2)
            new = {"rate of value": rate * new - seen, "not corrected": rate * new}.get(
                bug, rate * (new - seen)
            )
        state = state + k[:, t].unsqueeze(3) * new.unsqueeze(2)
        if decay is not None and bug == "decayed late":
            state = state * g.exp()
        read = (before if bug == "read early" else state).repeat_interleave(
            q_num_heads // kv_num_heads, dim=1
        )
        out = (read * q[:, t].unsqueeze(3)).sum(2) * factor
        outputs.append(out.mT.flatten(1) if bug == "interleaved" else out.flatten(1))
    present = (
        state.mT
        if bug == "transposed" and past_state is not None and state.shape[2] == state.shape[3]
        else state
    )
    dtype = query.dtype if past_state is None else past_state.dtype
    return torch.stack(outputs, 1).to(query.dtype), present.to(dtype)


def causal_conv_with_state(
    bug: str,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    past_state: Tensor | None = None,
    activation: str = "none",
) -> tuple[Tensor, Tensor]:
    """By ``conv1d``."""
    size, count = weight.shape[2] - 1, input.shape[2]
    past = torch.zeros(*input.shape[:2], size) if past_state is None else past_state.float()
    past = past.flip(2) if bug == "newest first" else past
    padded = torch.cat((past, input.float()), dim=2)
    later = (size + 1) // 2 if bug == "centered" else 0
    window = torch.nn.functional.pad(padded, (0, later))[:, :, later:]
    added = None if bias is None or bug == "bias late" else bias.float()
    out = torch.nn.functional.conv1d(window, weight.float(), added, groups=input.shape[1])
    if activation != "none":
        out = out.sigmoid() if bug == "sigmoid" else torch.nn.functional.silu(out)
    if bias is not None and bug == "bias late":
        out = out + bias.float().view(-1, 1)
    first = count - 1 if bug == "without the newest" else count
    present = padded[:, :, first : first + size]
    if bug == "short" and past_state is not None:
        present = torch.cat((torch.zeros_like(past), input.float()), dim=2)[:, :, count:]
    present = present.flip(2) if bug == "newest first" else present
    return out.to(input.dtype), present.to(input.dtype)
