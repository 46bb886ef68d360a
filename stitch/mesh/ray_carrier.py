"""`RayCarrier`: a device server in each of several Ray actors, on this computer or on a cluster.

Large values go from store to store as Ray's object references, all of them owned by the client, so
that they outlive the servers. Ray restarts nothing: only the client knows what a server held.
"""

from __future__ import annotations

import os
import pickle
import secrets
import shutil
import socket
import sys
import sysconfig
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import ray
import ray._private.worker as ray_worker
from ray.exceptions import (
    GetTimeoutError,
    ObjectLostError,
    ObjectStoreFullError,
    OutOfDiskError,
    OutOfMemoryError,
    RayActorError,
    RayError,
)

from stitch.budget import machine_nbytes
from stitch.errors import TaskError, UsageError
from stitch.machine import Machine
from stitch.mesh.carrier import Outcome, Sending, unchanging
from stitch.mesh.messages import Failure, NotDone
from stitch.mesh.server import DeviceServer
from stitch.mesh.specification import MachineSpecification
from stitch.program import Array

#: Values up to this size travel inside messages, by the client: one of 256 KiB through two devices
#: takes 1.8 ms and not 4 by the store.
INLINE_NBYTES: Final = 1 << 20
#: The least store that Ray starts with, and the parts of memory and of /dev/shm that one takes.
LEAST_STORE_NBYTES: Final = 75 << 20
STORE_PART_OF_MEMORY: Final = 0.3
STORE_PART_OF_SHARED_MEMORY: Final = 0.8
#: The label of Ray's nodes that `node:` of a machine specification names.
NODE_LABEL: Final = "node"
#: How often Ray is asked which messages are answered that nobody waits for.
POLL_SECONDS: Final = 10e-3
#: How long an address has to answer.
CONNECT_SECONDS: Final = 5.0
#: `open_server` with its options.
OpenServer: TypeAlias = Callable[..., DeviceServer]
#: How long a wait lasts until the cluster is asked whether it is there.
ALIVE_SECONDS: Final = 5.0
#: Errors of a full store, and of a full disk, to which it would move values.
_FULL: Final = (ObjectStoreFullError, OutOfDiskError)
_SHARED_MEMORY = Path("/dev/shm")
_QUIET = "RAY_IGNORE_UNHANDLED_ERRORS"


class _Server:
    """The actor of a device."""

    def __init__(self, opened: OpenServer, name: str, machine: Machine, processes: int) -> None:
        self._server = opened(name, machine, copies=False, processes=processes)

    def place(self) -> tuple[int, str]:
        """Return the process and the host."""
        return os.getpid(), socket.gethostname()

    def handle(self, messages: bytes, *values: Any) -> object:
        """Take messages, each with the numbers of its values and of its answers; answer all values
        but the last one of each, and behind them these as bytes.

        Ray carries bytes faster than objects, which it would pickle the same way.
        """
        given = iter(values)
        others: list[object] = []
        last: list[object] = []
        for message, count, returns in pickle.loads(messages):
            answer = self._server.handle(message, *islice(given, count))
            # The server does not know how many values a message of an unknown piece has.
            answers = answer if isinstance(answer, tuple) else (answer,) * returns
            others += answers[:-1]
            last.append(answers[-1])
        told = pickle.dumps(last)
        return (*others, told) if others else told


@dataclass(slots=True, eq=False)
class _Call:
    """Messages that were sent together; `last` refers to the last value of the answer of each,
    which is small for runs and tells of the others."""

    device: str
    last: Any
    outcome: Outcome = Outcome.PENDING
    answers: Sequence[Any] = ()

    def settle(self, told: bytes) -> None:
        """Note the last values."""
        self.answers, self.outcome = pickle.loads(told), Outcome.READY


@dataclass(frozen=True, slots=True, eq=False)
class _Reference:
    """A value: Ray's reference to it, or a small array of the client itself; `number`: of its
    message in the call."""

    value: Any
    call: _Call | None = None
    number: int = 0


@dataclass(slots=True, eq=False)
class _Actor:
    """The actor of a device, and a reference to what `_Server.place` answers."""

    handle: Any
    place: Any
    death: str = ""
    #: `_Server.handle` by the number of values that it answers.
    methods: dict[int, Any] = field(default_factory=dict)

    def method(self, returns: int) -> Any:
        """Return `_Server.handle` with a number of values."""
        if returns not in self.methods:
            self.methods[returns] = self.handle.handle.options(num_returns=returns)
        return self.methods[returns]

    @property
    def number(self) -> str:
        """Ray's number of the actor."""
        return str(self.handle._actor_id.hex())


