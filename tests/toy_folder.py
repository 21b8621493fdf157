"""The toy target as a folder on disk: model, byte-level tokenizer, chat template, end-of-turn token."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.toy_target import toy_model

TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
TURN_START_ID, TURN_END_ID, PAD_ID = 256, 257, 258
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _byte_symbols() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return [chr(b) if b in printable else chr(256 + others.index(b)) for b in range(256)]


def toy_tokenizer() -> PreTrainedTokenizerFast:
    """Token id = byte value; three special tokens follow."""
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(_byte_symbols())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([TURN_START, TURN_END, "<pad>"])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token="<pad>",
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
    )
    assert fast.convert_tokens_to_ids([TURN_START, TURN_END, "<pad>"]) == [TURN_START_ID, TURN_END_ID, PAD_ID]
    return fast


def save_toy_target(folder: Path, seed: int = 0, **changes) -> Path:
    """A whole toy target in `folder`; `changes` override fields of its config."""
    tokenizer = toy_tokenizer()
    fields = {"vocab_size": 260, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = toy_model(seed, **(fields | changes))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
