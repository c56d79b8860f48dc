"""Trains an EAGLE-3 head for the reference target, so that vLLM's proposer has one to draft with.

    PYTHONPATH=reference python -m training.eagle_head OUT [--minutes 75] [--threads 1]

The head (Li et al. 2025, arXiv 2503.01840) is one layer that reads the target's hidden states of three depths and the
next token's embedding, and guesses the token after it; its own state stands for the target's in further passes, and is
trained to: each pass sees the target's states up to where they are known, and its own from there on. It learns the
target's distributions over the standard library's source, held-out files left out. Prints how often its likeliest token
is the target's, by pass, on held-out text. What it writes holds no embeddings: vLLM shares the target's.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn
from torch.nn.functional import embedding, kl_div, pad, silu
from transformers import AutoModelForCausalLM

from outrider.reference import target_dir
from training.corpus import load_corpus
from training.data import Windows, encode_files

DEPTHS: Final = (1, 3, 5)
"""Layers whose inputs the head reads."""
ROWS: Final = 4
LENGTH: Final = 128
RATE: Final = 1.5e-3
WARM_UP: Final = 100
MORE_PASSES_FROM: Final = 0.6
"""Of the time, from which three passes are trained, not two."""
LATER: Final = 0.8
"""Weight of a pass for each one before it."""
NUM_TESTED: Final = 5
"""Passes that are tested."""


def normed(weight: torch.Tensor, rows: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm, as Llama's."""
    return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps) * weight


class Head(nn.Module):
    """The layer, with the names of vLLM's `Eagle3LlamaForCausalLM`; config: the target's."""

    def __init__(self, config: Any, norm: torch.Tensor) -> None:
        super().__init__()
        self._config, size, heads = config, config.hidden_size, config.num_attention_heads
        keys = config.num_key_value_heads * config.head_dim
        self.fc = nn.Linear(len(DEPTHS) * size, size, bias=False)
        self.projections = nn.ModuleDict(
            {
                "q": nn.Linear(2 * size, heads * config.head_dim, bias=False),
                "k": nn.Linear(2 * size, keys, bias=False),
                "v": nn.Linear(2 * size, keys, bias=False),
                "o": nn.Linear(heads * config.head_dim, size, bias=False),
                "gate": nn.Linear(size, config.intermediate_size, bias=False),
                "up": nn.Linear(size, config.intermediate_size, bias=False),
                "down": nn.Linear(config.intermediate_size, size, bias=False),
            }
        )
        names = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        self.norms = nn.ParameterDict({name: torch.ones(size) for name in names})
        self.norm = nn.Parameter(norm.clone())
        for layer in self.projections.values():
            nn.init.normal_(layer.get_parameter("weight"), std=0.02)
        with torch.no_grad():  # it begins with the deepest states
            self.fc.weight.zero_()
            self.fc.weight[:, -size:].copy_(torch.eye(size))
        angles = config.rope_parameters["rope_theta"] ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
        turns = torch.arange(LENGTH)[:, None] * angles
        self._cos, self._sin = (torch.cat([each, each], -1) for each in (turns.cos(), turns.sin()))

    def weights(self) -> dict[str, torch.Tensor]:
        """By the names of a checkpoint."""
        found: dict[str, torch.Tensor] = {"fc.weight": self.fc.weight, "norm.weight": self.norm}
        for name, layer in self.projections.items():
            part = "self_attn" if name in "qkvo" else "mlp"
            found[f"midlayer.{part}.{name}_proj.weight"] = layer.get_parameter("weight")
        found |= {f"midlayer.{name}.weight": norm for name, norm in self.norms.items()}
        return {name: weight.detach().contiguous() for name, weight in found.items()}

    def rows(self, states: torch.Tensor) -> torch.Tensor:
        """What the target's output layer is applied to."""
        return normed(self.norm, states, self._config.rms_norm_eps)

    def forward(
        self,
        embeddings: torch.Tensor,
        states: torch.Tensor,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
    ) -> torch.Tensor:
        """One pass over all places: states [rows, length, H] of this one, from those of the last.

        keys, values: of the passes before, to which this one's are added. A place sees the first pass's up to as many
        places back as there were passes since, and of each later one a single key: its own past.
        """
        config, layer = self._config, self.projections
        eps, count, length = config.rms_norm_eps, states.shape[0], states.shape[1]
        first = [
            normed(self.norms["input_layernorm"], embeddings, eps),
            normed(self.norms["hidden_norm"], states, eps),
        ]
        both = torch.cat(first, -1)

        def split(name: str, heads: int) -> torch.Tensor:
            rows: torch.Tensor = layer[name](both)
            return rows.view(count, length, heads, config.head_dim).transpose(1, 2)

        shared = config.num_attention_heads // config.num_key_value_heads
        query = self._turned(split("q", config.num_attention_heads))
        keys.append(self._turned(split("k", config.num_key_value_heads)).repeat_interleave(shared, 1))
        values.append(split("v", config.num_key_value_heads).repeat_interleave(shared, 1))
        scale, num_before = config.head_dim**-0.5, len(keys) - 1
        place = torch.arange(length)
        hidden = place[None, :] > place[:, None] - num_before
        scores = [(query @ keys[0].transpose(-1, -2) * scale).masked_fill(hidden, -1e9)]
        own = []
        for each in range(1, num_before + 1):
            shift = num_before - each
            own.append([pad(part[each], (0, 0, shift, 0))[:, :, :length] for part in (keys, values)])
        scores += [(query * key).sum(-1, keepdim=True) * scale for key, _ in own]
        weights = torch.cat(scores, -1).softmax(-1)
        seen = weights[..., :length] @ values[0]
        for index, (_, value) in enumerate(own):
            seen = seen + weights[..., length + index : length + index + 1] * value
        states = states + layer["o"](seen.transpose(1, 2).reshape(count, length, -1))
        inner = normed(self.norms["post_attention_layernorm"], states, eps)
        inner = silu(layer["gate"](inner)) * layer["up"](inner)
        added: torch.Tensor = layer["down"](inner)
        return states + added

    def _turned(self, heads: torch.Tensor) -> torch.Tensor:
        """With rotary positions; [rows, heads, length, D]."""
        first, second = heads.chunk(2, -1)
        return heads * self._cos + torch.cat([-second, first], -1) * self._sin


