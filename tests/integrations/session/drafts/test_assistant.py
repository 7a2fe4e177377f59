"""Sessions with an assistant have the tokens and log probabilities of those without, bit for bit."""

from __future__ import annotations

import random
from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from campaign import times
from integrations.models.test_families import family
from integrations.session.drafts.test_drafts import answers, copying_requests
from integrations.session.test_batch_invariance import model_of
from oracles.batching import random_requests, session
from oracles.pairs import pairwise
from transformers import AutoModelForCausalLM

from kvloom.errors import ArgumentError, StateError, UnsupportedError
from kvloom.integrations.transformers import continuous_batching, report_layers
from kvloom.integrations.transformers.models.cache_argument import CACHE_ARGUMENT
from kvloom.integrations.transformers.session.choices.penalties import TokenBias
from kvloom.integrations.transformers.session.choices.sampling import Choice, choose_by_request
from kvloom.integrations.transformers.session.drafts import assistant as assistant_module
from kvloom.integrations.transformers.session.drafts.account import Account
from kvloom.integrations.transformers.session.drafts.assistant import Assistant
from kvloom.integrations.transformers.session.drafts.assisting import Assisting
from kvloom.integrations.transformers.session.drafts.costs import Costs
from kvloom.integrations.transformers.session.drafts.lent import LentModel
from kvloom.integrations.transformers.session.requests.prompt import CHOICE
from kvloom.tracing.recording import read_lines

SESSIONS = times(1)


@pytest.fixture(autouse=True)
def _counts_do_not_depend_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The assistant is asked for a random number of tokens, and its pages are checked after each draft."""
    draw, draft = random.Random(0), Assistant.draft

    def fixed(self: Costs, num_tokens: int, seconds: float) -> None:
        self.fixed = 1.0

    def counts(self: Assisting, candidates: Any, *args: Any) -> Counter[str]:
        return Counter({x.state.request_id: draw.randrange(x.most + 1) for x in candidates})

    def checked(self: Assistant, *args: Any) -> Any:
        found = draft(self, *args)
        self.check()
        return found

    monkeypatch.setattr(Costs, "note", fixed)
    monkeypatch.setattr(Account, "note", lambda self, *args: None)
    monkeypatch.setattr(Assisting, "counts", counts)
    monkeypatch.setattr(Assistant, "draft", checked)


def assistant_of(name: str) -> Any:
    """A model of the same tokens: that of the session, one that often agrees with it, or another one."""
    if name == "same":
        return model_of("Llama", torch.float32)
    if name == "close":
        model = model_of("Llama", torch.float32)
        for weight in model.parameters():
            weight.data += 0.1 * weight.data.std() * torch.randn_like(weight)
        return model
    return model_of(name, torch.bfloat16)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("name", "kv", "is_sampled", "share"),
    pairwise(["same", "close", "Gemma2"], ["auto", "int4:g32,recent=24"], [False, True], [False, True]),
    ids=str,
)
def test_no_bit_differs(name: str, kv: str, is_sampled: bool, share: bool) -> None:
    model, assistant = model_of("Llama", torch.float32), assistant_of(name)
    for seed in range(SESSIONS):
        draw = random.Random(seed + len(name + kv))
        requests = copying_requests(6, draw.randrange(1000))
        how: dict[str, Any] = {
            "page_size": draw.choice([8, 16]),
            "max_batch_tokens": draw.choice([24, 64, 300]),
            "num_blocks": draw.choice([24, 40]),
            "scheduler_type": draw.choice(["fifo", "prefill_first"]),
        }
        continuous_batching(model, kv, share=share)
        expected, _ = answers(model, requests, seed, is_sampled, **how)
        continuous_batching(model, kv, share=share, drafts=assistant)
        found, report = answers(model, requests, seed + 1, is_sampled, **how)
        assert found == expected
        assert report.tokens_accepted <= report.tokens_drafted and report.assistant["active"] == 0
        assert report.assistant["tokens_computed"] and report.assistant["max_pages"] == how["num_blocks"]
        if name != "Gemma2":
            assert 0 < report.tokens_assisted <= report.tokens_accepted


def ask(
    model: Any, requests: Any, drafts: Any, own: Any = None, file: Path | None = None, **options: Any
) -> tuple[Any, Any, Any]:
    """New tokens of greedy requests, the report, and the events of a session, also written to ``file``."""
    continuous_batching(model, drafts=drafts, **options.pop("how", {}))
    begin = None if own is None else choose_by_request
    with session(
        model, {"max_new_tokens": 40, **options.pop("config", {})}, begin=begin, **options
    ) as running:
        events = running.manager.record()
        for i, request in enumerate(requests):
            running.manager.add_request(request, **({} if own is None else {CHOICE: own(i)}))
        running.run()
        outputs = [x.generated_tokens for _, x in sorted(running.outputs.items())]
        if file is not None:
            running.manager.save_events(file)
        return outputs, running.manager.report(), [*events]


def test_a_draft_is_drawn_by_the_random_number_of_its_request() -> None:
    """A model that drafts for itself, or for its copy, is right about tokens that are drawn at random."""
    model = model_of("Llama", torch.float32)
    before = model.config._attn_implementation
    for assistant in (model, deepcopy(model)):
        _, report, _ = ask(model, random_requests(3, 1), assistant, own=lambda i: Choice(1.0, seed=i))
        assert report.tokens_accepted > 0.9 * report.tokens_drafted > 0
        assert report.tokens_assisted > 0.9 * report.tokens_accepted
    assert model.config._attn_implementation == assistant.config._attn_implementation == before


def test_after_a_wrong_token_an_assistant_reads_the_one_that_was_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each fifth token of a text is drafted wrong; all before it in a draft are right, now and later."""
    model, drafts, draft = (
        model_of("Llama", torch.float32),
        list[tuple[str, int, list[int]]](),
        Assistant.draft,
    )
    right = assistant_module._chosen

    def wrong(state: Any, logits: Any, position: int) -> int:
        return (right(state, logits, position) + (position % 5 == 0)) % 99

    def noted(self: Assistant, states: Any, *args: Any) -> Any:
        found = draft(self, states, *args)
        ends = {x.request_id: len(x.initial_tokens) + len(x.generated_tokens) for x in states}
        drafts.extend((name, ends[name], [*own]) for name, own in found.items())
        return found

    monkeypatch.setattr(assistant_module, "_chosen", wrong)
    monkeypatch.setattr(Assistant, "draft", noted)
    requests = random_requests(4, 7)
    found, report, _ = ask(model, requests, deepcopy(model), page_size=8)
    texts = [[*x, *y] for x, y in zip(requests, found, strict=True)]
    for name, end, own in drafts:
        count = min(-end % 5, len(own))
        assert own[:count] == texts[int(name[4:])][end : end + count]
    assert len(drafts) > 20 and report.tokens_accepted < report.tokens_drafted


