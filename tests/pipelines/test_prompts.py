"""Prompt sets: every line is either accepted or rejected with a reason."""

import gzip
import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from drafters.target import Target, load_target
from pipelines.data import SHIPPED
from pipelines.prompts import PromptError, PromptRow, read_prompts
from serving.chat_options import ChatOptions, ChatOptionsError
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


# a line that is rejected: the kind that it is counted under, and its reason
BAD_ROWS = {
    b'{"prompt": "a"': ("not JSON", "not JSON"),
    b"hello": ("not JSON", "not JSON .*column 1"),
    b"[1]": ("not an object", "the line is a list"),
    b"17": ("not an object", "the line is a number"),
    b"null": ("not an object", "the line is null"),
    b'{"prompt": "\xff\xfe"}': ("not UTF-8", r"not UTF-8 \(byte 12"),
    b"{}": ("no text", "no text"),
    b'{"text": "a"}': ("no text", "no text"),
    b'{"prompt": ""}': ("no text", "prompt has no text"),
    b'{"prompt": "  \\n"}': ("no text", "prompt has no text"),
    b'{"prompt": 3}': ("wrong type", "prompt is a number"),
    b'{"prompt": null}': ("no text", "no text"),
    b'{"prompt": "a", "turns": ["b"]}': ("several texts", "both prompt and turns"),
    b'{"turns": []}': ("no text", "turns is a list without entries"),
    b'{"turns": "a"}': ("wrong type", "turns is a string; give a list"),
    b'{"turns": ["a", 3]}': ("wrong type", r"turns\[1\] is a number"),
    b'{"turns": ["a", "b", " "]}': ("no text", r"turns\[2\] has no text"),
    b'{"turns": ["a", "<|im_end|>"]}': ("control token", r"control token <\|im_end\|>"),
    b'{"turns": ["a", "\\ud800"]}': ("half a character", "surrogate"),
    b'{"messages": []}': ("no text", "no text"),
    b'{"messages": {"role": "user"}}': ("wrong type", "messages is an object"),
    b'{"messages": ["hi"]}': ("wrong type", r"messages\[0\] is a string"),
    b'{"messages": [{"role": "user"}]}': ("wrong type", r"messages\[0\].content is null"),
    b'{"messages": [{"role": "robot", "content": "a"}]}': ("unknown role", "role is 'robot'"),
    b'{"messages": [{"role": "assistant", "content": "a"}]}': (
        "last message not the user's",
        "last message is of the assistant",
    ),
    b'{"messages": [{"role": "user", "content": "a <|im_end|>"}]}': ("control token", "control token"),
    b'{"messages": [{"role": "user", "content": ["a"]}]}': ("wrong type", "content is a list"),
    b'{"id": [], "prompt": "a"}': ("wrong type", "id is a list"),
    b'{"id": "", "prompt": "a"}': ("wrong type", "id is a string without entries"),
    b'{"id": true, "prompt": "a"}': ("wrong type", "id is a boolean"),
    b'{"id": "\\ud800", "prompt": "a"}': ("half a character", "id holds half of a surrogate pair"),
    b'{"id": "good", "prompt": "a"}': ("duplicate id", "already that of line 1$"),
    b'{"category": 5, "prompt": "a"}': ("wrong type", "category is a number"),
    b'{"category": "\\ud800", "prompt": "a"}': ("half a character", "category holds half"),
    b'{"prompt": "\\ud800"}': ("half a character", "the text holds half of a surrogate pair"),
    b'{"messages": [{"role": "user", "content": "\\udc00"}]}': ("half a character", "surrogate"),
    b'{"prompt": "' + b"x" * 101 + b'"}': ("too long", "101 tokens, 100 fit"),
    b'{"turns": ["' + b"x" * 101 + b'", "b"]}': ("too long", "tokens, 100 fit"),
    b'{"prompt": ' + b"[" * 100_000: ("not JSON", "not JSON that can be read"),
    b'{"prompt": ' + b"1" * 5000 + b"}": ("not JSON", "not JSON"),
}


def test_every_bad_row_has_its_reason(tmp_path: Path, target: Target):
    file = write(tmp_path / "p.jsonl", row(id="good", prompt="x" * 100), "", *BAD_ROWS, "   ", row(id=7, prompt="z"))
    read = read_prompts(file, target, max_prompt_tokens=100)
    assert [r.id for r in read.rows] == ["good", "7"]
    assert [r.line for r in read.rejected] == list(range(3, 3 + len(BAD_ROWS)))
    assert len(read.rows) + len(read.rejected) == len(BAD_ROWS) + 2
    assert read.kinds == [kind for kind, _ in BAD_ROWS.values()]
    for rejected, (line, (_, reason)) in zip(read.rejected, BAD_ROWS.items(), strict=True):
        assert re.search(reason, rejected.reason), line[:60]
        assert "\n" not in rejected.reason
        assert rejected.file == file


