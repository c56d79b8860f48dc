"""States the options that several commands share, in groups, as `takes_options` takes them."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Final

import click
import typer
from click.core import ParameterSource

from outrider.edge.devices.placement import AS_BUNDLED, DraftChoice, DraftRuntime
from outrider.edge.devices.power import OnBattery
from outrider.edge.drafting.depth import Effort
from outrider.edge.setup.endpoints import Keys, read_key_file, require_private
from outrider.edge.setup.settings import Settings
from outrider.models.bundle.reference_export import AUTO, DEFAULT_VERIFIER_URL, REFERENCE
from outrider.models.cache_folder import expanded
from outrider.models.client.certificate import ClientCertificate
from outrider.models.errors import ConfigError
from outrider.models.picks.sampling import SamplingParams

Clouds = Annotated[
    list[str], typer.Option("--cloud", "--server", help="Verifier's address; repeat for others to fall back on.")
]


LOOKUP: Final = "--lookup or --no-lookup"

TREE: Final = ("width", "lookup")
"""Options of drafted trees."""
DRAFTS: Final = (
    *("runtime", "draft_device", "emulate_npu"),
    *TREE,
    *("on_battery", "depth", "effort", "threads", "same_tokenizer"),
)
"""Options that have no effect where nothing drafts."""
OF_MODELS: Final = ("threads", "draft_context", "max_drafting", "offline_ok", "same_tokenizer")
"""Options that have no effect where no model drafts."""


OF_CLOUDS: Final = ("api_key", "key_file", "allow_http", "tls_client_cert", "offline_ok", "steady", "model")
"""Options that have no effect where the verifier is this machine's own."""


class DraftPath(click.types.StringParamType):
    """A bundle's path, or a word for one. In a variable, several are separated as in PATH."""

    envvar_list_splitter = os.pathsep


Drafts = Annotated[
    list[str],
    typer.Option(
        "--draft",
        envvar="OUTRIDER_DRAFT",
        click_type=DraftPath(),
        help=f"Draft bundle; '{REFERENCE}': the reference draft; '{AUTO}': the pulled draft that fits the verifier's "
        f"target, or else '{REFERENCE}'. Repeat it for drafts to choose from: the fastest here is taken.",
    ),
]
EmulateNpu = Annotated[bool, typer.Option("--emulate-npu", help="Run the NPU path on the CPU, to try it; slow.")]
Width = Annotated[str, typer.Option(help="Guesses per token: auto, or 1 to 8; 1 drafts a single path.")]
HowMuch = Annotated[Effort, typer.Option(help="How much the device drafts; low saves energy.")]
Lookup = Annotated[
    bool | None,
    typer.Option("--lookup/--no-lookup", help="Also copy earlier passages of the text.", show_default="lookup"),
]
Threads = Annotated[int, typer.Option(min=0, help="Threads of the draft; 0 leaves it to the runtime.")]
OfflineOk = Annotated[
    bool,
    typer.Option("--offline-ok", help="Where no cloud answers, let the draft write alone, marked as unverified."),
]


SameTokenizer = Annotated[
    bool, typer.Option("--same-tokenizer", help="Refuse a draft with another tokenizer than the target's.")
]


REMOVED_DRAFTING: Final = {
    "--draft-bytes": "A device sends 150 bytes of drafts per token of the text at most; with --width 1 about 10.",
    "--provider": "Give the execution provider's name to --draft-device.",
    "--patience-ms": "The target chooses how long it waits for a draft, by its step times.",
    "--tls-client-key": "Put the key into the file of --tls-client-cert, after the certificates.",
}
"""What to do in place of options that there were once."""


def source_of(parameter: str) -> ParameterSource:
    """Where the option's value comes from; outside of a command, where options are values, it counts as typed."""
    context = click.get_current_context(silent=True)
    source = context.get_parameter_source(parameter) if context is not None else None
    return source or ParameterSource.COMMANDLINE


def is_typed(parameter: str) -> bool:
    """Whether the option stands on the command line: a value from the environment or the file is for every run."""
    return source_of(parameter) is ParameterSource.COMMANDLINE


def refuse_idle(options: PlaceOptions | KeyOptions | SourceOptions, is_so: bool, reason: str, *parameters: str) -> None:
    """Raises ConfigError for options that were typed and have no effect. is_so: whether `reason`, why not, applies."""
    defaults = {each.name: each.default for each in fields(options)}
    idle = [name for name in parameters if getattr(options, name) != defaults[name] and is_typed(name)]
    if is_so and idle:
        names = [LOOKUP if name == "lookup" else f"--{name.replace('_', '-')}" for name in idle]
        it = "it" if len(names) == 1 else "them"
        raise ConfigError(f"{reason}, so {' and '.join(names)} would have no effect; leave {it} out")


