"""The drafter's end of the link: requests in, drafts out, in a thread of its own. No Ray here.

`serving/drafter_actor.py` runs it in an actor beside, or far from, the replica that it serves.
"""

from __future__ import annotations

import logging
import threading
import time

import zmq

from drafters.drafter import Drafter
from drafters.remote import first_line
from serving.draft_link import LinkKeys
from serving.draft_wire import Frames, WireError, decode_request, encode_answer

log = logging.getLogger(__name__)

_POLL_MS = 500  # how soon a stopped server notices


class DraftServer:
    """Connects to an engine and answers with whichever drafter a request names by its session."""

    def __init__(self, keys: LinkKeys, peer: bytes):
        self._drafters: dict[str, Drafter] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.identity = peer
        self._socket.curve_serverkey = keys.server_public
        self._socket.curve_publickey, self._socket.curve_secretkey = keys.client_public, keys.client_secret
        self._socket.linger = 0
        self._socket.ipv6 = "[" in keys.address
        self._socket.heartbeat_ivl, self._socket.heartbeat_timeout = 2000, 10000
        self._socket.connect(keys.address)
        self._thread = threading.Thread(target=self._run, name="draftloop-drafter", daemon=True)
        self._thread.start()

    def add(self, session: str, drafter: Drafter) -> None:
        """Answer for this drafter too, whose slots are allocated, until `keep` says otherwise."""
        with self._lock:
            self._drafters[session] = drafter

    def keep(self, session: str | None) -> None:
        """Of all drafters only this one stays; None: none does."""
        with self._lock:
            self._drafters = {name: drafter for name, drafter in self._drafters.items() if name == session}

    def close(self) -> None:
        """Stop answering."""
        self._stopped.set()
        self._thread.join(timeout=10.0)
        self._socket.close()
        self._context.term()

    def _run(self) -> None:
        while not self._stopped.is_set():
            if self._socket.poll(_POLL_MS):
                frames = self._socket.recv_multipart()
                try:
                    self._socket.send_multipart(self._answer(frames), flags=zmq.NOBLOCK)
                except WireError as error:
                    log.warning("a message was dropped: %s", error)
                except zmq.ZMQError as error:
                    log.warning("an answer could not be sent: %s", error)

    def _answer(self, frames: Frames) -> Frames:
        session, ticket, request = decode_request(frames)
        with self._lock:
            drafter = self._drafters.get(session)
        if drafter is None:
            return encode_answer(session, ticket, request.epochs, 0.0, None, f"no drafter of session {session}")
        started = time.perf_counter()
        try:
            reply = drafter.draft(request)
        except Exception as error:  # whatever it is, the engine is told and goes on without drafts
            return encode_answer(session, ticket, request.epochs, 0.0, None, first_line(error))
        return encode_answer(session, ticket, request.epochs, time.perf_counter() - started, reply)
