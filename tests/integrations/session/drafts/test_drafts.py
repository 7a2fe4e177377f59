"""Sessions with drafts have the tokens and log probabilities of those without, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from campaign import is_whole, times
from integrations.attention.test_latents import family as latent_family
from integrations.models.test_families import FAMILIES, family
from integrations.session.test_batch_invariance import MODELS, model_of
from oracles.batching import alone, random_requests, session
from oracles.pairs import pairwise
from oracles.threads import num_threads
from transformers import RepetitionPenaltyLogitsProcessor

from kvloom.errors import ArgumentError, UnsupportedError
from kvloom.integrations.transformers import continuous_batching, report_layers
from kvloom.integrations.transformers.session.choices.penalties import CountPenalties, TokenBias
from kvloom.integrations.transformers.session.choices.sampling import Choice, choose_by_request
from kvloom.integrations.transformers.session.drafts.costs import Costs
from kvloom.integrations.transformers.session.drafts.drafter import Drafter
from kvloom.integrations.transformers.session.drafts.guesses import MOST
from kvloom.integrations.transformers.session.requests.prompt import CHOICE
from kvloom.store import KVStore

SESSIONS = times(1)
NEW = 24
KINDS = ["auto", "int8:g32", "int4:g32,recent=0", "int4:g32,recent=24"]
if is_whole():
    KINDS += ["int4:g32", "int8,recent=1", "int2:g32"]
Answer = tuple[list[int], Any]


@pytest.fixture(autouse=True)
def _steps_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are as long as they can be, whatever steps take on this machine."""
    monkeypatch.setattr(Costs, "note", lambda self, num_tokens, seconds: None)


def copying_requests(count: int, seed: int) -> list[list[int]]:
    """Prompts of which many begin alike, most repeat themselves, and some hardly do."""
    draw = random.Random(seed)
    requests: list[list[int]] = random_requests(count, seed, longest=60)
    for request in requests:
        kind = draw.randrange(3)
        if kind:
            piece = [draw.randrange(3, 99) for _ in range(draw.randrange(1, 9))]
            request += piece * draw.randrange(2, 5) if kind == 1 else request[-20:]
    return requests


def choice_of(seed: int, num_prompt: int) -> Choice:
    """Sampling parameters of a request, of which a third take the likeliest token."""
    draw = random.Random(seed)
    processors: list[Any] = []
    if draw.random() < 0.4:
        processors.append(CountPenalties(num_prompt, draw.choice([-0.5, 0.5]), draw.choice([-0.2, 0.2])))
    if draw.random() < 0.8:
        processors.append(RepetitionPenaltyLogitsProcessor(draw.choice([0.2, 0.5, 0.8, 1.1])))
    if draw.random() < 0.3:
        processors.append(TokenBias({7: 2.0, 90: -3.0}))
    return Choice(
        temperature=draw.choice([0.0, 0.05, 0.2, 1.0]),
        top_p=draw.choice([1.0, 0.8]),
        top_k=draw.choice([0, 5]),
        min_p=draw.choice([0.0, 0.1]),
        seed=seed,
        num_logprobs=draw.choice([None, 0, 3]),
        processors=processors,
        scores_prompt=draw.random() < 0.3,
    )