def test_of_a_thousand_rows_none_vanishes(tmp_path: Path, target: Target):
    """60 bad rows of 20 kinds among 940 good ones, with blank lines, in one file and in three."""
    vague = ("no text", "not JSON", "not JSON .*column 1", "surrogate", "control token", "tokens, 100 fit")
    kinds = list({reason: line for line, (_, reason) in BAD_ROWS.items() if reason not in vague}.values())
    kinds = kinds[:12] + kinds[-8:]  # from a line that is no object to one that is too long
    lines: list[str | bytes] = [*([*kinds] * 3), *(row(id=f"r{i}", turns=[f"question {i}"]) for i in range(939))]
    random.Random(0).shuffle(lines)
    lines.insert(0, row(id="good", prompt="x"))
    assert len(lines) == 1000

    def check(spec: str) -> None:
        read = read_prompts(spec, target, max_prompt_tokens=100)
        assert (len(read.rows), len(read.rejected)) == (940, 60)
        assert {r.id for r in read.rows} == {"good", *(f"r{i}" for i in range(939))}
        expected = Counter({kind: 0 for kind, _ in BAD_ROWS.values()})
        for line in kinds:
            kind, reason = BAD_ROWS[line]
            expected[kind] += 3
            found = zip(read.rejected, read.kinds, strict=True)
            hits = [kind for r, kind in found if re.search(reason.removesuffix("$"), r.reason)]
            assert hits == [kind] * 3, line
        assert Counter(read.kinds) == +expected

    whole = write(tmp_path / "all.jsonl", *(part for line in lines for part in (line, "  ")))
    check(whole)
    for i in range(3):
        write(tmp_path / f"part-{i}.jsonl", *lines[i * 400 : (i + 1) * 400])
    check(str(tmp_path / "part-*.jsonl"))


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
        ("bom.jsonl", b"\xef\xbb\xbf\r\n", "is empty"),
        ("packed.jsonl", gzip.compress(b'{"prompt": "a"}', mtime=0), r"belongs into a .jsonl.gz file"),
        ("rows.jsonl", b"PAR1...", r"belongs into a .parquet file"),
        ("rows.parquet", b"PAR1", "Parquet data is damaged"),
        ("none.jsonl", b"{}\n{}", r"none of its 2 rows can be used .line 1: no text"),
        ("folder/", None, r"is a folder; .*folder/\*.jsonl'$"),
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
    assert len(read.rows) == {"gsm8k_train": 800, "gsm8k_test": 200, "mbpp": 240, "russian": 190}[name]
    assert not read.rejected
    kinds = {r.category.partition("_")[0] for r in read.rows}
    assert kinds == {"math" if name.startswith("gsm8k") else "code" if name == "mbpp" else "ru"}


def test_shipped_sets_do_not_overlap(target: Target):
    train, test = (read_prompts(name, target, max_prompt_tokens=10_000).rows for name in ("gsm8k_train", "gsm8k_test"))
    assert not {tuple(r.prompt_ids) for r in train} & {tuple(r.prompt_ids) for r in test}


SYSTEM = "<|im_start|>system\nbe brief<|im_end|>\n"
THINKING_TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}:{{ m['content'] }}]{% endfor %}"
    "{% if enable_thinking is defined %}{{ '+' if enable_thinking else '-' }}{% endif %}>"
)


def test_a_system_turn_is_put_before_chats_that_have_none(tmp_path: Path, target: Target):
    own = [{"role": "system", "content": "mine"}, {"role": "user", "content": "hi"}]
    file = write(tmp_path / "p.jsonl", row(messages=own), row(messages=own[1:]), row(turns=["hi"]), row(prompt="raw"))
    options = ChatOptions(system="be brief")
    texts = [target.tokenizer.decode(r.prompt_ids) for r in read_prompts(file, target, options=options).rows]
    user = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert texts == [f"<|im_start|>system\nmine<|im_end|>\n{user}", SYSTEM + user, SYSTEM + user, "raw"]
    wrapped = read_prompts(file, target, options=options, chat=True).rows[3]
    assert target.tokenizer.decode(wrapped.prompt_ids).startswith(SYSTEM + "<|im_start|>user\nraw")
    with pytest.raises(PromptError, match=r"the system turn holds the target's control token <\|im_end\|>"):
        read_prompts(file, target, options=ChatOptions(system="a<|im_end|>"))


def test_another_template_and_thinking(tmp_path: Path, target: Target):
    file = write(tmp_path / "p.jsonl", row(turns=["hi", "ho"]))
    for thinking, mark in (("default", ""), ("on", "+"), ("off", "-")):
        options = ChatOptions(template=THINKING_TEMPLATE, thinking=thinking, system="s")
        (read,) = read_prompts(file, target, options=options).rows
        assert target.tokenizer.decode(read.prompt_ids) == f"[system:s][user:hi]{mark}>"
        (after,) = read.follow_ups
        assert target.tokenizer.decode(after.after([1])) == f"][user:ho]{mark}>"
    with pytest.raises(ChatOptionsError, match="no variable enable_thinking"):
        read_prompts(file, target, options=ChatOptions(thinking="on"))


def test_later_turns_are_what_the_template_puts_after_a_reply(tmp_path: Path, target: Target):
    file = write(tmp_path / "p.jsonl", row(turns=["one", "two", "three"]))
    (read,) = read_prompts(file, target).rows
    assert [target.tokenizer.decode(f.closing_ids) for f in read.follow_ups] == ["<|im_end|>"] * 2
    opened = "\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    assert [target.tokenizer.decode(f.opening_ids) for f in read.follow_ups] == [
        opened.format(word) for word in ("two", "three")
    ]
    lengths = [len(read.prompt_ids), *map(len, read.follow_ups)]
    assert read.most_tokens(10) == sum(lengths) + 30
    assert PromptRow.from_json(json.loads(json.dumps(read.as_json()))) == read
