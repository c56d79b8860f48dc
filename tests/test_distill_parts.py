"""The parts of distillation: prompts, orders, the target's text, losses, compilation, interruption."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tools.tiny_sources import make_tiny_tokenizer

from outrider.export.distill.prompts import split_prompts
from outrider.export.distill.trainer.files import save_json, save_tensors
from outrider.export.source.family_facts import FAMILIES
from outrider.export.source.model_source import read_source
from outrider.export.source.prompts import encode_prompts, read_prompts
from outrider.models.errors import ExportError, TokenizerError
from outrider.models.text.tokenizer import Tokenizer
from outrider.models.text.vocabulary_map import VocabularyMap

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from outrider.export.distill.draft_rows import read_as_draft  # noqa: E402
from outrider.export.distill.target import load_for_torch  # noqa: E402
from outrider.export.distill.trainer import (  # noqa: E402
    acceptance,
    losses,
    pool,
    rollout,
)
from outrider.export.distill.trainer.pool import Pool  # noqa: E402


def sample(
    model: Any, stop_ids: Sequence[int] = (), top_k: int = 300, length: int = 24, seed: int = 3
) -> rollout.Rollout:
    """Two rows of 24 tokens after prompts of 4 and 9."""
    plan = rollout.PoolPlan(
        0, row_length=length, temperatures=(0.5, 1.0), top_k=top_k, num_ids=300, stop_ids=tuple(stop_ids)
    )
    prompts = [list(range(5, 9)), list(range(20, 29))]
    generator = torch.Generator().manual_seed(seed)
    rows = rollout.sample_rows(model, prompts, torch.tensor([1.0, 1.0]), plan, generator)
    assert rows is not None
    return rows


def stored_pool(folder: Path, rows: Sequence[rollout.Rollout]) -> Pool:
    """A finished pool of the rows, one part each."""
    for number, part in enumerate(rows):
        save_tensors(asdict(part), folder / f"part-{number:05d}.pt")
    made = {"parts": len(rows), "rows": sum(len(part) for part in rows), "is_complete": True}
    save_json(made, folder / "pool.json")
    return Pool(folder)


def test_prompts_are_read_from_every_format(tmp_path: Path) -> None:
    """A JSON list, JSONL with either key or messages, and plain text give the same prompts."""
    texts = ["def f(x):", "Größe"]
    forms = {
        "list.json": json.dumps([texts[0], {"text": texts[1]}]),
        "list.whatever": "\n" + json.dumps(texts),
        "lines.jsonl": '{"prompt": "def f(x):"}\n\n"Größe"\n',
        "lines.data": '{"text": "def f(x):"}\n{"prompt": "Größe"}',
        "plain.txt": "def f(x):\r\n\r\nGröße\n",
    }
    for name, content in forms.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
        assert read_prompts(tmp_path / name) == texts, name
    held = "a line\u2028separator and \x85"  # JSON may hold them as they are
    talk = [{"role": "user", "content": "Hi"}]
    lines = [json.dumps(line, ensure_ascii=False) for line in ({"text": held}, {"messages": talk})]
    (tmp_path / "held.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert read_prompts(tmp_path / "held.jsonl") == [held, talk]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "{}", "holds a dict"),
        ("a.json", "[1]", "entry 1 holds no prompt"),
        ("a.jsonl", '{"text": "x"}\n{"txt": "y"}', "line 2 holds no prompt"),
        ("a.jsonl", '{"text": "x"}\nnonsense', "line 2 is not JSON"),
        ("a.txt", "\n\n", "holds no prompts"),
        ("a.txt", b"\xff\xfe\xff", "cannot be read"),
        ("a.json", b"[" * 100_000, "is not JSON"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    """The message names the file and the place, and says what is expected."""
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ExportError, match=f"(?s){name}.*{message}.*expected a JSON list"):
        read_prompts(tmp_path / name)


def test_messages_go_through_the_chat_template(tmp_path: Path) -> None:
    """A conversation, or with `is_chat` a text, becomes what the model's template makes of it; none is an error."""
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<me>{% endif %}"
    )
    dated = "{{ strftime_now('%d %b %Y') }}"  # whatever day it is
    for chat_template, is_chat, expected in (
        (template, True, ["<user>Hi<me>", "<system>No<me>"]),
        (template, False, ["Hi", "<system>No<me>"]),
        (dated, True, ["01 Jan 2026"] * 2),
    ):
        make_tiny_tokenizer(tmp_path / "with", chat_template=chat_template)
        tokenizer = Tokenizer.from_dir(tmp_path / "with")
        ids = encode_prompts(["Hi", [{"role": "system", "content": "No"}]], tokenizer, is_chat=is_chat)
        assert [tokenizer.decode(one) for one in ids] == expected
    make_tiny_tokenizer(tmp_path / "plain")
    with pytest.raises(TokenizerError, match="no chat template"):
        encode_prompts(["Hi"], Tokenizer.from_dir(tmp_path / "plain"), is_chat=True)


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 5), max_size=6).map(tuple), min_size=40, max_size=120),
    heldout=st.one_of(st.floats(0.01, 0.5), st.lists(st.lists(st.integers(0, 5), max_size=6).map(tuple), min_size=20)),
    seed=st.integers(0, 3),
)
def test_no_prompt_is_in_two_parts(
    prompts: list[tuple[int, ...]], heldout: float | list[tuple[int, ...]], seed: int
) -> None:
    """However many duplicates there are, also after cutting; the order of the file makes no difference."""
    try:
        split = split_prompts(prompts, heldout, seed=seed, max_tokens=4)
    except ExportError as error:
        assert "give more prompts" in str(error)
        return
    parts = split.train, split.validation, split.test
    every = [prompt for part in parts for prompt in part]
    assert len(every) == len(set(every)) and all(len(part) >= 4 for part in parts)
    assert all(0 < len(prompt) <= 4 for prompt in every)
    if isinstance(heldout, float):
        assert set(every) == {prompt[-4:] for prompt in prompts} - {()}
    else:
        ends = {prompt[-4:] for prompt in heldout}
        assert set(split.test) <= ends and not {*split.train, *split.validation} & ends
    assert split_prompts(prompts[::-1], heldout, seed=seed, max_tokens=4).train == split.train