def test_a_text_of_several_requests_is_read_once() -> None:
    model, prompt = model_of("Llama", torch.float32), [*range(3, 99)]
    expected, _, _ = ask(model, [prompt] * 4, None)
    found, report, _ = ask(model, [prompt] * 4, deepcopy(model))
    assert found == expected and len(found) == 4
    _, alone, _ = ask(model, [prompt] * 4, deepcopy(model), how={"share": False})
    assert report.assistant["tokens_computed"] < alone.assistant["tokens_computed"] - 2 * 80


def test_nothing_is_kept_of_a_request_that_is_cancelled() -> None:
    model = model_of("Llama", torch.float32)
    requests = random_requests(4, 3)
    expected, _, _ = ask(model, requests, None)
    continuous_batching(model, drafts=deepcopy(model), share=False)
    with session(model, {"max_new_tokens": 40}) as running:
        names = [running.manager.add_request(x) for x in requests]
        for _ in range(4):
            running.step()
        held = running.manager.report().assistant["active"]
        running.manager.cancel_request(names[1])
        running.processor.scheduler.set_request_cancellation(names[1])
        running.step()
        assert 0 < running.manager.report().assistant["active"] < held + 8
        running.run()
        found = [running.outputs[x].generated_tokens for x in names if x != names[1]]
        report = running.manager.report().assistant
    assert found == expected[:1] + expected[2:]
    assert report["active"] == report["evictable"] == 0


def test_a_request_without_pages_of_the_assistant_has_no_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    model, requests = model_of("Llama", torch.float32), random_requests(6, 5)
    expected, _, _ = ask(model, requests, None)
    made = LentModel.assistant
    monkeypatch.setattr(LentModel, "assistant", lambda self, _, *args: made(self, 5, *args))
    found, report, _ = ask(model, requests, deepcopy(model), page_size=8)
    assert found == expected
    assert report.assistant["max_pages"] == report.assistant["num_pages"] == 5


