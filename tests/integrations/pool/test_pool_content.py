"""What stands behind placeholder tokens is part of what pages are found by."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from integrations.models.test_vision_models import FAMILIES, IMAGE, prompts, vision_model
from torch import Tensor

from kvloom.errors import ArgumentError, UnsupportedError
from kvloom.integrations.transformers import KVCache, KVPool, content_of

NAMES = pytest.mark.parametrize("name", ["Llava", "Qwen2.5-VL"])


def answer(model: Any, inputs: dict[str, Tensor], cache: Any) -> Tensor:
    out = model.generate(**inputs, past_key_values=cache, do_sample=False, max_new_tokens=6, min_new_tokens=6)
    assert isinstance(out, Tensor)
    return out


@NAMES
def test_a_picture_finds_its_own_pages_alone(name: str) -> None:
    model = vision_model(name)
    pool = KVPool.for_model(model, page_size=4, max_tokens=400)
    first = prompts(name, model, 1)
    second = first | {"pixel_values": first["pixel_values"] + 1}
    length = first["input_ids"].shape[1]
    for inputs, is_known in ((first, False), (second, False), (first, True), (second, True)):
        alone = answer(model, inputs, KVCache.for_model(model, page_size=4))
        cache = pool.begin(inputs["input_ids"], content=content_of(inputs))
        found = cache.get_seq_length()
        assert found == ((length - 1) // 4 * 4 if is_known else 0)
        if found:  # the picture is among what was found
            inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        out = answer(model, inputs, cache)
        pool.commit(cache, out)
        assert torch.equal(out, alone)
    assert not torch.equal(*(answer(model, x, KVCache.for_model(model)) for x in (first, second)))


@NAMES
def test_placeholders_without_content_are_refused(name: str) -> None:
    model = vision_model(name)
    pool = KVPool.for_model(model, page_size=4, max_tokens=400)
    inputs = prompts(name, model, 1)
    with pytest.raises(
        ArgumentError, match=r"^content must be given for input_ids with token \d+, the \w+_token"
    ):
        pool.begin(inputs["input_ids"])
    with pytest.raises(ArgumentError, match=r"^content must be one string for each of 1 rows, got 2"):
        pool.begin(inputs["input_ids"], content=["a", "b"])
    with pytest.raises(ArgumentError, match=r"^content must be a string or one for each row, got 3"):
        pool.begin(inputs["input_ids"], content=3)  # type: ignore[arg-type]
    text = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad(), pytest.raises(ArgumentError, match=r"^pixel_values must be left out"):
        model(text, pixel_values=inputs["pixel_values"], past_key_values=pool.begin(text))


def test_rows_have_content_of_their_own() -> None:
    model = vision_model("Llava")
    pool = KVPool.for_model(model, page_size=4, max_tokens=400)
    inputs = prompts("Llava", model, 1)
    ids = inputs["input_ids"].repeat(2, 1)
    ids[1, 0] = 94
    pictures = torch.cat((inputs["pixel_values"], inputs["pixel_values"] + 1))
    contents = [content_of({"pixel_values": x[None]}) for x in pictures]
    cache = pool.begin(ids, content=contents)
    out = answer(model, {"input_ids": ids, "pixel_values": pictures}, cache)
    pool.commit(cache, out)
    found = [pool.begin(ids, content=x).get_seq_length() for x in (contents, contents[::-1], contents[0])]
    assert found == [24, 0, 0]
    cache = pool.begin(ids, content=contents)
    cache.reorder_cache(torch.tensor([1, 0]))
    pool.commit(cache, ids[:, :24].flip(0))
    assert pool.begin(ids.flip(0), content=contents).get_seq_length() == 0
    assert pool.begin(ids.flip(0), content=contents[::-1]).get_seq_length() == 24


def test_rows_with_pictures_have_lengths_of_their_own() -> None:
    model = vision_model("Llava")
    pool = KVPool.for_model(model, page_size=4, max_tokens=400)
    inputs = prompts("Llava", model, 2)  # the second row is padded
    ids, mask, pictures = (inputs[name] for name in ("input_ids", "attention_mask", "pixel_values"))
    contents = [content_of({"pixel_values": x[None]}) for x in pictures]
    alone = answer(model, inputs, KVCache.for_model(model, page_size=4))
    for found in (0, 21):  # of 24 tokens of the second row 20
        cache = pool.begin(ids, content=contents, attention_mask=mask)
        assert cache.get_seq_length() == found
        given = inputs if found == 0 else {"input_ids": ids, "attention_mask": mask}
        out = answer(model, given, cache)
        assert torch.equal(out, alone)
        pool.commit(cache, out)
    own = pool.begin(ids[1:, 1:], content=contents[1])
    assert own.get_seq_length() == 20
    with torch.no_grad(), pytest.raises(ArgumentError, match=r"^attention_mask must be \[2, 25\]"):
        model(ids, pixel_values=pictures, past_key_values=pool.begin(ids, "b", contents, mask))


def test_a_picture_is_found_as_a_whole() -> None:
    model = vision_model("Llava")
    pool = KVPool.for_model(model, page_size=4, max_tokens=400)
    inputs = prompts("Llava", model, 1)
    content = content_of(inputs)
    cache = pool.begin(inputs["input_ids"], content=content)
    pool.commit(cache, answer(model, inputs, cache))
    ids = inputs["input_ids"].clone()
    ids[0, 14] = 3  # of the 16 tokens of the picture, from the third on, 12 are in pages that are known
    assert (ids == IMAGE).sum() == FAMILIES["Llava"][2] - 1
    assert pool.begin(ids, content=content).get_seq_length() == 0


def test_content_is_told_by_every_name_and_value() -> None:
    pixels = torch.arange(12.0).reshape(3, 4)
    inputs = {"input_ids": torch.ones(1, 3, dtype=torch.int64), "pixel_values": pixels}
    digest = content_of(inputs)
    assert len(digest) == 64
    assert digest == content_of(inputs | {"input_ids": None, "attention_mask": torch.ones(1, 9)})
    assert digest == content_of(
        {"pixel_values": pixels.t().contiguous().t(), "token_type_ids": torch.zeros(1, 3)}
    )
    others = [
        {"pixel_values": pixels + 1},
        {"pixel_values": pixels.reshape(4, 3)},
        {"pixel_values": pixels.bfloat16()},
        {"input_features": pixels},
        {"pixel_values": [pixels]},
        {"pixel_values": [pixels, pixels]},
        {"pixel_values": [[pixels], [pixels]]},
        {"pixel_values": pixels, "sizes": [[1, 23]]},
        {"pixel_values": pixels, "sizes": [[12, 3]]},
        {"pixel_values": pixels, "attention_mask": torch.tensor([[0, 1]])},
        {"position_ids": torch.arange(3)},
    ]
    digests = [digest, *map(content_of, others)]
    assert len(set(digests)) == len(digests)
    ones = torch.ones(3, dtype=torch.float64)
    assert content_of({"pixel_values": ones.numpy()}) == content_of({"pixel_values": ones})
    assert content_of({"input_ids": pixels}) == ""
    with pytest.raises(ArgumentError, match=r"^inputs\['x'\] must be a tensor, .* got object"):
        content_of({"x": object()})
    with pytest.raises(ArgumentError, match=r"^inputs must be a mapping"):
        content_of([pixels])  # type: ignore[arg-type]


def test_a_model_that_attends_to_what_follows_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"^model must attend to earlier tokens alone"):
        KVPool.for_model(vision_model("PaliGemma"), max_tokens=99)