def refuse_idle_tree(options: PlaceOptions, width: str) -> None:
    """Raises ConfigError for options of a drafted tree that have no effect beside one another."""
    refuse_idle(options, width == "1", "--width 1 drafts a single path", "lookup")
    refuse_idle(options, options.runtime == "ngram", "with --runtime ngram nothing but lookup drafts", "lookup")


Docs = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Find passages for the prompt in the text, Markdown and program files below DIR, and draft from them.",
    ),
]


AS_PARAM: Final = "Give it as --param NAME=NUMBER, such as --param top_p=0.9."
_SAMPLING: Final = ("top_k", "top_p", "min_p")
_INTEGERS: Final = ("top_k", "min_tokens")


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """Which drafts, and which clouds."""

    draft: Drafts = field(default_factory=lambda: [AUTO])
    cloud: Clouds = field(default_factory=lambda: [DEFAULT_VERIFIER_URL])
    target: Annotated[
        str | None,
        typer.Option(
            metavar="BUNDLE",
            help=f"Run the verifier on this machine, too, for this target bundle; '{REFERENCE}': the reference target. "
            "In place of --cloud.",
            show_default=False,
        ),
    ] = None
    steady: Annotated[
        bool,
        typer.Option(
            "--steady",
            help="Send and get texts in messages of one size at a fixed pace, so that an eavesdropper learns nothing "
            "from their sizes and times.",
        ),
    ] = False

    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Which of the verifier's models writes: the target, or a LoRA adapter of it. Default: the target.",
            show_default=False,
        ),
    ] = None
    same_tokenizer: SameTokenizer = False
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="The target's tokenizer, for a draft with another one; default: the verifier's.",
            show_default=False,
        ),
    ] = None

    def _choose_verifier(self) -> None:
        """Leaves `target` unset where an address from a source that comes first takes its place.

        Raises ConfigError where both come from one source, and for typed options that only matter to a --cloud, or
        that have no effect.
        """
        refuse_idle(self, self.same_tokenizer, "--same-tokenizer maps no draft", "tokenizer")
        if self.target is None:
            return
        ours, theirs = source_of("target"), source_of("cloud")
        is_outside = click.get_current_context(silent=True) is None
        if self.cloud != [DEFAULT_VERIFIER_URL] if is_outside else theirs is not ParameterSource.DEFAULT:
            if ours is theirs:
                raise ConfigError(
                    "--target runs the verifier on this machine and --cloud names one that runs; leave one of them out"
                )
            if theirs.value < ours.value:
                object.__setattr__(self, "target", None)
                return
        of_clouds = [name for name in OF_CLOUDS if hasattr(self, name)]
        refuse_idle(self, True, "--target asks no other verifier", *of_clouds)
        object.__setattr__(self, "model", None)  # a configured one is another verifier's


