"""Rounds over a real socket: the same tokens and drafts as in the process, whatever the other end does."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from functools import lru_cache

import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.checkpoint import as_drafter
from drafters.drafter import DrafterAwayError, DraftReply, DraftRequest, SparseProbs
from serving.draft_link import DrafterInfo, DraftLink, RemoteDrafter
from serving.draft_server import DraftServer
from serving.draft_wire import (
    WireError,
    decode_answer,
    decode_request,
    encode_answer,
    encode_request,
)
from serving.engine.engine import Engine, EngineConfig
from serving.engine.sampling import Sampling
from serving.engine.torch_rows import TorchRows
from tests.toy_dflash import toy_dflash
from tests.toy_mtp import TAPS, toy_mtp
from tests.toy_target import AlwaysRight, toy_model, toy_prompts

PEER, SESSION = b"peer", "session"
PROMPTS = toy_prompts(4, seed=8, low=3, high=20)
SAMPLINGS = [Sampling(max_new_tokens=20), Sampling(max_new_tokens=24, temperature=0.8, seed=3)] * 2
DEADLINE_S = 20.0


def request_of(batch: int = 2, features: bool = True) -> DraftRequest:
    return DraftRequest(
        slots=list(range(batch)), epochs=[7] * batch, counts=[3] * batch, starts=[0] * batch,
        first_tokens=[1] * batch, tokens_N=torch.arange(3 * batch),
        features_NF=torch.randn(3 * batch, 8) if features else None,
        num_draft_tokens=4, tree_nodes=5, temperatures=[0.5] * batch, seeds=[-(2**63), 2**63 - 1][:batch],
    )  # fmt: skip


@pytest.mark.parametrize("features", [True, False])
def test_a_request_arrives_as_it_was_sent_features_in_bfloat16(features):
    sent = request_of(features=features)
    session, ticket, came = decode_request(encode_request(SESSION, 3, sent))
    assert (session, ticket) == (SESSION, 3)
    for name in vars(sent).keys() - {"tokens_N", "features_NF"}:
        assert getattr(came, name) == getattr(sent, name)
    assert torch.equal(came.tokens_N, sent.tokens_N)
    if features:
        assert torch.equal(came.features_NF, sent.features_NF.bfloat16())
    else:
        assert came.features_NF is None


def test_an_answer_arrives_as_it_was_sent():
    tokens = torch.arange(6).view(2, 3)
    probs = SparseProbs(ids_BKC=torch.arange(12).view(2, 3, 2), probs_BKC=torch.rand(2, 3, 2))
    sent = DraftReply(
        tokens_BK=tokens, counts=[3, 1], probs=probs, parents_BK=tokens - 1, confidence_BK=torch.rand(2, 3)
    )
    came = decode_answer(encode_answer(SESSION, 9, [4, 5], 0.25, sent))
    assert (came.session, came.ticket, came.epochs, came.seconds, came.error) == (SESSION, 9, [4, 5], 0.25, None)
    assert came.reply.counts == [3, 1]
    for name in ("tokens_BK", "parents_BK", "confidence_BK"):
        assert torch.equal(getattr(came.reply, name), getattr(sent, name))
    assert torch.equal(came.reply.probs.ids_BKC, probs.ids_BKC)
    assert torch.equal(came.reply.probs.probs_BKC, probs.probs_BKC)
    bare = decode_answer(encode_answer(SESSION, 9, [4], 0.0, DraftReply(tokens_BK=tokens[:, :0]))).reply
    assert bare.tokens_BK.shape == (2, 0)
    assert bare.probs is bare.parents_BK is bare.confidence_BK is None
    assert decode_answer(encode_answer(SESSION, 9, [4], 0.0, None, "why")).error == "why"


@settings(max_examples=150)
@given(frames=st.lists(st.binary(max_size=40), max_size=7), real=st.booleans(), at=st.integers(0, 5), cut=st.integers())
def test_frames_that_are_none_are_refused_and_nothing_else_happens(frames, real, at, cut):
    if not real:
        return _refuses_or_reads(frames)
    for whole in (encode_request(SESSION, 1, request_of()), encode_answer(SESSION, 1, [7, 7], 0.0, _reply())):
        damaged = list(whole)  # one frame is replaced or cut
        here = at % len(damaged)
        damaged[here] = frames[0] if frames else damaged[here][: cut % (len(damaged[here]) + 1)]
        _refuses_or_reads(damaged)


def _reply() -> DraftReply:
    return DraftReply(tokens_BK=torch.arange(6).view(2, 3), parents_BK=torch.arange(6).view(2, 3))


def _refuses_or_reads(frames: list[bytes]) -> None:
    for decode in (decode_request, decode_answer):
        with suppress(WireError):
            decode(frames)


# -- an engine and a drafter with a socket between them ----------------------------------------------------------------


@lru_cache
def rows() -> TorchRows:
    return TorchRows(toy_model(), num_slots=2, max_len=64, target_layer_ids=TAPS)


@lru_cache
def plain() -> list[list[int]]:
    return [c.token_ids for c in Engine(rows()).generate(PROMPTS, SAMPLINGS)]


@pytest.fixture
def link():
    made = DraftLink()
    yield made
    made.close()


@pytest.fixture
def context():
    """For a test's own sockets. It waits for none of them at the end, however they were closed."""
    made = zmq.Context()
    made.linger = 0
    yield made
    made.destroy()


