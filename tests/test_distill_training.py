"""Tests training on stored rows: its loss, compiled passes, averages, memory, and how it is stopped."""

from __future__ import annotations

import copy
import errno
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.test_distill_parts import sample, stored_pool

from outrider.export.check.acceptance import Rounds
from outrider.export.distill.target import load_for_torch
from outrider.export.distill.trainer import (
    acceptance,
    losses,
    rollout,
)
from outrider.export.distill.trainer.distill import Trainer, distill
from outrider.export.distill.trainer.files import load_tensors, save_tensors
from outrider.export.distill.trainer.optim import (
    DistillPlan,
    MatrixOptimizer,
    Rates,
    moving_average,
)
from outrider.export.distill.trainer.pool import Pool
from outrider.export.progress import Interruption
from outrider.export.source.model_source import read_source

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def model(tiny_source: Callable[[str], Path]) -> Any:
    """A tiny Llama, ready for torch."""
    return load_for_torch(read_source(tiny_source("llama")), "float32", "cpu")


class Gradients(MatrixOptimizer):
    """Keeps the gradients of the last step, and changes no weight."""

    def step(self, scale: float) -> None:
        found = [parameter.grad for parameter in self._parameters]
        self.last = torch.cat([gradient.flatten() for gradient in found if gradient is not None])


def gradient(model: Any, pools: Sequence[Pool], **choices: Any) -> Any:
    """The gradient of the first step on the pools, as one vector."""
    student = copy.deepcopy(model)
    optimizer = Gradients(student, Rates())
    plan = DistillPlan(
        seed=1, steps=1, is_compiled=False, skip_positions=0, match_k=8, temperatures=(0.5, 1.0), **choices
    )
    Trainer(student, optimizer, moving_average(student, 0.9), pools, plan, 300, print).train(0.5)
    return optimizer.last


def test_several_pools_are_one_whose_rows_may_differ_in_length(model: Any, tmp_path: Path) -> None:
    """A step on two pools trains as on one pool of all their rows; rows of other lengths need nothing else."""
    first, second = sample(model, top_k=16, length=24), sample(model, top_k=16, length=24, seed=4)
    one, two = stored_pool(tmp_path / "one", [first]), stored_pool(tmp_path / "two", [second])
    together = gradient(model, [stored_pool(tmp_path / "both", [first, second])], rows_per_step=4)
    apart = gradient(model, [one, two], pool_rows=(2, 2))
    alone = gradient(model, [one], rows_per_step=2)
    longer = stored_pool(tmp_path / "longer", [sample(model, top_k=16, length=40)])
    mixed = gradient(model, [one, longer], pool_rows=(2, 2))
    assert (together - apart).norm() < 0.02 * together.norm()  # bfloat16 rounds
    assert all((each - alone).norm() > 0.2 * each.norm() for each in (together, mixed))
    with pytest.raises(ValueError, match="2 pools, and rows per step for 1"):
        distill(model, [one, two], DistillPlan(seed=1, steps=1), tmp_path / "run.pt")


def small_pass(model: Any, rows: Any) -> tuple[Any, Any]:
    """A loss, and what is reported of it."""
    found = torch.tanh(model(rows))
    return found.square().sum(), found.detach().sum()


def backward(model: Any, rows: Any, *, is_compiled: bool) -> tuple[Any, Any, list[str]]:
    """Gradients after two passes, what was reported of the second, and what was said."""
    said: list[str] = []
    run = losses.BackwardPass(small_pass, is_compiled=is_compiled, tell=said.append)
    run(model, rows)
    facts = run(model, rows)
    assert run.is_compiled == (is_compiled and not said)
    gradient = model.weight.grad.clone()
    model.zero_grad(set_to_none=True)
    return gradient, facts, said


def test_without_a_compiler_training_goes_on_and_says_so() -> None:
    """Without a C++ compiler the reason is reported once, and gradients and figures are those of plain PyTorch."""
    from torch._functorch import config as caches
    from torch._inductor import config

    linear, rows = torch.nn.Linear(8, 8), torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    gradient, facts, said = backward(linear, rows, is_compiled=False)
    no_compiler = {"cpp.cxx": (None, "/nonexistent"), "fx_graph_cache": False}
    with config.patch(no_compiler), caches.patch(enable_autograd_cache=False):
        *found, (words,) = backward(linear, rows, is_compiled=True)
    assert torch.equal(found[0], gradient) and torch.equal(found[1], facts) and said == []
    assert "torch.compile does not work here" in words and "/nonexistent" in words


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_compiled_passes_are_the_plain_ones() -> None:
    """Where there is a compiler nothing is said, and gradients and facts are the same up to rounding."""
    linear, rows = torch.nn.Linear(8, 8), torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    plain, compiled = (backward(linear, rows, is_compiled=which) for which in (False, True))
    assert all(torch.allclose(compiled[part], plain[part], rtol=1e-4) for part in (0, 1)) and compiled[2] == []


def test_an_error_of_our_own_is_not_taken_for_a_failed_compilation(model: Any) -> None:
    """What fails without compilation too is raised."""

    def broken(student: Any, ids: Any) -> tuple[Any, Any]:
        raise ValueError("ours")

    with pytest.raises(ValueError, match="ours"):
        losses.BackwardPass(broken, is_compiled=True, tell=lambda text: None)(model, None)


