"""Writes tiny/bpe-vocabulary.gguf: a byte-level BPE vocabulary, without a model, on which pre-tokenizers can be told apart.

usage: make_vocabulary.py
needs: gguf tokenizers

Real vocabulary is useless for that: it was trained behind one pre-tokenizer, so it holds no merge that the rule would have
forbidden (SmolLM2's has no two digits in one token), and breaking a text in the wrong place often gives the same ids. Here
merges were learnt from whole lines without any pre-tokenizer: they run across digits, spaces, line breaks, apostrophes and
scripts, so that every wrong border shows. A few whole words are tokens that no merge builds: only a family that looks up
a word before it merges (llama-bpe) finds them. All 256 bytes are tokens.
"""

import os

import gguf
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from lines import WORDS, lines
from make_tiny import CONTROL, NORMAL, byte_letters

OUT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tiny", "bpe-vocabulary.gguf")
SIZE = 3000
SPECIALS = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>"]


def learn(texts):
    """Merges in order, as pairs of tokens in byte letters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(vocab_size=SIZE, initial_alphabet=byte_letters(), max_token_length=10, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    merges, known = [], set(byte_letters())
    for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        if token in known:
            continue
        # The trainer hands out ids in the order of its merges, but not the two halves: any pair of known tokens makes it.
        left = max((n for n in range(1, len(token)) if token[:n] in known and token[n:] in known), default=None)
        if left is not None:
            merges.append((token[:left], token[left:]))
            known.add(token)
    return merges


def whole_words(known):
    letters = byte_letters()
    spelt = ["".join(letters[b] for b in (lead + word).encode()) for word in sum(WORDS.values(), []) for lead in ("", " ")]
    return sorted({w for w in spelt if 8 <= len(w) <= 24} - known)[::5]


def main():
    merges = learn(lines(6, 100, ["a"]))
    tokens = byte_letters() + [a + b for a, b in merges]
    tokens += whole_words(set(tokens))
    w = gguf.GGUFWriter(OUT, "llama")
    w.add_name("vocabulary for tests of pre-tokenizers")
    w.add_vocab_size(len(tokens) + len(SPECIALS))
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("llama-bpe")
    w.add_token_list(tokens + SPECIALS)
    w.add_token_types([NORMAL] * len(tokens) + [CONTROL] * len(SPECIALS))
    w.add_token_merges([f"{a} {b}" for a, b in merges])
    w.add_bos_token_id(len(tokens))
    w.add_eos_token_id(len(tokens) + SPECIALS.index("<|eot_id|>"))
    w.add_add_bos_token(True)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    print(f"{len(tokens)} tokens, {len(merges)} merges, {os.path.getsize(OUT)} bytes")


if __name__ == "__main__":
    main()
