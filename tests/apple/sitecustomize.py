"""Put first on PYTHONPATH: Linux looks like macOS, as far as Python shows it. Not the real thing: only what is missing
there is missing here, so that an import or a call which needs Linux fails."""

import os
import select
import socket
import sys
import types

LACKS = {
    os: ("sched_getaffinity", "sched_setaffinity", "pidfd_open", "sched_yield", "memfd_create", "splice", "eventfd",
         "posix_fadvise", "fdatasync", "getrandom", "copy_file_range", "sched_setscheduler"),
    select: ("epoll", "EPOLLIN", "EPOLLOUT"),
    socket: ("SO_TIMESTAMPING", "SO_TIMESTAMPNS", "SO_TIMESTAMP", "TCP_INFO", "TCP_QUICKACK", "AF_NETLINK", "AF_PACKET",
             "SO_BINDTODEVICE", "TCP_USER_TIMEOUT"),
}  # fmt: skip
HIDDEN = {"resource", "fcntl"} if os.environ.get("WHYWAIT_TEST_BARE") else set()


class _Hidden:
    """Modules that even macOS has, hidden as well: nothing may need them to be imported."""

    def find_spec(self, name, path=None, target=None):
        if name in HIDDEN:
            raise ImportError(f"{name} is hidden")


import platform  # noqa: E402 - before the system changes its name
import subprocess  # noqa: E402
import tempfile  # noqa: E402

_loaded = (platform, subprocess, tempfile)
proxies = types.ModuleType("_scproxy")  # urllib asks macOS for its proxies
proxies._get_proxy_settings = proxies._get_proxies = dict
sys.modules["_scproxy"] = proxies
for module, names in LACKS.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
for name in HIDDEN:
    sys.modules.pop(name, None)
if HIDDEN:
    sys.meta_path.insert(0, _Hidden())
sys.platform = "darwin"
