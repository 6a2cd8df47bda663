"""Calls as kernels with a ragged interface take them: the rows of all documents, one after another."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch

from backends.interface import AttentionImpl, AttentionMetadata, CallShape, PackedLengths


@dataclass(frozen=True)
class RaggedCall:
    """The documents of a call, by their numbers of rows: each batch row is one, or holds those of `PackedLengths`.

    A document without query rows or without keys takes no part: no kernel sees it, and its query rows are zeros.
    """

    batch: int
    query: tuple[int, ...]
    key: tuple[int, ...]

    @classmethod
    def of(cls, shape: CallShape) -> RaggedCall:
        packed = shape.packed or PackedLengths((shape.query_length,), (shape.key_length,))
        return cls(shape.batch, packed.query * shape.batch, packed.key * shape.batch)

    @cached_property
    def taking_part(self) -> tuple[int, ...]:
        lengths = zip(self.query, self.key, strict=True)
        return tuple(index for index, (rows, keys) in enumerate(lengths) if rows and keys)

    @cached_property
    def query_lengths(self) -> tuple[int, ...]:
        """Of the documents that take part, as all that follows."""
        return tuple(self.query[index] for index in self.taking_part)

    @cached_property
    def key_lengths(self) -> tuple[int, ...]:
        return tuple(self.key[index] for index in self.taking_part)

    def query_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """[B, Sq, H, D] -> [rows, H, D], contiguous."""
        return self._rows(tensor, self.query)

    def key_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """[B, Sk, Hkv, D] -> [keys, Hkv, D], contiguous."""
        return self._rows(tensor, self.key)

    def rows(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.query_rows(query), self.key_rows(key), self.key_rows(value)

    def _rows(self, tensor: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
        rows = tensor.flatten(0, 1)
        if len(self.taking_part) == len(lengths):
            return rows.contiguous()
        documents = _split(rows, lengths)
        return torch.cat([documents[index] for index in self.taking_part])

    def all_rows(self, rows: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        """[rows, H, D] -> [B, Sq, H, D], or [rows, H] -> [B, Sq, H]. fill: of rows that take no part."""
        if len(self.taking_part) != len(self.query):
            parts = dict(zip(self.taking_part, _split(rows, self.query_lengths), strict=True))
            others = {i: rows.new_full((n, *rows.shape[1:]), fill) for i, n in enumerate(self.query) if i not in parts}
            rows = torch.cat([parts[i] if i in parts else others[i] for i in range(len(self.query))])
        return rows.reshape(self.batch, -1, *rows.shape[1:])

    def mask_entries(self, mask: torch.Tensor) -> torch.Tensor:
        """[B or 1, 1, Sq or 1, Sk] -> the entries of each document, row by row, one document after another."""
        rows, keys = sum(self.query) // self.batch, sum(self.key) // self.batch
        every = mask[:, 0].expand(self.batch, rows, keys)
        first_rows, first_keys = (tuple(accumulate(lengths, initial=0)) for lengths in (self.query, self.key))

        def parts() -> Iterator[torch.Tensor]:
            for index in self.taking_part:
                item, row = divmod(first_rows[index], rows)
                column = first_keys[index] - item * keys
                yield every[item, row : row + self.query[index], column : column + self.key[index]].reshape(-1)

        return torch.cat(list(parts()))


def _split(rows: torch.Tensor, lengths: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    return torch.split(rows, list(lengths))


def offsets(lengths: tuple[int, ...], device: torch.device | None = None) -> torch.Tensor:
    """Where each document begins, and where the last one ends."""
    return torch.tensor(tuple(accumulate(lengths, initial=0)), dtype=torch.int32, device=device)


def nothing(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The result of a call in which no query meets a key: zeros, which a backward can pass through."""
    if torch.is_grad_enabled() and query.requires_grad:
        return (
            torch.zeros_like(query)
            .where(torch.ones_like(query, dtype=torch.bool), query)[..., :1]
            .expand(*query.shape[:3], value.shape[3])
        )
    return query.new_zeros(*query.shape[:3], value.shape[3])


def nothing_with_lse(query: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`nothing`, and its log-sum-exp."""
    batch, rows, heads, _ = query.shape
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    lse = torch.full((batch, heads, rows), float("-inf"), dtype=wide, device=query.device)
    return nothing(query, value), lse


def shape_of(query: torch.Tensor, key: torch.Tensor, metadata: AttentionMetadata) -> CallShape:
    batch, rows, heads, size = query.shape
    return CallShape(batch, rows, key.shape[1], heads, key.shape[2], size, metadata.features, metadata.packed)


@dataclass(frozen=True, eq=False)
class PlacedCall:
    """A call with its offsets and the numbers of keys on a device."""

    call: RaggedCall
    query_offsets: torch.Tensor
    key_offsets: torch.Tensor
    key_lengths: torch.Tensor

    @classmethod
    def on(cls, device: torch.device, call: RaggedCall) -> PlacedCall:
        lengths = torch.tensor(call.key_lengths, dtype=torch.int32, device=device)
        return cls(call, offsets(call.query_lengths, device), offsets(call.key_lengths, device), lengths)

    def settings(self) -> dict[str, Any]:
        """As FlashAttention's ragged functions take it."""
        return {
            "cu_seqlens_q": self.query_offsets,
            "cu_seqlens_k": self.key_offsets,
            "max_seqlen_q": max(self.call.query_lengths),
            "max_seqlen_k": max(self.call.key_lengths),
        }


class RaggedImpl(AttentionImpl):
    """A kernel that takes the rows of documents: `plan` lays them out, `attend` computes."""

    device: torch.device

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device

    def plan(self, shape: CallShape) -> PlacedCall | None:
        return PlacedCall.on(self.device, RaggedCall.of(shape))

    def placed(self, query: torch.Tensor, key: torch.Tensor, metadata: AttentionMetadata, plan: Any) -> PlacedCall:
        """The plan of the call, made now if there is none."""
        if plan is None:
            self.prepare(query.device, query.dtype)
            plan = self.plan(shape_of(query, key, metadata))
        placed: PlacedCall = plan
        return placed

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        plan: Any = None,
    ) -> torch.Tensor:
        placed = self.placed(query, key, metadata, plan)
        call = placed.call
        if not call.taking_part:
            return nothing(query, value)
        return call.all_rows(self.attend(*call.rows(query, key, value), placed, metadata))

    @abstractmethod
    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        placed: PlacedCall,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """query [rows, H, D], key and value [keys, Hkv, D]; returns [rows, H, D]."""
