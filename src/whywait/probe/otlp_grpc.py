"""OTLP over gRPC (extra ``otlp-grpc``): the same messages as over HTTP, so nothing but ``grpcio`` is needed."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc

from whywait.probe.otlp import MAX_BODY, OtlpError, spans_of_protobuf

if TYPE_CHECKING:
    from whywait.probe.otlp import Receiver

SERVICE, METHOD = "opentelemetry.proto.collector.trace.v1.TraceService", "Export"


def start(receiver: Receiver, address: str) -> Any:
    """A running gRPC server.

    Raises:
        RuntimeError: the address cannot be used.
    """

    def export(body: bytes, context: Any) -> bytes:
        said = dict(context.invocation_metadata()).get("authorization")
        if not receiver.allowed(said if isinstance(said, str) else None):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token, or another")
        began = time.thread_time()
        try:
            receiver.take(spans_of_protobuf(body))
        except OtlpError as exc:
            receiver.refuse()
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(exc))
        receiver.cost(time.thread_time() - began)
        return b""

    options = [("grpc.max_receive_message_length", MAX_BODY), ("grpc.so_reuseport", 0)]
    server = grpc.server(ThreadPoolExecutor(2, thread_name_prefix="otlp-grpc"), options=options)
    method = grpc.unary_unary_rpc_method_handler(export)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: method}),))
    if not server.add_insecure_port(address):
        raise RuntimeError(f"cannot listen on {address}")
    server.start()
    return server