@pytest.fixture
def serve(link):
    """Starts servers with a drafter, and returns the engine's end of each."""
    servers = []

    def start(drafter, peer: bytes = PEER, session: str = SESSION) -> RemoteDrafter:
        servers.append(DraftServer(link.keys, peer))
        drafter.allocate(rows().num_slots, rows().max_len)
        servers[-1].add(session, drafter)
        remote = RemoteDrafter(link, peer, session, info_of(drafter))
        wait_for_peer(remote)
        return remote

    yield start
    for server in servers:
        server.close()


def info_of(drafter) -> DrafterInfo:
    return DrafterInfo(
        name=drafter.name, target_layer_ids=tuple(drafter.target_layer_ids),
        max_draft_tokens=drafter.max_draft_tokens, max_tree_nodes=drafter.max_tree_nodes,
    )  # fmt: skip


def wait_for_peer(remote: RemoteDrafter) -> None:
    """Until the peer has connected: sending to one that is not there is an error."""
    until = time.monotonic() + DEADLINE_S
    while True:
        try:
            return remote._link.send(remote.peer, [b"hello?"])  # dropped by the server
        except DrafterAwayError:
            assert time.monotonic() < until, "nobody connects"
            time.sleep(0.01)


def engine_with(drafter, deadline_s: float = DEADLINE_S, overlap: str = "off", **changes) -> Engine:
    config = EngineConfig(num_draft_tokens=3, draft_deadline_s=deadline_s, overlap=overlap, **changes)
    return Engine(rows(), drafter, config=config)


def answers_of(engine: Engine) -> list[list[int]]:
    done = [c.token_ids for c in engine.generate(PROMPTS, SAMPLINGS)]
    assert engine.free_slots == engine.num_slots
    return done


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("make", [lambda: toy_mtp(toy_model()), lambda: toy_dflash(toy_model())], ids=["mtp", "dflash"])
def test_over_the_link_a_drafter_drafts_as_in_the_process(serve, make, overlap):
    remote = engine_with(serve(as_drafter(make())), overlap=overlap, sampled_drafts=False)
    local = engine_with(as_drafter(make()), sampled_drafts=False)
    assert answers_of(remote) == answers_of(local) == plain()
    assert not remote.stats.fallbacks
    assert remote.stats.acceptance.tau == pytest.approx(local.stats.acceptance.tau, abs=0.1)


def read_answers(engine: Engine, remote: RemoteDrafter) -> None:
    """All that the drafter still owes, as an idle engine does."""
    until = time.monotonic() + DEADLINE_S
    while remote.oldest_ask() is not None and time.monotonic() < until:
        engine.fetch_answers()
    assert remote.oldest_ask() is None


class Troubled:
    """A drafter that is right, and whose server misbehaves from its third request on."""

    def __init__(self, trouble):
        self.inner, self.trouble, self.requests = AlwaysRight(toy_model()), trouble, 0
        self.engine: Engine | None = None
        for name in ("name", "target_layer_ids", "max_draft_tokens", "max_tree_nodes"):
            setattr(self, name, getattr(self.inner, name))

    def allocate(self, num_slots: int, max_len: int) -> None:
        self.inner.allocate(num_slots, max_len)

    def draft(self, request: DraftRequest) -> DraftReply:
        self.requests += 1
        if self.requests == 3:
            return self.trouble(self, request)
        return self.inner.draft(request)


def slow(drafter: Troubled, request: DraftRequest) -> DraftReply:
    until = time.monotonic() + DEADLINE_S
    while drafter.engine.stats.fallbacks.get("overdue", 0) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    return drafter.inner.draft(request)


def broken(drafter: Troubled, request: DraftRequest) -> DraftReply:
    raise RuntimeError("out of memory\nand more")


@pytest.mark.parametrize(("trouble", "reason"), [(slow, "deadline"), (broken, "drafter_error")])
def test_a_slow_or_broken_drafter_changes_no_token(serve, trouble, reason):
    drafter = Troubled(trouble)
    remote = serve(drafter)
    # one wait takes all of it where the drafter is slow
    engine = drafter.engine = engine_with(remote, deadline_s=3.0 if trouble is slow else DEADLINE_S)
    assert answers_of(engine) == plain()
    assert engine.stats.fallbacks[reason] == 1
    read_answers(engine, remote)  # the one that is late
    more = engine.generate(PROMPTS, Sampling(max_new_tokens=20))
    assert all(c.acceptance.tau == 4 for c in more)


