"""The target's own MTP layers at work: pairs in, drafts out, with the layers' keys and values kept in slots.

Layer i's row for pair p takes the token at p + 1 + i. For a sequence's last i pairs that token was a draft: such rows
hold until the next round, which runs the last N - 1 pairs through all layers again, now with the verified tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from drafters.drafter import DraftReply, DraftRequest
from drafters.own_mtp_module import OwnMtpConfig, OwnMtpModule, within
from drafters.pair_ledger import PairLedger

MAX_DRAFT_TOKENS = 16  # of a lone layer, which is applied as often as it is asked to
WIDE = 32  # sequences with more rows than this (a fresh prompt) are run alone, unpadded


class OwnMtpDrafter:
    """Proposes its argmax, in chains."""

    def __init__(self, module: OwnMtpModule, name: str = "own-mtp"):
        self.module = module.eval()
        self.name = name
        self.target_layer_ids = module.config.target_layer_ids
        self._layers = module.config.num_mtp_layers
        self.max_draft_tokens = MAX_DRAFT_TOKENS if self._layers == 1 else self._layers
        self.max_tree_nodes = 0
        self._keys: list[Tensor] = []  # by layer [slots, entries, heads, width]
        self._values: list[Tensor] = []
        self._hidden = self._tokens = torch.empty(0)
        self._ledger = PairLedger(0)

    def allocate(self, num_slots: int, max_len: int) -> None:
        """Room for every slot's pairs, and for drafts and padding that reach past a full slot.

        With several layers also the pairs themselves: a sequence may go on from any of them.
        """
        like, room = self.module.lm_head_WD, _room(max_len)
        options: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
        widths = self.module.config.cache_widths
        self._keys = [torch.zeros((num_slots, room, heads, width), **options) for heads, width, _, _ in widths]
        self._values = [torch.zeros((num_slots, room, heads, width), **options) for _, _, heads, width in widths]
        kept = room if self._layers > 1 else 0
        self._hidden = torch.zeros((num_slots, kept, self.module.config.hidden_size), **options)
        self._tokens = torch.zeros((num_slots, kept), dtype=torch.int64, device=like.device)
        self._ledger = PairLedger(num_slots)

    @staticmethod
    def slot_bytes(config: OwnMtpConfig, max_len: int, dtype: torch.dtype) -> int:
        """Bytes that `allocate` takes for a slot."""
        numbers = sum(a * b + c * d for a, b, c, d in config.cache_widths)
        pairs = 0 if config.num_mtp_layers == 1 else config.hidden_size * dtype.itemsize + torch.int64.itemsize
        return _room(max_len) * (numbers * dtype.itemsize + pairs)

    @torch.inference_mode()
    def draft(self, request: DraftRequest) -> DraftReply:
        """See `Drafter`. Raises ValueError if pairs are missing."""
        assert request.features_NF is not None
        self._ledger.note(request)
        like, num = self.module.lm_head_WD, request.num_draft_tokens
        hidden = self.module.enter(request.features_NF.to(like.device, like.dtype)).split(request.counts)
        tokens = request.tokens_N.to(like.device).split(request.counts)
        runs = [self._run(*given) for given in zip(request.slots, request.starts, tokens, hidden, strict=True)]
        short = [b for b, run in enumerate(runs) if len(run.tokens_W) <= WIDE]
        groups = [short] if short else []
        groups += [[b] for b, run in enumerate(runs) if len(run.tokens_W) > WIDE]
        drafts_BK = torch.empty((len(runs), num), dtype=torch.int64, device=like.device)
        for group in groups:
            drafts_BK[group] = self._draft([runs[b] for b in group], num)
        return DraftReply(tokens_BK=drafts_BK.cpu())

    def _run(self, slot: int, start: int, tokens_C: Tensor, hidden_CD: Tensor) -> _Run:
        """The rows of a sequence in this round: those of its new pairs, and those that held until now."""
        first, end = max(0, start - (self._layers - 1)), start + len(tokens_C)
        if self._layers > 1:
            self._tokens[slot, start:end], self._hidden[slot, start:end] = tokens_C, hidden_CD
            tokens_C, hidden_CD = self._tokens[slot, first:end], self._hidden[slot, first:end]
        return _Run(slot, first, tokens_C, hidden_CD)

    def _draft(self, runs: list[_Run], num_draft_tokens: int) -> Tensor:
        """[B, K] drafts of some sequences; all layers' keys and values are written whatever K is."""
        hidden = pad_sequence([run.hidden_WD for run in runs], batch_first=True)
        device, width = hidden.device, hidden.shape[1]
        # the known tokens, and behind them the drafts; past those zeros, for rows that the next round runs again
        line = F.pad(pad_sequence([run.tokens_W for run in runs], batch_first=True), (0, self._layers))
        slots = [run.slot for run in runs]
        firsts, counts = torch.tensor([[run.first, len(run.tokens_W)] for run in runs], device=device).T
        entries_BW = firsts[:, None] + torch.arange(width, device=device)
        row_B, newest, end = torch.arange(len(runs), device=device), counts - 1, max(r.first for r in runs) + width
        drafts: list[Tensor] = []
        for i in range(self._layers):
            hidden = self._layer(i, slots, line[:, i : i + width], hidden, entries_BW, end)
            if i < num_draft_tokens:
                drafts.append(self._best(hidden[row_B, newest]))
                line[row_B, counts + i] = drafts[-1]
        last_BD = hidden[row_B, newest]
        for k in range(self._layers, num_draft_tokens):  # a lone layer: its own output, one position on
            entries_B1 = (firsts + newest + k)[:, None]
            last_BD = self._layer(0, slots, drafts[-1][:, None], last_BD[:, None], entries_B1, end + k)[:, 0]
            drafts.append(self._best(last_BD))
        return torch.stack(drafts, dim=1) if drafts else line[:, :0]

    def _best(self, hidden_BD: Tensor) -> Tensor:
        return self.module.draft_vocab_ids[self.module.head(hidden_BD).argmax(dim=-1)]

    def _layer(
        self, index: int, slots: list[int], tokens_BW: Tensor, hidden_BWD: Tensor, entries_BW: Tensor, end: int
    ) -> Tensor:
        """A layer over W rows per sequence, the pair p = entry of each; a slot's first `end` entries are looked at."""
        behind_BWL = entries_BW[:, :, None] - torch.arange(end, device=entries_BW.device)
        seen_BWL = (behind_BWL >= 0) & within(self.module.windows[index], behind_BWL)
        view = _SlotView(self._keys, self._values, slots, entries_BW, end)
        return self.module.run_layer(index, tokens_BW, hidden_BWD, entries_BW + 1 + index, seen_BWL, view)