def answers(
    model: Any, requests: Sequence[list[int]], seed: int, is_sampled: bool, store: Any = None, **options: Any
) -> tuple[list[Answer], Any]:
    """Tokens and log probabilities of requests that come at random steps of one session; its report.

    A ``store`` has everything once the session has ended.
    """
    draw, waiting, names, choices = random.Random(seed), [*enumerate(requests)], [], []
    begin = choose_by_request if is_sampled else None
    config = {
        "max_new_tokens": NEW,
        "eos_token_id": 11,
        **({} if is_sampled else {"repetition_penalty": 0.8}),
    }
    with session(model, config, begin=begin, return_logprobs=not is_sampled, **options) as running:
        while waiting or running.processor.has_pending_requests():
            for _ in range(draw.randrange(4)):
                if waiting:
                    number, request = waiting.pop(0)
                    choices.append(choice_of(number, len(request)))
                    own = {CHOICE: choices[-1]} if is_sampled else {}
                    names.append(running.manager.add_request(request, max_new_tokens=NEW - number % 3, **own))
            running.step()
        outputs, report = [running.outputs[name] for name in names], running.manager.report()
        if store is not None:
            running.processor.cache.reset()
            assert store.flush()
    assert [x.error for x in outputs] == [None] * len(requests)
    assert report.active == report.running == 0
    if is_sampled:
        logprobs = [[x.logprobs, x.prompt_logprobs] for x in choices]
    else:
        logprobs = [[*x.logprobs] for x in outputs]
    return [(x.generated_tokens, own) for x, own in zip(outputs, logprobs, strict=True)], report


def guessing(texts: dict[str, list[int]], seed: int) -> Any:
    """A ``Drafter._guess`` that knows each request's text, and is wrong now and then."""
    draw = random.Random(seed)

    def guess(self: Drafter, state: Any, most: int) -> tuple[list[int], float]:
        end = len(state.initial_tokens) + len(state.generated_tokens)
        draft = texts[state.request_id][end : end + min(most, draw.choice([0, 1, 2, 4, 8, MOST]))]
        if draft and draw.random() < 0.5:
            draft[draw.randrange(len(draft))] = draw.randrange(99)
        return draft, draw.choice([0.9, 0.999])

    return guess


def expect_same(model: Any, kv: str, requests: Sequence[list[int]], seed: int, **options: Any) -> Any:
    """Expect the bits of a session without drafts; the report of the one with them."""
    draw = random.Random(seed)
    how = {"share": draw.random() < 0.7, "pack": options.pop("pack", False)}
    how["state_interval"] = options.pop("state_interval", None)
    options |= {
        "is_sampled": draw.random() < 0.6,
        "page_size": draw.choice([8, 16]),
        "max_batch_tokens": draw.choice([24, 64, 300]),
        "num_blocks": draw.choice([24, 40, 300]),
        "scheduler_type": draw.choice(["fifo", "prefill_first"]),
    }
    continuous_batching(model, kv, **how)
    expected, _ = answers(model, requests, seed, **options)
    texts = {f"req_{i}": [*x, *y] for i, (x, (y, _)) in enumerate(zip(requests, expected, strict=True))}
    continuous_batching(model, kv, **how, drafts="lookup")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Drafter, "_guess", guessing(texts, seed))
        found, report = answers(model, requests, seed + 1, **options)
    assert found == expected
    return report


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("name", "kv", "dtype", "pack", "threads"),
    pairwise([*MODELS, "latents"], KINDS, [torch.float32, torch.bfloat16], [False, True], [1, 2]),
    ids=str,
)
def test_no_bit_differs(name: str, kv: str, dtype: torch.dtype, pack: bool, threads: int) -> None:
    model = latent_family("deepseek_v3").to(dtype) if name == "latents" else model_of(name, dtype)
    if name == "latents":
        kv = kv.replace(":g32", "")
    with num_threads(threads):
        for seed in range(SESSIONS):
            seed += 1000 * len(name + kv) + threads
            report = expect_same(model, kv, copying_requests(6, seed), seed, pack=pack)
            assert 0 < report.tokens_accepted < report.tokens_drafted