@given(count=st.integers(1, 20), first=st.integers(0, 60), size=st.integers(0, 50), seed=st.integers(0, 9))
def test_an_endless_shuffle_is_the_same_wherever_one_begins(count: int, first: int, size: int, seed: int) -> None:
    """Any piece equals that piece of the whole, and every round has everything once."""
    whole = pool.shuffled(count, seed, 0, first + size)
    assert np.array_equal(pool.shuffled(count, seed, first, size), whole[first:])
    rounds = [whole[start : start + count] for start in range(0, len(whole) - count + 1, count)]
    assert all(sorted(each) == list(range(count)) for each in rounds)


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_changes_nothing_that_is_recorded(family: str, tiny_source: Callable[[str], Path]) -> None:
    """In every family, prompts of different lengths in one batch: rows, normalizers and logits as of each row alone."""
    source = read_source(tiny_source(family))
    model = load_for_torch(source, "float32", "cpu")
    size = source.tokenizer.size
    prompts = [list(range(5, 5 + length)) for length in (3, 34, 17)]
    plan = rollout.PoolPlan(0, row_length=44, temperatures=(0.5, 1.0), top_k=8, num_ids=size)
    rows = rollout.sample_rows(model, prompts, torch.tensor([0.5, 0.8, 1.0]), plan, torch.Generator().manual_seed(1))
    assert rows is not None
    assert rows.starts.tolist() == [3, 34, 17] and rows.ends.tolist() == [13, 44, 27]
    assert int(rows.top_ids.max()) < size <= 320
    for row, (prompt, end) in enumerate(zip(prompts, rows.ends.tolist(), strict=True)):
        ids = rows.ids[row, :end].long()
        assert ids[: len(prompt)].tolist() == prompt
        with torch.inference_mode():
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1, :size]
        stored = rows.top_logits[row, : end - 1].float()
        assert torch.allclose(logits.topk(8).values, stored, atol=1e-5, rtol=2**-10)  # fp16
        norms = torch.stack([torch.logsumexp(logits / temperature, -1) for temperature in (0.5, 1.0)], -1)
        assert torch.allclose(norms, rows.log_norms[row, : end - 1], atol=1e-4)


