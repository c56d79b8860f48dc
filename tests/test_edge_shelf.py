"""Tests which of a server's drafts and of the pulled ones is chosen, and what `--prune` removes from the cache."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from filelock import FileLock
from tests.agents import scripted_client
from tests.commands import Outrider, screen
from tests.drafts import make_draft
from tests.serving import FakeServer, fake_tokenizer, serve_fake

from outrider.edge.cli.draft_source import Notes, _find_pulled, clouds_of
from outrider.edge.cli.pull import show_offered
from outrider.edge.devices.discovery import FoundDevice, FoundRuntime, ModelRuntime
from outrider.edge.devices.placement import AS_BUNDLED, DraftChoice
from outrider.edge.setup.endpoints import Keys
from outrider.edge.store.choice import Wishes, choose, judge
from outrider.edge.store.fitting import facts_of
from outrider.edge.store.prune import find_outdated, prune
from outrider.edge.store.shelf import PulledFor, Shelf, find_all_pulled, find_pulled, in_use
from outrider.models.bundle.bundle import hash_file
from outrider.models.bundle.manifest import Device, StaticShapes
from outrider.models.errors import BundleError, RequestError
from outrider.models.wire.offered import DraftList, OfferedDraft, OfferedFile
from outrider.models.wire.protocol import ModelFacts

SHA = "0" * 64


def offer(name: str, device: str = "cpu", runtime: str = "openvino", **fields: Any) -> OfferedDraft:
    """A draft of a server's list."""
    files = [OfferedFile(path="manifest.json", size=1, sha256=SHA)]
    values: dict[str, Any] = {"precision": "int8", "size_bytes": 1000, "acceptance": 0.7, "files": files, "model": "m"}
    return OfferedDraft(name=name, device=device, runtime=runtime, **(values | fields))


def found_there(runtime: ModelRuntime, devices: dict[str, tuple[Device, ...]]) -> FoundRuntime:
    """What `find_runtime` answers on a machine with these devices for each runtime."""
    found = tuple(FoundDevice(kind.upper(), kind, kind) for kind in devices.get(runtime, ()))
    return FoundRuntime(runtime, "1.0" if found else None, found)


LAPTOP = partial(found_there, devices={"openvino": ("cpu", "npu")})
WORKSTATION = partial(found_there, devices={"openvino": ("cpu", "gpu", "npu"), "onnxruntime": ("cpu",)})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    root = tmp_path_factory.mktemp("offered")
    make_draft(root / "cpu", rate=0.75)
    with serve_fake(drafts=root) as running:
        yield running


def put(shelf: Shelf, content: bytes, targets: dict[str, str], at_s: float = 1.0, **changes: Any) -> Path:
    """A draft that was pulled for these targets, each from a server. changes: of its manifest."""
    made = make_draft(shelf.root / "new", content=content, **changes).path
    sha256 = hash_file(made / "manifest.json")
    for target, server in targets.items():
        shelf.note(sha256, target, PulledFor(model="fake", server=server, name=content[:8].decode(), at_s=at_s))
    return made.rename(shelf.place(sha256))


def listed(target: str, *drafts: Path) -> DraftList:
    """What a server of this target offers: these bundles."""
    hashes = [hash_file(path / "manifest.json") if path.exists() else "f" * 64 for path in drafts]
    offered = [offer("d", files=[OfferedFile(path="manifest.json", size=1, sha256=each)]) for each in hashes]
    return DraftList(model="fake", target=target, tokenizer="t", drafts=offered)


def test_drafts_that_are_no_longer_offered_are_outdated(shelf: Shelf) -> None:
    """For the targets of the servers that answered, and where a draft in their place is here."""
    old, new, twin = (put(shelf, name, {"t": "a"}) for name in (b"old", b"new", b"twin"))
    put(shelf, b"both", {"t": "a", "other": "b"})
    put(shelf, b"elsewhere", {"other": "b"})
    earlier = put(shelf, b"recent", {"before": "a"})  # this server had another target
    replica = put(shelf, b"replica", {"t": "c"})
    put(shelf, b"unnoted", {})

    def found(lists: dict[str, DraftList]) -> set[Path]:
        return {each.bundle.path for each in find_outdated(shelf, lists)}

    assert found({"a": listed("t", new, twin)}) == {old, earlier, replica}
    assert found({"a": listed("t", new, twin), "c": listed("t", replica)}) == {old, earlier}
    nothing = [{"a": listed("t")}, {"a": listed("t", shelf.root / "not-here")}, {"a": listed("next")}, {}]
    assert not any(map(found, nothing))


