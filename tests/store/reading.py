"""A reader of runs written from docs/store-format.md alone, with safetensors, xxhash and hashlib."""

from __future__ import annotations

import hashlib
import json
import struct
from typing import Any

import torch
import xxhash
from safetensors import deserialize
from torch import Tensor

DTYPES = {
    "float32": (torch.float32, 4),
    "float16": (torch.float16, 2),
    "bfloat16": (torch.bfloat16, 2),
    "int8": (torch.int8, 1),
    "uint8": (torch.uint8, 1),
}


def read_states(file: bytes, salt: str, before: list[int]) -> tuple[list[int], list[tuple[Tensor, Tensor]]]:
    """Token ids, and keys and values ``[H, tokens, D]`` in float32 of each layer."""
    (size,) = struct.unpack_from("<Q", file)
    said: dict[str, str] = json.loads(file[8 : 8 + size])["__metadata__"]
    tensors = {name: (x["shape"], bytes(x["data"])) for name, x in deserialize(file)}
    whose = json.loads(said["fingerprint"])
    num_pages, page_size = int(said["num_pages"]), int(said["page_size"])
    tokens = list(struct.unpack(f"<{num_pages * page_size}q", tensors["tokens"][1]))
    (num_heads, _, nbytes), pages = tensors["pages"]
    rows = [
        [pages[(r * num_pages + n) * nbytes :][:nbytes] for n in range(num_pages)] for r in range(num_heads)
    ]
    expect_digests(said, salt, before + tokens, tensors["digests"][1])
    sums = b"".join(xxhash.xxh3_128_digest(page) for row in rows for page in row)
    assert sums == tensors["checksums"][1]
    end = file.index(tensors["seal"][1])
    assert xxhash.xxh3_128_digest(file[:end]) == tensors["seal"][1]
    layers = [layer for count, layer in whose["layers"] for _ in range(count)]
    states, at = [], 0
    for layer in layers:
        pair = []
        for side in (layer["key"], layer["value"]):
            found = []
            for dtype, width in parts_of(side):
                kind, item = DTYPES[dtype]
                part = layer["heads"] // num_heads * page_size * width * item
                read = [
                    torch.frombuffer(bytearray(page[at : at + part]), dtype=kind).view(-1, page_size, width)
                    for row in rows
                    for page in row
                ]
                # [R, N, H / R, S, elements] to [H, N * S, elements]
                whole = torch.stack(read).unflatten(0, (num_heads, num_pages)).transpose(1, 2)
                found.append(whole.reshape(layer["heads"], num_pages * page_size, width))
                at += -(-part // 8) * 8
            pair.append(dequantized(side, found))
        states.append((pair[0], pair[1]))
    assert at == nbytes
    return tokens, states


def expect_digests(said: dict[str, str], salt: str, tokens: list[int], digests: bytes) -> None:
    whose = hashlib.sha256(b"kvloom fingerprint\0" + said["fingerprint"].encode()).digest()
    salted = hashlib.sha256(b"kvloom salt\0" + salt.encode()).digest()
    assert said["salt"] == salted.hex()

    def digest(count: int) -> bytes:
        ids = struct.pack(f"<{count}q", *tokens[:count])
        return hashlib.sha256(b"kvloom prefix\0" + whose + salted + ids).digest()

    first, size = int(said["first"]), int(said["page_size"])
    ends = [first + size * (i + 1) for i in range(int(said["num_pages"]))]
    assert bytes.fromhex(said["before"]) == digest(first)
    assert digests == b"".join(map(digest, ends))


def parts_of(side: dict[str, Any]) -> list[tuple[str, int]]:
    if not side["bits"]:
        return [(side["dtype"], side["head_dim"])]
    codes = ("int8", side["head_dim"]) if side["bits"] == 8 else ("uint8", side["head_dim"] // 2)
    return [codes, (side["scale_dtype"], side["head_dim"] // side["group"])]


def dequantized(side: dict[str, Any], parts: list[Tensor]) -> Tensor:
    if not side["bits"]:
        return parts[0].float()
    codes, scales = parts
    if side["bits"] == 4:
        low, high = codes & 15, codes >> 4
        codes = torch.stack((low, high), dim=-1).flatten(-2).to(torch.int8)
        codes = torch.where(codes > 7, codes - 16, codes)
    product = codes.to(scales.dtype) * scales.repeat_interleave(side["group"], dim=-1)
    for dtype in (scales.dtype, DTYPES[side["dtype"]][0]):
        largest = torch.finfo(dtype).max
        product = product.float().clamp(-largest, largest).to(dtype)
    return product.float()
