"""One layer's tokens in pages of vLLM's: stored, and attended to; without vLLM.

Shapes: T new tokens of all requests, H key/value heads, Hq query heads, B blocks, S tokens of a block, D head
dim, C elements of a token of a head.
"""

from dataclasses import dataclass

from torch import Tensor

from kvloom import ops
from kvloom.caches.tokens import attend_behind, scores_of_newest
from kvloom.caches.transform import Transform, store_transformed
from kvloom.caches.transform import attend as transformed
from kvloom.core.views import KVView
from kvloom.integrations.vllm.builder import Step
from kvloom.integrations.vllm.pages import PageFormat


class Paged:
    """Views of pages, which vLLM replaces once, after it has measured memory.

    Args:
        format: What they hold.
    """

    def __init__(self, format: PageFormat) -> None:
        self._format = format
        self._memory: Tensor | None = None

    def view(self, memory: Tensor) -> KVView:
        """Keys and values in ``memory``, ``[B, H, S, C]``."""
        if self._memory is not memory:
            self._view = self._format.view(memory)
            self._memory = memory
        return self._view


@dataclass(frozen=True, slots=True, eq=False)
class Newest:
    """Pages of the newest tokens of each request, unquantized.

    Attributes:
        view: Keys and values.
        recent: How many of them each token attends to, itself included.
    """

    view: KVView
    recent: int


def store(
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    view: KVView,
    transform: Transform | None = None,
    positions: Tensor | None = None,
    full_range: bool = False,
) -> None:
    """Store new tokens.

    Args:
        key: ``[T, H, D]``, perhaps padded at the end.
        value: As ``key``.
        slots: ``[T]`` int64; -1 skips a token.
        view: The pages of the layer.
        transform: What is done to keys and values before; ``None`` for nothing.
        positions: ``[T]`` int64, the places of tokens in their requests, where ``transform`` needs them;
            what follows them is padding.
        full_range: As of ``ops.store``.
    """
    if positions is not None:
        slots = slots[: positions.shape[0]]
    key, value = key[: slots.shape[0]], value[: slots.shape[0]]
    store_transformed(key, value, slots, view, transform, positions, full_range=full_range)


def attend_latents(
    query: Tensor,
    view: KVView,
    step: Step,
    scores: ops.Scores,
    transform: Transform | None = None,
    newest: tuple[Newest, Step] | None = None,
) -> Tensor:
    """Attend to latents (MLA) that are stored, as ``ops.attend`` with ``is_latent``.

    Args:
        query: ``[T, Hq, rank + rope]``.
        view: The pages of the layer: latents as keys, rope keys as values.
        step: As of ``attend``.
        scores: The same.
        transform: The same.
        newest: The same.

    Returns:
        ``[T, Hq, rank]``.
    """
    if newest is None:
        return transformed(query, view, step.batch, scores, transform, is_latent=True)
    pages, where = newest
    part = ops.attend_part(
        query, pages.view, where.batch, scores_of_newest(scores, pages.recent), is_latent=True
    )
    codes = view, step.batch, scores, transform, None, True
    return attend_behind(part, query, *codes, skip=pages.recent, skip_from=None)


def attend(
    query: Tensor,
    view: KVView,
    step: Step,
    scores: ops.Scores,
    out: Tensor,
    transform: Transform | None = None,
    newest: tuple[Newest, Step] | None = None,
) -> None:
    """Attend to what is stored.

    Args:
        query: ``[T, Hq, D]``, perhaps padded at the end, as ``out``.
        view: The pages of the layer.
        step: Where all tokens lie in them.
        scores: Of the model.
        out: ``[T, Hq, D]``, written.
        transform: What was done to keys and values before they were stored; ``None`` for nothing.
        newest: The pages of the newest tokens, and where these lie in them; ``None`` if all tokens are read
            from ``view``.
    """
    query, out = query[: step.num_tokens], out[: step.num_tokens]
    if newest is not None:
        pages, where = newest
        part = ops.attend_part(query, pages.view, where.batch, scores_of_newest(scores, pages.recent))
        codes = view, step.batch, scores, transform, None
        out.copy_(attend_behind(part, query, *codes, skip=pages.recent, skip_from=None))
    elif transform is None:
        ops.attend(query, view, step.batch, scores, out=out)
    else:
        query, scores = transform.query(query, scores, None)
        ops.attend(query, view, step.batch, scores, out=out)
        if transform.value:
            out.copy_(transform.output(out))
