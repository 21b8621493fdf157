"""Prompt sets: every line is either accepted or rejected with a reason."""

import gzip
import json
import re
from pathlib import Path

import pytest

from drafters.target import Target, load_target
from pipelines.data import SHIPPED
from pipelines.prompts import PromptError, read_prompts
from tests.toy_folder import TURN_START_ID


@pytest.fixture(scope="module")
def target(toy_target_dir: Path) -> Target:
    return load_target(str(toy_target_dir))


def write(path: Path, *lines: str | bytes, end: bytes = b"\n") -> str:
    path.write_bytes(end.join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return str(path)


def row(**fields) -> str:
    return json.dumps(fields)


def test_messages_go_through_the_template(tmp_path: Path, target: Target):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    file = write(tmp_path / "p.jsonl", row(id="a", category="chat", messages=messages))
    (read,) = read_prompts(file, target).rows
    text = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert target.tokenizer.decode(read.prompt_ids) == text
    assert read.prompt_ids[0] == TURN_START_ID
    assert (read.id, read.category, read.row_number) == ("a", "chat", 1)


def test_prompt_is_raw_unless_chat_wraps_it(tmp_path: Path, target: Target):
    file = write(tmp_path / "p.jsonl", row(prompt="def f("), row(turns=["hi"]))
    raw, turn = read_prompts(file, target).rows
    assert raw.prompt_ids == list(b"def f(")
    assert raw.id == "line-000001"
    assert target.tokenizer.decode(turn.prompt_ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    wrapped = read_prompts(file, target, chat=True).rows[0]
    assert target.tokenizer.decode(wrapped.prompt_ids).startswith("<|im_start|>user\ndef f(<|im_end|>")


def test_control_tokens_are_raw_text_s_own_business_but_no_user_s(tmp_path: Path, target: Target):
    raw = write(tmp_path / "p.jsonl", row(prompt="<|im_start|>x"))
    assert read_prompts(raw, target).rows[0].prompt_ids == [TURN_START_ID, ord("x")]
    with pytest.raises(PromptError, match=r"control token <\|im_start\|>"):
        read_prompts(raw, target, chat=True)


BAD_ROWS = {
    b'{"prompt": "a"': "not JSON",
    b"[1]": "the line is a list",
    b"17": "the line is a number",
    b"null": "the line is null",
    b'{"prompt": "\xff\xfe"}': r"not UTF-8 \(byte 12",
    b"{}": "no text",
    b'{"prompt": ""}': "prompt has no text",
    b'{"prompt": "  \\n"}': "prompt has no text",
    b'{"prompt": 3}': "prompt is a number",
    b'{"prompt": null}': "no text",
    b'{"prompt": "a", "turns": ["b"]}': "both prompt and turns",
    b'{"turns": []}': "turns is a list without entries",
    b'{"turns": ["a", "b"]}': "turns has 2 entries",
    b'{"messages": []}': "no text",
    b'{"messages": {"role": "user"}}': "messages is an object",
    b'{"messages": ["hi"]}': r"messages\[0\] is a string",
    b'{"messages": [{"role": "user"}]}': r"messages\[0\].content is null",
    b'{"messages": [{"role": "robot", "content": "a"}]}': "role is 'robot'",
    b'{"messages": [{"role": "assistant", "content": "a"}]}': "last message is of the assistant",
    b'{"messages": [{"role": "user", "content": "a <|im_end|>"}]}': "control token",
    b'{"messages": [{"role": "user", "content": ["a"]}]}': "content is a list",
    b'{"id": [], "prompt": "a"}': "id is a list",
    b'{"id": true, "prompt": "a"}': "id is a boolean",
    b'{"id": "good", "prompt": "a"}': "already that of line 1",
    b'{"category": 5, "prompt": "a"}': "category is a number",
    b'{"prompt": "\\ud800"}': "surrogate",
    b'{"messages": [{"role": "user", "content": "\\udc00"}]}': "surrogate",
    b'{"prompt": "' + b"x" * 101 + b'"}': "101 tokens, 100 fit",
    b'{"prompt": ' + b"[" * 100_000: "not JSON",
    b'{"prompt": ' + b"1" * 5000 + b"}": "not JSON",
}


def test_every_bad_row_has_its_reason(tmp_path: Path, target: Target):
    file = write(tmp_path / "p.jsonl", row(id="good", prompt="x" * 100), "", *BAD_ROWS, "   ", row(id=7, prompt="z"))
    read = read_prompts(file, target, max_prompt_tokens=100)
    assert [r.id for r in read.rows] == ["good", "7"]
    assert [r.line for r in read.rejected] == list(range(3, 3 + len(BAD_ROWS)))
    assert len(read.rows) + len(read.rejected) == len(BAD_ROWS) + 2
    for rejected, (line, reason) in zip(read.rejected, BAD_ROWS.items(), strict=True):
        assert re.search(reason, rejected.reason), line[:60]
        assert "\n" not in rejected.reason
        assert rejected.file == file


def test_bom_crlf_and_gzip_read_alike(tmp_path: Path, target: Target):
    lines = [row(id=str(i), prompt=f"p{i}") for i in range(3)]
    plain = read_prompts(write(tmp_path / "a.jsonl", *lines), target)
    dos = read_prompts(
        write(tmp_path / "b.jsonl", b"\xef\xbb\xbf" + lines[0].encode(), *lines[1:], end=b"\r\n"), target
    )
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    packed = read_prompts(str(tmp_path / "c.jsonl.gz"), target)
    assert plain.rows == dos.rows == packed.rows
    assert plain.sha256 == packed.sha256
    assert plain.sha256 != dos.sha256


def test_limit_counts_accepted_rows(tmp_path: Path, target: Target):
    file = write(tmp_path / "p.jsonl", row(prompt="a"), "{", row(prompt="b"), "{", row(prompt="c"))
    read = read_prompts(file, target, limit=2)
    assert [r.row_number for r in read.rows] == [1, 3]
    assert [r.line for r in read.rejected] == [2]


@pytest.mark.parametrize(
    ("name", "data", "cause"),
    [
        ("empty.jsonl", b"", "is empty"),
        ("blank.jsonl", b"\n \r\n\n", "is empty"),
        ("wide.jsonl", '{"prompt": "a"}'.encode("utf-16"), "UTF-16"),
        ("bad.jsonl.gz", b"not gzip", "gzip data is damaged"),
        ("cut.jsonl.gz", gzip.compress(b'{"prompt": "a"}', mtime=0)[:-12], "gzip data is damaged"),
        ("rows.parquet", b"PAR1", "Parquet"),
        ("none.jsonl", b"{}\n{}", r"none of its 2 rows can be used .line 1: no text"),
        ("folder/", None, "is a folder"),
        ("missing.jsonl", None, "do not exist.*gsm8k_train"),
    ],
)
def test_unusable_file_is_one_line(tmp_path: Path, target: Target, name: str, data: bytes | None, cause: str):
    if name.endswith("/"):
        (tmp_path / name).mkdir()
    elif data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(PromptError, match=cause) as caught:
        read_prompts(str(tmp_path / name), target)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_sets_read_whole(target: Target, name: str):
    read = read_prompts(name, target, max_prompt_tokens=10_000)
    assert len(read.rows) == {"gsm8k_train": 800, "gsm8k_test": 200}[name]
    assert not read.rejected
    assert {r.category for r in read.rows} == {"math"}


def test_shipped_sets_do_not_overlap(target: Target):
    train, test = (read_prompts(name, target, max_prompt_tokens=10_000).rows for name in ("gsm8k_train", "gsm8k_test"))
    assert not {tuple(r.prompt_ids) for r in train} & {tuple(r.prompt_ids) for r in test}
