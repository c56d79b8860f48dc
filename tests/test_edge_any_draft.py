"""Tests commands with a draft of another tokenizer than the target's, and how the target's tokenizer is got."""

from __future__ import annotations

import asyncio
import io
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from tests.commands import Outrider, screen
from tests.drafts import make_draft
from tests.fake_runtime import FakeSequenceRuntime
from tests.other_tokenizers import tokenizer_of
from tests.serving import FakeServer, fake_tokenizer, serve_fake
from tests.waiting import run

from outrider.edge.cli.chat import chat_here
from outrider.edge.cli.command_options import ChatOptions, ServeOptions
from outrider.edge.cli.line_editor import PipeReader
from outrider.edge.cli.serve import _open_core
from outrider.edge.cli.summary import draft_lines
from outrider.edge.cli.verifiers import open_verifiers
from outrider.edge.link.downloads import DraftClient
from outrider.edge.modes.assemble import open_draft_bundle, open_draft_model
from outrider.edge.serve.state import LocalCore, LocalSettings
from outrider.edge.store import tokenizers
from outrider.edge.store.tokenizers import fetch_tokenizer, last_tokenizer, target_tokenizer
from outrider.models.client.client import ClientOptions
from outrider.models.errors import BundleError, ConfigError, TokenizerError, TokenizerMismatch
from outrider.models.picks.sampling import SamplingParams
from outrider.models.runtimes.mapped_sequence import MappedSequence
from outrider.models.text.tokenizer import Tokenizer
from outrider.models.text.vocabulary_map import VocabularyMap
from outrider.models.wire.offered import OfferedFile, TokenizerFiles

FOREIGN = "gpt2"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and drafts whose model is fake."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    runtime = lambda *_: FakeSequenceRuntime(vocab_size=tokenizer_of(FOREIGN).size)  # noqa: E731
    monkeypatch.setattr("outrider.edge.modes.assemble.open_sequence_runtime", runtime)
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one draft, of another tokenizer; do not change it."""
    root = tmp_path_factory.mktemp("foreign")
    make_draft(root / "cpu", rate=0.5, tokenizer=tokenizer_of(FOREIGN))
    return root


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[FakeServer]:
    with serve_fake(drafts=place) as running:
        yield running


def test_pull_then_run(server: FakeServer, cache: Path, outrider: Outrider) -> None:
    """The draft is pulled with the target's tokenizer, drafts, and the text is that of cloud-only; or it is refused."""
    refused, pulled = (
        outrider("pull", "--server", server.url, "--same-tokenizer", code=2),
        outrider("pull", "--server", server.url),
    )
    assert "it has another tokenizer than the target, and --same-tokenizer is given" in refused.err
    assert "50 % of its tokens are accepted, another tokenizer" in pulled.err
    (kept,) = (cache / "tokenizers").iterdir()
    assert kept.name.startswith(fake_tokenizer().fingerprint[:16]) and (kept / "tokenizer.json").is_file()
    asked = ["run", "def verify(x):", "--cloud", server.url, "--max-tokens", "24", "--seed", "3", "--json"]
    for mode in ("stop-and-wait", "stream"):
        shown = outrider(*asked, "--depth", "3", "--mode", mode)
        drafted = json.loads(shown.out)
        assert "draft: tiny-draft has another tokenizer than fake: its tokens are mapped" in shown.err
        assert drafted["draft"]["runtime"] == "openvino" and drafted["num_drafted"] > 0
        alone = json.loads(outrider(*asked, "--mode", "cloud-only").out)
        assert drafted["text"] == alone["text"] and len(alone["text"]) > 20
    message = outrider(*asked, "--same-tokenizer", code=2).err
    assert "use a draft made for this target, or leave out --same-tokenizer: then its tokens are mapped" in message


def test_a_mapped_draft_holds_texts_of_any_length(place: Path) -> None:
    """Its own positions bound its own texts only: nothing says that a longer one is not drafted. One of the target's
    own tokenizer is not mapped.
    """
    target, bundle = fake_tokenizer(), open_draft_bundle(place / "cpu")
    own, mapped, same = (open_draft_model(bundle, target=each) for each in (None, target, bundle.tokenizer()))
    assert own.placement.max_positions == 4096 and mapped.placement.max_positions is None
    assert len(draft_lines(own.placement, 5000, 8)) == 2 and len(draft_lines(mapped.placement, 5000, 8)) == 1
    assert isinstance(mapped.runtime, MappedSequence) and mapped.num_ids == target.size
    assert not isinstance(same.runtime, MappedSequence)
    mapped.runtime.close()