@dataclass(slots=True, eq=False)
class _Connection:
    """The connection of this process to Ray; `folder`: of a cluster that it started.

    Ray does not log what failed and was not asked for: the client sends it again.
    """

    folder: str | None
    meshes: int = 0
    logs_failures: bool = field(default_factory=lambda: _QUIET not in os.environ)

    def __post_init__(self) -> None:
        os.environ.setdefault(_QUIET, "1")


#: The connection that meshes of this process made, if any.
_connection: _Connection | None = None


class RayCarrier:
    """Device servers in Ray actors.

    Args:
        specification: The devices; `node` places one on nodes that have the label `node=...`.
        opened: Opens the server of a device by name and machine, in its actor.
        address: A running cluster: `auto`, or HOST:PORT. None: the one that this process uses
            already, else one that is started on this computer and ended with the last mesh.

    Attributes:
        capacity: The bytes of values that the smallest store of the cluster holds.

    Raises:
        UsageError: The address is malformed, or another cluster than the one in use.
        TaskError: Nothing answers at the address, or another version; no node has a label, or the
            nodes have fewer CPUs than devices; the shared memory of this computer is too small for
            a store.
    """

    def __init__(
        self, specification: MachineSpecification, opened: OpenServer, address: str | None = None
    ) -> None:
        self._specification, self._opened = specification, opened
        self._process = os.getpid()
        self._actors: dict[str, _Actor] = {}
        #: The last values of messages that were not answered when Ray was asked, and when it was.
        self._pending: set[Any] = set()
        self._polled = 0.0
        connection = _connect(address, len(specification.devices))
        self._close = weakref.finalize(self, _end, os.getpid(), self._actors, connection)
        nodes = [node for node in ray.nodes() if node["Alive"]]
        stores = [int(node["Resources"].get("object_store_memory", 0)) for node in nodes]
        self.capacity: int | None = min(stores)
        is_own = connection is not None and connection.folder is not None
        try:
            self._check_nodes(nodes, is_own)
        except TaskError:
            self.close()
            raise

    def _check_nodes(self, nodes: Sequence[Any], is_own: bool) -> None:
        """Raise `TaskError` for labels that no node has, and for a cluster of others with fewer
        CPUs than devices: they would take turns."""
        entries = self._specification.devices
        labels = {node["Labels"].get(NODE_LABEL) for node in nodes}
        for name, entry in entries.items():
            if entry.node is not None and entry.node not in labels:
                raise TaskError(
                    f"no node of the cluster has the label of device {name!r}",
                    expected=f"{NODE_LABEL}={entry.node}",
                    got=", ".join(sorted(str(label) for label in labels if label)) or "no labels",
                    remedy=f"ray start --labels={NODE_LABEL}={entry.node}",
                )
        for label in () if is_own else dict.fromkeys([None, *[e.node for e in entries.values()]]):
            devices = [n for n, entry in entries.items() if label in (None, entry.node)]
            there = [n for n in nodes if label in (None, n["Labels"].get(NODE_LABEL))]
            cpus = int(sum(node["Resources"].get("CPU", 0) for node in there))
            if cpus < len(devices):
                raise TaskError(
                    "the cluster has too few CPUs for the devices",
                    where="all nodes" if label is None else f"nodes {NODE_LABEL}={label}",
                    expected=f"{len(devices)}: one for each of {', '.join(devices)}",
                    got=f"{cpus} on {len(there)} nodes",
                    remedy="ray start --num-cpus=N, another node, or fewer devices",
                )

    # -- the carrier -------------------------------------------------------------------------------

    def start(self, device: str) -> None:
        """Start an actor for a device; an actor that was there before is killed."""
        self._check_process()
        self._check_cluster()
        before = self._actors.pop(device, None)
        if before is not None:
            ray.kill(before.handle)
        entry = self._specification.devices[device]
        options: dict[str, Any] = {"runtime_env": {"env_vars": _environment()}}
        if entry.node is not None:
            options["label_selector"] = {NODE_LABEL: entry.node}
        made = ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)(_Server)
        beside = [each for each in self._specification.devices.values() if each.node == entry.node]
        handle = made.options(**options).remote(self._opened, device, entry.machine, len(beside))
        self._actors[device] = _Actor(handle, handle.place.remote())

    def send(self, device: str, *sendings: Sending) -> list[tuple[_Reference, ...]]:
        """Send messages to the actor of a device, in one call."""
        self._check_process()
        actor = self._actors.get(device)
        if actor is None:
            lost = _Call(device, None, Outcome.LOST)
            return [(_Reference(None, lost),) * sending.returns for sending in sendings]
        messages = pickle.dumps([(m, len(values), returns) for m, values, returns in sendings])
        count = sum(sending.returns - 1 for sending in sendings) + 1
        made = actor.method(count).remote(
            messages, *[value.value for sending in sendings for value in sending.values]
        )
        *others, last = made if count > 1 else [made]
        call, rest = _Call(device, last), iter(others)
        self._pending.add(last)
        return [
            tuple([
                _Reference(reference, call, number)
                for reference in (*islice(rest, sending.returns - 1), last)
            ])
            for number, sending in enumerate(sendings)
        ]  # fmt: skip

    def put(self, value: Array | Failure) -> _Reference:
        """Return a reference to a value of the client; a large array is copied into the store."""
        self._check_process()
        if not isinstance(value, np.ndarray) or value.nbytes <= INLINE_NBYTES:
            return _Reference(unchanging(value))
        try:
            return _Reference(ray.put(value))
        except _FULL as error:
            raise self._store_is_full(f"an array of {value.nbytes:,} bytes") from error

    def wait(self, references: Sequence[_Reference]) -> None:
        """Wait until no reference is pending."""
        self._check_process()
        calls = {
            reference.call for reference in references
            if reference.call is not None and reference.call.outcome is Outcome.PENDING
        }  # fmt: skip
        if not calls:
            return
        last = [call.last for call in calls]
        is_waiting = True
        while is_waiting:
            try:
                for call, answer in zip(calls, ray.get(last, timeout=ALIVE_SECONDS), strict=True):
                    call.settle(answer)
                is_waiting = False
            except GetTimeoutError:
                self._check_cluster()
            except RayError:  # Each tells of itself; others are perhaps not there yet.
                _, left = ray.wait(
                    last, num_returns=len(last), timeout=ALIVE_SECONDS, fetch_local=False
                )
                is_waiting = bool(left)
        self._pending.difference_update(last)

    def _check_cluster(self) -> None:
        """Raise `TaskError` if the cluster has ended: Ray itself would wait for a minute, and then
        end this process."""
        address = ray.get_runtime_context().gcs_address
        host, _, port = address.rpartition(":")
        try:
            with suppress(TimeoutError):  # It is busy.
                socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
        except OSError as error:
            raise TaskError(
                "the Ray cluster has ended", where=address, got=str(error),
                remedy="close this mesh, and open one on another cluster",
            ) from error  # fmt: skip

    def outcome(self, reference: _Reference) -> Outcome:
        """Return what became of a value by now; raise `TaskError` if the store is full."""
        call = reference.call
        if call is None:
            return Outcome.READY
        if call.outcome is Outcome.PENDING:
            self._look(call)
        if call.outcome is Outcome.READY and type(call.answers[reference.number]) is NotDone:
            return Outcome.SILENT
        return call.outcome

    def _look(self, call: _Call) -> None:
        """Note what became of a message, if it is known by now."""
        self._poll()
        if call.last in self._pending:
            return
        try:
            call.settle(ray.get(call.last))
        except RayActorError as error:
            # The actor is perhaps that of an earlier message, which made an argument of this one.
            for name, actor in self._actors.items():
                if error.actor_id == actor.number:
                    if error.actor_init_failed:
                        raise TaskError(
                            f"the server of device {name!r} did not start",
                            got=str(error).strip().splitlines()[-1],
                        ) from error
                    actor.death = _cause(str(error))
            call.outcome = Outcome.LOST
        except OutOfMemoryError as error:  # Ray ended the actor, as its node had no memory left.
            self._actors[call.device].death = str(error).split(" Refer to ")[0].strip()
            call.outcome = Outcome.LOST
        except ObjectLostError:
            call.outcome = Outcome.LOST
        except _FULL as error:
            call.outcome = Outcome.SILENT  # The next look sends the message again.
            raise self._store_is_full(self.whereabouts(call.device)) from error
        except RayError as error:
            raise TaskError(
                f"the server of device {call.device!r} failed",
                where=self.whereabouts(call.device), got=str(error).strip().splitlines()[-1],
            ) from error  # fmt: skip

    def _store_is_full(self, where: str) -> TaskError:
        return TaskError(
            "the object store of the cluster is full", where=where,
            got=f"{self.capacity:,} bytes", remedy="fewer calls in flight, or free results",
        )  # fmt: skip

    def _poll(self) -> None:
        """Ask Ray which of all pending messages are answered, unless it was asked just now."""
        now = time.monotonic()
        if now < self._polled + POLL_SECONDS or not self._pending:
            return
        pending = list(self._pending)
        ready, _ = ray.wait(pending, num_returns=len(pending), timeout=0, fetch_local=False)
        self._pending.difference_update(ready)
        self._polled = now

    def values(self, references: Sequence[_Reference]) -> list[Any]:
        """Return values that are ready, or `Outcome.LOST` where a node ended with one; arrays are
        views of the store."""
        self._check_process()
        found = [
            each.call.answers[each.number]
            if each.call is not None and each.value is each.call.last else each.value
            for each in references
        ]  # fmt: skip
        places = [i for i, each in enumerate(found) if isinstance(each, ray.ObjectRef)]
        try:
            values = ray.get([found[i] for i in places])
        except ObjectLostError:
            values = [self._value_or_lost(found[i]) for i in places]
        for i, value in zip(places, values, strict=True):
            found[i] = value
        return found

    def _value_or_lost(self, reference: Any) -> Any:
        try:
            return ray.get(reference)
        except ObjectLostError:
            return Outcome.LOST

    def has_ended(self, device: str) -> bool:
        """Return whether a message told that the actor of a device has ended."""
        actor = self._actors.get(device)
        return actor is None or bool(actor.death)

    def whereabouts(self, device: str) -> str:
        """Return the process and node of a device's actor, and how it ended."""
        actor = self._actors.get(device)
        if actor is None:
            return f"device {device!r}, not started"
        words = f"device {device!r}"
        with suppress(RayError):
            pid, host = ray.get(actor.place, timeout=0)
            words += f", pid {pid} on node {host}"
        return words + (f"; {actor.death}" if actor.death else "")

    def close(self) -> None:
        """Kill all actors; end the cluster with the last mesh that uses it."""
        self._close()

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise UsageError(
                "a mesh belongs to the process that opened it", expected=f"pid {self._process}",
                got=f"pid {os.getpid()}, after a fork", remedy="open another mesh here",
            )  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Clusters.