def test_an_answer_is_delivered_with_its_last_draft_counted() -> None:
    """What reads an answer reads its counts then, while the step that ended it may still go on."""
    model, request, counted = model_of("Llama", torch.float32), [7, 8, 9, 7, 8], list[tuple[int, int]]()
    continuous_batching(model, "auto")
    text = [*request, *alone(model, request, NEW)]
    continuous_batching(model, "auto", drafts="lookup")
    choice = Choice(temperature=0.0)

    def begin(manager: Any) -> None:
        choose_by_request(manager)
        deliver = manager.output_router.deliver_batch

        def counting(outputs: Any) -> None:
            counted.append((choice.num_drafted, choice.num_accepted))
            deliver(outputs)

        manager.output_router.deliver_batch = counting

    def guess(self: Drafter, state: Any, most: int) -> tuple[list[int], float]:
        end = len(request) + len(state.generated_tokens)
        return text[end : end + min(most, 4)], 0.999

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Drafter, "_guess", guess)
        with session(model, begin=begin) as running:
            running.manager.add_request(request, max_new_tokens=NEW, **{CHOICE: choice})
            (output,) = running.run().values()
    assert [*request, *output.generated_tokens] == text
    assert counted[-1] == (choice.num_drafted, choice.num_accepted)
    assert choice.num_drafted == choice.num_accepted > NEW // 2


