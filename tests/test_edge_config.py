"""Tests where options get their values: flag, environment, configuration file, default; and key files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.commands import KEY, OTHER_KEY, Outrider, commands_group, key_file
from tests.drafts import make_draft
from tests.serving import serve_fake

from outrider.cloud.api.state import ServerSettings
from outrider.edge.devices.placement import DraftChoice
from outrider.edge.setup.config_file import ConfigFile, config_path, read_config
from outrider.edge.setup.endpoints import Endpoint, Keys, read_key_file
from outrider.edge.setup.settings import Settings
from outrider.models.errors import ConfigError
from outrider.models.http.security import KeyRing


def shown(outrider: Outrider, *arguments: str) -> dict[str, tuple[object, str, object]]:
    """Values, sources and places that `outrider config show` prints for a command with these flags."""
    document = json.loads(outrider("config", "show", "--json", *arguments).out)
    return {name: (each["value"], each["source"], each["where"]) for name, each in document["commands"]["run"].items()}


def test_a_value_comes_from_flag_then_environment_then_file_then_default(
    config: Path, outrider: Outrider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each source wins over those below it; a command's own table and variable over those for all commands."""

    def max_tokens(*flags: str) -> tuple[object, str, object]:
        return shown(outrider, "run", *flags)["max_tokens"]

    assert max_tokens() == (128, "default", None)
    for text, *found in (
        ("# for all\n[common]\nmax_tokens = 11\n", 11, "line 3"),
        ("[run]\nmax-tokens = 12\n[common]\nmax_tokens = 11\n", 12, "line 2"),
    ):
        config.write_text(text, encoding="utf-8")
        assert max_tokens() == (found[0], "file", found[1])
    for name, value in (("OUTRIDER_MAX_TOKENS", 13), ("OUTRIDER_RUN_MAX_TOKENS", 14)):
        monkeypatch.setenv(name, str(value))
        assert max_tokens() == (value, "environment", name)
    assert max_tokens("--max-tokens", "15") == (15, "flag", "--max-tokens")