@pytest.fixture(scope="module")
def model(tiny_source: Callable[[str], Path]) -> Any:
    """A tiny Llama, ready for torch."""
    return load_for_torch(read_source(tiny_source("llama")), "float32", "cpu")


def test_a_row_ends_with_its_stop_token(model: Any) -> None:
    """The token that ends a text is the row's last; the other row continues, and both are as without stopping."""
    free = sample(model)
    stop_id = int(free.ids[0, 9])
    stopped = sample(model, stop_ids=[stop_id])
    end = int(stopped.ends[0])
    ids = stopped.ids[0, :end].tolist()
    assert 5 <= end <= 10 and ids.index(stop_id, 4) == end - 1 and ids == free.ids[0, :end].tolist()


def test_only_known_positions_are_trained_on(model: Any) -> None:
    """Position t counts if the target's distribution for t + 1 is known; a prompt's first ones only if it is short."""
    rows = replace(sample(model, top_k=8), ends=torch.tensor([19, 12], dtype=torch.int32))
    masks = losses.Masks.of(rows, skip=6)
    known, written = ([row.nonzero().flatten().tolist() for row in mask] for mask in (masks.known, masks.written))
    assert known == [[*range(3, 18)], [*range(6, 11)]] and written == [[*range(3, 18)], [*range(8, 11)]]


def test_a_model_agrees_with_itself(model: Any) -> None:
    """With the whole vocabulary recorded, KL from a model to itself is nothing and both always pick the same token."""
    rows = sample(model)
    with torch.no_grad():
        logits = model(input_ids=rows.ids.long(), use_cache=False).logits[:, :-1, :300].float()
        kl, match = losses.agreement(
            logits,
            rows.top_ids[:, :-1].long(),
            rows.top_logits[:, :-1],
            rows.log_norms[:, :-1, 1],
            torch.tensor(1.0),
            300,
        )
    known = losses.Masks.of(rows, 0).known
    assert float(kl[known].abs().max()) < 5e-3 and float(match[known].min()) > 0.99  # the logits are kept in fp16


PROSE = "The target writes a token, and the draft reads it as its own. naïve 東京 and a tab "


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Tokenizer]:
    """A target's, and a draft's with longer tokens."""
    root = tmp_path_factory.mktemp("tokenizers")
    make_tiny_tokenizer(root / "target")
    make_tiny_tokenizer(root / "draft", vocab_size=500, special_tokens=("<|stop|>",), text=(PROSE * 9,))
    return Tokenizer.from_dir(root / "target"), Tokenizer.from_dir(root / "draft")


def row_of(tokenizer: Tokenizer, prompt: str, text: str, *, ends: bool) -> rollout.Rollout:
    """One row of a target's ids, with its end token if it ends."""
    before = tokenizer.encode(prompt)
    ids = [*before, *tokenizer.encode(text), *([0] if ends else [])]
    length = len(ids) + 3
    return rollout.Rollout(
        ids=torch.tensor([ids + [7] * 3], dtype=torch.int32),
        starts=torch.tensor([len(before)], dtype=torch.int32),
        ends=torch.tensor([len(ids)], dtype=torch.int32),
        temperatures=torch.tensor([0.8]),
        top_ids=torch.zeros(1, length, 4, dtype=torch.int32),
        top_logits=torch.zeros(1, length, 4, dtype=torch.float16),
        log_norms=torch.zeros(1, length, 2),
    )


