"""ONNX operators with recurrent states, in plain torch: ``LinearAttention`` and ``CausalConvWithState``.

Names, order and defaults are those of opset 27. Nothing is written in place: each call takes the state of the
earlier tokens and returns that of all tokens so far.
"""

from kvloom.dialects.onnx.causal_conv import causal_conv_with_state
from kvloom.dialects.onnx.linear_attention import linear_attention

__all__ = ["causal_conv_with_state", "linear_attention"]
