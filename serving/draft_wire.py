"""Rounds as frames of bytes: ids and numbers in a JSON header, tensors raw beside it. No pickle.

A request is [header, tokens, features], an answer [header, tokens, parents, confidence, candidates, their
probabilities]; frames of tensors that there are none of are empty. Features travel as bfloat16.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from drafters.drafter import DraftReply, DraftRequest, SparseProbs

REQUEST_FRAMES, ANSWER_FRAMES = 3, 6
_TENSORS = ("tokens_N", "features_NF")
_LISTS = tuple(f.name for f in fields(DraftRequest) if f.name not in _TENSORS)  # ids and numbers

Frames = list[bytes]


class WireError(ValueError):
    """Frames that are no request or answer; one line."""


@dataclass(frozen=True, kw_only=True)
class RemoteAnswer:
    """An answer as it came over the wire."""

    session: str
    ticket: int
    epochs: list[int]  # of the request, as the drafter saw them
    reply: DraftReply | None
    error: str | None
    seconds: float


def encode_request(session: str, ticket: int, request: DraftRequest) -> Frames:
    """The frames of one round's request."""
    header = {name: getattr(request, name) for name in _LISTS} | {"session": session, "ticket": ticket}
    features = b"" if request.features_NF is None else _bytes(request.features_NF, torch.bfloat16)
    return [json.dumps(header).encode(), _bytes(request.tokens_N, torch.int64), features]


def decode_request(frames: Sequence[bytes]) -> tuple[str, int, DraftRequest]:
    """Session, ticket and request. Raises WireError."""
    header = _header(frames, REQUEST_FRAMES)
    try:
        values: dict[str, Any] = {name: header[name] for name in _LISTS}
        tokens_N = _tensor(frames[1], torch.int64, (sum(values["counts"]),))
        features_NF = _tensor(frames[2], torch.bfloat16, (len(tokens_N), -1)) if frames[2] else None
        request = DraftRequest(**values, tokens_N=tokens_N, features_NF=features_NF)
        return str(header["session"]), int(header["ticket"]), request
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise WireError(f"not a draft request: {error!r}") from error


def encode_answer(
    session: str, ticket: int, epochs: list[int], seconds: float, reply: DraftReply | None, error: str | None = None
) -> Frames:
    """The frames of what became of a request."""
    header: dict[str, Any] = {"session": session, "ticket": ticket, "epochs": epochs, "seconds": seconds}
    if reply is None:
        return [json.dumps(header | {"error": error or "no reason given"}).encode(), *[b""] * (ANSWER_FRAMES - 1)]
    header |= {"shape": list(reply.tokens_BK.shape), "counts": reply.counts}
    probs = reply.probs
    header["candidates"] = 0 if probs is None else probs.ids_BKC.shape[2]
    return [
        json.dumps(header).encode(),
        _bytes(reply.tokens_BK, torch.int64),
        b"" if reply.parents_BK is None else _bytes(reply.parents_BK, torch.int64),
        b"" if reply.confidence_BK is None else _bytes(reply.confidence_BK, torch.float32),
        b"" if probs is None else _bytes(probs.ids_BKC, torch.int64),
        b"" if probs is None else _bytes(probs.probs_BKC, torch.float32),
    ]


def decode_answer(frames: Sequence[bytes]) -> RemoteAnswer:
    """What came. Raises WireError."""
    header = _header(frames, ANSWER_FRAMES)
    try:
        error = header.get("error")
        return RemoteAnswer(
            session=str(header["session"]),
            ticket=int(header["ticket"]),
            epochs=[int(epoch) for epoch in header["epochs"]],
            reply=None if error is not None else _reply(header, frames),
            error=None if error is None else str(error),
            seconds=float(header["seconds"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise WireError(f"not an answer: {error!r}") from error


def _reply(header: dict[str, Any], frames: Sequence[bytes]) -> DraftReply:
    batch, width = (int(n) for n in header["shape"])
    shape, candidates = (batch, width), int(header["candidates"])
    probs = None
    if candidates and width:
        deep = (batch, width, candidates)
        probs = SparseProbs(
            ids_BKC=_tensor(frames[4], torch.int64, deep), probs_BKC=_tensor(frames[5], torch.float32, deep)
        )
    counts = header["counts"]
    return DraftReply(
        tokens_BK=_tensor(frames[1], torch.int64, shape),
        counts=None if counts is None else [int(n) for n in counts],
        probs=probs,
        parents_BK=_tensor(frames[2], torch.int64, shape) if frames[2] else None,
        confidence_BK=_tensor(frames[3], torch.float32, shape) if frames[3] else None,
    )


def _header(frames: Sequence[bytes], count: int) -> dict[str, Any]:
    if len(frames) != count:
        raise WireError(f"{len(frames)} frames instead of {count}")
    try:
        header = json.loads(frames[0])
    except (ValueError, RecursionError) as error:
        raise WireError(f"the header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise WireError("the header is no JSON object")
    return header


def _bytes(tensor: Tensor, dtype: torch.dtype) -> bytes:
    return tensor.detach().to("cpu", dtype).contiguous().view(torch.uint8).numpy().tobytes()


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor of its own memory; `shape` may leave the last axis open (-1)."""
    found = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return found.view(shape)
