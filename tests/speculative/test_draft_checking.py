"""Drafters in whole engines against a law that is computed apart; and that the check finds what is wrong."""

import pytest

from jaxinfer import draft_checking
from jaxinfer.drafts import Drafts
from jaxinfer.engine.known_law import KINDS, TinyTarget
from jaxinfer.speculative.check.matrix import Finding

FEATURES = {
    "n-gram": "n-gram speculation",
    "suffix": "suffix speculation",
    "draft model": "draft model speculation",
}


@pytest.fixture(scope="module")
def target() -> TinyTarget:
    return TinyTarget(0)


def marked(name: str):
    trees = ["draft tree speculation"] if KINDS[name].speculative.trees else []
    feature = FEATURES.get(name, "draft head speculation")
    marks = [pytest.mark.feature("verify-spec", feature, *trees)]
    return pytest.param(name, marks=marks if name == "n-gram" else [*marks, pytest.mark.slow])


@pytest.mark.parametrize("name", [marked(name) for name in KINDS])
def test_every_token_is_the_one_of_its_number(target: TinyTarget, name: str) -> None:
    for setting, (tokens, wrong) in draft_checking._run(target, KINDS[name], 3).items():
        assert tokens == 3 * draft_checking.LENGTH
        assert wrong == 0, setting


@pytest.mark.feature("verify-spec", "n-gram speculation")
def test_a_draft_that_is_believed_is_found(target: TinyTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    matching = Drafts.matching

    def believing(drafts: Drafts, samples):
        """A first draft counts whatever the target says."""
        return matching(drafts, [*drafts.tokens[:1], *samples[1:]])

    monkeypatch.setattr(Drafts, "matching", believing)
    monkeypatch.setattr("jaxinfer.engine.commit.is_next", lambda row: row.samples)
    counts = draft_checking._run(target, KINDS["n-gram"], 3)
    assert sum(wrong for _, wrong in counts.values()) > 0


def test_findings_in_words() -> None:
    assert Finding("engine, eagle", "tree", "top-k", tokens=288, wrong=0).holds
    bad = Finding("engine, eagle", "tree", "top-k", tokens=288, wrong=3)
    assert (bad.measure, bad.holds) == ("3 of 288", False)
