"""`RankProcess`: one process of a pool, which joins the pool's process group and runs the roles placed there.

Imports no Ray: `rlpack.distributed.rank_actor` makes a Ray actor of it, and tests call it directly.
"""

import logging
import math
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import psutil
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from transformers.utils.logging import disable_progress_bar

from rlpack.batch.offload import OffloadedBatch, offload
from rlpack.config.sections.submission import Submission
from rlpack.distributed.context import RankContext
from rlpack.distributed.errors import PlacementError, RankError
from rlpack.distributed.failures import place_in_user_code
from rlpack.distributed.jobs.secrets import load_secrets
from rlpack.distributed.layout import ParallelLayout
from rlpack.distributed.results import check_is_rows
from rlpack.gloo import GLOO
from rlpack.malloc_settings import keep_freed_memory
from rlpack.role_call import role_call
from rlpack.run_log import log_until_exit
from rlpack.spans import FOLDER, record_until_exit, span
from rlpack.user_code import describe_exception, import_user_module, text_of

logger = logging.getLogger(__name__)

# Attribute of the SystemExit by which Ray ends a process.
_RAY_TERMINATES = "ray_terminate_msg"
# Names the network interface that gloo uses.
_INTERFACE = "GLOO_SOCKET_IFNAME"


@runtime_checkable
class _HasBackgroundThreads(Protocol):
    """`rlpack.worker.Worker`, from which a user's role need not derive."""

    background_threads: int


def _check_threads(number: Any, role_class: type[Any]) -> None:
    """Raise unless a role's number of threads is one.

    Raises:
        PlacementError: names the class and the value.
    """
    if type(number) is not int or number < 1:
        raise PlacementError(
            f"{role_class.__name__}.background_threads is {number!r}; set it to a whole number of at least 1"
        )