def test_what_lookup_finds_needs_no_assistant_unless_that_is_more_often_right() -> None:
    """An answer of one token again and again, which the assistant does not expect."""
    model = model_of("Llama", torch.float32)
    biased = lambda _: Choice(processors=[TokenBias({7: 1e6})])  # noqa: E731
    found, report, events = ask(model, [[*range(3, 27)]], deepcopy(model), own=biased)
    assert found == [[7] * 40] and report.tokens_accepted > 20
    assert sum(more["accepted"] for *_, more in events if more.get("by") == "assistant") == 0


def test_drafts_are_recorded(tmp_path: Path) -> None:
    model, file = model_of("Llama", torch.float32), tmp_path / "events.jsonl"
    _, report, events = ask(model, copying_requests(5, 1), deepcopy(model), file=file)
    names = {number: more["name"] for _, kind, number, _, more in events if kind == "name"}
    drafts = [(number, more) for _, kind, number, _, more in events if kind == "draft"]
    assert {*names} == {number for number, _ in drafts}
    assert sum(more["drafted"] for _, more in drafts) == report.tokens_drafted
    assert sum(more["accepted"] for _, more in drafts) == report.tokens_accepted
    assert [x["drafted"] for x in read_lines(file) if x.get("kind") == "draft"] == [
        more["drafted"] for _, more in drafts
    ]
    own = sum(more["accepted"] for _, more in drafts if more["by"] == "assistant")
    assert own == report.tokens_assisted > 0


def test_an_assistant_has_few_positions_and_is_not_asked_for_longer_texts() -> None:
    model, config = model_of("Llama", torch.float32), deepcopy(model_of("Llama", torch.float32).config)
    config.max_position_embeddings = 60
    assistant = AutoModelForCausalLM.from_config(config)
    _, report, _ = ask(model, [[*range(3, 63)]], assistant)
    assert report.assistant["tokens_computed"] == 0


def test_an_assistant_that_fails_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of("Llama", torch.float32)
    assistant, before = deepcopy(model), model.config._attn_implementation
    requests, forwards = random_requests(4, 1), list[int]()
    expected, *_ = ask(model, requests, None)

    def fail_later(*_: Any) -> None:
        forwards.append(1)
        if len(forwards) == 25:
            raise RuntimeError("no room")

    assistant.model.layers[1].register_forward_pre_hook(fail_later)
    found, report, _ = ask(model, requests, assistant)
    assert found == expected and len(forwards) == 25
    assert report.tokens_assisted > 0 == report.assistant["active"]
    assert "the assistant failed, and drafts no more in this session" in caplog.text
    assert assistant.config._attn_implementation == before


def test_an_assistant_is_as_before_after_a_session() -> None:
    model, assistant, other = (model_of("Llama", torch.float32) for _ in range(3))
    before = assistant.config._attn_implementation
    continuous_batching(model, drafts=assistant, pack=True)
    manager = model.init_continuous_batching()
    assert report_layers(assistant).packed and not report_layers(assistant).batch_invariant
    continuous_batching(other, drafts=assistant)
    with pytest.raises(StateError, match=r"^drafts must be a model that no session holds"):
        other.init_continuous_batching()
    manager.start()
    manager.stop()
    assert assistant.config._attn_implementation == before and not report_layers(assistant).packed
    continuous_batching(model, None)
    other.init_continuous_batching().release()
    assert assistant.config._attn_implementation == before


def test_wrong_assistants_are_refused_and_nothing_is_changed() -> None:
    model = model_of("Llama", torch.float32)
    config = deepcopy(model.config)
    config.vocab_size += 1
    larger = AutoModelForCausalLM.from_config(config)
    with pytest.raises(
        ArgumentError, match=r"^drafts must be a model with the tokens of Llama.* has 99 rows.* 100"
    ):
        continuous_batching(model, drafts=larger)
    with pytest.raises(UnsupportedError, match=r"^drafts must be a model on a CPU, got .* on meta"):
        continuous_batching(model, drafts=deepcopy(model).to("meta"))
    with pytest.raises(
        ArgumentError, match=r"^drafts must be 'lookup', a PreTrainedModel or None, got Linear"
    ):
        continuous_batching(model, drafts=torch.nn.Linear(1, 1))  # type: ignore[arg-type]
    assert "init_continuous_batching" not in vars(model)


@pytest.mark.skipif(CACHE_ARGUMENT != "cache", reason="sessions serve no recurrent states before 5.24")
def test_an_assistant_with_recurrent_states_is_refused() -> None:
    assistant, config = family("Falcon-H1"), deepcopy(model_of("Llama", torch.float32).config)
    config.vocab_size = assistant.config.vocab_size
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(
        UnsupportedError, match=r"^drafts must be a model that may draft: .* recurrent states"
    ):
        continuous_batching(model, drafts=assistant)