def _connect(address: str | None, devices: int) -> _Connection | None:
    """Connect this process to a cluster; return None if others connected it before."""
    global _connection
    if ray.is_initialized():
        used = ray.get_runtime_context().gcs_address
        if address not in (None, "auto") and _port_of(str(address)) != _port_of(used):
            raise UsageError("this process uses another Ray cluster already", expected=used,
                             got=address, remedy="ray.shutdown() first")  # fmt: skip
    elif address is None:
        _connection = _start(devices)
    else:
        _join(address)
        _connection = _Connection(None)
    if _connection is not None:
        _connection.meshes += 1
    return _connection


def _start(devices: int) -> _Connection:
    """Start a cluster on this computer, with a token that this process and its own know."""
    free = os.statvfs(_SHARED_MEMORY)
    shared = free.f_bavail * free.f_frsize
    store = int(min(STORE_PART_OF_MEMORY * machine_nbytes(), STORE_PART_OF_SHARED_MEMORY * shared))
    if store < LEAST_STORE_NBYTES:
        raise TaskError(
            f"{_SHARED_MEMORY} is too small for the object store of a Ray cluster",
            expected=f"{int(LEAST_STORE_NBYTES / STORE_PART_OF_SHARED_MEMORY):,} bytes free",
            got=f"{shared:,} bytes", remedy="docker run --shm-size=2g, or remove files there",
        )  # fmt: skip
    # Paths of sockets must be short, whatever TMPDIR is.
    folder = tempfile.mkdtemp(prefix="stitch-ray-", dir="/tmp")
    words = {
        "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
    }  # fmt: skip
    before = {word: os.environ.get(word) for word in words}
    os.environ.update(words)
    try:
        _read_token()
        ray.init(
            # Without `_memory`, which no actor asks for, Ray looks at what is free by chance.
            "local", num_cpus=devices, num_gpus=0, _memory=store, object_store_memory=store,
            _temp_dir=folder,
            include_dashboard=False, log_to_driver=False, configure_logging=False,
            # The devices have their own limits; Ray would kill them for what others take.
            _system_config={
                "max_direct_call_object_size": INLINE_NBYTES, "memory_monitor_refresh_ms": 0,
            },
        )  # fmt: skip
    except BaseException as error:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
        if not isinstance(error, Exception):  # Ray raises any kind.
            raise
        raise TaskError(
            "no Ray cluster can be started on this computer", got=str(error).strip(),
            expected=f"free memory, for the store alone {store:,} bytes",
        ) from error  # fmt: skip
    finally:
        for word, value in before.items():
            if value is None:
                del os.environ[word]
            else:
                os.environ[word] = value
        if not ray.is_initialized():
            _read_token()
    # Ray prints to the standard output that an actor ended; the client tells of it.
    ray_worker._worker_logs_enabled = False
    return _Connection(folder)


