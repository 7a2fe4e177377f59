"""Runner of a target on vectors, and outcomes."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from torch import Tensor

from kvloom.conform.causes import Cause, decisive, explain
from kvloom.conform.comparing import Difference, changed_argument, first_difference
from kvloom.conform.describe import Call, Results, Vector
from kvloom.conform.judging import named
from kvloom.conform.operators import OPERATORS
from kvloom.conform.outcomes import CallRefused, NoAnswer, Target, Unsupported

_EXPLAINED: Final = 4
_TRIED: Final = 12
"""Number of failures, or of explained ones, after which only the mistakes found so far are tried."""


@dataclass(slots=True, eq=False)
class Outcome:
    """Outcome of one vector: passed, failed or skipped, and why.

    Attributes:
        vector: The vector.
        status: ``"passed"``, ``"failed"`` or ``"skipped"``.
        message: One sentence, empty if it passed.
        difference: First difference of a failure.
        causes: Known mistakes that give the same results, here and in most of the other failures.
        is_answered: Whether the target returned at all.
    """

    vector: Vector
    status: str
    message: str = ""
    difference: Difference | None = None
    causes: list[Cause] = field(default_factory=list)
    is_answered: bool = True


@dataclass(slots=True, eq=False)
class Report:
    """Outcomes of all vectors of a run.

    Attributes:
        dialect: A key of ``OPERATORS``.
        target: Name of the target, as given.
        outcomes: Outcome of each vector.
        cause: Mistake that explains most failures, if there is one.
        explained: Number of failures that it explains.
        nearest: Without a cause, the mistake that explains most failures, though no more than half.
        nearest_explained: Number of failures that the nearest explains.
    """

    dialect: str
    target: str
    outcomes: list[Outcome]
    cause: Cause | None = None
    explained: int = 0
    nearest: Cause | None = None
    nearest_explained: int = 0

    def count(self, status: str) -> int:
        """Number of outcomes with this status."""
        return sum(outcome.status == status for outcome in self.outcomes)

    @property
    def failures(self) -> list[Outcome]:
        """Failed outcomes: those without an answer, then with an element to show; simple calls first."""
        failed = [outcome for outcome in self.outcomes if outcome.status == "failed"]
        return sorted(
            failed, key=lambda x: (x.is_answered, x.difference is None, _num_elements(x.vector.call))
        )

    @property
    def reasons(self) -> dict[str, int]:
        """Number of skipped vectors by their reason, the most frequent first."""
        return dict(Counter(x.message for x in self.outcomes if x.status == "skipped").most_common())

    @property
    def passed(self) -> bool:
        """Whether nothing failed, and something passed: a legal call, if there was one."""
        legal = [outcome for outcome in self.outcomes if outcome.vector.expected is not None]
        return not self.failures and any(o.status == "passed" for o in legal or self.outcomes)


def run(
    target: Target, vectors: Iterable[Vector], name: str = "", tick: Callable[[Outcome], object] | None = None
) -> Report:
    """Run ``target`` on every vector; ``tick`` is called with each outcome."""
    outcomes: list[Outcome] = []
    known: list[frozenset[str]] = []
    dialect = ""
    for vector in vectors:
        dialect = vector.dialect
        is_enough = sum(map(bool, known)) >= _EXPLAINED or len(known) >= _TRIED
        outcome = run_one(target, vector, known if is_enough else None)
        outcomes.append(outcome)
        if outcome.difference is not None:
            known.append(frozenset(cause.name for cause in outcome.causes))
        if tick is not None:
            tick(outcome)
    report = Report(dialect, name, outcomes)
    _name_cause(report)
    return report


def run_one(target: Target, vector: Vector, known: list[frozenset[str]] | None = None) -> Outcome:
    """Run ``target`` on one vector; if it fails, look for a cause among all mistakes, or those ``known``."""
    operator = OPERATORS[vector.dialect]
    call = {name: _fresh(x) for name, x in vector.call.items()}
    refusal = None
    got: Results = {}
    try:
        got = target(operator, vector, call)
    except Unsupported as error:
        return Outcome(vector, "skipped", str(error))
    except NoAnswer as error:
        return Outcome(vector, "failed", str(error), is_answered=False)
    except CallRefused as error:
        refusal = str(error)
    after = {name: x for name, x in named(call).items() if isinstance(x, Tensor)}
    changed = changed_argument(operator, vector, after)
    if vector.expected is None:
        if changed is not None:
            return Outcome(vector, "failed", f"a call that must be refused: {changed.message}", changed)
        if refusal is None:
            text = f"a call that must be refused was not: {vector.about}"
            return Outcome(vector, "failed", text)
        return Outcome(vector, "passed")
    if refusal is not None:
        return Outcome(vector, "failed", f"a legal call was refused: {refusal}")
    difference = first_difference(operator, vector, got) or changed
    if difference is None:
        return Outcome(vector, "passed")
    names = None if known is None else frozenset().union(*known)
    return Outcome(vector, "failed", difference.message, difference, explain(operator, vector, got, names))


def _name_cause(report: Report) -> None:
    """Set the cause of the run; failures keep no other, since one failure fits many mistakes."""
    differing = [outcome for outcome in report.failures if outcome.difference is not None]
    legal = [outcome for outcome in differing if outcome.vector.expected is not None]
    passed = [each.vector for each in report.outcomes if each.status == "passed" and each.vector.expected]
    names = decisive([outcome.causes for outcome in legal], passed)
    counts = Counter(cause for outcome in legal for cause in {*outcome.causes})
    if counts and not names:
        report.nearest, report.nearest_explained = min(counts.items(), key=lambda x: (-x[1], x[0].name))
    for outcome in legal:
        outcome.causes = [cause for cause in outcome.causes if cause.name in names]
    explained = [outcome.causes[0] for outcome in legal if outcome.causes]
    if explained:
        report.cause, report.explained = explained[0], len(explained)


def _num_elements(call: Call) -> int:
    """Elements of all tensors of a call: the fewer, the simpler it is to look at."""
    return sum(x.numel() for x in named(call).values() if isinstance(x, Tensor))


def _fresh(x: object) -> object:
    """Copy with the same strides, in new memory."""
    if isinstance(x, list):
        return [_fresh(each) for each in x]
    if not isinstance(x, Tensor):
        return x
    memory = x.untyped_storage().nbytes() // x.itemsize
    return x.as_strided((memory,), (1,), 0).clone().as_strided(x.shape, x.stride(), x.storage_offset())