class RankProcess:
    """Runs the roles of one rank of a pool; colocated roles share this process and its devices."""

    def __init__(self, context: RankContext, threads: int, import_path: Sequence[str] = ()) -> None:
        """Prepare the process.

        Args:
            context: the rank's place in its pool.
            threads: number of torch threads.
            import_path: the driver's, from which users' modules are imported. It comes after this process's own, so
                that no file of a user replaces an installed module or one of the standard library.
        """
        sys.path.extend(path for path in dict.fromkeys(import_path) if path not in sys.path)
        torch.set_num_threads(threads)
        keep_freed_memory()
        disable_progress_bar()  # ranks' progress bars would mix with the driver's output
        self._context = context
        self._rendezvous_store: TCPStore | None = None
        self._roles: dict[str, Any] = {}
        self._columns: dict[int, list[dict[str, Any]]] = {}
        self._background: dict[int, Future[OffloadedBatch]] = {}
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._background_ends: dict[str, float] = {}  # of each role's last submitted method that ended
        self._role_of: dict[int, str] = {}

    def open_log(self, path: Path) -> None:
        """Append this process's log records to a file, and record its spans next to it; a failure is only a warning."""
        process = f"{self._context.pool}/{self._context.rank}"
        try:
            log_until_exit(process, path)
        except OSError as error:
            logger.warning("rank %d of pool %s writes no log: %s", self._context.rank, self._context.pool, error)
        record_until_exit(path.parent / FOLDER, process)

    def load_secrets(self, job: Submission) -> None:
        """Read the secrets that a run names, on this node."""
        load_secrets(job, os.environ)

    def rendezvous(self, node_ip: str, timeout_s: float) -> tuple[str, int]:
        """Open the pool's rendezvous store on rank 0 and return its address.

        It is `node_ip`, if an interface has this address, or else the address of the interface that GLOO_SOCKET_IFNAME
        names.

        Raises:
            RuntimeError: there is no such interface.
        """
        node_ip = _own_address(node_ip)
        # By itself the store would listen on all interfaces; it closes the socket that it is given.
        listening = socket.create_server((node_ip, 0), family=socket.AF_INET6 if ":" in node_ip else socket.AF_INET)
        port = listening.getsockname()[1]
        self._rendezvous_store = TCPStore(
            node_ip,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listening.detach(),
        )
        return node_ip, port

    def join(self, address: tuple[str, int], node_ip: str, timeout_s: float) -> None:
        """Join the pool's process group: gloo for CPU tensors, and NCCL for CUDA tensors where there is a GPU."""
        if not os.environ.get(_INTERFACE):
            os.environ[_INTERFACE] = _interface_of(node_ip)
        timeout = timedelta(seconds=timeout_s)
        store = self._rendezvous_store or TCPStore(*address, is_master=False, timeout=timeout)
        backend = f"cpu:{GLOO},cuda:nccl" if self._context.device == "cuda" else GLOO
        dist.init_process_group(
            backend, store=store, rank=self._context.rank, world_size=self._context.num_ranks, timeout=timeout
        )

    def start_role(
        self,
        role: str,
        target: str,
        settings: tuple[Any, ...],
        arguments: Mapping[str, Any] | None = None,
        layout: ParallelLayout | None = None,
    ) -> None:
        """Build the role by its class's `from_settings`."""
        context = self._context if layout is None else replace(self._context, layout=layout)
        with _sendable_errors():
            built = load_class(target).from_settings(context, *settings, **(arguments or {}))
            if isinstance(built, _HasBackgroundThreads):
                _check_threads(built.background_threads, type(built))
            self._roles[role] = built

    def call(self, role: str, method: str, kwargs: dict[str, Any], *args: Any) -> Any:
        """Run a method of a role.

        `args` are separate arguments, because Ray replaces references by values only there.
        """
        with _sendable_errors(), span(f"{role}.{method}"), role_call():
            return getattr(self._roles[role], method)(*args, **kwargs)

    def execute(self, role: str, method: str, kwargs: dict[str, Any], *args: Any) -> None:
        """Run a method of a role for its side effects; an output rank returns the result."""
        self.call(role, method, kwargs, *args)

    def call_rows(self, call_id: int, role: str, method: str, kwargs: dict[str, Any], *args: Any) -> OffloadedBatch:
        """Run a method that returns rows; keep their token-sized columns here until `pop_columns` is called.

        Raises:
            DataError: it returns anything else.
        """
        with _sendable_errors(), span(f"{role}.{method}"), role_call():
            result = getattr(self._roles[role], method)(*args, **kwargs)
        offloaded, payloads = offload(check_is_rows(result, f"{type(self._roles[role]).__name__}.{method}"))
        if payloads:
            self._columns[call_id] = payloads
        return offloaded

    def submit(self, call_id: int, role: str, method: str, kwargs: dict[str, Any], *args: Any) -> None:
        """Run a method as `call_rows` does, in one of the role's own threads; calls start in the order of submission.

        Threads start only as calls wait for one.
        """
        if role not in self._threads:
            worker = self._roles[role]
            num_threads = worker.background_threads if isinstance(worker, _HasBackgroundThreads) else 1
            self._threads[role] = ThreadPoolExecutor(num_threads, thread_name_prefix=f"background-{role}")

        def run() -> OffloadedBatch:
            try:
                return self.call_rows(call_id, role, method, kwargs, *args)
            finally:
                self._background_ends[role] = time.monotonic()

        self._background_ends.setdefault(role, -math.inf)
        self._role_of[call_id] = role
        self._background[call_id] = self._threads[role].submit(run)

    def result(self, call_id: int, wait_s: float) -> OffloadedBatch | float:
        """Return the rows of a submitted method.

        If it is not done within `wait_s` seconds, return how many seconds ago the last of the role's submitted methods
        ended, which may have held it up; infinity if none has.
        """
        wait([self._background[call_id]], timeout=wait_s)
        if not self._background[call_id].done():
            return time.monotonic() - self._background_ends[self._role_of[call_id]]
        del self._role_of[call_id]
        return self._background.pop(call_id).result()

    def pop_columns(self, call_id: int) -> list[dict[str, Any]]:
        """Return the offloaded columns of a call's rows and forget them."""
        return self._columns.pop(call_id)

    def discard(self, call_id: int) -> None:
        """Forget a call whose rows are not needed: cancel it if it has not started, and drop its columns."""
        future = self._background.pop(call_id, None)
        self._role_of.pop(call_id, None)
        if future is not None and not future.cancel():
            future.add_done_callback(lambda _: self._columns.pop(call_id, None))  # it runs, or has ended
        self._columns.pop(call_id, None)

    def close(self) -> None:
        """Drop the roles and leave the process group."""
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)
        self._roles.clear()
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def _sendable_errors() -> Iterator[None]:
    """Replace an exception that can't be sent to the driver by one with the same text.

    Exceptions that end a process, such as SystemExit, and those that can't be pickled and unpickled can't be sent. Nor
    can a KeyboardInterrupt, which Ray reports as a cancelled call; Ctrl-C doesn't reach ranks.

    Raises:
        RankError: in place of such an exception.
    """
    try:
        yield
    except BaseException as error:  # a user's role may raise anything
        if _RAY_TERMINATES in vars(error) or _is_sendable(error):
            raise
        lines = "".join(traceback.format_exception(error))
        raise RankError(type(error).__name__, text_of(error), lines) from error