@dataclass(frozen=True, kw_only=True)
class KeyOptions:
    """Which key the clouds get, and which certificate the device shows."""

    api_key: Annotated[
        str | None,
        typer.Option(envvar="OUTRIDER_API_KEY", help="Key for the verifier; better in OUTRIDER_API_KEY or --key-file."),
    ] = None
    key_file: Annotated[Path | None, typer.Option(help="File that holds the verifier's key; only you may read it.")] = (
        None
    )
    allow_http: Annotated[
        bool, typer.Option("--allow-http", help="Send the key over http:// beyond this machine, readable on the way.")
    ] = False
    tls_client_cert: Annotated[
        Path | None,
        typer.Option(
            help="Certificate chain and its private key to show to servers that ask for one, PEM; only you may "
            "read it.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None

    def keys(self) -> Keys:
        """The keys, and the device's certificate, for the command that runs now: its options', and the endpoints' own.

        Raises ConfigError where a key and a key file come from the same place, or a file cannot be used.
        """
        context = click.get_current_context(silent=True)
        settings = context.find_object(Settings) if context is not None else None
        certificate = None
        if self.tls_client_cert is not None:
            certificate = ClientCertificate(expanded(self.tls_client_cert))
            require_private(certificate.certificate)
            certificate.check()
        sources = {name: source_of(name) for name in ("api_key", "key_file") if getattr(self, name) is not None}
        if len(set(sources.values())) < len(sources):
            raise ConfigError("both a key and a key file are given (--api-key, --key-file); leave one of them out")
        key, is_asked = None, False
        if sources:
            chosen = min(sources, key=lambda name: sources[name].value)
            key = read_key_file(expanded(self.key_file)) if self.key_file and chosen == "key_file" else self.api_key
            is_asked = sources[chosen] in (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
        endpoints = settings.endpoints if settings is not None else ()
        return Keys(key, is_asked, endpoints, is_http_allowed=self.allow_http, certificate=certificate)


@dataclass(frozen=True, kw_only=True)
class PlaceOptions:
    """Where the draft runs."""

    draft_device: Annotated[
        str | None,
        typer.Option(
            metavar="[cpu|gpu|npu|gpu.N]",
            help="What the draft runs on, gpu.1 for the second GPU; or ONNX Runtime's execution provider by full name, "
            "or prefer-npu. Default: the device that its bundle was made for.",
        ),
    ] = None
    runtime: Annotated[
        DraftRuntime | None,
        typer.Option(help="What drafts; default: the bundle's runtime. ngram copies earlier passages of the text."),
    ] = None
    emulate_npu: EmulateNpu = False
    choice: DraftChoice = field(init=False)

    def __post_init__(self) -> None:
        """Sets `choice`. Raises ConfigError where typed options contradict each other; a configured one gives way."""
        try:
            choice = self._choice(lambda name: True)
        except ConfigError:
            choice = self._choice(is_typed)
            if choice == AS_BUNDLED:
                raise
        object.__setattr__(self, "choice", choice)

    def _choice(self, counts: Callable[[str], bool]) -> DraftChoice:
        runtime = self.runtime if counts("runtime") else None
        device = self.draft_device if counts("draft_device") else None
        emulate_npu = self.emulate_npu and counts("emulate_npu")
        if device is not None and (device == "prefer-npu" or device.endswith("ExecutionProvider")):
            return DraftChoice(runtime, None, emulate_npu, device)
        return DraftChoice(runtime, device, emulate_npu)


@dataclass(frozen=True, kw_only=True)
class DraftingOptions(PlaceOptions):
    """Where the draft runs, and how much it drafts."""

    depth: Annotated[str, typer.Option(help="How far to draft ahead: auto or a number, 0 to 64.")] = "auto"
    width: Width = "auto"
    effort: HowMuch = Effort.NORMAL
    on_battery: Annotated[
        OnBattery,
        typer.Option(
            "--on-battery", help="What is drafted on battery, or when the processor is hot: half or all of it."
        ),
    ] = OnBattery.HALF
    lookup: Lookup = None
    threads: Threads = 0

    @property
    def is_looked_up(self) -> bool:
        """Whether earlier passages of a text are copied."""
        return self.lookup is not False

    def _refuse_idle_drafting(self) -> None:
        """Raises ConfigError for typed options that have no effect beside one another."""
        refuse_idle(self, self.depth != "auto", f"--depth {self.depth} does not depend on times", "effort")
        refuse_idle_tree(self, self.width)
        of_models = [name for name in OF_MODELS if hasattr(self, name)]
        refuse_idle(self, self.choice.runtime == "ngram", "with --runtime ngram no model drafts", *of_models)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How the text is drawn, but for its seed."""

    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.8
    param: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=NUMBER",
            help="Another parameter of the pick, repeatable: top_k, top_p, min_p; for `run` also repetition_penalty, "
            "presence_penalty, frequency_penalty, min_tokens, typical_p, xtc_probability and xtc_threshold.",
        ),
    ] = field(default_factory=list)
    params: SamplingParams = field(init=False)

    def _set_params(self, seed: int | None, others: Sequence[str] = ()) -> dict[str, float]:
        """Sets `params`; draws a seed where none is given. Raises SamplingError.

        others: names that --param may have beside those of the sampling; returns their numbers.
        """
        numbers = dict(_named(each, (*_SAMPLING, *others)) for each in self.param)
        seed = secrets.randbits(32) if seed is None else seed
        top_k, top_p, min_p = int(numbers.get("top_k", 0)), numbers.get("top_p", 1.0), numbers.get("min_p", 0.0)
        object.__setattr__(self, "params", SamplingParams(self.temperature, top_k, top_p, min_p, seed))
        return {name: number for name, number in numbers.items() if name not in _SAMPLING}


def _named(text: str, names: Sequence[str]) -> tuple[str, float]:
    name, _, number = text.partition("=")
    try:
        if name not in names or not math.isfinite(float(number)):
            raise ValueError
        return name, int(number) if name in _INTEGERS else float(number)
    except (ValueError, OverflowError):
        raise ConfigError(f"--param is {text!r}; expected NAME=NUMBER, with one of {', '.join(names)}") from None
