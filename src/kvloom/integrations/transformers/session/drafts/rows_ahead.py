"""``RowsAhead``: prompt lookup for a batch, whose rows run ahead of ``generate``.

transformers' own loop chooses the tokens, one of each row at a time, as without drafts. Its forwards are
answered with logits that were computed ahead, of each row as far as its guesses hold. A guess that the loop
does not choose is taken back. So logits processors, random numbers, scores, streams and ends are those of
``generate`` without drafts.

Shapes: B rows, T tokens of the prompt, N columns of the cache, Q tokens of each row in a forward, V tokens of
the vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteriaList
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvloom.caches.format import RESIDUAL_ROLLBACK
from kvloom.errors import OutOfPages
from kvloom.integrations.transformers.cache.kv_cache import KVCache
from kvloom.integrations.transformers.session.drafts.costs import Costs
from kvloom.integrations.transformers.session.drafts.guesses import MOST, Guesses
from kvloom.integrations.transformers.stand_in import StandIn

LEAD: Final = 64
"""Number of tokens ahead with which a row waits for the others; their logits are kept."""


@dataclass
class RowAhead:
    """A row of the batch, and what is ahead of it.

    Attributes:
        guesses: Guesses for it.
        chosen: New tokens that ``generate`` chose.
        ahead: Tokens after these that are in the cache, too.
        logits: ``[V]`` each, after the last chosen token and after each one that is ahead; empty if the last
            chosen token is not in the cache.
        num_gone: Number of its last tokens in the cache that are not wanted.
        is_finished: Whether only padding follows.
    """

    guesses: Guesses
    chosen: list[int] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    num_gone: int = 0
    is_finished: bool = False

    def choose(self, token: int) -> None:
        """Note the token that ``generate`` chose; another one than was guessed takes back what is ahead."""
        self.chosen.append(token)
        if self.ahead and self.ahead[0] == token:
            del self.ahead[0], self.logits[0]
            return
        self.num_gone += len(self.ahead)
        self.ahead, self.logits = [], []
        self.guesses.take_back(len(self.chosen) - 1)

    @property
    def num_past(self) -> int:
        """Number of wanted tokens in the cache from the last chosen one on."""
        return len(self.ahead) + 1 if self.logits else 0


class RowsAhead(StandIn):
    """The model as ``generate``'s loop calls it after the prompt.

    Args:
        model: The model.
        cache: Its cache.
        input_ids: ``[B, T]``.
        attention_mask: ``[B, N]``, of the columns after the prompt; ``None`` for no padding.
        most: Largest number of drafted tokens of a row in a forward.
        max_length: Largest length of the text.
        ends: Tokens after which a row has only padding; none if there is no padding.
        padding: Token of the padding, and of what a row computes for nothing.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: KVCache,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        most: int,
        max_length: int,
        ends: frozenset[int],
        padding: int,
    ) -> None:
        super().__init__(model)
        self._cache, self._costs = cache, Costs()
        self._num_fed = max_length - input_ids.shape[1] - 1  # the last token is not fed
        self._ends, self._padding = ends, padding
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        texts = zip(input_ids.tolist(), mask[:, -input_ids.shape[1] :].tolist(), strict=True)
        self._rows = [RowAhead(Guesses([x for x, n in zip(*own, strict=True) if n])) for own in texts]
        # A row that goes back must find what its windows show, and in residual windows that is counted from
        # the last token that was computed, wanted or not.
        self._lead = min([LEAD, *(x.rollback - 1 for x in cache.sequences if x.window is not None)])
        self._most = min(most, MOST)
        self._is_in_step = False  # whether no row runs ahead, since the cache had no room for it
        if any(not x.is_required for x in cache.sequences):
            self._lead, self._most = RESIDUAL_ROLLBACK // 2, min(most, RESIDUAL_ROLLBACK // 2 - 1)

    def __call__(self, input_ids: Tensor, **inputs: Any) -> CausalLMOutputWithPast:
        """Logits ``[B, 1, V]`` after one token ``[B, 1]`` of each row, which were computed before or are now.

        Args:
            input_ids: The tokens.
            inputs: Other arguments of the model's forward, ``position_ids`` among them.
        """
        for row, token in zip(self._rows, input_ids[:, -1].tolist(), strict=True):
            row.choose(token)
        if not all(row.logits for row in self._rows):
            try:
                self._compute(inputs)
            except OutOfPages:  # nothing was changed
                if self._is_in_step:
                    raise
                self._fall_in_step()
                self._compute(inputs)
        return CausalLMOutputWithPast(logits=torch.stack([row.logits[0] for row in self._rows])[:, None])

    def stopping(self, criteria: StoppingCriteriaList) -> StoppingCriteriaList:
        """The same criteria, which note the rows that have only padding from then on."""
        return _Noting(criteria, self._rows if self._ends else [])

    def align(self) -> None:
        """Remove from the cache what is ahead; its rows then end together, as without drafts."""
        for row in self._rows:
            row.num_gone += len(row.ahead)
            row.ahead = []
        self._crop()

    def _fall_in_step(self) -> None:
        """Remove from the cache all that it does not have without lookup, and compute no more than that."""
        for row in self._rows:
            row.num_gone += row.num_past
            row.ahead, row.logits = [], []
            row.guesses.take_back(len(row.chosen))
        self._is_in_step, self._most = True, 0

    def _crop(self) -> None:
        counts = [-row.num_gone for row in self._rows]
        if any(counts):
            self._cache.crop(counts)
        for row in self._rows:
            row.num_gone = 0

    def _compute(self, inputs: dict[str, Any]) -> None:
        """Compute the tokens that were chosen, and guesses behind them."""
        begin = perf_counter()
        self._crop()
        feeds = [self._feed(row) for row in self._rows]
        width = self._width(feeds)
        fed = [[*feed[:width], *[self._padding] * (width - len(feed))] for feed in feeds]
        logits = self._model(input_ids=torch.tensor(fed), **inputs | self._inputs(inputs, width)).logits
        for row, feed, own in zip(self._rows, feeds, logits[:, -width:], strict=True):
            count = self._num_right(row, feed[:width], own.argmax(-1).tolist())
            row.ahead += feed[not row.logits : count]
            row.logits += own[:count].clone()
            row.num_gone = width - count
        self._costs.note(width * len(self._rows), perf_counter() - begin)

    def _feed(self, row: RowAhead) -> list[int]:
        """What may follow in a row: the chosen token, and guesses; empty while it waits."""
        room = self._num_fed - len(row.chosen) + 1 - row.num_past
        if row.logits:
            room = min(room, self._lead - len(row.ahead))
        if room <= 0:
            return []
        most = min(self._most, room - 1)
        is_over = self._is_over(row)
        if not row.logits:
            first = row.chosen[-1]
        else:
            first = self._padding if is_over else int(row.logits[-1].argmax())
        if is_over:
            return [first, *[self._padding] * most]
        text = [*row.chosen, *row.ahead, first] if row.logits else row.chosen
        return [first, *row.guesses.after(text, most)]

    def _is_over(self, row: RowAhead) -> bool:
        """Whether only padding follows in a row, if its guesses hold."""
        return row.is_finished or not self._ends.isdisjoint(row.chosen[-1:] + row.ahead)

    def _num_right(self, row: RowAhead, feed: list[int], best: list[int]) -> int:
        """Number of first tokens of ``feed`` that hold, by the likeliest token after each."""
        if not feed:
            return 0
        count, is_over = 1, self._is_over(row) or feed[0] in self._ends
        while count < len(feed) and feed[count] == (self._padding if is_over else best[count - 1]):
            is_over = is_over or feed[count] in self._ends
            count += 1
        return count

    def _width(self, feeds: Sequence[list[int]]) -> int:
        """Q with which a forward is expected to make most tokens a second."""
        count, costs = len(feeds), self._costs
        drafts = [
            (row.guesses.odds, len(feed) - 1)
            for row, feed in zip(self._rows, feeds, strict=True)
            if feed and not self._is_over(row)
        ]
        width, longest = 1, max(map(len, feeds))
        if not drafts:  # of padding all is right
            return longest
        expected, seconds = float(len(drafts)), costs.fixed + costs.token * count
        while width < longest:
            gain = sum(odds**width for odds, most in drafts if width <= most)
            if not gain or gain * seconds < expected * costs.token * count:
                break
            expected, seconds, width = expected + gain, seconds + costs.token * count, width + 1
        return width

    def _inputs(self, inputs: dict[str, Any], width: int) -> dict[str, Any]:
        """Arguments of a forward of ``width`` tokens of each row, of those of one token."""
        rows, newest, mask = self._rows, inputs["position_ids"], inputs.get("attention_mask")
        past = torch.tensor([row.num_past for row in rows])
        positions = newest + past[:, None] + torch.arange(width)
        last = newest + self._num_fed - len(rows[0].chosen)  # what is behind it is not wanted
        found: dict[str, Any] = {"position_ids": torch.minimum(positions, last)}
        begins = (past.max() - past).tolist()
        if mask is not None or any(begins):
            seen = torch.ones(len(rows), self._cache.get_seq_length() + width, dtype=torch.int64)
            for b, begin in enumerate(begins):
                seen[b, :begin] = 0
                if mask is not None:
                    seen[b, begin : begin + mask.shape[1]] = mask[b]
            found["attention_mask"] = seen
        if "logits_to_keep" in inputs:
            found["logits_to_keep"] = width
        return found


class _Noting(StoppingCriteriaList):  # type: ignore[misc]
    """Stopping criteria that note which rows are finished."""

    def __init__(self, criteria: StoppingCriteriaList, rows: Sequence[RowAhead]) -> None:
        super().__init__(criteria)
        self._rows = rows

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        """``[B]`` bool: the rows that are finished."""
        done = super().__call__(input_ids, scores, **kwargs)
        for row, is_done in zip(self._rows, done.tolist(), strict=False):
            row.is_finished = row.is_finished or is_done
        return done
