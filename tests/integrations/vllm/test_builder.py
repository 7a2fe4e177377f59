"""Steps of vLLM's requests, against a reading of them token by token; without vLLM."""

import torch

from kvloom.integrations.vllm.builder import VllmStep

SIZE = 4
NEW, STORED = [1, 3, 2], [9, 3, 8]
TABLE = torch.tensor([[5, 0, 7, 99], [2, -1, 99, 99], [4, 1, 2**31 - 1, 0]], dtype=torch.int32)


def make() -> tuple[VllmStep, list[torch.Tensor]]:
    starts = torch.tensor([0, *NEW], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    buffers = [starts, torch.tensor(STORED, dtype=torch.int32), TABLE.clone()]
    return VllmStep.of(*buffers, SIZE, num_tokens=sum(NEW), max_length=max(STORED)), buffers


def test_every_stored_token_is_found() -> None:
    step, _ = make()
    for request, stored in enumerate(STORED):
        position = torch.arange(stored)
        expected = TABLE[request].long()[position // SIZE] * SIZE + position % SIZE
        assert step.batch.index.slots(torch.full((stored,), request), position).tolist() == expected.tolist()


def test_new_and_stored_tokens_are_counted() -> None:
    step, _ = make()
    assert step.num_tokens == 6
    assert step.batch.seqstarts.tolist() == [0, 1, 4, 6]
    assert step.batch.kvstarts.tolist() == [0, 9, 12, 20]


def test_positions_are_the_places_of_new_tokens_in_their_requests() -> None:
    step, buffers = make()
    for buffer in buffers:
        buffer.fill_(-3)
    assert step.positions.tolist() == [8, 0, 1, 2, 6, 7]
    assert step.positions is step.positions


def test_the_table_ends_with_the_longest_request() -> None:
    step, _ = make()
    assert step.batch.index.table.shape == (3, 3)


def test_a_step_keeps_nothing_of_buffers_that_are_written_again() -> None:
    step, buffers = make()
    kept = [step.batch.seqstarts, step.batch.kvstarts, step.batch.index.table]
    before = [x.clone() for x in kept]
    for buffer in buffers:
        buffer.fill_(-3)
    assert all(torch.equal(x, y) for x, y in zip(kept, before, strict=True))