def _is_sendable(error: BaseException) -> bool:
    if not isinstance(error, Exception):
        return False
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - pickling runs the error's own code
        return False
    return True


def _interface_of(node_ip: str) -> str:
    """Return the network interface with this address; gloo would guess it from the host name."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == node_ip for address in addresses):
            return name
    raise RuntimeError(
        f"no network interface has this node's address {node_ip}; set {_INTERFACE} in the environment of the node's "
        "Ray to the name of the interface that reaches the other nodes"
    )


def _own_address(node_ip: str) -> str:
    """Return an address of this machine: `node_ip`, unless only others know the node by it, as behind a NAT."""
    interfaces, name = psutil.net_if_addrs(), os.environ.get(_INTERFACE, "").split(",")[0]
    if not name or any(one.address == node_ip for addresses in interfaces.values() for one in addresses):
        _interface_of(node_ip)
        return node_ip
    families = (socket.AF_INET, socket.AF_INET6)
    found = sorted(
        (families.index(one.family), one.address) for one in interfaces.get(name, []) if one.family in families
    )
    if not found:
        having = ", ".join(sorted(interfaces))
        raise RuntimeError(
            f"{_INTERFACE} is {name!r}, which has no IP address on this node; its interfaces are {having}"
        )
    return found[0][1]


def load_class(target: str) -> type[Any]:
    """Return the class that `package.module:Class` names.

    Raises:
        PlacementError: the target has another form, the module can't be imported, or it has no such class.
    """
    module_name, _, class_name = target.partition(":")
    if not module_name or not class_name:
        raise PlacementError(f"role target {target!r} is not of the form package.module:Class")
    try:
        module = import_user_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):  # something that the module imports
            reason = f"{describe_exception(error)}{place_in_user_code(''.join(traceback.format_exception(error)))}"
            raise PlacementError(f"role target {target!r}: {module_name} can't be imported: {reason}") from error
        raise PlacementError(f"role target {target!r}: {error}; is the package installed on every node?") from error
    except Exception as error:  # importing a user's module may raise anything
        reason = describe_exception(error)
        raise PlacementError(f"role target {target!r}: {module_name} can't be imported: {reason}") from error
    role_class = vars(module).get(class_name)
    if not isinstance(role_class, type):
        classes = ", ".join(sorted(name for name, value in vars(module).items() if isinstance(value, type)))
        raise PlacementError(f"role target {target!r}: {module_name} has no class {class_name}; it has {classes}")
    return role_class


def driver_import_path() -> list[str]:
    """Return where the driver imports users' modules from: its import path and its working directory."""
    return [os.path.abspath(path) for path in (*sys.path, os.getcwd())]
