"""``jaxinfer verify-spec``: table, picture and exit code, and the comparison of two engines."""

from collections.abc import Sequence

import numpy as np
import pytest
from typer.testing import CliRunner

from jaxinfer.config_speculative import SpeculativeConfig
from jaxinfer.speculative.check.matrix import Finding
from serve import verify_spec
from serve.cli import app
from serve.verify_spec_model import Comparison, compare
from serve.verify_spec_model import run as ask
from tests.support import engines
from tests.support.engines import Job, ids
from tests.support.tokenizers import ByteTokenizer

pytestmark = pytest.mark.feature("verify-spec", "command line")

GOOD = Finding("matching, chain", "random", "top-k", difference=1e-16)
SAMPLED = Finding("matching, chain", "random", "top-k", p_value=0.4)
WRONG = Finding("rejection, tree", "likeliest", "penalties", difference=0.03)


@pytest.mark.parametrize(("findings", "code"), [([GOOD, SAMPLED], 0), ([GOOD, WRONG, SAMPLED], 1)])
def test_the_exit_code_says_whether_a_law_differs(monkeypatch, tmp_path, findings, code):
    monkeypatch.setattr(verify_spec, "exact_checks", lambda seed: [lambda f=f: f for f in findings])
    monkeypatch.setattr(verify_spec, "sampled_checks", lambda samples, seed: [])
    monkeypatch.setattr(verify_spec, "drafter_checks", lambda seed: [])
    monkeypatch.setattr(verify_spec, "use_compilation_cache", lambda _: None)
    done = CliRunner().invoke(app, ["verify-spec", "--plot", str(tmp_path / "laws.png")])
    assert done.exit_code == code
    assert ("WRONG" in done.stdout) == (code == 1)
    assert "matching, chain" in done.stdout
    assert f"{len(findings)} checks, {code} wrong" in done.stdout
    assert (tmp_path / "laws.png").read_bytes().startswith(b"\x89PNG")


def test_configuration_values_need_a_model():
    done = CliRunner().invoke(app, ["verify-spec", "--cache.num-blocks", "8"])
    assert isinstance(done.exception, ValueError)
    assert "give --config" in str(done.exception)


def outputs(speculative: SpeculativeConfig, first_seed: int, likes: dict[int, float]):
    config = engines.config(speculative=speculative)
    engine = engines.scripted(engines.static_script(likes), config, tokenizer=ByteTokenizer())

    def generate(prompts: Sequence, params: Sequence):
        return engines.run(engine, [Job(p, s) for p, s in zip(prompts, params)], check=False)

    return ask(generate, 60, first_seed, [ids([65, 66, 65, 66]), ids([70])])


def test_two_engines_agree_and_another_law_is_found():
    likes = {65: 3.0, 66: 2.5, 67: 2.0}
    ngram = SpeculativeConfig(drafter="ngram", max_drafts=5, max_step_drafts=12, ngram_shortest=1)
    fast, plain = outputs(ngram, 0, likes), outputs(SpeculativeConfig(), 60, likes)
    results = compare(fast, plain, "ngram")
    assert all(result.holds for result in results), results
    assert all(result.differing == 0 for result in results)
    assert results[-1].p_value is not None
    other = outputs(SpeculativeConfig(), 120, {65: 1.0, 66: 2.5, 67: 2.0})
    results = compare(fast, other, "ngram")
    assert not any(result.holds for result in results if result.setting in ("greedy", "temperature"))
    assert np.isfinite([result.p_value for result in results if result.p_value is not None]).all()


def test_few_different_tokens_are_rounding():
    assert Comparison("", "", "", differing=1, sequences=5).holds
    assert not Comparison("", "", "", differing=2, sequences=5).holds
