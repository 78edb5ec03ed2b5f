"""Line by line formats of published traces: Azure, BurstGPT, Mooncake, LLMServingSim, and our own replay file."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from typing import Any

import orjson

from whywait.convert.clock import number, seconds
from whywait.convert.traces import Bad, Record, Skip, whole

Row = dict[str, Any]
MOONCAKE_BLOCK = 512  # tokens a hash id stands for; the published traces have ceil(input_length / 512) of them


def json_row(line: str) -> Row:
    """A line as a JSON object.

    Raises:
        Bad: it is none.
    """
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        try:  # NaN and lone surrogates: Python writes them, orjson does not read them
            row = json.loads(line)
        except ValueError:
            raise Bad("a JSON object on a line of its own") from None
    if not isinstance(row, dict):
        raise Bad("a JSON object on a line of its own")
    return row


def csv_reader(header: str, record: Callable[[Row], Record]) -> Callable[[str], Record]:
    """A parser of the lines after ``header``."""
    names = [name.strip().lower() for name in next(csv.reader([header]))]

    def parse(line: str) -> Record:
        cells = next(csv.reader([line]), [])
        if len(cells) != len(names):
            raise Bad(f"{len(names)} columns ({', '.join(names)}), found {len(cells)}")
        return record(dict(zip(names, cells, strict=True)))

    return parse


def azure(row: Row) -> Record:
    """AzureLLMInferenceTrace: TIMESTAMP, ContextTokens, GeneratedTokens (2023 and 2024)."""
    return Record(
        seconds(row.get("timestamp"), "a date in TIMESTAMP"),
        whole(row.get("contexttokens"), "a whole number of at least 1 in ContextTokens", 1),
        _answered(whole(row.get("generatedtokens"), "a whole number in GeneratedTokens")),
    )


def burstgpt(row: Row) -> Record:
    """BurstGPT: Timestamp (s), Model, Request tokens, Response tokens, Log Type; in some files Session ID, Elapsed time
    (s)."""
    session = row.get("session id") or None
    took = row.get("elapsed time") or None
    return Record(
        seconds(row.get("timestamp"), "seconds in Timestamp"),
        whole(row.get("request tokens"), "a whole number of at least 1 in 'Request tokens'", 1),
        _answered(whole(row.get("response tokens"), "a whole number in 'Response tokens'")),
        session=session,
        klass=str(row.get("log type") or row.get("model") or "default").strip().lower(),
        took_s=None if took is None else number(took, "seconds in 'Elapsed time'"),
    )


def mooncake(line: str) -> Record:
    """Mooncake: timestamp (ms), input_length, output_length, hash_ids of 512-token prefix blocks."""
    row = json_row(line)
    ids = row.get("hash_ids") or []
    if not isinstance(ids, list) or not all(isinstance(x, (int, str)) for x in ids):
        raise Bad("a list of block numbers in hash_ids")
    return Record(
        whole(row.get("timestamp"), "whole milliseconds in timestamp") / 1e3,
        whole(row.get("input_length"), "a whole number of at least 1 in input_length", 1),
        _answered(whole(row.get("output_length"), "a whole number in output_length")),
        ids,
    )


def llmservingsim(line: str) -> Record:
    """LLMServingSim: arrival_time_ns, input_toks, output_toks; token ids of the prompt are not read."""
    row = json_row(line)
    return Record(
        whole(row.get("arrival_time_ns"), "whole nanoseconds in arrival_time_ns") / 1e9,
        whole(row.get("input_toks"), "a whole number of at least 1 in input_toks", 1),
        _answered(whole(row.get("output_toks"), "a whole number in output_toks")),
    )


def schedule(line: str) -> Record:
    """Our own replay file: at_s or timestamp_ms, prompt_tokens, output_tokens; the rest where known."""
    row = json_row(line)
    if "timestamp_ms" in row:
        at = number(row["timestamp_ms"], "milliseconds in timestamp_ms") / 1e3
    else:
        at = number(row.get("at_s"), "seconds in at_s")
    turn = row.get("turn")
    return Record(
        at,
        whole(row.get("prompt_tokens"), "a whole number of at least 1 in prompt_tokens", 1),
        whole(row.get("output_tokens"), "a whole number of at least 1 in output_tokens", 1),
        row.get("hash_ids") or (),
        row.get("session_id"),
        None if turn is None else whole(turn, "a whole number in turn"),
        str(row.get("class", "default")),
        think_s=None if row.get("think_s") is None else number(row["think_s"], "seconds in think_s"),
    )


def _answered(tokens: int) -> int:
    if tokens == 0:
        raise Skip("requests without an answer (0 output tokens)")
    return tokens
