"""Storing and attending to one layer's tokens in vLLM's pages; does not import vLLM.

Shapes: T new tokens of all requests, H key/value heads, Hq query heads, B blocks, S tokens of a block, D head
dim, C elements of a token of a head.
"""

from dataclasses import dataclass

from torch import Tensor

from kvloom import ops
from kvloom.caches.tensors.residual import Unquantized, attend_beside, scores_of_newest
from kvloom.caches.tensors.transform import Transform, stored_by
from kvloom.caches.tensors.transform import attend as attend_transformed
from kvloom.core.views import KVView
from kvloom.integrations.vllm.builder import VllmStep
from kvloom.integrations.vllm.pages import PageFormat


class Paged:
    """View of a layer's pages, made again when vLLM replaces them after it has measured memory.

    Args:
        format: Format of the pages.
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
    """Pages of the residual windows of all requests.

    Attributes:
        view: Unquantized keys and values.
        recent: Residual window: number of last tokens that each token attends to, itself included.
    """

    view: KVView
    recent: int


def store_in_pages(
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
        key: ``[T, H, D]``, possibly padded at the end.
        value: As ``key``.
        slots: ``[T]`` int64; -1 skips a token.
        view: Pages of the layer.
        transform: Transform of keys and values before they are stored; ``None`` for none.
        positions: ``[T]`` int64, positions of the tokens in their requests, if ``transform`` needs them;
            rows after T are padding.
        full_range: As in ``ops.store``.
    """
    if positions is not None:
        slots = slots[: positions.shape[0]]
    key, value = key[: slots.shape[0]], value[: slots.shape[0]]
    ops.store(key, value, slots, view, full_range=full_range, **stored_by(transform, positions))


def attend_latents(
    query: Tensor,
    view: KVView,
    step: VllmStep,
    scores: ops.Scores,
    transform: Transform | None = None,
    newest: tuple[Newest, VllmStep] | None = None,
) -> Tensor:
    """Attend to stored latents (MLA), as ``ops.attend`` with ``is_latent``.

    Args:
        query: ``[T, Hq, rank + rope]``.
        view: Pages of the layer: latents as keys, rope keys as values.
        step, scores, transform, newest: As in ``attend_to_pages``.

    Returns:
        ``[T, Hq, rank]``.
    """
    if newest is None:
        return attend_transformed(query, view, step.batch, scores, transform, is_latent=True)
    codes = view, step.batch, scores, transform, None, True
    return attend_beside(query, _unquantized(*newest, scores), *codes, skip=newest[0].recent)


def attend_to_pages(
    query: Tensor,
    view: KVView,
    step: VllmStep,
    scores: ops.Scores,
    out: Tensor,
    transform: Transform | None = None,
    newest: tuple[Newest, VllmStep] | None = None,
) -> None:
    """Attend to stored tokens.

    Args:
        query: ``[T, Hq, D]``, possibly padded at the end, as ``out``.
        view: Pages of the layer.
        step: Attention metadata for these pages.
        scores: Options of the model's scores.
        out: ``[T, Hq, D]``, written.
        transform: Transform of keys and values before they were stored; ``None`` for none.
        newest: Pages of residual windows, and the step for them; ``None`` if all tokens are read from
            ``view``.
    """
    query, out = query[: step.num_tokens], out[: step.num_tokens]
    if newest is not None:
        own = _unquantized(*newest, scores)
        out.copy_(attend_beside(query, own, view, step.batch, scores, transform, skip=newest[0].recent))
    elif transform is None:
        ops.attend(query, view, step.batch, scores, out=out)
    else:
        query, scores = transform.query(query, scores, None)
        ops.attend(query, view, step.batch, scores, out=out)
        if transform.value:
            out.copy_(transform.output(out))


def _unquantized(newest: Newest, step: VllmStep, scores: ops.Scores) -> Unquantized:
    """What ``attend_beside`` reads of the pages of residual windows."""
    return Unquantized(newest.view, step.batch, scores_of_newest(scores, newest.recent))
