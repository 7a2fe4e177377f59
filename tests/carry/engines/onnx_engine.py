"""ONNX Runtime and OpenVINO, with one graph of a llama or a qwen2: see ``common.py``.

``engine`` is ``onnxruntime``, with GroupQueryAttention and past and present as inputs and outputs, of which
keys have adjacent pairs if ``interleaved``; or ``openvino``, with standard operators, past and present made a
state. A cache is ``.npz`` with ``past.{layer}.key`` and ``.value``, ``[1, H, T, D]``.
"""

import numpy as np
from common import go_on, request, weights_of
from onnx import TensorProto, helper, numpy_helper


class Graph:
    """A graph that grows node by node."""

    def __init__(self):
        self.nodes, self.constants = [], []

    def const(self, x, dtype=np.float32):
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(np.asarray(x, dtype)), name))
        return name

    def __call__(self, kind, *inputs, outputs=None, domain="", **attributes):
        outputs = outputs or [f"n{len(self.nodes)}"]
        self.nodes.append(helper.make_node(kind, [*inputs], outputs, domain=domain, **attributes))
        return outputs[0]


class Decoder:
    """The layers of a model in a graph."""

    def __init__(self, folder, fused, interleaved=False):
        self.c, self.w = weights_of(folder)
        self.fused, self.interleaved, self.g = fused, interleaved, Graph()
        self.layers = self.c["num_hidden_layers"]
        self.query_heads, self.heads = self.c["num_attention_heads"], self.c["num_key_value_heads"]
        self.dim = self.c.get("head_dim") or self.c["hidden_size"] // self.query_heads
        rope = self.c.get("rope_parameters") or {}
        self.theta = float(rope.get("rope_theta", self.c.get("rope_theta", 10000.0)))

    def angles(self, positions):
        return np.asarray(positions)[:, None] / self.theta ** (np.arange(0, self.dim, 2) / self.dim)

    def linear(self, x, name, heads=0):
        def rows(w):
            if not (heads and self.interleaved):
                return w
            parts = w.reshape(heads, 2, self.dim // 2, -1)
            return np.moveaxis(parts, 1, 2).reshape(w.shape)

        y = self.g("MatMul", x, self.g.const(rows(self.w[f"{name}.weight"]).T))
        if f"{name}.bias" in self.w:
            y = self.g("Add", y, self.g.const(rows(self.w[f"{name}.bias"])))
        return y

    def norm(self, x, name):
        mean = self.g("ReduceMean", self.g("Mul", x, x), self.g.const([-1], np.int64))
        root = self.g("Sqrt", self.g("Add", mean, self.g.const(self.c["rms_norm_eps"])))
        return self.g("Mul", self.g("Div", x, root), self.g.const(self.w[f"{name}.weight"]))

    def split(self, x, heads):
        shaped = self.g("Reshape", x, self.g.const([0, 0, heads, self.dim], np.int64))
        return self.g("Transpose", shaped, perm=[0, 2, 1, 3])

    def rope(self, x):
        half = self.dim // 2
        ends = [self.g.const([n], np.int64) for n in (0, half, self.dim, 3)]
        one = self.g("Slice", x, ends[0], ends[1], ends[3])
        two = self.g("Slice", x, ends[1], ends[2], ends[3])
        turned = self.g("Concat", self.g("Neg", two), one, axis=-1)
        return self.g("Add", self.g("Mul", x, "cos"), self.g("Mul", turned, "sin"))

    def wide(self, x):
        """Each key/value head for its group of queries."""
        group = self.query_heads // self.heads
        parts = self.g("Unsqueeze", x, self.g.const([2], np.int64))
        parts = self.g("Mul", parts, self.g.const(np.ones((1, 1, group, 1, 1))))
        return self.g("Reshape", parts, self.g.const([0, self.query_heads, -1, self.dim], np.int64))

    def attention(self, q, k, v, i):
        past = [f"past.{i}.{x}" for x in ("key", "value")]
        present = [f"present.{i}.{x}" for x in ("key", "value")]
        if self.fused:
            return self.g(
                "GroupQueryAttention", q, k, v, *past, "lengths", "total", *self.tables,
                outputs=[f"attention.{i}", *present], domain="com.microsoft", num_heads=self.query_heads,
                kv_num_heads=self.heads, do_rotary=1, rotary_interleaved=int(self.interleaved),
            )  # fmt: skip
        q, k = (self.rope(self.split(x, n)) for x, n in ((q, self.query_heads), (k, self.heads)))
        k = self.g("Concat", past[0], k, axis=2, outputs=[present[0]])
        v = self.g("Concat", past[1], self.split(v, self.heads), axis=2, outputs=[present[1]])
        scores = self.g("MatMul", q, self.g("Transpose", self.wide(k), perm=[0, 1, 3, 2]))
        scores = self.g("Add", self.g("Mul", scores, self.g.const(self.dim**-0.5)), "mask")
        y = self.g("MatMul", self.g("Softmax", scores, axis=-1), self.wide(v))
        y = self.g("Transpose", y, perm=[0, 2, 1, 3])
        return self.g("Reshape", y, self.g.const([0, 0, -1], np.int64))

    def model(self):
        embedding = self.w["model.embed_tokens.weight"]
        if self.fused:
            self.tables = [self.g.const(f(self.angles(range(1024)))) for f in (np.cos, np.sin)]
        x = self.g("Gather", self.g.const(embedding), "ids")
        for i in range(self.layers):
            at = f"model.layers.{i}."
            y = self.norm(x, f"{at}input_layernorm")
            sides = (("q", self.query_heads), ("k", self.heads), ("v", 0))
            y = self.attention(*(self.linear(y, f"{at}self_attn.{n}_proj", h) for n, h in sides), i)
            x = self.g("Add", x, self.linear(y, f"{at}self_attn.o_proj"))
            y = self.norm(x, f"{at}post_attention_layernorm")
            gate = self.linear(y, f"{at}mlp.gate_proj")
            gate = self.g("Mul", gate, self.g("Sigmoid", gate))
            y = self.linear(self.g("Mul", gate, self.linear(y, f"{at}mlp.up_proj")), f"{at}mlp.down_proj")
            x = self.g("Add", x, y)
        head = self.w["lm_head.weight"] if "lm_head.weight" in self.w else embedding
        self.g("MatMul", self.norm(x, "model.norm"), self.g.const(head.T), outputs=["logits"])
        shapes = {"ids": (TensorProto.INT64, ["B", "S"])}
        if self.fused:
            shapes |= {"lengths": (TensorProto.INT32, ["B"]), "total": (TensorProto.INT32, [])}
        else:
            shapes |= {x: (TensorProto.FLOAT, ["B", 1, "S", self.dim]) for x in ("cos", "sin")}
            shapes["mask"] = (TensorProto.FLOAT, ["B", 1, "S", "N"])
        kept = [self.heads, "T", self.dim]
        outputs = {"logits": (TensorProto.FLOAT, ["B", "S", len(embedding)])}
        for i in range(self.layers):
            for side in ("key", "value"):
                shapes[f"past.{i}.{side}"] = (TensorProto.FLOAT, ["B", *kept])
                outputs[f"present.{i}.{side}"] = (TensorProto.FLOAT, ["B", self.heads, "N", self.dim])
        given = [[helper.make_tensor_value_info(k, *v) for k, v in x.items()] for x in (shapes, outputs)]
        graph = helper.make_graph(self.g.nodes, "decoder", *given, self.g.constants)
        sets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=sets, ir_version=10)


