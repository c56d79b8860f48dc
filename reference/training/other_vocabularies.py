"""Trains drafts of other vocabularies for the reference target.

    PYTHONPATH=reference python -m training.other_vocabularies DIR [--minutes 4]

Three drafts of one architecture, on the text that the reference pair was trained on, for the same time:

  own     the target's tokenizer
  gpt2    byte-level BPE of 3,500 ids with GPT-2's splitting: a space belongs to the word after it
  pieces  BPE of 5,000 ids as SentencePiece makes it for Llama 2: spaces are part of the pieces, bytes where none fits

Each is exported to DIR/<kind>/bundle, in INT8 for OpenVINO. `bench.never_slower --draft` measures one in use.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import LlamaForCausalLM

from outrider.export.distill.trainer.optim import Rates
from outrider.export.make.pipeline import export_model
from outrider.export.recipes import ExportOptions
from outrider.reference import target_dir
from training.corpus import load_corpus
from training.data import SEPARATOR_ID, encode_files
from training.pretrain import Plan, pretrain
from training.recipe import DRAFT_SEED, new_draft
from training.vocabulary import END_OF_TEXT, save_tokenizer

MAX_POSITIONS = 1024


def own(texts: Iterable[str]) -> Tokenizer:
    """The target's tokenizer."""
    return Tokenizer.from_file(str(target_dir() / "tokenizer.json"))


def gpt2(texts: Iterable[str]) -> Tokenizer:
    """Byte-level BPE, split as GPT-2 does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=3500,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def pieces(texts: Iterable[str]) -> Tokenizer:
    """BPE with byte fallback over text whose spaces are U+2581, as in Llama 2: not split before, a prefix of one."""
    by_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.Replace(" ", "▁")
    learner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\n▁]+(?=▁)|▁?[^▁\n]+|[\n▁]+"), behavior="isolated")
    characters = sorted({chr(code) for code in range(33, 127)} | {"▁", "\n"})
    trainer = trainers.BpeTrainer(
        vocab_size=5000 - len(by_bytes) - 2,
        initial_alphabet=characters,
        limit_alphabet=len(characters),
        show_progress=False,
    )
    learner.train_from_iterator(texts, trainer)
    learned = json.loads(learner.to_str())["model"]
    names = [END_OF_TEXT, "<unk>", *by_bytes, *sorted(learned["vocab"], key=learned["vocab"].__getitem__)]
    vocab = {name: index for index, name in enumerate(dict.fromkeys(names))}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[tuple(merge) for merge in learned["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([END_OF_TEXT, "<unk>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, vocab[END_OF_TEXT])]
    )
    return tokenizer


KINDS: dict[str, Callable[[Iterable[str]], Tokenizer]] = {"own": own, "gpt2": gpt2, "pieces": pieces}


def train(root: Path, minutes: float) -> None:
    """Writes a Hugging Face directory for each kind that is not there yet."""
    corpus = load_corpus()
    for kind, make in KINDS.items():
        if (root / kind / "source").is_dir():
            continue
        tokenizer = make(file.text for file in corpus.train)
        assert tokenizer.token_to_id(END_OF_TEXT) == SEPARATOR_ID
        plain = Tokenizer.from_str(tokenizer.to_str())
        plain.post_processor = None  # the stream has its own separators
        stream, heldout = encode_files(plain, corpus.train, DRAFT_SEED), encode_files(plain, corpus.heldout)
        config = new_draft().config
        config.vocab_size = tokenizer.get_vocab_size()
        model = LlamaForCausalLM(config)
        print(f"{kind}: {config.vocab_size} ids, {len(stream):,} tokens, {model.num_parameters():,} parameters")
        plan = Plan(minutes, Rates(), DRAFT_SEED, phases=((0.0, 256), (0.8, 512)))
        pretrain(model, stream, heldout, plan, root / kind / "run.pt")
        model.save_pretrained(root / kind / "source")
        save_tokenizer(tokenizer, root / kind / "source", MAX_POSITIONS)
        export_model(root / kind / "source", root / kind / "bundle", ExportOptions("draft", "int8", "openvino"))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="the directory that is written")
    parser.add_argument("--minutes", type=float, default=4.0, help="of training, for each draft")
    options = parser.parse_args()
    train(options.root, options.minutes)


if __name__ == "__main__":
    main()
