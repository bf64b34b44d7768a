"""Hostile functions that want credentials, the run's files, sockets and devices."""

import ctypes
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

from tests.unit.rewards.hostile_tools import SECRET, Breach, refused, system_call


def reads_credentials(files):
    leaked = []
    for path in files["secrets"]:
        with suppress(OSError):
            leaked += [path] if SECRET in Path(path).read_text() else []
    if leaked:
        raise Breach(f"{leaked}")


def reads_credentials_that_are_new(files):
    """A file that the driver wrote after this process started."""
    refused(lambda: Path(files["late"]).read_text(), files["late"])


def reads_the_run_directory(files):
    run = Path(files["run_dir"])
    refused(lambda: (run / "config.yaml").read_text(), "a file of the run")
    refused(lambda: (run / "checkpoints" / "state.json").read_text(), "a checkpoint")


def changes_the_run_directory(files):
    run = Path(files["run_dir"])
    refused(lambda: (run / "config.yaml").write_text("x"), "written")
    refused(lambda: (run / "new").write_text("x"), "created")
    refused((run / "config.yaml").unlink, "deleted")
    refused(lambda: (run / "config.yaml").rename("stolen"), "moved")
    refused(lambda: os.truncate(run / "config.yaml", 0), "truncated")
    refused(lambda: run.rename(run.with_name("other")), "directory moved")


def links_to_a_secret(files):
    Path("link").symlink_to(files["secrets"][0])
    refused(Path("link").read_text, "by a symbolic link")
    refused(lambda: os.link(files["secrets"][0], "hard"), "by a hard link")
    refused(lambda: os.rename(files["secrets"][0], "moved"), "by a new name")
    descriptor = os.open(files["secrets"][0], os.O_PATH)
    refused(Path(f"/proc/self/fd/{descriptor}").read_text, "by a path descriptor")


def opens_a_secret_by_its_handle(files):
    handle = ctypes.create_string_buffer(struct.pack("Ii", 128, 0), 136)
    path = files["secrets"][0].encode()
    with suppress(OSError):
        system_call("name_to_handle_at", -100, path, handle, ctypes.byref(ctypes.c_int()), 0)
    folder = os.open("/", os.O_RDONLY | os.O_PATH)
    refused(lambda: system_call("open_by_handle_at", folder, handle, 0), "opened by its handle")


def reads_shared_memory(files):
    refused(Path(files["shared"]).read_text, "another process's shared memory")


def connects_to_a_local_socket(files):
    def connect(address):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(address)

    refused(lambda: connect(files["socket"]), "a socket in a directory")
    refused(lambda: connect(f"\0{files['abstract']}"), "an abstract socket")
    for kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
        refused(lambda kind=kind: socket.socketpair(type=kind), "a pair that can be connected to another process")


def opens_other_kinds_of_sockets(files):
    for family in (socket.AF_VSOCK, socket.AF_PACKET, 38, 16 if files["strict"] else 38):  # 38: AF_ALG, 16: netlink
        refused(lambda family=family: socket.socket(family, socket.SOCK_RAW), f"family {family}")


def opens_a_disk(files):
    for name in ("mem", "kmsg", "vda", "sda", "nvme0n1", "kvm", "fuse", "ptmx", "tty"):
        refused(lambda name=name: os.open(f"/dev/{name}", os.O_RDONLY), name)
    refused(lambda: os.mknod("disk", 0o60600, os.makedev(254, 0)), "a device node of its own")