def _read_token() -> None:
    """Have Ray read the mode and the token from the environment again."""
    raylet: Any = import_module("ray._raylet")
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def _join(address: str) -> None:
    """Connect to a running cluster."""
    host, _, port = address.rpartition(":")
    if address != "auto":
        if not (host and port.isdigit() and "/" not in host):
            raise UsageError("the address of a cluster is wrong", expected="auto, or HOST:PORT",
                             got=address)  # fmt: skip
        _check_answers(host.strip("[]"), int(port), address)
    try:
        ray.init(address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        ray.shutdown()
        raise TaskError(
            "the Ray cluster cannot be used", where=address, got=str(error).strip(),
            expected=f"Ray {ray.__version__}, Python {sys.version.split()[0]}",
            remedy="ray start --head, and the address that it prints",
        ) from error  # fmt: skip


def _check_answers(host: str, port: int, address: str) -> None:
    """Raise `TaskError` if no HTTP/2 server answers: Ray itself would wait for minutes."""
    # The preface of a client, and an empty SETTINGS frame, which the server answers with its own.
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
    got = "no answer of an HTTP/2 server"
    try:
        with socket.create_connection((host, port), CONNECT_SECONDS) as there:
            there.settimeout(CONNECT_SECONDS)
            if os.environ.get("RAY_USE_TLS", "0") != "0":
                return
            there.sendall(preface)
            if there.recv(9)[3:4] == b"\x04":
                return
    except OSError as error:
        got = str(error)
    raise TaskError(
        "no Ray cluster answers", where=address, expected=f"an answer in {CONNECT_SECONDS:g} s",
        got=got, remedy="ray start --head, and the address that it prints",
    )  # fmt: skip


def _port_of(address: str) -> str:
    return address.rpartition(":")[2]


def _environment() -> dict[str, str]:
    """Return the environment of actors: modules that can be imported here can be there, and NumPy
    has as many threads, on which the bits of its products depend."""
    installed = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib")}
    paths = [str(Path(entry).absolute()) for entry in sys.path if Path(entry).is_dir()]
    paths = [path for path in paths if not any(path.startswith(each) for each in installed)]
    threads = os.environ.get("OMP_NUM_THREADS") or str(len(os.sched_getaffinity(0)))
    words = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        **{word: os.environ.get(word) or threads for word in words},
    }


def _cause(text: str) -> str:
    """Return the sentence of Ray's error that tells how an actor ended."""
    line = next((line for line in text.splitlines() if "actor is dead" in line), "it ended")
    return line.strip().split(" Some common causes")[0].split(" There are some potential")[0]


def _end(process: int, actors: dict[str, _Actor], connection: _Connection | None) -> None:
    """Kill actors; end a connection with the last mesh that uses it."""
    global _connection
    if os.getpid() != process:
        return
    if ray.is_initialized():
        for actor in actors.values():
            ray.kill(actor.handle)
    actors.clear()
    if connection is None:
        return
    connection.meshes -= 1
    if connection.meshes:
        return
    if connection is _connection:
        _connection = None
    ray_worker._worker_logs_enabled = True
    ray.shutdown()
    if connection.logs_failures:
        os.environ.pop(_QUIET, None)
    if connection.folder is not None:
        _read_token()
        shutil.rmtree(connection.folder, ignore_errors=True)
