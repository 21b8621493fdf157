"""The engine's end of the link to a drafter elsewhere: a ZeroMQ socket, and the drafter as the engine knows it.

A replica has one link for its life; drafters come and go over it (swaps, restarts), each under a session of its own.
The transport is encrypted (CURVE), and only the pair's own key gets in. The socket belongs to the engine's thread.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from dataclasses import dataclass

import zmq
from zmq.auth.thread import ThreadAuthenticator

from drafters.drafter import Answer, DrafterAwayError, DraftReply, DraftRequest
from serving.draft_wire import Frames, WireError, decode_answer, encode_request

log = logging.getLogger(__name__)

_WAIT_S = 30.0  # of a round trip that somebody waits for
_QUEUED_MESSAGES = 64  # at most one request is under way; more than a few are a drafter that does not read


@dataclass(frozen=True, kw_only=True)
class LinkKeys:
    """What a drafter needs to connect. Handed over by Ray, never over the link."""

    address: str  # tcp://host:port
    server_public: bytes
    client_public: bytes
    client_secret: bytes


@dataclass(frozen=True, kw_only=True)
class DrafterInfo:
    """What the engine must know of a drafter that is loaded elsewhere."""

    name: str
    target_layer_ids: tuple[int, ...]
    max_draft_tokens: int
    max_tree_nodes: int
    memory: str = ""  # what it takes where it runs, in one line


class _OneKey:
    """Lets the pair's own client in and nobody else; keys are in Z85."""

    def __init__(self, client_public: bytes):
        self._client_public = client_public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._client_public


class DraftLink:
    """Listens on a free port of `host` for the replica's drafter."""

    def __init__(self, host: str = "127.0.0.1"):
        public, secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        self._context = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(credentials_provider=_OneKey(client_public))
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.curve_server = True
        self._socket.curve_secretkey, self._socket.curve_publickey = secret, public
        self._socket.router_mandatory = True  # a peer that is not there is an error, not silence
        self._socket.router_handover = True
        self._socket.linger = 0
        self._socket.sndhwm = self._socket.rcvhwm = _QUEUED_MESSAGES
        self._socket.ipv6 = ":" in host
        port = self._socket.bind_to_random_port(f"tcp://[{host}]" if ":" in host else f"tcp://{host}")
        address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        self.keys = LinkKeys(
            address=address, server_public=public, client_public=client_public, client_secret=client_secret
        )
        self.events: Counter[str] = Counter()  # messages that were dropped, by kind

    def send(self, peer: bytes, frames: Frames) -> None:
        """Hand frames to a peer without waiting. Raises DrafterAwayError."""
        try:
            self._socket.send_multipart([peer, *frames], flags=zmq.NOBLOCK, copy=False)
        except zmq.Again:
            raise DrafterAwayError("backlog") from None
        except zmq.ZMQError:
            raise DrafterAwayError("unreachable") from None

    def receive(self, timeout_s: float) -> list[tuple[bytes, Frames]]:
        """(peer, frames) of the messages that have come; waits up to `timeout_s` seconds for the first."""
        found: list[tuple[bytes, Frames]] = []
        if self._socket.poll(int(timeout_s * 1000 + 0.999)):
            while True:
                try:
                    peer, *frames = self._socket.recv_multipart(flags=zmq.NOBLOCK)
                except zmq.Again:
                    break
                found.append((peer, frames))
        return found

    def close(self) -> None:
        """Close the socket, once the engine's thread has ended."""
        self._socket.close()
        self._authenticator.stop()
        self._context.term()


class RemoteDrafter:
    """One drafter behind the link: an AwaitedDrafter. `away` and `oldest_ask` may be used from other threads."""

    def __init__(self, link: DraftLink, peer: bytes, session: str, info: DrafterInfo):
        self._link, self.peer, self.session = link, peer, session
        self.name = info.name
        self.target_layer_ids = info.target_layer_ids
        self.max_draft_tokens, self.max_tree_nodes = info.max_draft_tokens, info.max_tree_nodes
        self.memory = info.memory
        self.away: str | None = None
        self._tickets = itertools.count(1)
        self._lock = threading.Lock()
        self._open: dict[int, tuple[list[int], float]] = {}  # by ticket: epochs, when it was asked

    @property
    def events(self) -> Counter[str]:
        """What was dropped on the link, by kind; of all its drafters."""
        return self._link.events

    def oldest_ask(self) -> float | None:
        """Seconds since the oldest request that has no answer; None if there is none."""
        with self._lock:
            return time.monotonic() - min(at for _, at in self._open.values()) if self._open else None

    def allocate(self, num_slots: int, max_len: int) -> None:
        """The drafter made room for its slots when it was loaded."""

    def draft(self, request: DraftRequest) -> DraftReply:
        """Ask and wait, at most 30 s; engines ask ahead instead. Raises DrafterAwayError."""
        ticket, until = self.ask(request), time.monotonic() + _WAIT_S
        while (left := until - time.monotonic()) > 0:
            for answer in self.answers(left):
                if answer.ticket == ticket and answer.reply is not None:
                    return answer.reply
                if answer.ticket == ticket:
                    raise DrafterAwayError(answer.error or "no_drafts")
        raise DrafterAwayError("deadline")

    def ask(self, request: DraftRequest) -> int:
        """See `AwaitedDrafter`."""
        if self.away is not None:
            raise DrafterAwayError(self.away)
        ticket = next(self._tickets)
        self._link.send(self.peer, encode_request(self.session, ticket, request))
        with self._lock:
            self._open[ticket] = (list(request.epochs), time.monotonic())
        return ticket

    def answers(self, timeout_s: float) -> list[Answer]:
        """See `AwaitedDrafter`. What is not an answer to an open request is dropped and counted."""
        found = []
        for peer, frames in self._link.receive(timeout_s):
            answer = self._answer(peer, frames)
            if answer is not None:
                found.append(answer)
        return found

    def _answer(self, peer: bytes, frames: Frames) -> Answer | None:
        try:
            came = decode_answer(frames)
        except WireError as error:
            self._drop("malformed_reply", str(error))
            return None
        if peer != self.peer or came.session != self.session:
            self._drop("stale_reply", f"of session {came.session}")
            return None
        with self._lock:
            asked = self._open.pop(came.ticket, None)
        if asked is None:
            self._drop("duplicate_reply", f"to request {came.ticket}")
            return None
        if came.epochs != asked[0]:
            self._drop("wrong_epoch", f"{came.epochs} instead of {asked[0]}")
            return Answer(ticket=came.ticket, reply=None, error="wrong_epoch")
        if came.error is not None:
            log.warning("drafter %s failed: %s", self.name, came.error)
            return Answer(ticket=came.ticket, reply=None, error="drafter_error")
        return Answer(ticket=came.ticket, reply=came.reply, seconds=came.seconds)

    def _drop(self, kind: str, detail: str) -> None:
        if not self._link.events[kind]:
            log.warning("drafter %s: %s (%s), dropped", self.name, kind.replace("_", " "), detail)
        self._link.events[kind] += 1
