"""Writes and reads the file of a parked prefix: a header that is checked first, token ids, the bytes of its blocks.

    8 bytes   magic, with the format's version
    4 bytes   length of the header, little endian
    header    JSON: what must be equal (target, owner, name, layout, block size), counts, time, two SHA-256
    32 bytes  SHA-256 of all before
    ids       uint32, little endian
    blocks    [num_blocks, bytes of a block], as `BlockRuntime.read_blocks` gives them

No pickle. SHA-256 finds damage; it does not prove who wrote: whoever may write to the directory is trusted.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import stat
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

MAGIC: Final = b"OUTRKV1\n"
SUFFIX: Final = ".kv"
PART_SUFFIX: Final = ".part"
_MAX_HEADER: Final = 1 << 16
_DIGEST_BYTES: Final = 32
_SKEW_S: Final = 60.0
"""Between the clocks of replicas."""


class BadFile(Exception):
    """A file that must not be used; the message says why, and nothing of its content."""


@dataclass(frozen=True)
class SpillTarget:
    """What a file must be of: equal for replicas that may read each other's.

    target: identity of the target. layout: of a cache block, as `BlockRuntime.block_layout`. vocab_size, max_tokens:
    bounds on ids and their number.
    """

    target: str
    layout: tuple[str, ...]
    block_size: int
    block_bytes: int
    vocab_size: int
    max_tokens: int

    def place(self, owner: bytes, name: str) -> str:
        """The file's name: digests of the owner and of the prefix's name, which only the owner was given."""
        key = hashlib.sha256(self.target.encode()).digest()
        secret = hashlib.blake2b(owner, key=key, person=b"outrider spill").digest()
        own = hashlib.blake2b(b"owner", key=secret, digest_size=8).hexdigest()
        return f"{own}-{hashlib.blake2b(name.encode(), key=secret, digest_size=16).hexdigest()}{SUFFIX}"

    def facts(self, place: str) -> dict[str, Any]:
        """The part of the header that must be equal."""
        return {
            "target": self.target,
            "type": "exact",  # earlier versions could round: those files have another type
            "layout": list(self.layout),
            "block_size": self.block_size,
            "block_bytes": self.block_bytes,
            "place": place,
        }


@dataclass(frozen=True, slots=True)
class Spilled:
    """A prefix on disk, its header and ids checked, its blocks not yet. created: seconds of the wall clock."""

    path: Path
    tokens: array[int]
    num_blocks: int
    created: float
    data_start: int
    data_bytes: int
    data_digest: str


def write(path: Path, target: SpillTarget, tokens: Sequence[int], data: NDArray[np.uint8], created: float) -> int:
    """Writes the file, readable by this user only, and renames it into place; returns its bytes. Raises OSError."""
    ids = np.asarray(tokens, dtype="<u4").tobytes()
    flat = np.ascontiguousarray(data).reshape(-1).data
    header = json.dumps(
        target.facts(path.name)
        | {
            "num_tokens": len(tokens),
            "num_blocks": len(data),
            "created": created,
            "tokens_sha256": hashlib.sha256(ids).hexdigest(),
            "data_sha256": hashlib.sha256(flat).hexdigest(),
        }
    ).encode()
    start = MAGIC + struct.pack("<I", len(header)) + header
    partial = path.with_name(f"{path.name}.{os.getpid()}{PART_SUFFIX}")
    partial.unlink(missing_ok=True)
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(start + hashlib.sha256(start).digest() + ids)
            file.write(flat)
            size = file.tell()
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    return size


def open_checked(path: Path) -> BinaryIO:
    """Opens a regular file of this user, and no link. Raises OSError or BadFile."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    file = os.fdopen(os.open(path, flags), "rb")
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode) or (hasattr(os, "geteuid") and found.st_uid != os.geteuid()):
        file.close()
        raise BadFile("it is no file of this user")
    return file


def read_head(path: Path, target: SpillTarget, now: float, max_s: float) -> Spilled:
    """Reads and checks everything but the blocks. Raises OSError (not there) or BadFile."""
    with open_checked(path) as file:
        fixed = file.read(len(MAGIC) + 4)
        if len(fixed) < len(MAGIC) + 4 or not fixed.startswith(MAGIC):
            raise BadFile("it has another format")
        (length,) = struct.unpack("<I", fixed[len(MAGIC) :])
        if length > _MAX_HEADER:
            raise BadFile("its header is too long")
        header, digest = file.read(length), file.read(_DIGEST_BYTES)
        if not hmac.compare_digest(hashlib.sha256(fixed + header).digest(), digest):
            raise BadFile("its header is damaged")
        facts = json.loads(header)
        expected = target.facts(path.name)
        if {key: facts.get(key) for key in expected} != expected:
            raise BadFile("it is of another target, owner or cache")
        num_tokens, num_blocks, created = facts["num_tokens"], facts["num_blocks"], facts["created"]
        if not 0 < num_tokens <= target.max_tokens or not 0 < num_blocks * target.block_size <= num_tokens:
            raise BadFile("its counts are impossible")
        if not now - max_s < created <= now + _SKEW_S:
            raise BadFile("it is too old, or of the future")
        ids = file.read(4 * num_tokens)
        start = file.tell()
        if hashlib.sha256(ids).hexdigest() != facts["tokens_sha256"]:
            raise BadFile("its ids are damaged")
        data_bytes = num_blocks * target.block_bytes
        if os.fstat(file.fileno()).st_size != start + data_bytes:
            raise BadFile("it has another length")
    tokens = np.frombuffer(ids, dtype="<u4")
    if int(tokens.max()) >= target.vocab_size:
        raise BadFile("it has ids beyond the vocabulary")
    found = array("i", tokens.tolist())
    return Spilled(path, found, num_blocks, created, start, data_bytes, facts["data_sha256"])


def read_blocks(spilled: Spilled) -> NDArray[np.uint8]:
    """Reads and checks the blocks: [num_blocks, bytes of a block]. Raises OSError or BadFile."""
    with open_checked(spilled.path) as file:
        file.seek(spilled.data_start)
        data = np.fromfile(file, np.uint8, spilled.data_bytes)
    if len(data) != spilled.data_bytes or hashlib.sha256(data.data).hexdigest() != spilled.data_digest:
        raise BadFile("its blocks are damaged")
    return data.reshape(spilled.num_blocks, -1)
