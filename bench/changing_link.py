"""Delays a connection by a round trip that changes at a command: `DelayProxy` in a process of its own, with a control.

A process, because a thread would wait for the measuring one's interpreter lock, and that is no network's delay.
"""

from __future__ import annotations

import argparse
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final
from urllib.parse import urlsplit

from outrider.edge.lab.child_process import child_process
from outrider.edge.lab.cores import Cores
from outrider.edge.lab.proxy import DelayProxy

_READY: Final = "LINK "
_TIMEOUT_S: Final = 30.0


class ChangingLink:
    """The link, as its user sees it. url: of the server behind it."""

    def __init__(self, url: str, control: socket.socket) -> None:
        self.url = url
        self._control = control.makefile("rw", encoding="ascii", newline="\n")
        self.rtt_ms = 0.0

    def set_rtt_ms(self, rtt_ms: float) -> None:
        """Changes the round trip; returns once it is in force for all bytes to come."""
        self._control.write(f"{rtt_ms}\n")
        self._control.flush()
        if self._control.readline() != "done\n":
            raise SystemExit("the link's process has ended")
        self.rtt_ms = rtt_ms

    def close(self) -> None:
        """Gives the control back; the link ends with its context."""
        self._control.close()


@contextmanager
def changing_link(url: str, cores: Cores) -> Iterator[ChangingLink]:
    """A link to the server at `url`, with no delay yet."""
    arguments = ["-m", "bench.changing_link", "--target", urlsplit(url).netloc]
    with ExitStack() as stack:
        ready = stack.enter_context(child_process(arguments, ready_prefix=_READY, cores=cores))
        link_url, port = ready.split()
        control = stack.enter_context(socket.create_connection(("127.0.0.1", int(port)), timeout=_TIMEOUT_S))
        link = ChangingLink(link_url, control)
        stack.callback(link.close)
        yield link


def main() -> None:
    """The link's process; it serves one control."""
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--target", required=True, help="HOST:PORT to forward to")
    host, _, port = cli.parse_args().target.rpartition(":")
    with DelayProxy(host, int(port)) as proxy, socket.create_server(("127.0.0.1", 0)) as listener:
        print(f"{_READY}{proxy.url} {listener.getsockname()[1]}", flush=True)
        control, _ = listener.accept()
        with control, control.makefile("rw", encoding="ascii", newline="\n") as lines:
            for line in lines:
                proxy.set_rtt_ms(float(line))
                lines.write("done\n")
                lines.flush()


if __name__ == "__main__":
    main()