def test_a_server_that_shares_no_tokenizer(place: Path, tmp_path: Path, outrider: Outrider) -> None:
    """The error says so, and how to name a directory; another tokenizer there is refused."""
    own, other = fake_tokenizer().directory, tokenizer_of("target").directory
    with serve_fake(shares_tokenizer=False) as silent:
        asked = ["run", "def f(", "--cloud", silent.url, "--draft", str(place / "cpu"), "--max-tokens", "8"]
        for words, code, told in (
            ([], 2, r"does not share its target's tokenizer.*Give its directory with --tokenizer"),
            (["--tokenizer", other], 2, "name the directory that the target was exported from"),
            (["--tokenizer", own], 0, "its tokens are mapped"),
            (
                ["--tokenizer", tmp_path, "--same-tokenizer"],
                *(2, "--same-tokenizer maps no draft, so --tokenizer would have no effect"),
            ),
        ):
            assert re.search(told, outrider(*asked, *words, code=code).err)


def test_chat_and_serve(server: FakeServer, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both map, too; `chat` refuses with --same-tokenizer, which needs a draft."""
    (out, text), (about, said) = screen(), screen()
    draft = [str(place / "cpu")]
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    chat_here(ChatOptions(cloud=[server.url], draft=draft, max_tokens=8), out, about, PipeReader())
    assert len(text.getvalue().strip()) > 2 and "its tokens are mapped" in said.getvalue()
    with pytest.raises(TokenizerMismatch, match=r"leave out --same-tokenizer"):
        chat_here(ChatOptions(cloud=[server.url], draft=draft, same_tokenizer=True), out, about, PipeReader())
    with pytest.raises(ConfigError, match="nothing drafts with --no-drafts, so --same-tokenizer would have no effect"):
        ChatOptions(drafts=False, same_tokenizer=True)
    core = opened_core(ServeOptions(cloud=[server.url], draft=draft, max_requests=2), about)
    assert core.fingerprint == fake_tokenizer().fingerprint and core.drafts.max_sequences == 2
    with core.drafts.lend(b"", [1, 2]) as loan:
        assert loan.drafter is not None
        loan.drafter.begin([1, 2, 3], SamplingParams())
        assert loan.drafter.guess([()], 1)
    core.drafts.close()


def opened_core(options: ServeOptions, about: Console) -> LocalCore:
    """What `outrider serve` would serve."""
    with open_verifiers(options, about) as verifiers:
        return _open_core(options, verifiers, LocalSettings(), about)


async def fetched(url: str) -> Tokenizer:
    async with DraftClient(url) as client:
        return await fetch_tokenizer(client, fake_tokenizer().fingerprint)


def test_a_tokenizer_is_fetched_once(cache: Path) -> None:
    """From then on its files come from the cache; one that is damaged there is fetched again."""
    own = fake_tokenizer().fingerprint
    assert last_tokenizer(own) is None
    with serve_fake() as server:
        assert run(fetched(server.url)).fingerprint == own
        (kept,) = (cache / "tokenizers").iterdir()
        file = kept / "tokenizer.json"
        written = file.stat().st_mtime_ns
        assert run(fetched(server.url)).directory == kept and file.stat().st_mtime_ns == written
        file.write_text("{")
        assert last_tokenizer(own) is None and run(fetched(server.url)).fingerprint == own
    found = last_tokenizer(own)
    assert found is not None and [found.directory] == [kept] == list((cache / "tokenizers").iterdir())


def test_what_one_server_shares_does_not_serve_for_another(cache: Path) -> None:
    """The fingerprint does not cover the chat template: each server's own counts."""
    hostile, ours = "EVIL {{ messages[0].content }}", "{{ messages[0].content }}"
    shown = []
    for template in (hostile, ours, hostile):
        with serve_fake(chat_template=template) as server:
            shown.append(run(fetched(server.url)).apply_chat_template([{"role": "user", "content": "hi"}]))
    assert shown == ["EVIL hi", "hi", "EVIL hi"] and len(list((cache / "tokenizers").iterdir())) == 2


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda file: file.model_copy(update={"sha256": "0" * 64}), r"tokenizer\.json .* arrived damaged; try again"),
        (lambda file: file.model_copy(update={"size": 1 << 30}), r"at most 67108864 are taken"),
        (lambda file: file.model_copy(update={"path": "other.json"}), r"is not the tokenizer .* of its target"),
    ],
)
def test_what_is_no_such_tokenizer_is_not_kept(
    server: FakeServer,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[OfferedFile], OfferedFile],
    why: str,
) -> None:
    files = DraftClient.tokenizer_files

    async def changed(client: DraftClient) -> TokenizerFiles:
        listed = await files(client)
        ours = [change(file) if file.path == "tokenizer.json" else file for file in listed.files]
        return listed.model_copy(update={"files": ours})

    monkeypatch.setattr(DraftClient, "tokenizer_files", changed)
    with pytest.raises(BundleError, match=why):
        run(target_tokenizer([(server.url, ClientOptions())], fake_tokenizer().fingerprint))
    assert not list(cache.glob("tokenizers/*"))


