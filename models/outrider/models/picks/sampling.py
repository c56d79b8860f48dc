"""Samples with position-keyed noise: the pure function that the whole system rests on.

The token at absolute position `i` is `argmax(logit / temperature + g(seed, i, token))` over the tokens that survive
top-k, top-p and min-p, where `g` is a Gumbel variate computed from a counter-based hash. By the Gumbel-max theorem
(Gumbel 1954; Maddison, Tarlow and Minka 2014, arXiv 1411.0030) the pick is an exact sample of the truncated softmax.
Because the noise depends on nothing but seed, position and token id, draft and target that use it independently often
pick the same token: coupling without communication (Daliri, Musco and Suresh 2024, arXiv 2408.07978), with match
probability at least (1 - TV) / (1 + TV).

The hash, bit by bit (all arithmetic unsigned, wrapping):

    mix64(z):  z ^= z >> 30;  z *= 0xBF58476D1CE4E5B9;  z ^= z >> 27;  z *= 0x94D049BB133111EB;  z ^= z >> 31
    fmix32(h): h ^= h >> 16;  h *= 0x85EBCA6B;          h ^= h >> 13;  h *= 0xC2B2AE35;          h ^= h >> 16

    key      = mix64(mix64(seed + 0x9E3779B97F4A7C15) + position * 0xD1342543DE82EF95)       64 bits
    h(token) = fmix32(fmix32(token * 0x9E3779B1 + low32(key)) ^ high32(key))                   32 bits
    u(token) = (h + 0.5) / 2^32                                                                float64, in (0, 1)
    g(token) = -log(-log(u))                                                                   float64

mix64 is the finalizer of SplitMix64 (Steele, Lea and Flood 2014), fmix32 that of MurmurHash3 (Appleby). For a fixed key
`h` is a bijection of the token id, so no two tokens tie. Golden vectors in tests/test_sampling.py pin every bit.

This module knows numpy only; `sampling_torch` is its equal for tensors. Temperature 0 is plain argmax, ties to the
lowest id. Truncation is that of transformers' logits processors, in their order: temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.models.errors import ModelFault, SamplingError

_U64: Final = (1 << 64) - 1
_U32: Final = 0xFFFFFFFF
MAX_SEED: Final = (1 << 63) - 1
# No variate exceeds this, since u <= 1 - 2^-33.
MAX_GUMBEL: Final = -math.log(-math.log1p(-(2.0**-33)))
# One variate in 404 exceeds this one; it is found by comparing hashes, without logarithms.
_RARE_GUMBEL: Final = 6.0
_RARE_BITS: Final = np.uint32(math.floor(math.exp(-math.exp(-_RARE_GUMBEL)) * 2.0**32) - 1)
_MANY: Final = 4096
"""Tokens of which not all are scored: `_contenders` finds the best among them faster."""
_FEW: Final = 6
"""Tokens that are found faster one after the other than by a floor under them."""
_BLOCK: Final = 128  # logits of which one bounds the scores from below


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What decides a pick, besides the logits and the position.

    temperature: 0 is greedy; otherwise in (0, 100].
    top_k: keep the k most likely tokens (ties with the k-th are kept); 0 keeps all, and so does -1, which becomes 0.
    top_p: keep the smallest set of most likely tokens whose mass reaches top_p, in (0, 1]; 1 keeps all.
    min_p: drop tokens less likely than min_p times the most likely one, in [0, 1]; 0 keeps all.
    seed: of the position-keyed noise, 0 .. 2^63 - 1.

    Raises SamplingError on anything else, NaN included.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        _require(0.0 <= self.temperature <= 100.0, "temperature", self.temperature, "0 (greedy) to 100")
        if 0.0 < self.temperature < 1e-4:
            # logit / temperature would leave float32's exact range; whoever asks for this means greedy.
            raise SamplingError(f"temperature is {self.temperature!r}; expected 0 (greedy) or at least 0.0001")
        _require(isinstance(self.top_k, int) and self.top_k >= -1, "top_k", self.top_k, "0 or -1 (off), or more")
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)  # as vLLM says it: equal texts have equal parameters
        _require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "more than 0, up to 1 (off)")
        _require(0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "0 (off) to 1")
        _require(isinstance(self.seed, int) and 0 <= self.seed <= MAX_SEED, "seed", self.seed, "0 to 2^63 - 1")

    @property
    def is_greedy(self) -> bool:
        """Whether the pick is plain argmax."""
        return self.temperature == 0.0


def _require(is_fine: bool, name: str, found: object, expected: str) -> None:
    if not is_fine:  # NaN compares false with everything, so it ends here too
        raise SamplingError(f"{name} is {found!r}; expected {expected}")


def noise_key(seed: int, position: int) -> int:
    """The 64-bit key of one position, as the module docstring specifies it."""
    key = (mix64((seed + 0x9E3779B97F4A7C15) & _U64) + position * 0xD1342543DE82EF95) & _U64
    return mix64(key)


def mix64(z: int) -> int:
    """The 64-bit finalizer of the module docstring."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _U64
    return z ^ (z >> 31)