class OnnxRuntime:
    """Past in, present out."""

    def __init__(self, decoder, model):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, ["CPUExecutionProvider"]
        )
        self.names = [f"{i}.{x}" for i in range(decoder.layers) for x in ("key", "value")]
        self.cache = {x: np.zeros((1, decoder.heads, 0, decoder.dim), np.float32) for x in self.names}

    def feed(self, ids, start):
        total = start + len(ids)
        given = {
            "ids": np.array([ids]),
            "lengths": np.array([total - 1], np.int32),
            "total": np.array(total, np.int32),
        }
        given |= {f"past.{x}": self.cache[x] for x in self.names}
        logits, *present = self.session.run(["logits", *(f"present.{x}" for x in self.names)], given)
        self.cache = dict(zip(self.names, present, strict=True))
        return logits[0, -1]


class OpenVino:
    """A state for each side of each layer."""

    def __init__(self, decoder, model):
        import openvino
        from openvino._offline_transformations import apply_make_stateful_transformation

        read = openvino.Core().read_model(model.SerializeToString())
        names = [f"{i}.{x}" for i in range(decoder.layers) for x in ("key", "value")]
        apply_make_stateful_transformation(read, {f"past.{x}": f"present.{x}" for x in names})
        hints = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": 1}
        self.request = openvino.Core().compile_model(read, "CPU", hints).create_infer_request()
        self.decoder, self.tensor = decoder, openvino.Tensor
        self.states = {next(x for x in names if f"past.{x}" in s.name): s for s in self.request.query_state()}
        for state in self.states.values():
            state.state = self.tensor(np.zeros((1, decoder.heads, 0, decoder.dim), np.float32))

    @property
    def cache(self):
        return {x: s.state.data.copy() for x, s in self.states.items()}

    @cache.setter
    def cache(self, arrays):
        for name, x in arrays.items():
            self.states[name].state = self.tensor(np.ascontiguousarray(x))

    def feed(self, ids, start):
        angles = self.decoder.angles(range(start, start + len(ids)))
        angles = np.concatenate((angles, angles), -1)[None, None].astype(np.float32)
        seen = np.tri(len(ids), start + len(ids), start, bool)
        mask = np.where(seen, 0, -1e9).astype(np.float32)[None, None]
        given = {"ids": np.array([ids]), "cos": np.cos(angles), "sin": np.sin(angles), "mask": mask}
        return self.request.infer(given)[0][0, -1].copy()


def main():
    wanted = request()
    fused = wanted["engine"] == "onnxruntime"
    decoder = Decoder(wanted["folder"], fused, wanted.get("interleaved", False))
    engine = (OnnxRuntime if fused else OpenVino)(decoder, decoder.model())
    if "load" in wanted:
        held = np.load(wanted["load"])
        engine.cache = {x.removeprefix("past."): held[x] for x in held.files}
    else:
        engine.feed(wanted["prompt"], 0)
    if "save" in wanted:
        np.savez(wanted["save"], **{f"past.{x}": y for x, y in engine.cache.items()})
    go_on(lambda token, position: engine.feed([token], position), wanted)


main()