def test_a_server_that_is_too_slow_is_given_up(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(client: DraftClient) -> TokenizerFiles:
        await asyncio.Event().wait()
        raise AssertionError

    for timeout_s, answer, why in (
        (tokenizers.TIMEOUT_S, DraftClient.tokenizer_files, r"has the tokenizer .*, not 000000000000"),
        (0.01, never, r"did not send its tokenizer within 0\.01 s"),
    ):
        monkeypatch.setattr(tokenizers, "TIMEOUT_S", timeout_s)
        monkeypatch.setattr(DraftClient, "tokenizer_files", answer)
        with pytest.raises(BundleError, match=why):
            run(target_tokenizer([(server.url, ClientOptions())], "0" * 64))


def test_without_a_server_what_was_pulled_with_the_draft_counts(
    place: Path, outrider: Outrider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`serve` at boot, before the network is there: the endpoint has the target's tokenizer."""
    monkeypatch.setattr("outrider.edge.cli.draft_source.MAX_LOADING_S", 0.0)
    with serve_fake(drafts=place) as server:
        outrider("pull", "--server", server.url)
    about, said = screen(width=200)
    here = ServeOptions(cloud=[server.url], max_requests=2)
    for options in (here, replace(here, draft=[str(place / "cpu")], tokenizer=fake_tokenizer().directory)):
        core = opened_core(options, about)
        assert core.fingerprint == fake_tokenizer().fingerprint
        core.drafts.close()
        assert "has another tokenizer than the target: its tokens are mapped" in said.getvalue()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", b"[" * 100_000),
        ("tokenizer_config.json", b'{"chat_template": 7}'),
        ("generation_config.json", b'{"eos_token_id": ["a", 1]}'),
        ("chat_template.jinja", b"\xff\xfe"),
    ],
    ids=["deep", "template", "ends", "bytes"],
)
def test_files_that_cannot_be_used_are_no_tokenizer(tmp_path: Path, name: str, content: bytes) -> None:
    place = shutil.copytree(fake_tokenizer().directory, tmp_path / "it")
    assert tokenizers._kept(place, fake_tokenizer().fingerprint) is not None
    (place / name).write_bytes(content)
    assert tokenizers._kept(place, fake_tokenizer().fingerprint) is None


def test_a_huge_id_is_refused(tmp_path: Path) -> None:
    """A file of a few bytes could ask for gigabytes."""
    place = shutil.copytree(fake_tokenizer().directory, tmp_path / "it")
    document = json.loads((place / "tokenizer.json").read_text())
    document["model"]["vocab"]["zzqq"] = 4_000_000_000
    (place / "tokenizer.json").write_text(json.dumps(document))
    huge = Tokenizer.from_dir(place)
    assert tokenizers._kept(place, huge.fingerprint) is None
    with pytest.raises(TokenizerError, match=r"at most 2097152 are mapped"):
        VocabularyMap(fake_tokenizer(), huge)
