"""Small tokenizers of several kinds, trained on a little text: of a target, and of drafts with another one."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Final

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from outrider.models.text.tokenizer import Tokenizer

TEXT: Final = (
    '    def parse(self, name, value=None):\n        """Parses a name; returns it, or None."""\n'
    "        if name in self._names:\n            return self._names[name]\n\n"
    "        for index, token in enumerate(self.tokens):\n            self.tokens[index] = token + 10 * value\n"
    "        raise ValueError(f'no name {name!r}; expected one of {len(self._names)}')\n\n\n"
    "# Größe über 3 µm, naïve café: 中文字符 и кириллица 🙂🙂\nclass Parser:\n    pass\n"
    "parsed = tokenizer.parse('tokens', reparsed=123456)\n"
)
END: Final = "<|end|>"
BEGIN: Final = "<s>"
DRAFTS: Final = ("gpt2", "pieces", "unigram")
_BYTES: Final = [f"<0x{byte:02X}>" for byte in range(256)]


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    """Of this kind, trained once.

    target: byte-level BPE whose words never take an indentation's last space. gpt2: GPT-2's splitting. pieces: BPE with
    byte fallback, as in Llama 2. unigram: Unigram with byte fallback. These two begin with a token. normalized: as
    gpt2, after NFKC.
    """
    made = _MAKERS[kind]()
    place = Path(mkdtemp(prefix=f"tokenizer-{kind}-"))  # for the whole run: nothing refers to it at its end
    made.save(str(place / "tokenizer.json"))
    config = {"eos_token": END} | ({"bos_token": BEGIN} if made.token_to_id(BEGIN) is not None else {})
    (place / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_dir(place, name=kind)


def _bytes_bpe(pre_tokenizer: pre_tokenizers.PreTokenizer, size: int) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizer, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([TEXT] * 3, trainer)
    return made


def _target() -> tokenizers.Tokenizer:
    pieces = Regex(r"(?:\r?\n)+[ \t]*| ?[^\W\d]+| ?\d{1,3}| ?[^\s\w]+| +|\s+")
    steps = [pre_tokenizers.Split(pieces, "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    return _bytes_bpe(pre_tokenizers.Sequence(steps), 420)


def _gpt2() -> tokenizers.Tokenizer:
    return _bytes_bpe(pre_tokenizers.ByteLevel(add_prefix_space=False), 360)


def _begun(made: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([BEGIN, END, "<unk>"])
    made.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, made.token_to_id(BEGIN))]
    )
    return made


def _pieces() -> tokenizers.Tokenizer:
    learner = tokenizers.Tokenizer(models.BPE())
    learner.normalizer = normalizers.Replace(" ", "▁")
    learner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\n▁]+(?=▁)|▁?[^▁\n]+|[\n▁]+"), "isolated")
    trainer = trainers.BpeTrainer(vocab_size=240, limit_alphabet=60, show_progress=False)
    learner.train_from_iterator([TEXT] * 3, trainer)
    learned = json.loads(learner.to_str())["model"]
    names = [BEGIN, END, "<unk>", *_BYTES, *sorted(learned["vocab"], key=learned["vocab"].__getitem__)]
    model = models.BPE(
        vocab={name: index for index, name in enumerate(names)},
        merges=[tuple(merge) for merge in learned["merges"]],
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    made = tokenizers.Tokenizer(model)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _begun(made)


def _unigram() -> tokenizers.Tokenizer:
    learner = tokenizers.Tokenizer(models.Unigram())
    learner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(vocab_size=160, show_progress=False, unk_token="<unk>")
    learner.train_from_iterator(TEXT.splitlines(), trainer)
    learned = [(name, score) for name, score in json.loads(learner.to_str())["model"]["vocab"] if name != "<unk>"]
    begin = [(BEGIN, 0.0), (END, 0.0), ("<unk>", 0.0), *((name, 0.0) for name in _BYTES)]
    made = tokenizers.Tokenizer(models.Unigram([*begin, *learned], 2, True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return _begun(made)


def _normalized() -> tokenizers.Tokenizer:
    made = _gpt2()
    made.normalizer = normalizers.NFKC()
    return made


_MAKERS: Final = {
    "target": _target,
    "gpt2": _gpt2,
    "pieces": _pieces,
    "unigram": _unigram,
    "normalized": _normalized,
}