def _fmix32(h: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """In place; returns its argument."""
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x85EBCA6B)
    h ^= h >> np.uint32(13)
    h *= np.uint32(0xC2B2AE35)
    h ^= h >> np.uint32(16)
    return h


def noise_bits(seed: int, position: int, tokens: NDArray[np.integer]) -> NDArray[np.uint32]:
    """h(token) for each token id: uint32, same shape as `tokens`."""
    key = noise_key(seed, position)
    h = tokens.astype(np.uint32) * np.uint32(0x9E3779B1)
    h += np.uint32(key & _U32)
    _fmix32(h)
    h ^= np.uint32(key >> 32)
    return _fmix32(h)


def gumbel(seed: int, position: int, tokens: NDArray[np.integer]) -> NDArray[np.float64]:
    """g(seed, position, token) for each token id: float64, same shape as `tokens`."""
    return _variates(noise_bits(seed, position, tokens))


def _variates(bits: NDArray[np.uint32]) -> NDArray[np.float64]:
    u = bits.astype(np.float64)
    u += 0.5
    u *= 2.0**-32
    np.log(u, out=u)
    np.negative(u, out=u)
    np.log(u, out=u)
    return np.negative(u, out=u)


def survivors(logits: NDArray[np.float32], params: SamplingParams) -> NDArray[np.int64]:
    """Ids, ascending, of the tokens that top-k, top-p and min-p leave; `logits` is one row, [V]; not greedy.

    top-p keeps a token while the mass ranked strictly above it is under top_p, equally likely tokens ranked by id.
    """
    ids: NDArray[np.int64] | None = None
    kept = logits
    if 0 < params.top_k < logits.size:
        kth = np.partition(logits, logits.size - params.top_k)[logits.size - params.top_k]
        ids = np.flatnonzero(logits >= kth)
        kept = logits[ids]
    if params.top_p < 1.0 or params.min_p > 0.0:
        weights = kept - kept.max()
        weights /= np.float32(params.temperature)
        np.exp(weights, out=weights)  # the most likely token weighs 1
        inside = _nucleus(weights, params.top_p) if params.top_p < 1.0 else np.ones(weights.size, dtype=np.bool_)
        if params.min_p > 0.0:
            inside &= weights >= np.float32(params.min_p)
        chosen = np.flatnonzero(inside)
        ids = chosen if ids is None else ids[chosen]
    return np.arange(logits.size, dtype=np.int64) if ids is None else ids


