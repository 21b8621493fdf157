"""What a template puts between a reply and the user's next turn, as token ids, for templates of several kinds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drafters.target import Target, load_target
from pipelines.prompts import read_prompts
from serving.chat_options import ChatOptions
from tests.toy_folder import TURN_END_ID, TURN_START_ID, save_toy_target

OPENING = "\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def target(toy_target_dir: Path) -> Target:
    return load_target(str(toy_target_dir))


TEMPLATES = {
    # end-of-turn token: what comes after a reply that stopped with it, and after one that was cut
    "chatml": ("<|im_end|>", OPENING.format("more")),
    "space before the end": (" <|im_end|>", "[more]"),
    "no end of turn": ("", "\nuser: more\nassistant:"),
    "end of the user's turn only": ("", "\n[more<|im_end|>]"),
}
JINJA = {
    "chatml": None,
    "space before the end": (
        "{% for m in messages %}{% if m['role'] == 'user' %}[{{ m['content'] | trim }}]{% else %}"
        "{{ m['content'] }} <|im_end|>{% endif %}{% endfor %}"
    ),
    "no end of turn": ("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{{ 'assistant:' }}"),
    "end of the user's turn only": (
        "{% for m in messages %}{% if m['role'] == 'user' %}[{{ m['content'] }}<|im_end|>]{% else %}"
        "{{ m['content'] }}\n{% endif %}{% endfor %}"
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_end_of_a_turn_is_found_in_any_template(target: Target, tmp_path: Path, name: str):
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps({"turns": ["start [reply 1]", "more"]}))  # a text that looks like a stand-in
    (row,) = read_prompts(str(file), target, options=ChatOptions(template=JINJA[name])).rows
    (following,) = row.follow_ups
    closing, opening = TEMPLATES[name]
    assert target.tokenizer.decode(following.closing_ids) == closing
    assert target.tokenizer.decode(following.opening_ids) == opening
    whole = target.tokenizer(closing + opening)["input_ids"]
    assert following.after([5, 7]) == whole
    stopped = target.tokenizer(opening)["input_ids"] if closing else whole
    assert following.after([5, TURN_END_ID]) == stopped
    assert TURN_START_ID not in row.prompt_ids or name == "chatml"


def test_a_template_that_hides_replies_cannot_be_continued(target: Target, tmp_path: Path):
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps({"turns": ["a", "b"]}) + "\n" + json.dumps({"turns": ["a"]}))
    hiding = "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"
    read = read_prompts(str(file), target, options=ChatOptions(template=hiding))
    assert [row.row_number for row in read.rows] == [2]
    assert [r.reason for r in read.rejected] == ["the chat template does not show earlier replies as they are"]


def test_a_set_of_several_turns_reads_with_another_target_s_end_of_turn(tmp_path: Path):
    """Without an end-of-turn token among the target's own, a cut reply and a stopped one go on alike."""
    folder = save_toy_target(tmp_path / "toy", eos_token_id=None)
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"eos_token": None}))
    bare = load_target(str(folder))
    assert bare.eos_token_ids == ()
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps({"turns": ["a", "b"]}))
    (row,) = read_prompts(str(file), bare).rows
    (following,) = row.follow_ups
    assert following.closing_ids == []
    assert following.after([TURN_END_ID])[0] == TURN_END_ID