def test_a_row_is_read_as_the_tokens_of_another_tokenizer(tokenizers: tuple[Tokenizer, Tokenizer]) -> None:
    """The same text, its end and all; what is trained on begins where the target's text does, and knows one token."""
    target, draft = tokenizers
    row = row_of(target, "The target", " writes naïve 東京", ends=True)
    read = read_as_draft(row, VocabularyMap(target, draft).text, 64)
    start, end = int(read.starts[0]), int(read.ends[0])
    ids = read.ids[0, :end].tolist()
    assert ids == [*draft.encode("The target writes naïve 東京"), draft.eos_token_ids[0]]
    assert draft.decode(ids[:start]) == "The target"
    assert read.top_ids[0, : end - 1, 0].tolist() == ids[1:] and read.ids.shape == (1, 64)
    assert read.temperatures.tolist() == row.temperatures.tolist() and read.log_norms.shape == (1, 64, 2)
    masks = losses.Masks.of(read, 512)
    assert masks.known.tolist() == masks.written.tolist() and int(masks.written.sum()) == end - start


def test_a_row_that_ends_inside_a_word_does_not_teach_its_beginning(tokenizers: tuple[Tokenizer, Tokenizer]) -> None:
    """More of the word would be another token. Rows are cut to their length, prompts too."""
    mapping = VocabularyMap(*tokenizers)
    row = row_of(tokenizers[0], "The target", " writes a tok", ends=False)
    whole, cut, alone = (read_as_draft(row, mapping.text, length) for length in (64, 3, 1))
    assert whole.ids[0, :3].tolist() == cut.ids[0].tolist() and int(cut.ends[0]) == min(3, int(whole.ends[0]))
    assert int(alone.starts[0]) == int(alone.ends[0]) == 1 and not losses.Masks.of(alone, 512).known.any()


def test_reading_a_pool_goes_on_where_it_was_stopped(tokenizers: tuple[Tokenizer, Tokenizer], tmp_path: Path) -> None:
    """Part by part; the parts that are there are not made again."""
    text, place, answers = VocabularyMap(*tokenizers).text, tmp_path / "read", iter((False, True))
    source = stored_pool(tmp_path / "pool", [row_of(tokenizers[0], "The target", " writes a token", ends=True)] * 3)

    def read(part: rollout.Rollout) -> rollout.Rollout:
        return read_as_draft(part, text, 16)

    assert not pool.rewrite_pool(source, read, place, stop=lambda: next(answers))
    (first,) = place.glob("part-*")
    made_ns = first.stat().st_mtime_ns
    assert pool.rewrite_pool(source, read, place)
    found = Pool(place)
    assert (len(found), found.row_length, len(found.parts)) == (3, 16, 3)
    assert first.name == "part-00000.pt" and first.stat().st_mtime_ns == made_ns


def test_a_model_in_memory_reads_as_a_sequence(model: Any) -> None:
    """Its logits are those of one pass over the text, also after it was cut back, to its beginning too."""
    sequence = acceptance.TorchSequence(model, 64)
    text = [3, 1, 4, 1, 5, 9]
    wanted = acceptance.row_logits(model, [*text, 0], 1).numpy()
    assert np.allclose(sequence.extend(text[:3]), wanted[2], atol=1e-4)
    assert np.allclose(sequence.extend([7, 7, 7]).shape, wanted[0].shape)
    sequence.truncate(2)
    assert np.allclose(sequence.extend(text[2:]), wanted[5], atol=1e-4) and sequence.length == 6
    sequence.truncate(0)
    assert np.allclose(sequence.extend(text[:1]), wanted[0], atol=1e-4)
