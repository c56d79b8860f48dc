"""Encodes drafts with evidence: the message of sessions whose rule is rejection or tolerance.

It says of each node what the draft model found: the distribution that the token was drawn from, or log q. It has the
numbers and parents of `tree_draft`; but under these rules drafts are one path, and the first that arrives counts.

The body, in bytes (varints as in `tree_draft`; fixed numbers are little-endian):

    varint   base: tokens that the device has seen committed in this session
    varint   first: the number of the first node; the others count up from it
    byte     n: ids of each distribution, 1 to 16; 0: nodes have log q
    then for each node:
    byte     0: its parent is the last of the `base` tokens; 1: its parent is the node before it
    with a distribution, 5 n - 1 bytes:
      byte     which of the ids was drawn
      3 bytes  n times: an id, the heaviest first
      2 bytes  n - 1 times: the weights of all but the first id. The first has the rest of 65536
    with log q:
      varint   the token id
      2 bytes  -2048 log q, at most 65535

A node with a distribution has the same length whatever it holds. So when a message arrives does not depend on what was
drawn: see `rejection`.
"""

from __future__ import annotations

import struct
from typing import Final

from outrider.models.errors import RequestError
from outrider.models.rejection import MAX_IDS, WHOLE, Evidence, SparseDistribution
from outrider.models.tree_draft import ROOT, TreeDraft, put_varint, read_varint

RULE_MEDIA_TYPE: Final = "application/vnd.outrider.rule"
MAX_RULE_NODES: Final = 64
LOG_UNIT: Final = 2048.0
_LEAST_LOG: Final = 0xFFFF


def encode_rule_draft(message: TreeDraft) -> bytes:
    """The body. All nodes have distributions of one size, or log q. A parent is ROOT or the node before."""
    first = message.evidence[0]
    num_ids = len(first.ids) if isinstance(first, SparseDistribution) else 0
    body = bytearray()
    put_varint(body, message.base)
    put_varint(body, message.first)
    body.append(num_ids)
    nodes = zip(message.tokens, message.parents, message.evidence, strict=True)
    for number, (token, parent, evidence) in enumerate(nodes, start=message.first):
        assert parent in (ROOT, number - 1), "these drafts are one path"
        body.append(0 if parent == ROOT else 1)
        if isinstance(evidence, SparseDistribution):
            assert len(evidence.ids) == num_ids, "the distributions of a message have one size"
            body.append(evidence.ids.index(token))
            for each in evidence.ids:
                body += each.to_bytes(3, "little")
            body += struct.pack(f"<{num_ids - 1}H", *evidence.weights[1:])
        else:
            put_varint(body, token)
            body += struct.pack("<H", min(_LEAST_LOG, max(0, round(-LOG_UNIT * evidence))))
    return bytes(body)


def decode_rule_draft(body: bytes) -> TreeDraft:
    """Decodes a message. Raises RequestError `invalid_request` for other bytes."""
    tokens: list[int] = []
    parents: list[int] = []
    evidence: list[Evidence] = []
    try:
        base, at = read_varint(body, 0)
        first, at = read_varint(body, at)
        num_ids, at = body[at], at + 1
        if num_ids > MAX_IDS:
            raise _invalid(f"its distributions have {num_ids} ids; expected at most {MAX_IDS}")
        while at < len(body):
            number = first + len(tokens)
            if len(tokens) == MAX_RULE_NODES:
                raise _invalid(f"it has more than {MAX_RULE_NODES} nodes")
            back, at = body[at], at + 1
            if back > min(1, number):
                raise _invalid(f"node {number} has a parent {back} numbers before it; expected 0 or 1")
            parents.append(number - 1 if back else ROOT)
            if num_ids:
                token, q = _distribution(body[at : at + 5 * num_ids - 1], num_ids)
                if (fault := q.fault(token)) is not None:
                    raise _invalid(f"the distribution of node {number}: {fault}")
                at += 5 * num_ids - 1
                evidence.append(q)
            else:
                token, at = read_varint(body, at)
                (log_q,) = struct.unpack_from("<H", body, at)
                at += 2
                evidence.append(-log_q / LOG_UNIT)
            tokens.append(token)
    except (IndexError, struct.error):
        raise _invalid("it ends within a node") from None
    if not tokens:
        raise _invalid("it has no nodes; expected at least 1")
    return TreeDraft(base, first, tokens, parents, [0] * len(tokens), evidence)


def _distribution(part: bytes, num_ids: int) -> tuple[int, SparseDistribution]:
    """The drawn token and its distribution. Raises IndexError and struct.error where bytes are missing."""
    drawn, end = part[0], 1 + 3 * num_ids
    if drawn >= num_ids:
        raise _invalid(f"it draws id {drawn} of a distribution with {num_ids}")
    rest = struct.unpack(f"<{num_ids - 1}H", part[end:])
    ids = tuple(int.from_bytes(part[start : start + 3], "little") for start in range(1, end, 3))
    return ids[drawn], SparseDistribution(ids, (WHOLE - sum(rest), *rest))


def _invalid(reason: str) -> RequestError:
    return RequestError(
        "invalid_request", f"the body is not a draft with probabilities: {reason}; see docs/protocol.md"
    )
