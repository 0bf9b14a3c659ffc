"""No model family of transformers differs silently: a sample here, and every family in a sweep.

docs/models.md (family_table.py) has the results of the sweep with the oldest and the newest supported
transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedConfig

from tests.transformers import family_table, sweep
from tests.transformers.family_table import all_recorded, recorded
from tests.transformers.sweep import KINDS, families, runs_under_sdpa, sweep_family, verdict_of
from tests.transformers.tiny_models import DEVICE
from torch_fattn.integrations.transformers import masks, support
from torch_fattn.runtime import versions

# The cases in which families have gone wrong; `make test` has no time for all of them on the emulator.
CASES = ["plain", "left"]
NAMES = {
    "causal": "bert bloom codegen deepseek_v3 doge falcon gemma2 gemma3_text gpt2 gpt_neox gpt_oss llama "
    "mamba mistral mpt opt qwen3 roformer trocr xglm",
    "masked": "convbert distilbert modernbert mpnet mvp",
    "seq2seq": "bart bigbird_pegasus t5",
    "base": "canine paligemma vit",
}
SAMPLE = [(kind, name) for kind, names in NAMES.items() for name in names.split()]


RECORDED = recorded(transformers.__version__)
of_the_recorded = pytest.mark.skipif(RECORDED is None, reason="this version of transformers was not swept")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The models are too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("kind", "name"), SAMPLE)
def test_family(kind: str, name: str) -> None:
    found = verdict_of(sweep_family(kind, name, DEVICE, CASES))
    assert found["verdict"] in ("matches", "refuses", "not used")
    if RECORDED:
        assert found == RECORDED["families"][kind][name]


@of_the_recorded
@pytest.mark.parametrize(("kind", "name"), families())
def test_every_family(kind: str, name: str) -> None:
    assert RECORDED
    assert verdict_of(sweep_family(kind, name, DEVICE)) == RECORDED["families"][kind][name]


@pytest.mark.parametrize(("kind", "name"), [("causal", "falcon"), ("masked", "mpnet"), ("base", "canine")])
def test_refused_families_run_under_sdpa(kind: str, name: str) -> None:
    assert all(name in document["under_sdpa"][kind] for document in all_recorded())
    assert runs_under_sdpa(kind, name, DEVICE, CASES)


@of_the_recorded
@pytest.mark.parametrize(("kind", "name"), families())
def test_every_refused_family(kind: str, name: str) -> None:
    assert RECORDED
    if RECORDED["families"][kind][name]["verdict"] == "refuses":
        assert runs_under_sdpa(kind, name, DEVICE) == (name in RECORDED["under_sdpa"][kind])


@pytest.mark.parametrize("document", all_recorded(), ids=lambda document: document["transformers"])
def test_no_family_differs(document: dict[str, Any]) -> None:
    for kind, verdicts in document["families"].items():
        for name, found in verdicts.items():
            assert found["verdict"] in ("matches", "refuses", "not used", "not built"), (kind, name, found)


def test_the_oldest_and_the_newest_transformers_were_swept() -> None:
    oldest, newest = (versions.minor(document["transformers"]) for document in all_recorded())
    assert (oldest, newest) == versions.TRANSFORMERS
    if RECORDED:
        assert {(kind, name) for kind in KINDS for name in RECORDED["families"][kind]} == set(families())


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_control_lost_padding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "_padding_or_none", lambda *_, **_options: None)
    assert sweep_family("causal", name, "cpu", ["left"])["left"].verdict == "differs"


@pytest.mark.parametrize(("name", "case"), [("bloom", "plain"), ("mpt", "single"), ("roformer", "left")])
def test_control_unlisted_classes(name: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check of a class's declarations, its own attention would misread the mask."""

    def accept(config: PreTrainedConfig) -> support.MaskForm:
        return support.MaskForm.BOOL

    monkeypatch.setattr(masks, "mask_form", accept)
    assert sweep_family("causal", name, "cpu", [case])[case].verdict in ("differs", "fails")


def test_control_attention_that_ignores_masks_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep runs every family without its masks once, and calls it blind if that goes unnoticed."""
    monkeypatch.setattr(sweep, "VISIBLE", 1e9)
    assert sweep_family("causal", "llama", "cpu", ["single"])["single"].verdict == "differs"


def test_the_table_is_as_the_sweep_writes_it() -> None:
    page = family_table.PAGE.read_text()
    assert page.endswith(family_table.text_of(family_table.read(page)))
