"""What the launcher of node 0 decides for all nodes.

It waits until all nodes have said hello and tells them to start; passes on the first failure and
interruptions; and when all processes have ended tells the nodes the outcome, or to start again.
Node 0's own launcher is a node like the others, reached by calls instead of a connection. One
thread; nothing waits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import selectors
import socket
import time
from collections.abc import Callable

from jaxfabric.bootstrap.service import CoordinationService
from jaxfabric.launch.links import Connection, JoinError, Nodes, deadline_after, listen
from jaxfabric.launch.messages import STRANGE, Message, is_hello, is_of_a_node
from jaxfabric.launch.processes import dies_with_launcher
from jaxfabric.launch.results import ProcessResult, Summary, result_from_json


class Hub:
    """Node 0's decisions.

    Args:
        nodes: how many nodes take part, and where they come to.
        max_restarts: how often a job that has failed starts again.
        heartbeat: of JAX's coordination service, in seconds.
        selector: where the hub's connections are registered, with the hub's method to call.
        deliver: takes the messages to node 0's own launcher.
        say: prints a line.
    """

    def __init__(
        self,
        nodes: Nodes,
        max_restarts: int,
        heartbeat: int,
        selector: selectors.BaseSelector,
        deliver: Callable[[Message], None],
        say: Callable[[str], None],
    ) -> None:
        self._nodes = nodes
        self._max_restarts = max_restarts
        self._heartbeat = heartbeat
        self._selector = selector
        self._deliver = deliver
        self._say = say
        self._began = time.monotonic()
        self._listener: socket.socket | None = None
        self._host = "127.0.0.1"
        self._strangers: set[Connection] = set()
        self._links: dict[int, Connection] = {}
        self._hellos: dict[int, Message] = {}
        self._service: CoordinationService | None = None
        self._running = False
        self._restarts = 0
        self._interrupted = False
        self._failure: Message | None = None
        self._ended: dict[int, list[ProcessResult]] = {}
        # By when all nodes must have come; None while they are here.
        self.join_by: float | None = deadline_after(nodes.join_timeout)
        if nodes.count > 1:
            self._listener, self._host = listen(nodes)
            selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def receive(self, node: int, message: Message) -> None:
        """Takes a message of a node."""
        if "hello" in message:
            self._hellos[node] = message["hello"]
            self._start_if_complete()
        elif "failed" in message and self._running:
            self._fail(message["failed"])
        elif "signal" in message:
            self._interrupted = True
            self._broadcast(message, but=node)
        elif "ended" in message and self._running:
            self._ended[node] = [result_from_json(each) for each in message["ended"]]
            self._finish_if_all_ended()

    def check_join(self) -> None:
        """Called when `join_by` has come.

        Raises:
            JoinError: names the nodes that did not come.
        """
        missing = [n for n in range(self._nodes.count) if n not in self._hellos]
        names = ", ".join(f"node {node}" for node in missing)
        text = (
            f"only {len(self._hellos)} of {self._nodes.count} nodes came to "
            f"{self._nodes.coordinator} within {self._nodes.join_timeout:g} s; missing: {names} "
            "(start the same command there with its --node-rank)"
        )
        self._broadcast({"refused": text}, but=0)
        raise JoinError(text)

    def close(self) -> None:
        """Ends the service and all connections. Idempotent."""
        for connection in [*self._strangers, *self._links.values()]:
            self._forget(connection)
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
        self._drop_service()

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            accepted, _ = self._listener.accept()
        except OSError:
            return
        connection = Connection(accepted)
        # Those that say nothing must not use up descriptors.
        if len(self._strangers) > self._nodes.count + 16:
            self._forget(next(iter(self._strangers)))
        self._strangers.add(connection)
        self._selector.register(accepted, selectors.EVENT_READ, lambda: self._read(connection))

    def _read(self, connection: Connection) -> None:
        messages, end = connection.receive()
        for message in messages:
            if connection.peer is None:
                self._admit(connection, message)
            elif not is_of_a_node(message):
                return self._lose(connection, STRANGE)
            else:
                self.receive(connection.peer["node"], message)
            if connection not in self._links.values():
                return
        if end is not None:
            self._lose(connection, end)

    def _admit(self, connection: Connection, message: Message) -> None:
        reason = self._objection(message) if is_hello(message) else "a launcher says hello first"
        if reason:
            self._post(connection, {"refused": reason})
            self._forget(connection)
            return
        connection.peer = hello = message["hello"]
        self._strangers.discard(connection)
        self._links[hello["node"]] = connection
        self.receive(hello["node"], message)

    def _objection(self, message: Message) -> str:
        from jaxfabric import __version__

        hello = message["hello"]
        node = hello["node"]
        if hello["version"] != __version__:
            return f"node {node} has jaxfabric {hello['version']}, node 0 has {__version__}"
        if hello["nodes"] != self._nodes.count:
            return f"node {node} has --nnodes {hello['nodes']}, node 0 has {self._nodes.count}"
        if not 0 < node < self._nodes.count or hello["processes"] < 1:
            return f"--node-rank {node} is not one of 1 to {self._nodes.count - 1}"
        if node in self._links:
            return f"node {node} is here already, from {self._hellos[node]['host']}"
        return ""

    def _lose(self, connection: Connection, why: str) -> None:
        node = connection.peer["node"] if connection.peer else None
        self._forget(connection)
        if node is None or self._links.get(node) is not connection:
            return
        del self._links[node]
        hello = self._hellos.pop(node)
        if not self._running:
            self._say(f"the launcher of node {node} on {hello['host']} has gone: {why}")
            if self.join_by is None:
                self.join_by = deadline_after(self._nodes.join_timeout)
            return
        text = f"the launcher of node {node} on {hello['host']} has gone ({why})"
        self._ended.setdefault(node, [])
        self._fail({"process": None, "exit_code": 1, "text": text})
        self._finish_if_all_ended()

    def _forget(self, connection: Connection) -> None:
        self._strangers.discard(connection)
        if connection.socket.fileno() >= 0:
            self._selector.unregister(connection.socket)
        connection.close()

    def _start_if_complete(self) -> None:
        if self._running or len(self._hellos) < self._nodes.count:
            return
        self.join_by = None
        counts = [self._hellos[node]["processes"] for node in range(self._nodes.count)]
        port = None
        if sum(counts) > 1:
            port = self._nodes.address()[1] + 1 if self._nodes.count > 1 else 0
            port = self._start_service(sum(counts), port)
        self._failure, self._running, self._ended = None, True, {}
        job = secrets.token_hex(8)
        for node in range(self._nodes.count):
            start = {
                "first": sum(counts[:node]),
                "total": sum(counts),
                "host": self._host,
                "port": port,
                "job": job,
                "restarts": self._restarts,
            }
            self._tell(node, {"start": start})

    def _start_service(self, num_processes: int, port: int) -> int:
        try:
            service = CoordinationService(num_processes, self._heartbeat, self._host, port)
        except OSError as error:
            raise JoinError(str(error.strerror)) from None
        self._service = service
        service.start(dies_with_launcher())
        if service.process is not None:
            self._selector.register(service.pidfd, selectors.EVENT_READ, self._service_has_ended)
        return service.port

    def _service_has_ended(self) -> None:
        self._drop_service()
        text = f"JAX's coordination service at {self._host} has ended"
        self._fail({"process": None, "exit_code": 1, "text": text})

    def _drop_service(self) -> None:
        if self._service is not None:
            if self._service.process is not None:
                self._selector.unregister(self._service.pidfd)
            self._service.stop()
            self._service = None

    def _fail(self, failure: Message) -> None:
        if self._failure is None:
            self._failure = failure
            self._broadcast({"failed": failure})

    def _finish_if_all_ended(self) -> None:
        if not self._running or len(self._ended) < self._nodes.count:
            return
        self._running = False
        self._drop_service()
        failure = self._failure
        if failure and not self._interrupted and self._restarts < self._max_restarts:
            self._restarts += 1
            self._broadcast({"again": {"number": self._restarts, "of": self._max_restarts}})
            self.join_by = deadline_after(self._nodes.join_timeout)
            self._start_if_complete()
            return
        results = sorted(
            (r for some in self._ended.values() for r in some), key=lambda r: r.process
        )
        summary = Summary(
            exit_code=failure["exit_code"] if failure else 0,
            first_failure=failure["process"] if failure else None,
            seconds=round(time.monotonic() - self._began, 3),
            processes=tuple(results),
            failure=failure["text"] if failure else None,
            restarts=self._restarts,
        )
        self._broadcast({"outcome": dataclasses.asdict(summary)})

    def _broadcast(self, message: Message, but: int | None = None) -> None:
        for node in [*self._links, 0]:
            if node != but:
                self._tell(node, message)

    def _tell(self, node: int, message: Message) -> None:
        if node == 0:
            self._deliver(message)
        elif node in self._links:
            self._post(self._links[node], message)

    def _post(self, connection: Connection, message: Message) -> None:
        try:
            connection.send(message)
        except OSError:
            # So that its end is read from it, when its turn has come.
            with contextlib.suppress(OSError):
                connection.socket.shutdown(socket.SHUT_RD)