def test_what_answers_wrongly_is_counted_and_changes_no_token(link, context):
    """A peer that answers twice, under another session, with another epoch, with rubbish."""
    drafter, stop = AlwaysRight(toy_model()), threading.Event()

    def misbehave():
        socket = peer_socket(context, link.keys, PEER)
        for count in range(10**6):
            while not socket.poll(100):
                if stop.is_set():
                    return
            frames = socket.recv_multipart()
            if len(frames) == 1:
                continue
            session, ticket, request = decode_request(frames)
            reply = drafter.draft(request)
            good = encode_answer(session, ticket, request.epochs, 0.0, reply)
            if count % 5 == 1:
                socket.send_multipart([b"rubbish"] * 3)
                socket.send_multipart(encode_answer("other", ticket, request.epochs, 0.0, reply))
                socket.send_multipart(good)
            if count % 5 == 3:
                good = encode_answer(session, ticket, [epoch + 1 for epoch in request.epochs], 0.0, reply)
            socket.send_multipart(good)

    thread = threading.Thread(target=misbehave, daemon=True)
    thread.start()
    remote = RemoteDrafter(link, PEER, SESSION, info_of(drafter))
    wait_for_peer(remote)
    engine = engine_with(remote)
    assert answers_of(engine) == plain()
    stop.set()
    thread.join(DEADLINE_S)
    assert set(link.events) == {"malformed_reply", "stale_reply", "duplicate_reply", "wrong_epoch"}
    assert engine.stats.fallbacks == {"wrong_epoch": link.events["wrong_epoch"]}


def peer_socket(context: zmq.Context, keys, peer: bytes) -> zmq.Socket:
    socket = context.socket(zmq.DEALER)
    socket.identity = peer
    socket.curve_serverkey = keys.server_public
    socket.curve_publickey, socket.curve_secretkey = keys.client_public, keys.client_secret
    socket.connect(keys.address)
    return socket


def test_a_peer_that_is_gone_costs_one_wait_at_most_and_its_successor_takes_over(link, serve):
    server, drafter = DraftServer(link.keys, b"first"), AlwaysRight(toy_model())
    server.add("first", drafter)
    remote = RemoteDrafter(link, b"first", "first", info_of(drafter))
    wait_for_peer(remote)
    engine = engine_with(remote, deadline_s=3.0, keep_history=True)
    engine.add(PROMPTS[0], Sampling(max_new_tokens=40))
    engine.step()
    engine.step()
    server.close()
    for _ in range(4):
        engine.step()
    assert engine.stats.fallbacks.get("deadline", 0) <= 1
    assert sum(engine.stats.fallbacks.values()) >= 2
    engine.set_drafter(serve(AlwaysRight(toy_model())))
    done = [p.completion for _ in range(40) if engine.has_work for p in engine.step() if p.completion]
    assert done[0].token_ids == Engine(rows()).generate(PROMPTS[:1], Sampling(max_new_tokens=40))[0].token_ids
    assert done[0].acceptance.tau == 4
    assert done[0].acceptance.rounds >= 6


def test_an_idle_engine_is_made_to_read_what_was_answered(serve):
    """Else a drafter that answered a request whose client then left would be taken for hung."""
    remote = serve(AlwaysRight(toy_model()))
    engine = engine_with(remote)
    engine.add(PROMPTS[0], Sampling(max_new_tokens=40), request_id="leaves")
    engine.step()
    engine.cancel("leaves")
    engine.step()
    assert not engine.has_work
    assert remote.oldest_ask() is not None
    read_answers(engine, remote)
    again = engine.generate(PROMPTS[:1], Sampling(max_new_tokens=40))[0]
    assert again.acceptance.tau == 4


@pytest.mark.parametrize("has_keys", [True, False])
def test_only_the_pairs_own_key_gets_in(link, context, has_keys):
    """A stranger that is refused is cut off for good: a send that waits would wait for ever."""
    public, secret = zmq.curve_keypair()
    stranger = context.socket(zmq.DEALER)
    stranger.identity = PEER
    if has_keys:
        stranger.curve_serverkey = link.keys.server_public
        stranger.curve_publickey, stranger.curve_secretkey = public, secret
    with stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL) as refused:
        stranger.connect(link.keys.address)
        with suppress(zmq.Again):
            stranger.send(b"let me in", zmq.NOBLOCK)
        assert refused.poll(DEADLINE_S * 1000), "nobody refuses the stranger"
        assert link.receive(0.1) == []
        with pytest.raises(DrafterAwayError):
            link.send(PEER, [b"x"])
        stranger.disable_monitor()
    friend = peer_socket(context, link.keys, PEER)
    friend.send(b"hello", zmq.NOBLOCK)
    assert link.receive(DEADLINE_S) == [(PEER, [b"hello"])]