@pytest.mark.parametrize(("name", "kv"), [("Llama", "int4:g32,recent=24"), ("Gemma2", "auto")])
def test_what_drafts_leave_in_a_store_is_what_others_find(name: str, kv: str, tmp_path: Path) -> None:
    """The second turn of each request begins with the pages of an answer that drafts computed."""
    model, requests = model_of(name, torch.float32), copying_requests(6, 2)
    options: dict[str, Any] = {"is_sampled": True, "page_size": 8, "max_batch_tokens": 64}
    continuous_batching(model, kv)
    first, _ = answers(model, requests, 1, **options)
    turns = [[*x, *y, 5, 6, 7] for x, (y, _) in zip(requests, first, strict=True)]
    second, _ = answers(model, turns, 2, **options)
    texts = {f"req_{i}": [*x, *y] for i, (x, (y, _)) in enumerate(zip(requests, first, strict=True))}
    store = KVStore(f"file://{tmp_path}/store", read="always")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Drafter, "_guess", guessing(texts, 1))
        continuous_batching(model, kv, store=store, drafts="lookup")
        found, report = answers(model, requests, 1, store=store, **options)
    assert found == first and report.tokens_accepted > 0
    continuous_batching(model, kv, store=store)
    found, report = answers(model, turns, 2, store=store, **options)
    assert found == second and report.tokens_found >= sum(len(x) // 8 * 8 - 8 for x in turns) // 2
    store.close()


@pytest.mark.parametrize("name", [*FAMILIES] if is_whole() else ["Gemma3n", "gpt-oss", "Llama4"])
def test_a_family_has_the_same_bits_or_is_refused_by_name(name: str) -> None:
    model = family(name)
    try:
        continuous_batching(model)
    except UnsupportedError:
        with pytest.raises(UnsupportedError):
            continuous_batching(model, drafts="lookup")
        return
    try:
        expect_same(model, "auto", copying_requests(4, 1), 1)
    except UnsupportedError as error:
        assert str(error).startswith(f"drafts must be None for {type(model).__name__}")


def test_text_that_copies_takes_few_steps() -> None:
    """An answer of one token again and again: lookup finds it as soon as it has come four times."""
    model, reports = model_of("Llama", torch.float32), []
    for drafts in (None, "lookup"):
        continuous_batching(model, drafts=drafts)
        choice = Choice(processors=[TokenBias({7: 1e6})])
        with session(model, begin=choose_by_request) as running:
            running.manager.add_request([*range(3, 27)], max_new_tokens=60, **{CHOICE: choice})
            running.run()
            reports.append(running.manager.report())
        assert choice.tokens == [7] * 60
    without, report = reports
    assert (without.steps, without.tokens_drafted) == (60, 0) and report.steps <= 12
    assert report.steps + report.tokens_accepted == 60
    assert report.tokens_computed == 24 + report.steps - 1 + report.tokens_drafted


def test_a_draft_takes_no_page_that_an_answer_needs() -> None:
    """Two answers that fill all pages are not preempted, and what drafts took is free again."""
    model = model_of("Llama", torch.float32)
    continuous_batching(model, share=False, drafts="lookup")
    options: dict[str, Any] = {"page_size": 8, "num_blocks": 12, "safety_margin": 0.0}
    with (
        session(model, {"max_new_tokens": 24}, begin=choose_by_request, **options) as running,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(Drafter, "_guess", lambda self, state, most: ([7, 7, *[98] * 9][:most], 0.999))
        for length in (24, 23):
            choice = Choice(processors=[TokenBias({7: 1e6})])
            running.manager.add_request([7] * length, **{CHOICE: choice})
        while running.step():
            held = [x.num_tokens for x in running.manager.page_map().requests]
            states = running.processor.scheduler.active_requests.values()
            assert held == [x.current_len() for x in states]
        report = running.manager.report()
    assert report.preemptions == 0 and 0 < report.tokens_accepted < report.tokens_drafted


def test_a_row_that_was_cut_reads_its_new_pages() -> None:
    """A page that a draft had taken, and that another request took since, is read by neither."""
    model = model_of("Llama", torch.float32)
    requests = [[number, *range(3, 3 + length)] for number, length in enumerate((13, 14, 15, 16, 29), 50)]
    for drafts in (None, "lookup"):
        continuous_batching(model, share=False, drafts=drafts)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Drafter, "_guess", lambda self, state, most: ([98] * min(most, 9), 0.999))
            found, report = answers(model, requests, 0, False, page_size=8)
        if drafts is None:
            expected = found
    assert found == expected and report.tokens_drafted > 100


def test_a_step_has_room_for_prompts_first() -> None:
    model, lengths = model_of("Llama", torch.float32), list[int]()
    continuous_batching(model, share=False, drafts="lookup")
    hook = model.register_forward_hook(
        lambda module, args, kwargs, out: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    with session(model, begin=choose_by_request, max_batch_tokens=20) as running:
        choice = Choice(processors=[TokenBias({7: 1e6})])
        running.manager.add_request([7] * 10, max_new_tokens=90, **{CHOICE: choice})
        for _ in range(3):
            running.step()
        assert lengths == [10, 16, 16]
        running.manager.add_request([*range(3, 83)], max_new_tokens=1)
        for _ in range(5):
            running.step()
        assert lengths[3:] == [20, 20, 20, 20, 20] and running.manager.report().tokens_computed == 142
        running.run()
    hook.remove()


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"drafts": "mtp"}, ArgumentError, "^drafts must be 'lookup', a PreTrainedModel or None, got 'mtp'"),
        (
            {"drafts": "lookup", "batch_invariant": False},
            ArgumentError,
            "^batch_invariant must be True or None",
        ),
    ],
)
def test_wrong_drafts_are_refused(options: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        continuous_batching(model_of("Llama", torch.float32), **options)


def test_random_numbers_of_all_requests_together_are_refused() -> None:
    model = model_of("Llama", torch.float32)
    continuous_batching(model, drafts="lookup")
    with (
        pytest.raises(UnsupportedError, match=r"^drafts must be None with do_sample"),
        session(model, {"do_sample": True}),
    ):
        pass


def test_a_layer_that_is_not_invariant_is_refused_and_the_model_is_as_before() -> None:
    model = model_of("Llama", torch.float32)
    head = model.lm_head
    head.forward = type(head).forward.__get__(head)
    continuous_batching(model, drafts="lookup")
    before = model.config._attn_implementation
    with pytest.raises(
        UnsupportedError, match=r"^drafts must be None for LlamaForCausalLM, .* was replaced$"
    ):
        model.init_continuous_batching()
    assert model.config._attn_implementation == before
    assert not report_layers(model).batch_invariant


def test_drafts_are_no_longer_than_attention_allows() -> None:
    """Calls of more than 16 new tokens of a text have other bits on processors with AMX."""
    assert MOST <= 15
