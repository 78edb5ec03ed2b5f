"""Put first on PYTHONPATH: Linux looks like macOS, as far as Python shows it. Not the real thing: only what is missing
there is missing here, so that an import or a call which needs Linux fails."""

import os
import select
import sys
import types


def without(module, *names):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)


without(os, "sched_getaffinity", "sched_setaffinity", "sched_setscheduler", "pidfd_open", "memfd_create", "splice",
        "eventfd", "posix_fadvise", "fdatasync", "getrandom", "copy_file_range")  # fmt: skip
without(select, "epoll", "EPOLLIN", "EPOLLOUT")  # before anything chooses how it waits

import platform  # noqa: E402 - these look at the system when they are imported, and ours is not the one we play
import socket  # noqa: E402
import subprocess  # noqa: E402
import tempfile  # noqa: E402

_loaded = (platform, subprocess, tempfile)
without(socket, "SO_TIMESTAMPING", "SO_TIMESTAMPNS", "SO_TIMESTAMP", "TCP_INFO", "TCP_QUICKACK", "AF_NETLINK",
        "AF_PACKET", "SO_BINDTODEVICE", "TCP_USER_TIMEOUT")  # fmt: skip

#: Modules that even macOS has, hidden as well: nothing may need them to be imported.
HIDDEN = {"resource", "fcntl"} if os.environ.get("WHYWAIT_TEST_BARE") else set()


class _Hidden:
    def find_spec(self, name, path=None, target=None):
        if name in HIDDEN:
            raise ImportError(f"{name} is hidden")


for hidden in HIDDEN:
    sys.modules.pop(hidden, None)
if HIDDEN:
    sys.meta_path.insert(0, _Hidden())
proxies = types.ModuleType("_scproxy")  # urllib asks macOS for its proxies
proxies._get_proxy_settings = proxies._get_proxies = dict
sys.modules["_scproxy"] = proxies
sys.platform = "darwin"
