"""Rows as float8_e4m3 with one fp32 scale for each row and head, which stands behind the row's own bytes.

A row is scaled by its largest absolute value, so an outlier costs only its own row precision, and a row of zeros comes
back as zeros; of numbers that are not finite the row is lost, as it is without. The error of a number is at most 1/16
of it, or 2**-10 of the scale.
"""

from __future__ import annotations

import torch

from parallel.exchange import SCALE_BYTES, fp8_row_bytes
from parallel.plan import ExchangeCounts, HeadSplit
from parallel.transport.packing import QueryKeyValue

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def quantise(rows: torch.Tensor) -> torch.Tensor:
    """[..., D] as bytes, [..., D + 4]."""
    wide = rows.float()
    largest = wide.abs().amax(dim=-1, keepdim=True)
    scale = (largest / _LARGEST).clamp_min(_SMALLEST_SCALE)
    packed = rows.new_empty(*rows.shape[:-1], rows.shape[-1] + SCALE_BYTES, dtype=torch.uint8)
    packed[..., :-SCALE_BYTES] = (wide / scale).to(FP8).view(torch.uint8)
    packed[..., -SCALE_BYTES:] = scale.view(torch.uint8)
    return packed


def dequantise(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[..., D + 4] bytes as [..., D] numbers."""
    numbers = packed[..., :-SCALE_BYTES].view(FP8).float()
    scale = _as_numbers(packed[..., -SCALE_BYTES:], torch.float32)
    return (numbers * scale).to(dtype)


def pack_heads(qkv: QueryKeyValue, heads: HeadSplit, counts: ExchangeCounts) -> torch.Tensor:
    """Q [B, S_r, H, D], K [B, S_r, Hkv, D] and V [B, S_r, Hkv, Dv] as one block of bytes for each rank: [rows, B, its K
    as it is, Q, V]. counts: in bytes.
    """
    query, key, value = qkv
    batch, rows = key.shape[:2]
    carried = _bytes_of(key), quantise(query), quantise(value)
    send = carried[0].new_empty(sum(counts.sends))
    start = 0
    for rank, count in enumerate(counts.sends):
        sizes = key.shape[3], value.shape[3], key.element_size()
        width = fp8_row_bytes(len(heads.query[rank]), len(heads.kv[rank]), *sizes)
        block, at = send[start : start + count].view(rows, batch, width), 0
        for tensor, mine in zip(carried, (heads.kv[rank], heads.query[rank], heads.kv[rank]), strict=True):
            part = tensor[:, :, mine.start : mine.stop].transpose(0, 1).flatten(2)
            block[:, :, at : at + part.shape[2]] = part
            at += part.shape[2]
        start += count
    return send


def unpack_heads(
    received: torch.Tensor, shape: tuple[int, int, int, int], heads: HeadSplit, place: int, dtype: torch.dtype
) -> QueryKeyValue:
    """All rows of a place's heads: Q [B, S, H_u, D], K [B, S, Hkv_u, D] and V [B, S, Hkv_u, Dv]; shape: B, S, D, Dv."""
    batch, rows, size, value_size = shape
    query, kv = len(heads.query[place]), len(heads.kv[place])
    whole, quantised = kv * size * dtype.itemsize, size + SCALE_BYTES
    full = received.view(rows, batch, fp8_row_bytes(query, kv, size, value_size, dtype.itemsize)).transpose(0, 1)
    of_query, of_value = full[:, :, whole : whole + query * quantised], full[:, :, whole + query * quantised :]
    key = _as_numbers(full[:, :, :whole], dtype)
    return (
        dequantise(of_query.view(batch, rows, query, quantised), dtype),
        key.view(batch, rows, kv, size),
        dequantise(of_value.view(batch, rows, kv, value_size + SCALE_BYTES), dtype),
    )


def _as_numbers(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes of a record as a tensor of its own: they cannot be viewed where they do not start at a multiple of the
    number's size.
    """
    numbers = part.new_empty(*part.shape[:-1], part.shape[-1] // dtype.itemsize, dtype=dtype)
    numbers.view(torch.uint8).copy_(part)
    return numbers


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """[..., D] as [..., bytes of D numbers]; a view unless the numbers of a row lie apart."""
    return (tensor if tensor.stride(-1) == 1 else tensor.contiguous()).view(torch.uint8)
