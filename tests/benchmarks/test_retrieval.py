"""Texts of the retrieval benchmark ask for what stands far back, and answers are judged as decoding would."""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

UNKNOWN = 0


class Reader:
    """Answers by searching what it has read, of which it forgets all but the newest tokens."""

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.fed: list[int] = []

    def __call__(self, tokens: Tensor, cache: list[Tensor], **_: Any) -> Any:
        self.fed.append(tokens.shape[1])
        cache.append(tokens)
        rows = torch.cat(cache, dim=1)[:, -self.memory :].tolist()
        found = torch.tensor([self._next(row) for row in rows])
        return SimpleNamespace(logits=torch.nn.functional.one_hot(found, 320).unsqueeze(1).float())

    @staticmethod
    def _next(row: list[int]) -> int:
        before = row[:-1]
        return row[before.index(row[-1]) + 1] if row[-1] in before else UNKNOWN


@pytest.fixture
def task(quick: Callable[..., Any]) -> Any:
    import recall_task

    return recall_task


def drawn(task: Any, seed: int = 3) -> Any:
    return task.make_texts(random.Random(seed), 4, 500, records=30, questions=10, gap=64)


def test_every_question_repeats_a_record_at_its_distance(task: Any) -> None:
    texts = drawn(task)
    assert texts.tokens.shape == (4, 500) and texts.prompt == 500 - 10 * task.RECORD
    assert int(texts.distances.min()) >= 64 + task.RECORD
    for row, distances in zip(texts.tokens.tolist(), texts.distances.tolist(), strict=True):
        starts = range(texts.prompt, 500, task.RECORD)
        for start, distance in zip(starts, distances, strict=True):
            question = row[start : start + task.RECORD]
            assert row[start - distance : start - distance + task.RECORD] == question
        prompt = [x for x in row[: texts.prompt] if x in task.SYMBOLS]
        assert len(set(prompt)) == len(prompt) == 30 * task.RECORD
        assert all(x in task.NOISE for x in row[texts.prompt - 64 : texts.prompt])


def test_texts_are_those_of_their_seed(task: Any) -> None:
    assert torch.equal(drawn(task).tokens, drawn(task).tokens)
    assert not torch.equal(drawn(task).tokens, drawn(task, seed=4).tokens)


def test_records_that_do_not_fit_are_refused(task: Any) -> None:
    with pytest.raises(ValueError, match="records must be from 2 to 5, got 6"):
        task.make_texts(random.Random(0), 1, 28, records=6, questions=2)
    with pytest.raises(ValueError, match="records must be from 3 to 72, got 2"):
        task.make_texts(random.Random(0), 1, 1000, records=2, questions=3)


def test_who_searches_everything_answers_everything_token_by_token(task: Any) -> None:
    reader, texts = Reader(1000), drawn(task)
    assert task.answered(reader, texts, []).all()
    assert reader.fed == [texts.prompt, *[1] * (10 * task.RECORD)]


def test_who_forgets_answers_what_is_near(task: Any) -> None:
    texts = drawn(task)
    right = task.answered(Reader(250), texts, [])
    assert right.shape == texts.distances.shape
    assert right[texts.distances <= 240].all() and not right[texts.distances > 250].any()
    assert 0 < int(right.sum()) < right.numel()


def test_one_wrong_symbol_is_a_wrong_answer_and_spoils_no_other(task: Any) -> None:
    texts = drawn(task)

    class Mistaken(Reader):
        def __call__(self, tokens: Tensor, cache: list[Tensor], **how: Any) -> Any:
            out = super().__call__(tokens, cache, **how)
            if len(self.fed) == 1 + 3 * task.RECORD + task.VALUE:  # the last symbol of the fourth answer
                out.logits = out.logits.roll(1, -1)
            return out

    right = task.answered(Mistaken(1000), texts, [])
    assert right.sum(0).tolist() == [4, 4, 4, 0, *[4] * 6]


def test_rates_are_told_by_distance(task: Any) -> None:
    import retrieval

    right = torch.tensor([[True, False, True, True]])
    near, _, far = retrieval.FARTHER
    assert retrieval.rates(right, torch.tensor([[near, near + 1, far, far + 9]])) == [0.5, None, 1.0]


def test_retrieval_measures_every_kind_of_keys(quick: Callable[..., Any]) -> None:
    import quality_sections

    result = quick("retrieval")
    assert {x["keys"] for x in result["rows"]} == {"plain", "outliers", "biases"}
    assert {x["contender"] for x in result["rows"]} >= {"DynamicCache", "kvloom int8"}
    for row in result["rows"]:
        row |= {"exact": 0.997, "by_distance": [0.99, None, 1.0], "nbytes_per_token": 301.5}
    text = quality_sections.retrieval_section(result)
    assert "| plain | DynamicCache | 302 | 99.7% | 99.0% |  | 100.0% |" in text


def test_training_keeps_what_it_learnt_by_its_sources(
    quick: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    import recall_model

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    trained: list[Any] = []
    monkeypatch.setattr(recall_model, "train", trained.append)
    first, second = recall_model.trained_model(), recall_model.trained_model()
    assert len(trained) == 1
    assert all(torch.equal(x, y) for x, y in zip(first.parameters(), second.parameters(), strict=True))
    monkeypatch.setattr(recall_model, "_SOURCES", b"others")
    recall_model.trained_model()
    assert len(trained) == 2