def _room(max_len: int) -> int:
    """Entries of a slot."""
    return max_len + max(MAX_DRAFT_TOKENS, WIDE)


@dataclass(frozen=True)
class _Run:
    """Rows of one sequence, for pairs `first`, `first` + 1 and so on."""

    slot: int
    first: int
    tokens_W: Tensor  # at p + 1
    hidden_WD: Tensor  # what layer 0 takes


@dataclass(frozen=True)
class _SlotView:
    """What decoder layers take for a cache: rows' keys and values go to their entries, the slots' come back."""

    keys: list[Tensor]
    values: list[Tensor]
    slots: list[int]
    entries_BW: Tensor
    end: int  # of the slots' entries that are looked at; a lone sequence's rows are the last of them

    def update(
        self, key_BHWD: Tensor, value_BHWD: Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """As decoder layers of transformers call it."""
        pairs = ((self.keys[layer_idx], key_BHWD), (self.values[layer_idx], value_BHWD))
        found = [self._kept(buffer, new.transpose(1, 2).to(buffer.dtype)).to(new.dtype) for buffer, new in pairs]
        return found[0].transpose(1, 2), found[1].transpose(1, 2)

    def _kept(self, buffer: Tensor, new_BWHD: Tensor) -> Tensor:
        """[B, end, H, D] with the new entries written: of a lone sequence a view, of several a copy."""
        if len(self.slots) == 1:
            slot = buffer[self.slots[0]]
            slot[self.end - new_BWHD.shape[1] : self.end] = new_BWHD[0]
            return slot[None, : self.end]
        slot_B = torch.tensor(self.slots, device=buffer.device)
        buffer[slot_B[:, None], self.entries_BW] = new_BWHD
        return buffer[slot_B, : self.end]