def test_commands_run_with_what_config_shows(config: Path, outrider: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of option, from the file and from the environment, in the command itself."""
    config.write_text(
        "[common]\neffort = 'low'\n[run]\nlookup = false\ndepth = '3'\nparam = ['top_p=0.9']\ncloud = ['http://a', 'http://b']\n"
        "draft = ['~/drafts/x', 'drafts/y', 'reference']\nkey_file = 'my.key'\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("OUTRIDER_RUN_IGNORE_EOS", "yes")
    monkeypatch.setenv("OUTRIDER_SEED", "7")
    key_file(config.parent).rename(config.parent / "my.key")
    called = []
    monkeypatch.setattr("outrider.edge.cli.run.run_once", lambda options, *_: called.append((options, options.keys())))
    outrider("run", "text", "--temperature", "0")
    ((options, keys),) = called
    expected = {"effort": "low", "lookup": False, "depth": "3", "param": ["top_p=0.9"], "ignore_eos": True}
    expected |= {"seed": 7, "temperature": 0.0, "cloud": ["http://a", "http://b"]}
    expected["draft"] = [str(Path.home() / "drafts" / "x"), str(config.parent / "drafts" / "y"), "reference"]
    values = shown(outrider, "run", "--temperature", "0")
    assert {name: values[name][0] for name in expected} == expected
    assert {name: getattr(options, name) for name in expected} == expected
    assert options.params.top_p == 0.9 and keys == Keys(KEY, is_asked=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[runn]\n", "line 1: runn is unknown; did you mean run?"),
        ("\n[run]\nmax_tokns = 1\n", "line 3: run.max_tokns is unknown; did you mean max_tokens?"),
        ("[run]\ntop_p = 1\n", "line 2: run.top_p is no option any more. Give it as --param NAME=NUMBER"),
        ("[common]\npatience-ms = 1\n", "common.patience-ms is no option any more. The target chooses"),
        ("[run]\n\n# why\nmax_tokens = 'x'\n", "line 4: run.max_tokens is 'x'; expected a whole number, at least 1"),
        ("[run]\nmax_tokens = 0\n", "line 2: run.max_tokens is 0; expected a whole number, at least 1"),
        ("[run]\nmax_tokens = true\n", "run.max_tokens is true; expected a whole number, at least 1"),
        ("[run]\nmax_tokens = 1.5\n", "run.max_tokens is 1.5; expected a whole number"),
        ("[run]\nlookup = 1\n", "run.lookup is 1; expected true or false"),
        ("[run]\ntemperature = nan\n", "run.temperature is nan; expected a number"),
        ("[run]\ndepth = 4\n", "run.depth is 4; expected text in quotes"),
        (
            "[common]\neffort = 'much'\n",
            "line 2: common.effort is 'much'; expected one of low, normal, high for `outrider ",
        ),
        ("[run]\ncloud = [\n  'http://a',\n  3,\n]\n", "line 2: run.cloud is a list; expected a list, each of it text"),
        ("run = 3\n", "line 1: run is 3; expected a table, [run]"),
        ("[run]\nseed = 1\nseed = 2\n", "is not TOML: Cannot overwrite a value (at line 3"),
        ("[run]\nmax_tokens = 3\nmax-tokens = 3\n", "line 3: run.max-tokens is there twice"),
        ("[common]\njson = true\n", "line 2: common.json is unknown"),  # a flag of run, a file of demo
        ("[config]\n", "line 1: config is unknown"),
        ("endpoint = 3\n", "line 1: endpoint is 3; expected tables, each begun by [[endpoint]]"),
        ("[[endpoint]]\nname = 'a'\n", "line 1: endpoint[0] has no url"),
        ("[[endpoint]]\nurl = 'http://a'\n[[endpoint]]\nurl = 3\n", "line 4: endpoint[1].url does not fit"),
        ("[[endpoint]]\nurl = 'ftp://a'\n", "line 2: endpoint[0].url is 'ftp://a'; expected an address such as"),
        ("[[endpoint]]\nurl = 'http://a'\nkey = 'x'\n", "line 3: endpoint[0].key is no key of an endpoint"),
        ("[[endpoint]]\nurl = 'http://a'\nkey_file = 'k'\n", "line 1: endpoint[0] would send its key without"),
        ("[[endpoint]]\nurl='http://a'\n[[endpoint]]\nurl='http://a/v1'\n", "line 4: endpoint[1].url is that of"),
        (b"[run]\nseed = 1\xff\n", " is not "),  # not UTF-8
        (b"\x00", " is not "),  # not TOML
        (b"a = " + b"[" * 20_000, " is not "),
    ],
)
def test_a_mistake_in_the_file_names_file_line_and_key(
    config: Path, outrider: Outrider, text: str | bytes, message: str
) -> None:
    """With what was found and expected; exit code 2, one line; `--help` still works."""
    config.write_bytes(text if isinstance(text, bytes) else text.encode())
    error = outrider("run", "hello", "--draft", "nowhere", code=2).err
    assert error.startswith(f"error: {config}") and message in error and error.count("\n") == 1
    assert "configuration" in outrider("run", "--help").out
    assert outrider("config", "path").out == f"{config}\n"


def test_a_key_in_the_file_is_refused_and_not_shown(
    config: Path, outrider: Outrider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names key_file; a key from the environment is only reported as set."""
    config.write_text(f"[run]\napi_key = '{KEY}'\n", encoding="utf-8")
    error = outrider("run", "hello", "--draft", "nowhere", code=2).err
    assert "line 2: run.api_key would keep a key in clear text; expected key_file" in error and KEY not in error
    config.write_text("", encoding="utf-8")
    monkeypatch.setenv("OUTRIDER_API_KEY", KEY)
    with_address = ["config", "show", "run", "--cloud", f"http://me:{KEY}@a"]
    for arguments, words in ((["config"], ""), (["config", "--json"], ""), (with_address, "http://***@a")):
        out = outrider(*arguments).out
        assert KEY not in out and "(set, not shown)" in out and "OUTRIDER_API_KEY" in out and words in out


def test_a_value_for_all_commands_may_be_too_much_for_some(
    config: Path, outrider: Outrider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo's texts are at most 512 tokens: it refuses the value, and the other commands run with it."""
    config.write_text("[common]\nmax_tokens = 1000\n", encoding="utf-8")
    assert shown(outrider, "run")["max_tokens"] == (1000, "file", "line 2")
    expected = "a whole number, at least 2, at most 512 for `outrider demo`"
    assert f"line 2: common.max_tokens is 1000; expected {expected}\n" in outrider("demo", code=2).err
    assert json.loads(outrider("config", "--json").out)["commands"]["demo"]["error"].endswith(expected)
    shows = "".join(outrider("config").out.split())
    assert "[run]" in shows and "[demo]cannotrun:" in shows and "atmost512for`outriderdemo`" in shows


def test_a_variable_of_the_wrong_type_is_named(
    config: Path, outrider: Outrider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the option, which nobody typed."""
    monkeypatch.setenv("OUTRIDER_MAX_TOKENS", "many")
    error = outrider("run", "hello", "--draft", "nowhere", code=2).err
    assert error == "error: OUTRIDER_MAX_TOKENS is 'many'; expected a whole number, at least 1\n"
    outrider("devices", "--help")


def test_where_the_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the user's configuration directory; elsewhere by OUTRIDER_CONFIG, and then it must be there."""
    monkeypatch.delenv("OUTRIDER_CONFIG")
    monkeypatch.setattr("platformdirs.user_config_path", lambda name, appauthor: tmp_path / name)
    assert config_path() == tmp_path / "outrider" / "config.toml" and not read_config().is_there
    for place, message in (
        (tmp_path / "mine.toml", r"mine\.toml is not there, and OUTRIDER_CONFIG names it"),
        (tmp_path, "is a directory"),
    ):
        monkeypatch.setenv("OUTRIDER_CONFIG", str(place))
        with pytest.raises(ConfigError, match=message):
            read_config()
    (tmp_path / "mine.toml").write_bytes(b"\xef\xbb\xbf[run]\r\nseed = 1\r\n")
    monkeypatch.setenv("OUTRIDER_CONFIG", str(tmp_path / "mine.toml"))
    assert read_config().document == {"run": {"seed": 1}}


def test_the_example_names_every_option_and_is_never_written_twice(config: Path, outrider: Outrider) -> None:
    """As it is, it changes nothing; with every line in use, all but the paths fit."""
    assert "is there already and is left as it is" in outrider("config", "init", code=2).err
    assert config.read_bytes() == b""
    config.unlink()
    outrider("config", "init")
    text, group = config.read_text(encoding="utf-8"), commands_group()
    settings = Settings(group, read_config(), {})
    assert {each.source for path in settings.commands for each in settings.resolve(path)} == {"default"}
    used = re.sub(r"(?m)^#(?=\w+ = |\[\[)", "", text).replace('"..."', '"x"')
    document = tomllib.loads(used)
    for path, command in settings.commands.items():
        names = {option.name for option in command.params if option.param_type_name == "option"}
        assert len(document[path]) == len(names - {"api_key"}), path
    assert settings.resolve("run") != Settings(group, ConfigFile(config, used, document), {}).resolve("run")
    assert re.search(r"\bapi_key\b", text) is None


FAR, NEAR = "http://cloud.example.com", "http://127.0.0.1:8078"
ENDPOINTS = {
    "own": Endpoint(url="https://a", key_file="cloud.key"),
    "other": Endpoint(url="https://b"),
    "in the clear": Endpoint(url=FAR, allow_http=True),
}


@pytest.mark.parametrize(
    ("given", "endpoints", "url", "others", "found"),
    [
        pytest.param({"is_asked": True}, ["own", "other"], "https://a", ["https://b"], KEY, id="its own"),
        pytest.param({"is_asked": True}, ["own", "other"], "https://b", ["https://a"], None, id="no general one"),
        pytest.param({"is_asked": True}, ["own", "other"], "https://a", [], OTHER_KEY, id="asked for, for one address"),
        pytest.param({}, ["own"], "https://a", [], KEY, id="its own before one that is not asked for"),
        pytest.param({}, ["own"], "https://a", [NEAR], KEY, id="its own beside this machine"),
        pytest.param({}, ["other"], "https://b/v1", [], OTHER_KEY, id="an endpoint without a key"),
        pytest.param({}, [], "https://b", ["https://a"], OTHER_KEY, id="no endpoint"),
        pytest.param({}, ["own"], "https://c", ["https://a"], OTHER_KEY, id="an address beside an endpoint"),
        pytest.param({"is_http_allowed": True}, [], FAR, [], OTHER_KEY, id="in the clear by option"),
        pytest.param({}, ["in the clear"], FAR, [], OTHER_KEY, id="in the clear by endpoint"),
        pytest.param({}, [], NEAR, [], OTHER_KEY, id="this machine"),
        pytest.param({}, [], "https://x", [], OTHER_KEY, id="https"),
        pytest.param({"general": None}, [], FAR, [], None, id="none in the clear"),
    ],
)
def test_a_key_goes_to_its_own_endpoint_only(
    given: dict[str, Any],
    endpoints: list[str],
    url: str,
    others: list[str],
    found: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not to the others, whatever general key there is; in the clear only to this machine, or where that is allowed."""
    key_file(tmp_path)
    monkeypatch.chdir(tmp_path)
    keys = Keys(**{"general": OTHER_KEY, **given}, endpoints=tuple(ENDPOINTS[name] for name in endpoints))
    assert keys.for_url(url, [url, *others]) == found


@pytest.mark.parametrize(("url", "others"), [(FAR, []), ("cloud.example.com", [NEAR])])  # http where no scheme is given
def test_a_general_key_is_not_sent_in_the_clear(url: str, others: list[str]) -> None:
    """The error names the option, and not the key."""
    with pytest.raises(ConfigError, match="without encryption") as found:
        Keys(KEY, is_asked=True).for_url(url, [url, *others])
    assert KEY not in str(found.value) and "--allow-http" in str(found.value)


def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    """With the command that mends it; a key never stands in a message."""

    def refusal(path: Path) -> str:
        with pytest.raises(ConfigError) as found:
            read_key_file(path)
        assert KEY not in str(found.value)
        return str(found.value)

    path = key_file(tmp_path)
    assert read_key_file(path) == KEY
    for mode in (0o640, 0o604, 0o620, 0o644):
        path.chmod(mode)
        assert f"(mode {mode:04o}); expected 0600: run `chmod 600" in refusal(path)
    assert read_key_file(path, is_posix=False) == KEY  # Windows' modes say nothing
    path.chmod(0o600)
    for text in ("", f"{KEY}\n{KEY}", f"{KEY} x", "ä" * 9, "x" * 5000):
        path.write_bytes(text.encode())
        assert "expected" in refusal(path)
    assert "No such file" in refusal(tmp_path / "nowhere")
    assert re.search(r"not a regular file|Is a directory", refusal(tmp_path))


def test_a_key_and_a_key_file_from_one_place_are_refused(
    config: Path, outrider: Outrider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which one is meant cannot be known; a flag wins over the environment."""
    asked, from_file = list[Keys](), ["--key-file", key_file(config.parent)]
    both = ["--api-key", OTHER_KEY, *from_file]
    assert "leave one of them out" in outrider("run", "text", "--draft", "nowhere", *both, code=2).err
    monkeypatch.setenv("OUTRIDER_API_KEY", OTHER_KEY)
    monkeypatch.setattr("outrider.edge.cli.run.run_once", lambda options, *_: asked.append(options.keys()))
    outrider("run", "text", *from_file)
    outrider("run", "text")
    assert asked == [Keys(KEY, is_asked=True), Keys(OTHER_KEY, is_asked=True)]


def test_variables_that_no_option_has_are_found(config: Path) -> None:
    """With the closest name that one has."""
    environment = {"OUTRIDER_RUN_MAX_TOKNS": "3", "OUTRIDER_SEED": "3", "OUTRIDER_CACHE": "x", "HOME": "x"}
    settings = Settings(commands_group(), ConfigFile(config), environment)
    assert settings.unknown_variables() == {"OUTRIDER_RUN_MAX_TOKNS": "OUTRIDER_RUN_MAX_TOKENS"}


@pytest.mark.parametrize(
    ("words", "shown"),
    [(["run", "--help"], ["--draft", "--cloud"]), (["config", "show", "run"], ["max_tokens", "default"])],
)
def test_help_and_config_need_no_runtime_and_no_http_library(words: list[str], shown: list[str]) -> None:
    """A half-installed device still shows them."""
    code = (
        f"import sys\nsys.path[:0] = {[path for path in sys.path if path]!r}\n"
        "for name in ('openvino', 'onnxruntime', 'httpx', 'torch'): sys.modules[name] = None\n"
        f"sys.argv = ['outrider', *{words!r}]\n"
        "from outrider.edge.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and all(word in done.stdout for word in shown), done.stderr


def test_configured_values_keep_no_mode_from_running(
    config: Path, fake_bundle: Path, outrider: Outrider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has no effect is refused where it was typed; a value from the file or the environment is for every run."""
    config.write_text(
        "[common]\neffort = 'low'\ndraft_device = 'gpu'\n[run]\nwidth = '4'\ncompare = true\nlookup = false\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("OUTRIDER_THREADS", "2")
    command = ["run", "def", "--draft", str(fake_bundle), "--max-tokens", "4", "--mode", "cloud-only"]
    with serve_fake() as server:
        outrider(*command, "--cloud", server.url)
    for typed, name in ((("--effort", "low"), "--effort"), (("--draft-device", "cpu"), "--draft-device")):
        shown = outrider(*command, *typed, code=2).err
        assert f"nothing drafts with --mode cloud-only, so {name} would have no effect; leave it out" in shown
    assert "--compare measures cloud-only beside another --mode" in outrider(*command, "--compare", code=2).err


def test_a_typed_option_comes_before_a_configured_one_that_contradicts_it(
    config: Path, outrider: Outrider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device in the file does not forbid --runtime ngram, which no device runs; two in the file are a mistake."""
    chosen: list[DraftChoice] = []
    monkeypatch.setattr("outrider.edge.cli.run.run_once", lambda options, *_: chosen.append(options.choice))
    config.write_text("[run]\ndraft_device = 'gpu.1'\n", encoding="utf-8")
    for typed in (("--runtime", "ngram"), ("--draft-device", "prefer-npu"), ("--runtime", "openvino")):
        outrider("run", "text", *typed)
    assert chosen == [DraftChoice("ngram"), DraftChoice(provider="prefer-npu"), DraftChoice("openvino", "gpu.1")]
    config.write_text("[run]\ndraft_device = 'gpu.1'\nruntime = 'ngram'\n", encoding="utf-8")
    assert "no device runs it" in outrider("run", "text", code=2).err


def test_address_and_key_come_from_the_file(
    config: Path, tmp_path: Path, outrider: Outrider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a text and for a pull: the preferred endpoint, with its own key; --server goes elsewhere without it."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    key_file(config.parent)
    draft, settings = make_draft(tmp_path / "drafts" / "cpu").path, ServerSettings(keys=KeyRing([KEY]))
    command = ["run", "def", "--draft", draft, "--mode", "cloud-only", "--max-tokens", "4"]
    with serve_fake(settings, drafts=tmp_path / "drafts") as server, serve_fake(settings) as other:
        for key, code, words in (("", 2, "requires an API key"), ("key_file = 'cloud.key'\n", 0, "")):
            endpoints = f"[[endpoint]]\nurl = '{server.url}'\n{key}[[endpoint]]\nurl = 'http://127.0.0.1:1'\n"
            config.write_text(endpoints, encoding="utf-8")
            assert words in outrider(*command, code=code).err
        assert Path(outrider("pull").out.strip()).parent == tmp_path / "cache" / "drafts"
        monkeypatch.setenv("OUTRIDER_CLOUD", f"{server.url} {other.url}")
        assert f"at {server.url}" in outrider("pull", "--list").out
        assert "requires an API key" in outrider("pull", "--cloud", other.url, code=2).err
        keyed = ["--server", other.url, "--key-file", config.parent / "cloud.key"]
        assert "has no drafts" in outrider("pull", *keyed, code=2).err
