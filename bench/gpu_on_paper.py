"""Assumes targets, GPUs and what a step takes on them, for `bench.scale`. Measured is only what a comment says is.

A step of a replica takes a fixed time, and the longest of reading its weights and multiplying by them, and reading the
keys and values of each sequence once. A mixture of experts reads the experts that the step's tokens are routed to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

GB: Final = 1e9
_HOURS: Final = 1 / 3600.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """bandwidth: bytes/s that kernels reach. flops: by bytes of a weight, that large products reach."""

    name: str
    memory: float
    bandwidth: float
    flops: dict[int, float]
    dollars_per_hour: float


# Assumed: peaks of 3.35 TB/s (H100 SXM) and 4.8 (H200), of 989 TFLOP/s in BF16 and 1,979 in FP8, dense. What kernels
# reach of them: 0.8 of the bandwidth, with which the 8B shape takes 7.6 ms at one sequence and 9.4 at 32, where
# bench.gpu measured 7.6 and 10.0 (docs/benchmarks.md), and 0.6 of the arithmetic. Neither that nor the prices were
# looked up.
H100: Final = Gpu("H100", 80 * GB, 0.8 * 3.35e12, {2: 0.6 * 989e12, 1: 0.6 * 1979e12}, 2.5)
H200: Final = Gpu("H200", 141 * GB, 0.8 * 4.8e12, {2: 0.6 * 989e12, 1: 0.6 * 1979e12}, 3.5)

USABLE: Final = 0.9
"""Of the memory: vLLM's default share (`gpu_memory_utilization`)."""


@dataclass(frozen=True, slots=True)
class Model:
    """Weights by number; always: those that every token uses. experts: of a layer, of which a token is routed to
    `routed`. kv: bytes of a token's keys and values. attention_flops: of a token, for each position that it attends to.
    fixed_s: of a step, whatever its size: launches, sampling, and the exchange between GPUs.
    """

    name: str
    weights: float
    always: float
    weight_bytes: int
    kv: float
    attention_flops: float
    fixed_s: float
    experts: int = 1
    routed: int = 1

    def read(self, num_tokens: int) -> float:
        """Bytes of weights that a step reads, with routing that is even and independent: each expert is missed by a
        token with probability 1 - routed / experts.
        """
        used = 1.0 - (1.0 - self.routed / self.experts) ** num_tokens
        return self.weight_bytes * (self.always + used * (self.weights - self.always))

    @property
    def active(self) -> float:
        """Weights that a token is multiplied by."""
        return self.always + self.routed / self.experts * (self.weights - self.always)

    def seconds(self, gpu: Gpu, num_gpus: int, num_sequences: int, num_tokens: int, context: int) -> float:
        """Of a step, spread evenly over the GPUs."""
        bandwidth, flops = num_gpus * gpu.bandwidth, num_gpus * gpu.flops[self.weight_bytes]
        products_s = max(self.read(num_tokens) / bandwidth, 2.0 * self.active * num_tokens / flops)
        # Keys and values stay in BF16, and attention computes in it.
        attention_s = max(
            num_sequences * context * self.kv / bandwidth,
            num_tokens * context * self.attention_flops / (num_gpus * gpu.flops[2]),
        )
        return self.fixed_s + products_s + attention_s


# fixed_s of the first: 7.6 ms measured at one sequence, less the weights' 5.7 (docs/benchmarks.md, "On a GPU").
DENSE_8B: Final = Model(
    "8B dense", 7.6e9, 7.6e9, 2, 36 * 8 * 128 * 2 * 2, 36 * 32 * 128 * 4, 1.9e-3
)  # Qwen3-8B's shape
# Llama 3.1 70B's shape; two exchanges a layer of some 15 us each are 2.4 ms.
DENSE_70B: Final = Model("70B dense", 70.6e9, 70.6e9, 2, 80 * 8 * 128 * 2 * 2, 80 * 64 * 128 * 4, 4.3e-3)
# DeepSeek-V3's shape (arXiv 2412.19437): 671B, of which 37B are active; 256 routed experts a layer, 8 of them for a
# token; FP8 weights; 61 layers of latent attention with 576 numbers a token and 128 heads.
MIXTURE: Final = Model(
    "671B mixture", 671e9, 17e9, 1, 61 * 576 * 2, 61 * 128 * (576 + 512) * 2, 5.0e-3, experts=256, routed=8
)
# Llama 3.2 1B's shape, in BF16; its fixed part is less than the 8B's by its 16 layers of 36.
DRAFT: Final = Model("1B draft", 1.24e9, 1.24e9, 2, 16 * 8 * 64 * 2 * 2, 16 * 32 * 64 * 4, 0.9e-3)


@dataclass(frozen=True, slots=True)
class Replica:
    """A target on its GPUs, each of whose texts has so many positions on average."""

    model: Model
    gpu: Gpu
    num_gpus: int
    context: int

    def step_s(self, num_sequences: int, num_tokens: int) -> float:
        """Of a step."""
        return self.model.seconds(self.gpu, self.num_gpus, num_sequences, num_tokens, self.context)

    def draft_s(self, num_sequences: int) -> float:
        """Of one token of the draft beside, for so many sequences."""
        return DRAFT.seconds(self.gpu, self.num_gpus, num_sequences, num_sequences, self.context)

    def places(self, with_draft: bool) -> int:
        """Sequences whose keys and values fit: the draft's, too, where it is beside the target."""
        models = (self.model, DRAFT) if with_draft else (self.model,)
        free = USABLE * self.num_gpus * self.gpu.memory - sum(each.weights * each.weight_bytes for each in models)
        return int(free // (self.context * sum(each.kv for each in models)))

    @property
    def dollars_per_s(self) -> float:
        """Of all its GPUs."""
        return self.num_gpus * self.gpu.dollars_per_hour * _HOURS


def replicas(context: int) -> tuple[Replica, ...]:
    """The three targets: on one GPU, on four (140 GB of weights do not fit two), on eight."""
    return (
        Replica(DENSE_8B, H100, 1, context),
        Replica(DENSE_70B, H100, 4, context),
        Replica(MIXTURE, H200, 8, context),
    )