def pruned(shelf: Shelf, notes: list[str], *offered: Path) -> set[Path]:
    """What is removed where server "a" offers these only."""
    removed = prune(shelf, find_outdated(shelf, {"a": listed("t", *offered)}), notes.append)
    return {each.bundle.path for each in removed}


def test_what_is_in_use_or_being_pulled_stays(shelf: Shelf) -> None:
    """Another process has it mapped, or is about to open it; the others go, with their records."""
    used, pulled, free, new = (put(shelf, name, {"t": "a"}) for name in (b"used", b"pulled", b"free", b"new"))
    code = (
        "import sys, pathlib\nfrom outrider.edge.store.shelf import in_use\n"
        "with in_use(pathlib.Path(sys.argv[1])): print('ready', flush=True); sys.stdin.read()"
    )
    notes: list[str] = []
    with subprocess.Popen(
        [sys.executable, "-c", code, str(used)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as user:
        assert user.stdout is not None and user.stdin is not None and user.stdout.readline() == "ready\n"
        with FileLock(shelf.lock(pulled.name)):
            assert pruned(shelf, notes, new) == {free}
        assert used.is_dir() and pulled.is_dir() and not free.exists()
        assert not (shelf.root / f"{free.name}.json").exists()
        assert sorted(notes) == [
            "pulled, pulled from a, stays: another process pulls it.",
            "used, pulled from a, stays: a running process uses it.",
        ]
    assert pruned(shelf, notes, new) == {used, pulled}
    assert [path.name for path in shelf.root.iterdir() if path.is_dir()] == [new.name]


def test_a_draft_that_cannot_be_removed_stays_whole(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows, where another process has a file of it open: it is reported, and the others go."""
    first, second, new = (put(shelf, name, {"t": "a"}) for name in (b"1", b"2", b"new"))
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self == first:
            raise PermissionError(13, "Access is denied")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    notes: list[str] = []
    assert pruned(shelf, notes, new) == {second} and notes == ["1, pulled from a, stays: Access is denied."]
    assert (first / "manifest.json").is_file() and (shelf.root / f"{first.name}.json").is_file()


def test_a_pull_says_what_is_kept_and_prunes_when_asked(server: FakeServer, shelf: Shelf, outrider: Outrider) -> None:
    """The size of all, and of what is no longer offered. Without --prune nothing goes."""
    target = server.core.model.target
    assert target is not None
    old = put(shelf, b"x" * 2_000_000, {target: server.url})
    other = put(shelf, b"other", {"another": "http://elsewhere.example"})
    shown = outrider("pull", "--cloud", server.url)
    pulled = Path(shown.out.strip())
    assert re.search(
        rf"The cache holds 3 drafts, 2\.\d MB, in {re.escape(str(shelf.root))}; no longer offered: 1, 2\.\d MB\. "
        "`outrider pull --prune` removes them\\.",
        shown.err,
    )
    with in_use(old):
        assert "stays: a running process uses it" in outrider("pull", "--cloud", server.url, "--prune").err
    assert old.is_dir()
    shown = outrider("pull", "--cloud", server.url, "--prune")
    assert Path(shown.out.strip()) == pulled and "Removed: " in shown.err and "holds 2 drafts, 0.0 MB" in shown.err
    assert [path.is_dir() for path in (old, pulled, other)] == [False, True, True]


def test_prune_goes_with_a_pull_into_the_cache(
    server: FakeServer, shelf: Shelf, tmp_path: Path, outrider: Outrider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Typed where it has no effect it is a mistake; configured it is ignored."""
    for given, words in ((["--list"], "changes nothing"), (["--to", tmp_path], "leaves the cache as it is")):
        shown = outrider("pull", "--cloud", server.url, "--prune", *given, code=2).err
        assert f"{given[0]} {words}, so --prune would have no effect" in shown
    monkeypatch.setenv("OUTRIDER_PULL_PRUNE", "1")
    assert "The cache holds" not in outrider("pull", "--cloud", server.url, "--to", str(tmp_path / "to")).err


def test_the_draft_that_a_command_takes_is_marked(
    server: FakeServer, shelf: Shelf, outrider: Outrider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From before it is opened until the command ends: it may be opened late, or again after a failure."""
    pulled = Path(outrider("pull", "--cloud", server.url).out.strip())
    (found,) = shelf.drafts()
    stayed: list[str] = []

    def try_to_prune(*_: object) -> None:
        assert prune(shelf, [found], stayed.append) == []
        raise KeyboardInterrupt

    monkeypatch.setattr("outrider.edge.cli.draft_source.open_draft_bundle", try_to_prune)
    for draft in ("auto", str(pulled)):
        outrider("run", "text", "--cloud", server.url, "--draft", draft, code=130)
    assert len(stayed) == 2 and all("a running process uses it" in note for note in stayed)
    assert prune(shelf, [found], stayed.append) == [found]
    assert [path.name for path in shelf.root.iterdir()] == [f".{pulled.name}.lock"]


@pytest.mark.parametrize(
    ("drafts", "find", "wishes", "name", "why"),
    [
        ([offer("a")], LAPTOP, Wishes(), "a", "the only draft here"),
        ([offer("g", "gpu"), offer("c")], LAPTOP, Wishes(), "c", "the only one of 2 that fits"),
        ([offer("o", runtime="onnxruntime"), offer("c")], LAPTOP, Wishes(), "c", "the only one of 2 that fits"),
        ([offer("low", acceptance=0.5), offer("high")], LAPTOP, Wishes(), "high", "the highest acceptance of 2"),
        ([offer("n", "npu"), offer("c")], LAPTOP, Wishes(), "c", "and the CPU comes before the NPU"),
        ([offer("n", "npu", acceptance=0.9), offer("c")], LAPTOP, Wishes(), "n", "the highest acceptance"),
        ([offer("c"), offer("g", "gpu", acceptance=0.66)], WORKSTATION, Wishes(), "g", "acceptance is alike, and"),
        ([offer("big", size_bytes=9000), offer("c")], LAPTOP, Wishes(), "c", "it is the smallest for the CPU"),
        (
            [offer("u", acceptance=None), offer("v", acceptance=None, size_bytes=9)],
            LAPTOP, Wishes(), "v", "of 2 that fit, no acceptance is known",
        ),
        ([offer("unknown", acceptance=None), offer("c")], LAPTOP, Wishes(), "c", "the highest acceptance of 2"),
        ([offer("n", "npu"), offer("c")], LAPTOP, Wishes(device="npu"), "n", "the only one of 2 that fits"),
        ([offer("f", precision="fp32"), offer("c")], LAPTOP, Wishes(precision="fp32"), "f", "the only one"),
        ([offer("g", "gpu"), offer("c")], LAPTOP, Wishes(name="g"), "g", "the only one of 2 that fits"),
        ([offer("x", "tpu", "jax"), offer("c")], LAPTOP, Wishes(), "c", "the only one of 2 that fits"),
        ([offer("t", tokenizer="1" * 64), offer("c")], LAPTOP, Wishes(), "c", "it has the target's tokenizer"),
        ([offer("t", tokenizer="1" * 64), offer("c", acceptance=0.2)], LAPTOP, Wishes(), "t", "the highest acceptance"),
    ],
)  # fmt: skip
def test_the_best_draft_for_the_machine(
    drafts: list[OfferedDraft],
    find: Callable[[ModelRuntime], FoundRuntime],
    wishes: Wishes,
    name: str,
    why: str,
) -> None:
    """What runs here, then acceptance where it differs, then the device, then the size; whatever the order."""
    for order in (drafts, drafts[::-1]):
        chosen = choose(judge(order, wishes, find), "http://cloud")
        assert chosen.draft.name == name and why in chosen.why
    is_absent = name == "g" and find is LAPTOP
    assert chosen.note == ("g does not run on this machine: OpenVINO sees no GPU here" if is_absent else None)


def test_what_does_not_fit_is_named_with_its_reason() -> None:
    """All in one message, with one piece of advice."""
    drafts = [offer("g", "gpu"), offer("o", runtime="onnxruntime"), offer("c"), offer("x", "tpu")]
    words = r"(?s)none of the 4 drafts at http://cloud fits.*c: its precision is int8, --precision asks for int4"
    with pytest.raises(BundleError, match=words):
        choose(judge(drafts, Wishes(precision="int4"), LAPTOP), "http://cloud")
    reasons = {each.draft.name: each.why_not for each in judge(drafts, Wishes(), LAPTOP)}
    assert reasons == {
        "g": "OpenVINO sees no GPU here",
        "o": 'ONNX Runtime is not installed; run: pip install "outrider[edge-onnxruntime]"',
        "c": None,
        "x": "this version knows no drafts for openvino on tpu",
    }
    with pytest.raises(BundleError, match=r"has no drafts for its target; start it with --drafts DIR"):
        choose([], "http://cloud")


FACTS = ModelFacts(
    name="fake",
    tokenizer=fake_tokenizer().fingerprint,
    vocab_size=300,
    max_positions=100,
    eos_token_ids=[0],
    has_chat_template=True,
    target="a",
)
"""What a server says about its target."""


def test_the_last_draft_pulled_for_a_target_is_found(shelf: Shelf) -> None:
    """Before those of other targets with its tokenizer; only what can run as asked; never another tokenizer's."""

    def found(target: str, choice: DraftChoice = AS_BUNDLED, tokenizer: str = FACTS.tokenizer) -> Path | None:
        pulled = find_pulled(tokenizer, target, choice, shelf)
        return None if pulled is None else pulled.bundle.path

    assert found("a") is None
    for_a = put(shelf, b"1", {"a": "c"})
    assert found("a") == found("other") == for_a
    newer_for_b = put(shelf, b"2", {"b": "c"}, 2.0)
    assert found("a") == for_a and found("b") == found("other") == newer_for_b
    twin_for_b = put(shelf, b"4", {"b": "c"}, 1.5)
    of_b, of_other = (find_all_pulled(FACTS.tokenizer, target, AS_BUNDLED, shelf) for target in ("b", "other"))
    assert [each.bundle.path for each in of_b] == [newer_for_b, twin_for_b]  # these compete; the latest first
    assert len(of_other) == 1
    shutil.rmtree(twin_for_b)
    for_npu = put(shelf, b"3", {"a": "c"}, 3.0, device="npu", static_shapes=StaticShapes())
    assert for_npu != found("a") == for_a
    assert found("a", DraftChoice(emulate_npu=True)) == found("a", DraftChoice("ngram")) == for_npu
    assert found("a", tokenizer="1" * 64) == for_a  # mapped: it was pulled for this target
    assert found("c", tokenizer="1" * 64) is found("a", DraftChoice("onnxruntime")) is None
    (for_a / "manifest.json").write_text("damaged")
    assert found("a") == newer_for_b
    for path in shelf.root.glob("*.json"):
        path.write_text("{")
    assert found("b") == newer_for_b  # without its record


async def test_who_does_not_say_what_it_serves_has_no_draft_here() -> None:
    """One that refuses is an error."""
    asked: list[str] = []

    async def facts_from(answer: httpx.Response) -> ModelFacts | None:
        def handle(request: httpx.Request) -> httpx.Response:
            asked.append(request.url.path)
            return answer

        async with scripted_client(handle, "http://cloud.example") as client:
            return await facts_of([client])

    assert await facts_from(httpx.Response(404)) is await facts_from(httpx.Response(403)) is None
    assert await facts_from(httpx.Response(200, json=FACTS.model_dump())) == FACTS and asked == ["/v1/model"] * 3
    with pytest.raises(RequestError, match="requires an API key"):
        await facts_from(httpx.Response(401))


def test_nobody_is_asked_where_nothing_was_pulled(shelf: Shelf) -> None:
    about = Notes(screen()[0])
    assert _find_pulled(AS_BUNDLED, clouds_of(["http://127.0.0.1:9"], Keys()), about, needs_server=True) == []


def test_a_server_s_words_cannot_command_the_terminal() -> None:
    """Names in the table are shown, not obeyed."""
    console, out = screen(width=200)
    listed = DraftList(model="m\x1b]0;x", tokenizer="t", drafts=[offer("a", precision="\x1b[31m[bold]")])
    show_offered(console, listed, judge(listed.drafts, Wishes(), LAPTOP), "http://c")
    assert "\x1b" not in out.getvalue() and r"\x1b[31m[bold]" in out.getvalue()
