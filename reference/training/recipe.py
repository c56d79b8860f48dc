"""Holds the reference pair's shapes, seeds and minutes: every choice of its training."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from outrider.export.distill.trainer.optim import DistillPlan, Rates
from outrider.export.distill.trainer.rollout import PoolPlan
from training.pretrain import Plan
from training.vocabulary import VOCABULARY_SIZE

MAX_POSITIONS = 1024
DATA_SEED = 20
TARGET_SEED = 21
DRAFT_SEED = 22
DISTILL_SEED = 23
LONG_SEED = 24
LONG_ROPE_THETA = 60_000.0
"""The draft's rotary base from its long stage on, in place of 10,000: at 1,024 positions the slowest rotations are then
about those that it learned at 256. It agrees better at far positions before any training (docs/log.md has a table), so
the stage has less to mend.
"""

LONG_WRITTEN = (64, 192)
"""Least and most tokens that the target writes after a real passage in a long row; the upper end is excluded."""

LONG_PASSAGES = 8192
LONG_BEGINNINGS = 800
"""Prompts of the first pool among those of a long one: the target writes nearly the whole row after them."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The plans of the trained stages and of their pools.

    long_pools: of the second distillation, one for each length of row; it trains on all of them in every step.
    """

    target: Plan
    draft: Plan
    pool: PoolPlan
    distillation: DistillPlan
    long_pools: tuple[PoolPlan, ...]
    long_distillation: DistillPlan

    def scaled(self, factor: float) -> Recipe:
        """The same recipe with every stage's minutes multiplied by `factor`; small factors are for a quick test."""
        return Recipe(
            target=replace(self.target, minutes=self.target.minutes * factor),
            draft=replace(self.draft, minutes=self.draft.minutes * factor),
            pool=replace(self.pool, minutes=factor * (self.pool.minutes or 0.0)),
            distillation=replace(self.distillation, minutes=factor * (self.distillation.minutes or 0.0)),
            long_pools=tuple(replace(pool, minutes=factor * (pool.minutes or 0.0)) for pool in self.long_pools),
            long_distillation=replace(self.long_distillation, minutes=factor * (self.long_distillation.minutes or 0.0)),
        )


REFERENCE_RECIPE = Recipe(
    target=Plan(minutes=48.0, rates=Rates(), seed=TARGET_SEED),
    draft=Plan(minutes=15.0, rates=Rates(), seed=DRAFT_SEED, phases=((0.0, 256),)),
    pool=PoolPlan(minutes=4.5, seed=DISTILL_SEED, temperatures=(0.5, 0.8, 1.0)),
    distillation=DistillPlan(minutes=30.0, seed=DISTILL_SEED, temperature_shares=(0.2, 0.65, 0.15)),
    long_pools=(
        PoolPlan(minutes=2.5, seed=LONG_SEED, row_length=192, rows=256, temperatures=(0.5, 0.8, 1.0)),
        PoolPlan(minutes=3.0, seed=LONG_SEED, row_length=512, rows=128, temperatures=(0.5, 0.8, 1.0)),
        PoolPlan(minutes=6.5, seed=LONG_SEED, row_length=1024, rows=64, temperatures=(0.5, 0.8, 1.0)),
    ),
    long_distillation=DistillPlan(
        minutes=33.0,
        seed=LONG_SEED,
        rates=Rates(muon=0.01, adamw=1.5e-3, weight_decay=0.01),
        temperature_shares=(0.2, 0.65, 0.15),
        pool_rows=(4, 3, 2),
        blend=(0.0, 0.25),
        average_decay=0.99,
    ),
)


def llama(
    hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, feed_forward: int, rope_theta: float = 10_000.0
) -> LlamaConfig:
    """A Llama configuration with tied embeddings and the pair's vocabulary."""
    return LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=feed_forward,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        attn_implementation="sdpa",
    )


def new_target() -> PreTrainedModel:
    """The target before training: 14.6M parameters, fp32."""
    torch.manual_seed(TARGET_SEED)
    return LlamaForCausalLM(llama(448, 6, heads=8, kv_heads=2, head_dim=64, feed_forward=1152))


def new_draft(*, is_long: bool = False) -> PreTrainedModel:
    """The draft before training: 1.4M parameters, fp32; `is_long` with the rotary base of its long stage."""
    torch.manual_seed(DRAFT_SEED)
    theta = LONG_ROPE_THETA if is_long else 10_000.0
    return LlamaForCausalLM(llama(128, 4, heads=4, kv_heads=2, head_dim=32, feed_forward=448, rope_theta=theta))