def _nucleus(weights: NDArray[np.float32], top_p: float) -> NDArray[np.bool_]:
    """Mask of the smallest set of heaviest entries whose share of the whole reaches `top_p`.

    Only entries above a falling floor are sorted, so a peaked row of 152k costs little more than its sum.
    """
    wanted = top_p * float(weights.sum(dtype=np.float64))
    for floor in (1e-2, 1e-4, 1e-7, -1.0):
        heavy = weights[weights > floor]
        if floor < 0.0 or float(heavy.sum(dtype=np.float64)) >= wanted:
            break
    heavy.sort()
    above = np.cumsum(heavy[::-1], dtype=np.float64)
    # Entry r is kept while the mass above it is under `wanted`; entry 0 always is.
    count = 1 + int(np.searchsorted(above[:-1], wanted, side="left"))
    lightest = heavy[heavy.size - count]
    inside: NDArray[np.bool_] = weights > lightest
    short = count - int(np.count_nonzero(inside))
    inside[np.flatnonzero(weights == lightest)[:short]] = True
    return inside


class SurvivorFilter(Protocol):
    """Truncates further what top-k, top-p and min-p leave."""

    def narrow(
        self, logits: NDArray[np.float32], ids: NDArray[np.int64], params: SamplingParams, position: int
    ) -> NDArray[np.int64]:
        """A part of `ids`, ascending and not empty; logits: the row, [V]. A pure function; not called when greedy."""


def pick(
    logits: NDArray[np.float32], params: SamplingParams, position: int, narrowing: SurvivorFilter | None = None
) -> int:
    """The token at absolute `position` (0 is the first token of the prompt), from one row of logits, [V] float32.

    A pure function: no state is read or changed. Raises ModelFault if the row's maximum is not finite.
    """
    best = _likeliest(logits, position)
    if params.is_greedy:
        return best
    if narrowing is not None:
        ids = _pruned(logits, narrowing.narrow(logits, survivors(logits, params), params, position), params, position)
    elif params.top_k or params.top_p < 1.0 or params.min_p > 0.0:
        ids = survivors(logits, params)
    else:
        ids = _pruned(logits, None, params, position)
    return int(ids[_scores(logits, ids, params, position).argmax()])


def _likeliest(logits: NDArray[np.float32], position: int) -> int:
    """The first id with the row's maximum; raises ModelFault if that is not finite."""
    best = int(logits.argmax())
    if not math.isfinite(logits[best]):
        raise ModelFault(
            f"the model's logits at position {position} are not finite; check the export with a parity run"
        )
    return best


def _scores(
    logits: NDArray[np.float32], ids: NDArray[np.int64], params: SamplingParams, position: int
) -> NDArray[np.float64]:
    """What the pick is the argmax of, for these ids."""
    scores = logits[ids].astype(np.float64)
    scores /= params.temperature
    scores += gumbel(params.seed, position, ids)
    return scores


def _pruned(
    logits: NDArray[np.float32], ids: NDArray[np.int64] | None, params: SamplingParams, position: int
) -> NDArray[np.int64]:
    """Those of the ids that can win, None for all ids; exact."""
    kept = logits if ids is None else logits[ids]
    at = int(kept.argmax())
    best = at if ids is None else int(ids[at])
    # With g at most MAX_GUMBEL, no token this far under the leader's own score can win.
    lead = float(gumbel(params.seed, position, np.array([best]))[0])
    floor = float(logits[best]) - (MAX_GUMBEL - lead + 1e-3) * params.temperature
    able = np.flatnonzero(kept >= floor)
    return able if ids is None else ids[able]


@dataclass(frozen=True, slots=True)
class Candidates:
    """The tokens with the best scores, best first.

    tokens: ids; fewer than asked for where no more can be picked. gaps: by how much each score is
    behind the best one, in units of the noise (greedy: of the logits); but gaps[0] is the lead of the best over the
    second, infinite where there is no second.
    """

    tokens: list[int]
    gaps: list[float]


