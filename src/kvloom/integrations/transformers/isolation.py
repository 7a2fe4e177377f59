"""Test of one model: prefixes are shared where they may be, and nowhere else."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from kvloom.errors import ArgumentError, UnsupportedError
from kvloom.integrations.transformers.cache.build import make_layers
from kvloom.integrations.transformers.cache.kv_cache import KVCache
from kvloom.integrations.transformers.models.cache_argument import as_argument
from kvloom.integrations.transformers.models.content import placeholders_of
from kvloom.integrations.transformers.models.text_config import text_config_of
from kvloom.integrations.transformers.models.trials import undisturbed
from kvloom.integrations.transformers.pool.kv_pool import KVPool

_PAGE: Final = 4
_FOUND: Final = 20
_LENGTH: Final = _FOUND + 3
_SCALES: Final = ("scaling", "softmax_scale", "variance_epsilon", "eps")
"""Attributes of modules that change their results; most models have one of them."""


class Check(NamedTuple):
    """Result of one check.

    Attributes:
        name: What was changed between computing a text and asking for it again.
        expected: Tokens that should be found, or ``"refused"``.
        actual: Tokens that were found, or ``"refused"``.
        problem: What is wrong; empty if the check passed.
    """

    name: str
    expected: int | str
    actual: int | str
    problem: str


def check_isolation(model: Any, kv: str = "auto") -> list[Check]:
    """Check on a model that its prefixes are shared where they may be, and nowhere else.

    A text is computed in a ``KVPool``, and asked for again after each of several changes. Where sharing is
    allowed it must be found, with the logits of a cache that shares nothing; elsewhere it must not be found.
    The same is checked with a store in a temporary folder, and in a session of continuous batching.

    Hooks, attributes and one weight of the model are changed meanwhile, and restored at the end.

    Args:
        model: As ``KVPool.for_model``.
        kv: As ``KVPool.for_model``.

    Returns:
        The checks, in order.

    Raises:
        ArgumentError: as ``KVPool.for_model``.
        UnsupportedError: as ``KVPool.for_model``; such a model shares no prefixes.
    """
    with undisturbed(model):
        return [*_Tried(model, kv).checks()]


class _Tried:
    """A pool of the model, and one text."""

    def __init__(self, model: Any, kv: str) -> None:
        self._model, self._kv = model, kv
        config = text_config_of(model)
        self._placeholders = placeholders_of(model.config) | placeholders_of(config)
        rows = model.get_input_embeddings().weight.shape[0]
        usable = [x for x in range(rows // 3, rows) if x not in self._placeholders]
        self._tokens = torch.tensor(
            [[usable[i * 7919 % len(usable)] for i in range(_LENGTH)]], device=model.device
        )
        self._pool = self._pool_with(None)

    def checks(self) -> Iterator[Check]:
        """Run all checks; the change of a weight, after which the model has another state, comes last."""
        pool = self._pool
        yield self._asked("nothing was computed", pool, 0)
        yield self._asked("the same text", pool, _FOUND)
        yield self._asked("another salt", pool, 0, salt="another")
        yield self._asked("other content", pool, 0, content="a picture")
        yield self._asked("the same content", pool, _FOUND, content="a picture")
        yield self._prefixes_alone()
        yield from map(self._refused, self._inputs())
        for name, change in self._reversible():
            with change:
                yield self._asked(name, pool, 0)
            yield self._asked(f"{name}, undone", pool, _FOUND)
        with tempfile.TemporaryDirectory() as folder:
            yield from self._stored(folder)
        yield from self._session()
        with _changed_weight(self._model):
            yield self._asked("a weight was written", pool, 0)
            yield self._asked("a weight was written, the same text", pool, _FOUND)
        yield self._asked("the weight was restored", pool, 0)

    def _pool_with(self, store: Any) -> KVPool:
        options: dict[str, Any] = {"page_size": _PAGE, "max_tokens": 64 * _LENGTH, "store": store}
        return KVPool.for_model(self._model, self._kv, **options)

    def _asked(
        self, name: str, pool: KVPool, expected: int, salt: str = "", content: str | None = None
    ) -> Check:
        """Ask for the text, and compare its last logits with those of a cache that shares nothing."""
        cache = pool.begin(self._tokens, salt, content)
        found = int(cache.get_seq_length())
        logits = self._last_logits(cache, found)
        smoothed_alike = replace(cache.sequences[0].pages.format, max_tokens=None)
        alone = KVCache(make_layers(self._model, smoothed_alike))
        if found:  # cut into the same forwards as with a found prefix
            self._forward(self._tokens[:, :found], alone)
        expected_logits = self._last_logits(alone, found)
        pool.commit(cache, self._tokens)
        problem = ""
        if found != expected:
            problem = f"{found} tokens were found"
        elif not _are_alike(logits, expected_logits):
            problem = "the logits differ from those of a cache that shares nothing"
        return Check(name, expected, found, problem)

    def _last_logits(self, cache: Any, past: int) -> Tensor:
        logits: Tensor = self._forward(self._tokens[:, past:], cache).logits[0, -1]
        return logits

    def _forward(self, tokens: Tensor, cache: Any) -> Any:
        return self._model(tokens, use_cache=True, **as_argument(self._model, cache))

    def _prefixes_alone(self) -> Check:
        """Whether keys and values of a prefix depend on the prefix alone."""
        kept = []
        for rest in (self._tokens[:, _FOUND:], self._tokens[:, :3]):
            cache = KVCache.for_model(self._model, page_size=_PAGE)
            self._forward(torch.cat((self._tokens[:, :_FOUND], rest), 1), cache)
            kept.append([x[:, :, :_FOUND] for pair in cache.to_legacy_cache() for x in pair])
        alike = all(map(_are_alike, *kept))
        problem = "" if alike else "keys and values of a prefix depend on what follows it"
        return Check(
            "the same prefix, and another rest", "the same", "the same" if alike else "others", problem
        )

    def _inputs(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Calls that must be refused."""
        tokens, model = self._tokens, self._model

        def forward(**inputs: Any) -> Any:
            return model(use_cache=True, **as_argument(model, self._pool.begin(tokens)), **inputs)

        embeddings = model.get_input_embeddings()(tokens)
        positions = torch.arange(5, 5 + _LENGTH, device=tokens.device)[None]
        mask = (positions > 7).long()
        yield "embeddings in place of tokens", lambda: forward(inputs_embeds=embeddings)
        yield "other positions", lambda: forward(input_ids=tokens, position_ids=positions)
        yield "a mask that hides tokens", lambda: forward(input_ids=tokens, attention_mask=mask)
        for token, name in self._placeholders.items():
            with_placeholder = tokens.clone()
            with_placeholder[0, 3] = token
            yield f"{name} without content", partial(self._pool.begin, with_placeholder)

    def _refused(self, call: tuple[str, Callable[[], Any]]) -> Check:
        name, try_it = call
        try:
            try_it()
        except ArgumentError:
            return Check(name, "refused", "refused", "")
        return Check(name, "refused", "accepted", "it was not refused")

    def _reversible(self) -> Iterator[tuple[str, AbstractContextManager[Any]]]:
        """Changes of the model that can be undone exactly."""
        model = self._model
        yield "a hook", _hooked(model.get_input_embeddings())
        for owner, name in ((x, name) for x in model.modules() for name in _SCALES):
            value = vars(owner).get(name)
            if isinstance(value, float):
                yield f"another {name}", _set(owner, name, value * 1.5)
                break
        if getattr(model, "_hf_peft_config_loaded", False):
            yield "no adapter", _disabled(model)
        elif hasattr(model, "disable_adapter"):
            yield "no adapter", model.disable_adapter()

    def _session(self) -> Iterator[Check]:
        """Checks in a session of continuous batching, if the model supports one."""
        from kvloom.integrations.transformers.session import continuous_batching, has_sessions

        if has_sessions(self._model):  # of the caller
            return
        try:
            continuous_batching(self._model, self._kv)
        except UnsupportedError:
            return
        try:
            generation = GenerationConfig(max_new_tokens=1, do_sample=False, eos_token_id=-1, pad_token_id=0)
            from transformers import ContinuousBatchingConfig

            config = ContinuousBatchingConfig(page_size=_PAGE, num_blocks=16 * _LENGTH)
            manager = self._model.init_continuous_batching(generation, config)
            manager.start()
            try:
                name, change = next(self._reversible())
                yield self._requested("a session", manager, 0)
                yield self._requested("a session that has the text", manager, _FOUND)
                yield self._requested("a session, another salt", manager, 0, "another")
                with change:
                    yield self._requested(f"a session, {name}", manager, 0)
                yield self._requested("a session, and the unchanged model", manager, _FOUND)
            finally:
                manager.stop(block=True)
        finally:
            continuous_batching(self._model, None)

    def _requested(self, name: str, manager: Any, expected: int, salt: str = "") -> Check:
        before = manager.report().tokens_found
        request = manager.add_request(self._tokens[0].tolist(), cache_salt=salt)
        result = manager.get_result(request)
        found = manager.report().tokens_found - before
        problem = f"{found} tokens were found" if found != expected else ""
        return Check(name, expected, found, getattr(result, "error", "") or problem)

    def _stored(self, folder: str) -> Iterator[Check]:
        """Checks with a store; each pool plays the role of another process."""
        name, change = next(self._reversible())
        for said, expected, changed in (
            ("an empty store", 0, nullcontext()),
            ("a store that has the text", _FOUND, nullcontext()),
            (f"a store, {name}", 0, change),
            ("a store, and the unchanged model", _FOUND, nullcontext()),
        ):
            from kvloom.store import KVStore

            with changed, KVStore(f"file://{folder}", read="always") as store:
                yield self._asked(said, self._pool_with(store), expected)


def _are_alike(x: Tensor, y: Tensor) -> bool:
    """Whether tensors differ by rounding at most."""
    allowed = 64 * torch.finfo(x.dtype).eps * float(y.double().square().mean().sqrt())
    return float((x.double() - y.double()).square().mean().sqrt()) <= allowed


@contextmanager
def _hooked(module: nn.Module) -> Iterator[None]:
    handle = module.register_forward_hook(lambda module, args, output: output * 1.5)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _set(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def _disabled(model: Any) -> Iterator[None]:
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()


@contextmanager
def _changed_weight(model: Any) -> Iterator[None]:
    """Context with a changed embedding weight, which is restored bit for bit at the end."""
    weight = model.get_input_embeddings().weight
    if weight.device.type == "meta":
        raise UnsupportedError("model must have its weights in memory")
    before = weight.detach().clone()
    weight.mul_(1.25)
    try:
        yield
    finally:
        with contextlib.suppress(RuntimeError):
            weight.copy_(before)
