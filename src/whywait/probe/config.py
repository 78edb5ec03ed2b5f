"""What the sampler is told: one line of JSON on its stdin."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import orjson

from whywait.core.secrets import hide, hide_header
from whywait.errors import UsageError


@dataclass(frozen=True)
class Config:
    """``pids`` maps a group (``engine``, ``client``) to process numbers; their children are found. ``api_key_env``,
    ``headers_env`` and ``reach_env`` (a :class:`whywait.net.reach.Reach` as JSON) name environment variables: secrets
    are never in a configuration or on a command line.
    Only pages on the host ``home`` (the service's; '' = all) are sent those.
    ``kv_unified`` is for llama.cpp, see :func:`whywait.engines.llama_cpp.slot_gauges`.
    ``gpu_urls`` are pages of a DCGM exporter, ``agents`` base URLs of ``whywait agent``. ``otlp_fd`` is a listening
    socket the sampler was given (spans come in there), ``trace_prefix`` what the trace ids of our requests begin with.
    """

    zero_unix_ns: int
    spool: str
    hz: float = 4.0
    metrics_urls: tuple[str, ...] = ()
    home: str = ""
    slots_url: str | None = None
    engine: str | None = None
    kv_unified: bool | None = None
    pids: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    host: bool = True
    gpu: bool = True
    api_key_env: str | None = None
    headers_env: Mapping[str, str] = field(default_factory=dict)
    reach_env: str | None = None
    cpus: tuple[int, ...] = ()
    timeout_s: float = 2.0
    gpu_urls: tuple[str, ...] = ()
    agents: tuple[str, ...] = ()
    agent_token_env: str | None = None
    otlp_fd: int | None = None
    otlp_grpc: str | None = None
    otlp_token_env: str | None = None
    trace_prefix: str = ""

    @classmethod
    def from_json(cls, raw: bytes) -> Config:
        """Raises ``UsageError`` when it is not a configuration."""
        try:
            values = dict(orjson.loads(raw))
            unknown = set(values) - {f.name for f in dataclasses.fields(cls)}
            if unknown:
                raise ValueError(f"unknown keys {sorted(unknown)}")
            for name in ("metrics_urls", "cpus", "gpu_urls", "agents"):
                values[name] = tuple(values.get(name, ()))
            config = cls(**values)
            if not 0.01 <= config.hz <= 100:
                raise ValueError("hz must lie between 0.01 and 100")
        except (ValueError, TypeError) as exc:
            raise UsageError(f"not a sampler configuration: {exc}") from None
        return config

    def headers(self) -> dict[str, str]:
        """HTTP headers, with the secrets filled in from the environment."""
        out = {name: os.environ[var] for name, var in self.headers_env.items() if var in os.environ}
        if self.api_key_env and os.environ.get(self.api_key_env):
            out["Authorization"] = f"Bearer {os.environ[self.api_key_env]}"
        for name, value in out.items():
            hide_header(name, value)
        return out

    def secret(self, variable: str | None) -> str | None:
        """The value of an environment variable that holds a secret; cut out of everything written from then on."""
        value = os.environ.get(variable) if variable else None
        hide(value)
        return value or None