def candidates(
    logits: NDArray[np.float32],
    params: SamplingParams,
    position: int,
    count: int,
    narrowing: SurvivorFilter | None = None,
) -> Candidates:
    """The `count` best tokens by the scores that `pick` compares, for one row of logits, [V] float32.

    The first is `pick`'s token; none where every score is -inf. A pure function. Raises ModelFault if the row's maximum
    is not finite otherwise.
    """
    try:
        best = _likeliest(logits, position)
    except ModelFault:
        if np.isneginf(logits).all():
            return Candidates([], [])  # a mapped draft scores few ids, and a grammar may allow none of them
        raise
    count = max(2, count)  # the lead needs a second
    if params.is_greedy and count <= _FEW:
        # Right after a model's step each call of numpy costs ten times what it costs in a loop: as few as can be.
        tokens = _few_best(logits, best, count)
        values = [float(logits[token]) for token in tokens]
        gaps = [values[0] - value for value in values]
        gaps[0] = gaps[1] if len(gaps) > 1 else math.inf
        return Candidates(tokens, gaps)
    if params.is_greedy:
        ids = np.flatnonzero(logits >= _floor_of_best(logits, count))
        scores = logits[ids].astype(np.float64)
    elif narrowing is not None or params.top_k or params.top_p < 1.0 or params.min_p > 0.0:
        ids = survivors(logits, params)
        if narrowing is not None:
            ids = narrowing.narrow(logits, ids, params, position)
        if ids.size > _MANY:
            masked = np.full_like(logits, -np.inf)
            masked[ids] = logits[ids]
            ids, scores = _contenders(masked, params, position, count)
        else:
            scores = _scores(logits, ids, params, position)
    else:
        ids, scores = _contenders(logits, params, position, count)
    if ids.size > count:
        among = np.flatnonzero(scores >= np.partition(scores, -count)[-count])
        ids, scores = ids[among], scores[among]
    order = np.lexsort((ids, -scores))[:count]
    order = order[np.isfinite(scores[order])]  # a model may mask ids with -inf; no noise picks these
    found = scores[order]
    gaps = (found[0] - found).tolist()
    gaps[0] = gaps[1] if len(gaps) > 1 else math.inf
    return Candidates(ids[order].tolist(), gaps)


def _few_best(logits: NDArray[np.float32], best: int, count: int) -> list[int]:
    """Ids of the `count` best logits, best first, the lower id first of two that are equal; fewer where the others are
    -inf. best: the first of them.
    """
    left, found = logits.copy(), [best]
    while len(found) < count:
        left[found[-1]] = -np.inf
        following = int(left.argmax())
        if left[following] == -np.inf:
            break
        found.append(following)
    return found


def _floor_of_best(logits: NDArray[np.float32], count: int) -> float:
    """A logit that at least `count` tokens reach, if there are so many: cheap, and not much under the count-th."""
    whole = logits.size // _BLOCK * _BLOCK
    highest = logits[:whole].reshape(-1, _BLOCK).max(axis=1) if whole >= max(8, count) * _BLOCK else logits
    kept = min(count, highest.size)
    return float(np.partition(highest, -kept)[-kept])


def _contenders(
    logits: NDArray[np.float32], params: SamplingParams, position: int, count: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Ids among which the `count` best are, and their scores; exact pruning, no truncation."""
    high = np.flatnonzero(logits >= _floor_of_best(logits, count))
    reached = _scores(logits, high, params, position)
    # The count-th best score is at least this.
    least = float(np.sort(reached)[-min(count, reached.size)])
    # An ordinary variate lifts only these as high; any other token needs a rare one.
    ordinary = (least - _RARE_GUMBEL - 1e-3) * params.temperature
    rare = _rare(params.seed, position, logits.size)
    ids = np.concatenate((np.flatnonzero(logits >= ordinary), rare[logits[rare] < ordinary]))
    return ids, _scores(logits, ids, params, position)


@lru_cache(maxsize=64)
def _rare(seed: int, position: int, num_ids: int) -> NDArray[np.int64]:
    """Ids with a variate over `_RARE_GUMBEL`, ascending. Kept: a draft comes to a position by several branches."""
    return np.flatnonzero(noise_bits(seed, position, np.arange(num_ids)) >= _RARE_BITS)