def test_every_family_has_its_tables_trained_by_adamw(tiny_source: Callable[[str], Path]) -> None:
    """Embeddings, positions and output rows are not matrices to be orthogonalized, whatever a family calls them."""
    for family in ("gpt_neo", "gpt_neox", "bloom"):
        model = load_for_torch(read_source(tiny_source(family)), "float32", "cpu")
        optimizer = MatrixOptimizer(model, Rates.like_adamw(1e-3))
        state = optimizer.state_dict()
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        ids = torch.arange(12)[None]
        torch.autograd.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step(1.0)
        tables = [name for name in before if any(part in name for part in ("embed", "wte", "wpe", "lm_head"))]
        assert tables, family
        assert len(state["muon"]["param_groups"][0]["params"]) == sum(  # type: ignore[index]
            value.ndim == 2 and name not in tables for name, value in before.items()
        )
        assert all(not torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_the_average_follows_the_weights_over_a_growing_horizon() -> None:
    """It begins at the first weights that it sees; then it moves as far as its horizon says, and changes no weight."""
    model = torch.nn.Linear(2, 2)
    average = moving_average(model, decay=0.5)
    with torch.no_grad():
        for value, expected in ((1.0, 1.0), (3.0, 1.0 + 2.0 * (1 - 2 / 12)), (3.0, 3.0 - 2.0 * 2 / 12 * 3 / 13)):
            for parameter in model.parameters():
                parameter.fill_(value)
            average.update_parameters(model)
            assert all(torch.allclose(own, torch.tensor(expected)) for own in average.module.parameters())
            assert all(bool((own == value).all()) for own in model.parameters())


def test_memory_bounds_set_the_rows(model: Any) -> None:
    """Small models get the most rows; a large vocabulary, or a deep cache, fewer; a step is cut into equal passes."""
    large = type(model.config)(
        vocab_size=151_936, hidden_size=3584, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4
    )
    bound = (1 << 30) // (2 * 28 * 4 * 128 * 2 * 256)
    assert [rollout.rollout_rows(each, 256, 2) for each in (model.config, large)] == [256, bound]
    sizes = (256, 4096), (256, 151_936), (100_000, 151_936)
    assert [losses.training_rows(*each, 16) for each in sizes] == [16, 2, 1]


def test_a_change_is_judged_prompt_by_prompt() -> None:
    """The rise is the difference of the rates; its error is small where all prompts rise alike, large where not."""

    def scores(accepted: Sequence[int]) -> list[acceptance.Score]:
        return [acceptance.Score(Rounds(10, hits, 5), hits, 10) for hits in accepted]

    before, even, odd = scores([1, 5, 9]), scores([2, 6, 10]), scores([4, 5, 9])
    alike, mixed, both = (acceptance.compare([before] * len(to), to) for to in ([even], [odd], [even, odd]))
    assert [each.rise for each in (alike, mixed, both)] == pytest.approx([0.1] * 3)
    assert alike.error == pytest.approx(0.0, abs=1e-12) and 0.0 < both.error < mixed.error > 0.05


def test_a_perfect_draft_matches_every_pick(model: Any) -> None:
    """On the target's own text, to its stop token, the target itself is right everywhere; seeds follow the prompts."""
    prompts = [list(range(5, 9)), list(range(20, 29)), [7]]
    for temperature in (0.0, 0.9):
        together = acceptance.continue_prompts(model, prompts, temperature, 12, num_ids=300)
        apart = acceptance.continue_prompts(model, prompts, temperature, 12, num_ids=300, rows=1)
        assert together is not None and together == apart
        assert [passage.seed for passage in together] == [0, 1, 2]
        stop_id = together[1].ids[12]
        stopped = acceptance.continue_prompts(model, prompts, temperature, 12, num_ids=300, stop_ids=[stop_id])
        assert stopped is not None and stopped[1].ids[-1] == stop_id and len(stopped[1].ids) <= 13
        for passage in (*together, *stopped):
            found, _ = acceptance.score(model, passage, temperature, num_ids=300)
            assert found.hits == found.positions == len(passage.ids) - passage.start


def test_state_files_appear_whole_or_not_at_all(tmp_path: Path) -> None:
    """A disk that takes nothing is an OSError with its number, the old file stays, and no half file lies about."""
    if not Path("/dev/full").exists():
        pytest.skip("this platform has no /dev/full")
    path = tmp_path / "state.pt"
    save_tensors({"a": torch.arange(3)}, path)
    (tmp_path / ".state.pt.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, check=lambda error: error.errno == errno.ENOSPC):
        save_tensors({"a": torch.zeros(100_000)}, path)
    assert load_tensors(path)["a"].tolist() == [0, 1, 2] and list(tmp_path.iterdir()) == [path]


def test_the_first_signal_asks_and_the_second_ends() -> None:
    """SIGTERM is remembered and reported once; a second one raises; afterwards the handlers are restored."""
    before = signal.getsignal(signal.SIGTERM)
    said: list[str] = []
    with Interruption(said.append) as stop:
        assert not stop()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop() and stop.signal == signal.SIGTERM and len(said) == 1
        with pytest.raises(SystemExit, match=f"^{128 + signal.SIGTERM}$"):
            os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