class Trainer:
    """The target, frozen, and a head that learns from it."""

    def __init__(self) -> None:
        self.target = AutoModelForCausalLM.from_pretrained(target_dir(), dtype=torch.float32).eval()
        self.target.requires_grad_(False)
        self.head = Head(self.target.config, self.target.model.norm.weight)
        corpus, tokenizer = load_corpus(), Tokenizer.from_file(str(Path(target_dir()) / "tokenizer.json"))
        self.train = Windows(encode_files(tokenizer, corpus.train, seed=1), LENGTH - 1, seed=1)
        self.heldout = Windows(encode_files(tokenizer, corpus.heldout), LENGTH - 1, seed=1)

    def passes(self, ids: torch.Tensor, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For each pass over the ids [rows, length], the head's and the target's logits, [rows, places, V] each."""
        with torch.no_grad():
            found = self.target.model(ids, output_hidden_states=True)
            depths = torch.cat([found.hidden_states[layer] for layer in DEPTHS], -1)
            targets = self.target.lm_head(found.last_hidden_state)
        embeddings = embedding(torch.roll(ids, -1, 1), self.target.model.embed_tokens.weight)
        states, keys, values = self.head.fc(depths), list[torch.Tensor](), list[torch.Tensor]()
        for index in range(count):
            if index:  # a place goes on from the state of the one before it
                states = pad(states, (0, 0, 1, 0))[:, :-1]
            states = self.head(embeddings, states, keys, values)
            guesses = self.target.lm_head(self.head.rows(states))
            yield guesses[:, index:-1], targets[:, index + 1 :]

    def agreement(self, batches: int) -> list[float]:
        """How often the likeliest tokens are the same on held-out text, by pass."""
        same = torch.zeros(NUM_TESTED)
        with torch.no_grad():
            for batch in range(batches):
                for index, (guesses, targets) in enumerate(self.passes(self.heldout.batch(batch, ROWS), NUM_TESTED)):
                    same[index] += (guesses.argmax(-1) == targets.argmax(-1)).float().mean() / batches
        return [round(float(each), 3) for each in same]

    def run(self, seconds: float, every_s: float = 180.0) -> None:
        """Trains for so long."""
        optimizer = torch.optim.AdamW(self.head.parameters(), RATE, betas=(0.9, 0.95), weight_decay=0.0)
        began, reported, step = time.monotonic(), -every_s, 0
        while (spent := time.monotonic() - began) < seconds:
            share = spent / seconds
            for group in optimizer.param_groups:
                group["lr"] = RATE * min(1.0, (step + 1) / WARM_UP) * (0.52 + 0.5 * math.cos(math.pi * share))
            loss = torch.zeros(())
            count = 3 if share > MORE_PASSES_FROM else 2
            for index, (guesses, targets) in enumerate(self.passes(self.train.batch(step, ROWS), count)):
                places = guesses.shape[0] * guesses.shape[1]
                off = kl_div(guesses.log_softmax(-1), targets.softmax(-1), reduction="sum") / places
                loss = loss + LATER**index * off
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
            optimizer.step()
            step += 1
            if spent - reported > every_s:
                reported = spent
                print(f"{spent:.0f} s, {step * ROWS * LENGTH} tokens: agreement {self.agreement(3)}", flush=True)

    def save(self, place: Path) -> None:
        """As vLLM reads it."""
        config = self.target.config
        place.mkdir(parents=True, exist_ok=True)
        save_file(self.head.weights(), place / "model.safetensors")
        kept = (
            *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
            *("vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "hidden_act"),
            *("bos_token_id", "eos_token_id"),
        )
        found = {name: getattr(config, name) for name in kept} | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "draft_vocab_size": config.vocab_size,
            "tie_word_embeddings": False,
            "dtype": "float32",
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(DEPTHS), "use_aux_hidden_state": True},
        }
        (place / "config.json").write_text(json.dumps(found, indent=2), encoding="utf-8")


def main(given: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the directory that is written")
    parser.add_argument("--minutes", type=float, default=75.0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(given)
    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    trainer = Trainer()
    trainer.run(60 * options.minutes)
    print(f"agreement by pass: {trainer.agreement(12)}")
    trainer.save(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
