"""``Assistant``: a second, smaller model that writes drafts, with its keys and values in pages of its own.

Shapes: T tokens of a forward, R rows of it, V tokens of the vocabulary.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Final

import torch
from torch import Tensor

from kvloom.core.text import Text
from kvloom.integrations.transformers.models.rope import dynamic_rope
from kvloom.integrations.transformers.models.text_config import text_config_of
from kvloom.integrations.transformers.session.cache import BatchCache
from kvloom.integrations.transformers.session.drafts.costs import Costs
from kvloom.integrations.transformers.session.requests.prompt import CHOICE, Prompt

_FIRST_PIECE: Final = 64
"""Number of tokens of a text that are read before it is known what reading takes."""


@dataclass(slots=True)
class _Read:
    """What the assistant has computed of the text of a request.

    Attributes:
        num_sure: Number of tokens of the text that it has read.
        drafted: Tokens that it drafted behind them. It has read all but the last.
    """

    num_sure: int
    drafted: list[int] = field(default_factory=list)


class Assistant:
    """Drafts of a model, for all requests of a step at a time.

    A request holds pages while it is drafted for, and until it ends or loses its own. When pages are out, a
    request has no draft. Others find the pages of a text as they find those of the session.

    Args:
        model: The assistant, which has the attention of a session.
        cache: Its pages.

    Attributes:
        costs: Times of forwards that read few tokens of each text.
        pieces: Times of forwards that read more.
        most_tokens: Largest number of tokens of a text.
        num_computed: Number of tokens of all forwards.
    """

    def __init__(self, model: Any, cache: BatchCache) -> None:
        self._model, self._cache = model, cache
        self.num_computed = 0
        self.forget_costs()
        positions, rope = getattr(text_config_of(model), "max_position_embeddings", None), dynamic_rope(model)
        limits = (cache.most_tokens, positions, None if rope is None else rope.limit)
        self.most_tokens = min(x for x in limits if x)
        self._has_some_logits = (
            hasattr(model, "_supports_logits_to_keep") and model._supports_logits_to_keep()
        )
        self._read = dict[str, _Read]()

    def num_unread(self, state: Any) -> int:
        """Number of tokens of a request's text that are to be read, if others left no pages of it."""
        read = self._read.get(state.request_id)
        return _size(state) - (0 if read is None else self._settled(read, state))

    def room(self, seconds: float | None) -> int:
        """Number of tokens of texts that can be read in some time, at least a page; ``None`` for any time."""
        if seconds is None:
            return self._cache.max_batch_tokens
        if not self.pieces.token:
            return _FIRST_PIECE
        fits = int((seconds - self.pieces.fixed) / self.pieces.token)
        return min(fits, self._cache.max_batch_tokens) if fits >= self._cache.tokens_per_page else 0

    def forget_costs(self) -> None:
        """Forget what forwards take, so that it is measured again."""
        self.costs, self.pieces, self._num_forwards = Costs(), Costs(), Counter[bool]()

    @torch.no_grad()
    def draft(self, states: Sequence[Any], counts: Mapping[str, int], room: int) -> dict[str, list[int]]:
        """Read texts, and draft behind those that are read to their end.

        Args:
            states: Requests whose texts are read, those first that are to be read first.
            counts: Number of tokens to draft, by the id of a request; others are only read.
            room: Largest number of tokens of texts to read.

        Returns:
            Drafts by id, of requests for whose text there were pages and room.
        """
        rows, ends = list[tuple[Any, int, list[int]]](), dict[str, int]()
        size, is_shared, busy = self._cache.tokens_per_page, self._cache.use_prefix_sharing, set[Any]()
        for state in states:
            name, text = state.request_id, Text(state.initial_tokens, state.generated_tokens, _size(state))
            past = self._begin(state, text)
            new = [*text[past : past + room]]
            count = counts.get(name, 0) if past + len(new) == len(text) else 0
            page = past, tuple(new[:size])
            if is_shared and len(new) >= size and page in busy:
                self.release(name)  # to begin again with what another reads now
                continue
            if not new:
                continue
            if not self._take(state, text, past, past + len(new) + max(count - 1, 0)):
                continue
            room -= len(new)
            busy.add(page)
            rows.append((state, past, new))
            if count:
                ends[name] = len(text)
        if not rows:
            return {}
        began, num_tokens = perf_counter(), sum(len(new) for *_, new in rows)
        is_piece = num_tokens > 2 * len(rows)
        logits = self._compute([(x.request_id, past, new) for x, past, new in rows])
        for state, past, new in rows:
            name, end = state.request_id, past + len(new)
            self._read[name] = _Read(end)
            if is_shared and past // size < end // size:
                self._cache.requests.publish(name, state.initial_tokens, state.generated_tokens, end)
        drafting = [(i, state) for i, (state, *_) in enumerate(rows) if state.request_id in ends]
        if not drafting:
            self._note(num_tokens, began, is_piece)
        while drafting:
            for i, state in drafting:
                drafted = self._read[state.request_id].drafted
                drafted.append(_chosen(state, logits[i], ends[state.request_id] + len(drafted)))
            self._note(num_tokens, began, is_piece)
            states = [x for _, x in drafting if len(self._read[x.request_id].drafted) < counts[x.request_id]]
            drafting, began, num_tokens, is_piece = [*enumerate(states)], perf_counter(), len(states), False
            if drafting:
                logits = self._compute([self._newest(x.request_id) for x in states])
        return {name: self._read[name].drafted for name in ends}

    def release(self, name: str) -> None:
        """Release the pages of a request, if it holds any."""
        self._read.pop(name, None)
        self._cache.requests.release(name)

    def release_all(self, is_evicted: bool) -> None:
        """Release the pages of all requests, and possibly evict those that can be found."""
        self._read.clear()
        self._cache.free_all_requests(is_evicted)

    def check(self) -> None:
        """Check every invariant of the pages; raises ``StateError`` at the first that fails."""
        self._cache.requests.check()

    def report(self) -> dict[str, int]:
        """Numbers of pages and their bytes, and of tokens that were computed."""
        counts = self._cache.counts()
        kept = {name: counts[name] for name in ("max_pages", "num_pages", "active", "evictable")}
        groups = (*self._cache.codes, *self._cache.residuals)
        return {**kept, "nbytes": sum(x.pages.nbytes for x in groups), "tokens_computed": self.num_computed}

    def _begin(self, state: Any, text: Text) -> int:
        """Number of tokens of a text that are read; what was drafted and not chosen is forgotten."""
        name = state.request_id
        read = self._read.get(name)
        if read is None:
            found = self._cache.requests.begin_if_known(self._prompt(state, text))
            if found:
                self._read[name] = _Read(found)
            return found
        self._read[name] = read = _Read(self._settled(read, state))
        self._cache.requests.take_back(name, read.num_sure)
        return read.num_sure

    def _settled(self, read: _Read, state: Any) -> int:
        """Number of tokens that are read, with those of the last draft that were chosen."""
        first = read.num_sure - len(state.initial_tokens)
        known = state.generated_tokens[first : first + len(read.drafted) - 1] if read.drafted else []
        for count, (token, drafted) in enumerate(zip(known, read.drafted, strict=False)):
            if token != drafted:
                return read.num_sure + count
        return read.num_sure + len(known)

    def _prompt(self, state: Any, text: Text) -> Prompt:
        most = len(text) - 1 if self._cache.use_prefix_sharing else 0
        return Prompt.by(state)._replace(text=text, turn=None, most=most)

    def _take(self, state: Any, text: Text, past: int, end: int) -> bool:
        """Take pages for the tokens of a request before ``end``, all or none."""
        requests = self._cache.requests
        has_room = requests.extend(state.request_id, past, end)
        if has_room is None:
            return requests.begin(self._prompt(state, text), past, end)
        if not has_room:
            requests.take_back(state.request_id, past)
        return has_room

    def _newest(self, name: str) -> tuple[str, int, list[int]]:
        read = self._read[name]
        return name, read.num_sure + len(read.drafted) - 1, read.drafted[-1:]

    def _note(self, num_tokens: int, began: float, is_piece: bool) -> None:
        """Note what a forward, and choosing tokens of it, has taken."""
        self._num_forwards[is_piece] += 1
        if self._num_forwards[is_piece] > 1:  # the first one also prepares memory and kernels
            (self.pieces if is_piece else self.costs).note(num_tokens, perf_counter() - began)

    def _compute(self, rows: Sequence[tuple[str, int, list[int]]]) -> Tensor:
        """Logits ``[R, V]`` after the last of the new tokens of each request."""
        cache, device = self._cache, self._model.device
        positions, ids, ends = list[int](), list[int](), list[int]()
        for name, past, new in rows:
            cache.steps.add(cache.requests[name], past, len(new))
            positions += range(past, past + len(new))
            ids += new
            ends.append(len(ids) - 1)
        last = torch.tensor(ends, device=device)
        given = {"logits_to_keep": last} if self._has_some_logits else {}
        output = self._model(
            input_ids=torch.tensor([ids], device=device),
            position_ids=torch.tensor([positions], device=device),
            attention_mask=None,
            use_cache=False,
            cache=cache,
            **given,
        )
        self.num_computed += len(ids)
        logits: Tensor = output.logits[0]
        return logits if self._has_some_logits else logits[last]


def _size(state: Any) -> int:
    """Number of tokens of a request's text."""
    return len(state.initial_tokens) + len(state.generated_tokens)


def _chosen(state: Any, logits: Tensor, position: int) -> int:
    """The token that a request would choose of the assistant's logits, by its own random number."""
    choice = state.logit_processor_kwargs.get(CHOICE)
    return int(logits.argmax()) if choice is None else choice.next_token(logits, position)
