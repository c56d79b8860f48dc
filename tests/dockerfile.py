"""Reads Dockerfiles as far as tests/test_deploy.py needs: stages, instructions, exec forms."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Instruction:
    """One instruction: its name in capitals and its text, continued lines joined."""

    name: str
    text: str

    @property
    def exec_form(self) -> list[str]:
        """The arguments of an instruction in exec form. Fails for the shell form, which would hide signals."""
        words = json.loads(self.text)
        assert isinstance(words, list) and all(isinstance(word, str) for word in words), self.text
        return words


@dataclass(frozen=True)
class Stage:
    """A stage: its base image with arguments filled in, and its instructions."""

    base: str
    instructions: tuple[Instruction, ...]

    def all(self, name: str) -> list[Instruction]:
        """The stage's instructions of this name."""
        return [each for each in self.instructions if each.name == name]

    def one(self, name: str) -> Instruction:
        """The stage's only instruction of this name."""
        (only,) = self.all(name)
        return only

    @property
    def environment(self) -> dict[str, str]:
        """What ENV sets."""
        return dict(re.findall(r"(\w+)=(\S+)", " ".join(each.text for each in self.all("ENV"))))


@dataclass(frozen=True)
class Dockerfile:
    """A parsed Dockerfile. arguments: defaults of all ARG, by name."""

    stages: tuple[Stage, ...]
    arguments: Mapping[str, str]

    @classmethod
    def read(cls, path: Path) -> Dockerfile:
        """Parses the file."""
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not re.match(r"\s*(#|$)", line)]
        instructions = []
        for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
            name, text = line.split(maxsplit=1)
            instructions.append(Instruction(name.upper(), text.strip()))
        arguments = dict(each.text.split("=", 1) for each in instructions if each.name == "ARG")
        starts = [number for number, each in enumerate(instructions) if each.name == "FROM"]
        stages = []
        for begin, end in zip(starts, [*starts[1:], len(instructions)], strict=True):
            image = instructions[begin].text.split()[0]
            for name, value in arguments.items():
                image = image.replace(f"${{{name}}}", value)
            stages.append(Stage(image, tuple(instructions[begin + 1 : end])))
        return cls(tuple(stages), arguments)

    @property
    def health_check(self) -> list[str]:
        """The last stage's health check, in exec form."""
        options, _, command = self.stages[-1].one("HEALTHCHECK").text.partition("CMD ")
        assert "--start-period=" in options
        return Instruction("CMD", command).exec_form

    @property
    def command(self) -> list[str]:
        """What a container runs: entry point and default arguments."""
        last = self.stages[-1]
        return last.one("ENTRYPOINT").exec_form + last.one("CMD").exec_form
