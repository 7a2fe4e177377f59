"""What a step verifies: drafted tokens, which it computes behind the newest token of their requests.

The step computes the logits after the newest token and after each drafted one. Tokens are then chosen one
after the other, each as in a step of its own: from the logits after a drafted token only if this token and
all before it are those that were chosen. So processors, random numbers, log probabilities and ends are those
of a session without drafts. What was not chosen is taken back.

Shapes: T tokens of all requests of a step, R requests with a new token, D drafted tokens, V tokens of the
vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor
from transformers.generation.continuous_batching.requests import FutureRequestState, RequestStatus

from kvloom.integrations.transformers.session.more_logits import MoreLogits
from kvloom.integrations.transformers.session.requests.prompt import CHOICE
from kvloom.paging import Events


class DraftedRequest(FutureRequestState):  # type: ignore[misc]
    """A request of a step that computes drafted tokens behind its newest token.

    Attributes:
        draft: The drafted tokens.
        first: Index of the logits after the first drafted token among those after all drafted tokens.
        num_accepted: Number of drafted tokens that were chosen.
        by: What made the draft: ``"grammar"``, ``"lookup"`` or ``"assistant"``.
    """

    __slots__ = ("by", "draft", "first", "num_accepted")

    def __init__(self, request: Any, draft: list[int], by: str) -> None:
        count = request.query_length + len(draft)
        super().__init__(request.state, request.has_new_token, request.complete_blocks, count)
        self.draft, self.by, self.first, self.num_accepted = draft, by, 0, 0
        request.state.tokens_to_process = [*request.state.tokens_to_process, *draft]

    def accepts(self) -> bool:
        """Whether the token that was chosen last is the next drafted one, and the request goes on."""
        state, count = self.state, self.num_accepted
        return (
            state.status == RequestStatus.DECODING
            and count < len(self.draft)
            and state.generated_tokens[-1] == self.draft[count]
        )


class VerifyingProcessor(ContinuousBatchProcessor):  # type: ignore[misc]
    """transformers' processor of a session, whose steps also verify drafted tokens.

    Attributes:
        note_time: Called with the number of tokens of each step without prompts, and its seconds.
        note_drafts: Called with the drafted requests of each step, after what was not chosen is taken back.
    """

    note_time: Callable[[int, float], None] | None = None
    note_drafts: Callable[[Sequence[DraftedRequest]], None] | None = None
    _drafted: Sequence[DraftedRequest] = ()
    _behind: Sequence[int] = ()  # indices of drafted tokens among those of the step
    _kept: "_KeepingModel | None" = None
    _recorded: "tuple[Events | None, list[int]]" = None, []  # and the numbers of drafted requests in it

    def prepare_next_batch(self) -> bool:
        """Prepare as transformers does; the first token of each request is chosen before its draft."""
        self._drafted, self._behind = (), []
        is_ready: bool = super().prepare_next_batch()
        if is_ready:
            step = self.inputs_and_outputs
            self._drafted = [x for x in step.requests_in_batch if isinstance(x, DraftedRequest)]
            if self._drafted:
                new = [x for x in step.requests_in_batch if x.has_new_token]
                indices = step.logits_indices[: len(new)]
                ends, behind = indices.tolist(), list[int]()
                for i, x in enumerate(new):
                    if isinstance(x, DraftedRequest):
                        ends[i] -= len(x.draft)
                        x.first = len(behind)
                        behind += range(ends[i] + 1, ends[i] + 1 + len(x.draft))
                        x.state.position_offset -= len(x.draft)
                indices.copy_(torch.tensor(ends))
                self._behind = behind
                with (requests := self.cache.requests).lock:
                    numbers = [requests[x.state.request_id].table.request for x in self._drafted]
                    self._recorded = requests.pages.pool.events, numbers
        return is_ready

    def _generation_step(self, model: Any) -> None:
        """Compute a step as transformers does, and keep the logits after drafted tokens."""
        began = perf_counter()
        self._kept = _KeepingModel(model, self._behind) if self._behind else None
        super()._generation_step(model if self._kept is None else self._kept)
        requests = self.inputs_and_outputs.requests_in_batch
        if self.note_time is not None and all(x.state.generated_tokens for x in requests):
            self.note_time(sum(x.query_length for x in requests), perf_counter() - began)

    def update_batch(self) -> None:
        """Update requests as transformers does, once for each chosen token, and take the rest back.

        Drafted tokens are counted before, since an update delivers answers, which say how many there were.
        """
        for x in self._drafted:
            for counts in self._counts_of(x):
                counts.num_drafted += len(x.draft)
        super().update_batch()
        accepted = [x for x in self._drafted if x.accepts()]
        while accepted:
            self._choose(accepted)
            super().update_batch()
            accepted = [x for x in accepted if x.accepts()]
        for x in self._drafted:
            self.cache.requests.take_back(x.state.request_id, x.state.current_len())
        if self._drafted:
            self._record()
        if self.note_drafts is not None:
            self.note_drafts(self._drafted)
        self._drafted, self._behind, self._kept = (), [], None

    def _counts_of(self, x: DraftedRequest) -> Iterator[Any]:
        """What counts drafted tokens: the session, and the choice of the request if it has one."""
        yield self.cache.steps
        if (choice := x.state.logit_processor_kwargs.get(CHOICE)) is not None:
            yield choice

    def _record(self) -> None:
        """Record the drafts of this step as events of their requests, in the recording of its beginning."""
        (events, numbers), requests = self._recorded, self.cache.requests
        with requests.lock:
            if events is None or events is not requests.pages.pool.events:
                return
            for x, number in zip(self._drafted, numbers, strict=True):
                events.request = number
                events.note("draft", [], by=x.by, drafted=len(x.draft), accepted=x.num_accepted)

    @torch.no_grad()
    def _choose(self, accepted: Sequence[DraftedRequest]) -> None:
        """Choose the next token of requests whose next drafted token is now one of their own."""
        step, rows = self.inputs_and_outputs, list[int]()
        for x in accepted:
            x.complete_blocks = self.cache.count_new_complete_blocks(x.state, 1)
            x.state.position_offset += 1
            rows.append(x.first + x.num_accepted)
            x.num_accepted += 1
            for counts in self._counts_of(x):
                counts.num_accepted += 1
            self.cache.steps.num_assisted += x.by == "assistant"
        arguments = step._bulk_input_tensor[step.static_inputs :]
        self.logit_processor.prepare_tensor_args(requests_in_batch=accepted, arg_storage=arguments)
        step.requests_in_batch, step.num_request_in_batch = list(accepted), len(accepted)
        newest = [x.state.generated_tokens[-1] for x in accepted]
        known = {
            "input_ids": torch.tensor([newest], dtype=torch.int32, device=self.model_device),
            "logits_indices": torch.arange(len(rows), device=self.model_device),
            "logits_processor_args": arguments[:, : len(rows)],
        }
        logits = self._kept.logits[rows][None] if self._kept is not None else None
        self.model_runner._forward_process_and_sample(
            lambda **_: SimpleNamespace(logits=logits), known, *step.get_cb_kwargs()
        )


class _KeepingModel(MoreLogits):
    """The model in one step, which keeps the logits after drafted tokens for later.

    Args:
        model: The model.
        behind: Indices of the drafted tokens among those of the step.

    Attributes:
        logits: ``[D, V]``.
    """

    logits: Tensor

    def __init__(self, model: Any, behind: Sequence[int]) -> None:
        super().__init__(model)
        self._behind = behind

    def __call__(self, **inputs: Any) -> Any:
        """The model's output, with the logits that transformers asked for."""
        output, self.logits = self.forward_with(self._behind, inputs)
        return output
