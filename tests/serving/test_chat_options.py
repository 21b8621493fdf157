"""Chat options: what the template is told, what is refused, and what a drafter's training is compared with."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest

from drafters.target import Target, chat_template_hash, load_target
from serving import serve_app
from serving.chat_options import ChatOptions, ChatOptionsError, ChatTemplate, training_mismatch
from serving.prompt_encoding import PromptEncoder
from serving.replica import Replica
from serving.serve_config import ServeConfig
from tests.serving.test_replica import save_untrained_drafter
from tests.toy_folder import CHAT_TEMPLATE, save_toy_target

USER = [{"role": "user", "content": "hi"}]
THINKING = "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ '!' if enable_thinking else '?' }}"


@pytest.fixture(scope="module")
def target(toy_target_dir: Path) -> Target:
    return load_target(str(toy_target_dir))


def test_options_survive_json():
    options = ChatOptions(template="{{ messages }}", system="be brief", thinking="off")
    assert ChatOptions.from_json(json.loads(json.dumps(options.as_json()))) == options
    assert ChatOptions.from_json({}) == ChatOptions()


def test_a_template_of_the_same_text_is_the_same_template(tmp_path: Path, target: Target):
    own = tmp_path / "t.jinja"
    own.write_bytes((target.path / "chat_template.jinja").read_bytes())
    template = ChatTemplate(target, ChatOptions.read(str(own)))
    assert template.hash == ChatTemplate(target).hash == chat_template_hash(target.path)
    assert template.render(USER) == ChatTemplate(target).render(USER)
    other = ChatTemplate(target, ChatOptions(template=THINKING))
    assert other.hash != template.hash
    assert other.render(USER) == "hi?"


def test_the_encoder_of_requests_obeys_the_options(target: Target):
    encoder = PromptEncoder(target, ChatOptions(system="s"))
    plain = PromptEncoder(target)
    assert encoder.chat(USER) == plain.chat([{"role": "system", "content": "s"}, *USER])
    own = [{"role": "system", "content": "mine"}, *USER]
    assert encoder.chat(own) == plain.chat(own)
    for thinking, mark in (("on", "!"), ("off", "?")):
        told = PromptEncoder(target, ChatOptions(template=THINKING, thinking=thinking))
        assert told.chat(USER) == list(f"hi{mark}".encode())


def test_a_target_without_a_template_may_be_given_one(tmp_path: Path):
    folder = save_toy_target(tmp_path / "toy")
    (folder / "chat_template.jinja").unlink()
    bare = load_target(str(folder))
    assert not ChatTemplate(bare).exists
    given = ChatTemplate(bare, ChatOptions(template=CHAT_TEMPLATE))
    given.check()
    assert given.exists
    assert given.render(USER).startswith("<|im_start|>user\nhi<|im_end|>")


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"thinking": "on"}, "thinking is on, but the chat template has no variable enable_thinking"),
        ({"thinking": "off", "template": "{# enable_thinking #}{{ messages }}"}, "has no variable enable_thinking"),
        ({"template": "{% for m in messages %}{{ m"}, r"the chat template is not Jinja \(.*, line 1\)"),
        ({"template": "Dear reader"}, "does not show the user's messages"),
        ({"template": " \n"}, "the chat template is empty"),
        ({"system": ""}, "the system turn is empty"),
        ({"system": "\udcff"}, "the system turn is not UTF-8"),
        ({"thinking": "maybe"}, "thinking is 'maybe'; give one of default, on, off"),
    ],
)
def test_options_that_cannot_work_are_one_line(target: Target, options: dict, cause: str):
    with pytest.raises(ChatOptionsError, match=cause) as caught:
        ChatTemplate(target, ChatOptions(**options)).check()
    assert "\n" not in str(caught.value)


def test_a_template_that_refuses_the_system_turn_is_no_bad_file(target: Target):
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages }}"
    ChatTemplate(target, ChatOptions(template=refusing, system="s")).check()


@pytest.mark.parametrize("data", [None, b"\xff\xfe{"])
def test_a_template_file_that_cannot_be_read(tmp_path: Path, data: bytes | None):
    file = tmp_path / "t.jinja"
    if data is not None:
        file.write_bytes(data)
    with pytest.raises(ChatOptionsError, match=r"t.jinja (cannot be read|is not UTF-8)") as caught:
        ChatOptions.read(str(file))
    assert "\n" not in str(caught.value)


def test_a_mismatch_names_both_sides(target: Target):
    own = chat_template_hash(target.path)
    plain = ChatTemplate(target)
    options = {"template": None, "system": None, "thinking": "default"}
    for agreeing in ({}, {"chat_template_hash": own}, {"chat_template_hash": own, "chat_options": options}):
        assert training_mismatch(agreeing, plain) is None
    assert training_mismatch({"chat_template_hash": "f" * 32}, plain) == (
        f"trained with chat template {'f' * 32}; used with chat template {own}"
    )
    trained = {"chat_template_hash": own, "chat_options": options | {"thinking": "on", "system": "be\nbrief"}}
    assert training_mismatch(trained, plain) == (
        "trained with system be brief, thinking on; used with system none, thinking default"
    )
    # the template counts by its text, not by where it came from
    served = ChatTemplate(target, ChatOptions(template=(target.path / "chat_template.jinja").read_text()))
    assert training_mismatch({"chat_template_hash": own, "chat_options": options}, served) is None


def test_the_replica_says_it_at_its_start_and_at_a_swap(tmp_path, toy_target_dir, caplog):
    def drafter(name: str, **known) -> str:
        folder = save_untrained_drafter(tmp_path / name, toy_target_dir)
        provenance = json.loads((folder / "provenance.json").read_text())
        (folder / "provenance.json").write_text(json.dumps(provenance | known))
        return str(folder)

    def warnings() -> list[str]:
        return [r.message for r in caplog.records if "fewer drafts may be accepted" in r.message]

    thinking = drafter("thinking", chat_options=ChatOptions(thinking="on").as_json())
    same = drafter("same", chat_template_hash=chat_template_hash(toy_target_dir), chat_options=ChatOptions().as_json())
    (tmp_path / "t.jinja").write_text(THINKING)
    settings = {"target": str(toy_target_dir), "num_slots": 1, "max_len": 64, "threads": 1}
    with caplog.at_level(logging.WARNING, logger="serving.replica"):
        replica = Replica.__mro__[1](ServeConfig(drafter=thinking, **settings))
        expected = "was trained with thinking on; used with thinking default: fewer drafts may be accepted"
        assert warnings() == [f"drafter {thinking} {expected}"]
        asyncio.run(replica.reconfigure({"drafter": same}))
        assert len(warnings()) == 1
        asyncio.run(replica.reconfigure({"drafter": thinking}))
        assert len(warnings()) == 2
        assert replica.model.drafter["path"] == thinking
        assert replica._engine.close(0)
    with pytest.raises(ChatOptionsError, match="no variable"):
        Replica.__mro__[1](ServeConfig(thinking="on", **settings))


def test_serve_says_it_once_before_it_starts(tmp_path, toy_target_dir, caplog, monkeypatch):
    monkeypatch.setattr(serve_app.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(serve_app.ray, "get_actor", lambda *_, **__: (_ for _ in ()).throw(ValueError("no such actor")))
    monkeypatch.setattr(serve_app, "_check_port", lambda *_: None)
    drafter = save_untrained_drafter(tmp_path / "drafter", toy_target_dir)
    provenance = json.loads((drafter / "provenance.json").read_text()) | {"chat_template_hash": "f" * 32}
    (drafter / "provenance.json").write_text(json.dumps(provenance))
    config = ServeConfig(target=str(toy_target_dir), drafter=str(drafter))
    with caplog.at_level(logging.WARNING, logger="serving.serve_app"):
        serve_app._check(config)
    (said,) = [record.message for record in caplog.records]
    assert said.startswith(f"drafter {drafter} was trained with chat template {'f' * 32}; used with chat template ")
    assert "\n" not in said
    with pytest.raises(serve_app.ServeError, match="no variable enable_thinking"):
        serve_app._check(config.model_copy(update={"thinking": "on"}))
    with pytest.raises(serve_app.ServeError, match="cannot be read"):
        serve_app._check(config.model_copy(update={"chat_template": str(tmp_path / "none.jinja")}))
