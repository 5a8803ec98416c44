"""Runs a command with a loopback interface of its own, so that nothing else is counted on it.

As it is where the system does not allow that.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys

_NEWUSER, _NEWNET = 0x10000000, 0x40000000
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1  # SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP


def _enter() -> bool:
    unshare = ctypes.CDLL(None, use_errno=True).unshare
    if unshare(_NEWNET) == 0:
        return True
    user, group = os.getuid(), os.getgid()
    if unshare(_NEWUSER | _NEWNET) != 0:
        return False
    for file, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{file}", "w") as opened:
            opened.write(text)
    return True


def _loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)
        _, flags = struct.unpack("16sh14x", fcntl.ioctl(any_socket, _GET_FLAGS, request))
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", flags | _UP))


if __name__ == "__main__":
    if _enter():
        _loopback_up()
    os.execvp(sys.argv[1], sys.argv[1:])
