"""The process that tries constraints: it keeps the vocabulary ready and forks for each, so that any may be ended.

Run by `trials.Trials` with a socket as its input. What a tenant sent is looked at only in a child, which the kernel
ends when its time is up or its memory is spent, whatever it is doing then.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import socket
from typing import Any

from llguidance import LLTokenizer

from serve_app.constraints.compilation import compile_source
from serve_app.constraints.limits import ConstraintLimits
from serve_app.constraints.refusal import Refusal
from serve_app.constraints.vocabulary import Vocabulary

MESSAGE_BYTES = 4


def main() -> None:
    """Serve until the other end of the socket is closed."""
    with socket.socket(fileno=0) as control:
        vocabulary, limits = pickle.loads(receive(control))  # from the process that started this one
        tokenizer = vocabulary.tokenizer()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the children
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not message:
                return
            if os.fork() == 0:
                control.close()
                _try(descriptors[0], tokenizer, vocabulary, limits)
            os.close(descriptors[0])


def send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(len(message).to_bytes(MESSAGE_BYTES, "big") + message)


def receive(connection: socket.socket) -> bytes:
    """Raises EOFError where the other end went away."""
    return _exactly(connection, int.from_bytes(_exactly(connection, MESSAGE_BYTES), "big"))


def _exactly(connection: socket.socket, num_bytes: int) -> bytes:
    found = bytearray()
    while len(found) < num_bytes:
        more = connection.recv(num_bytes - len(found))
        if not more:
            raise EOFError
        found += more
    return bytes(found)


def _try(descriptor: int, tokenizer: LLTokenizer, vocabulary: Vocabulary, limits: ConstraintLimits) -> None:
    """Tell who one is, take one constraint, answer, and end."""
    status = 1
    try:
        _bound(limits)
        with socket.socket(fileno=descriptor) as connection:
            send(connection, json.dumps(os.getpid()).encode())
            job = json.loads(receive(connection))
            signal.setitimer(signal.ITIMER_REAL, job["wall_s"])
            send(connection, json.dumps(_answer(job, tokenizer, vocabulary)).encode())
        status = 0
    finally:
        os._exit(status)


def _answer(job: dict[str, Any], tokenizer: LLTokenizer, vocabulary: Vocabulary) -> dict[str, object]:
    try:
        grammar = compile_source(job["kind"], job["source"], tokenizer, dict(vocabulary.special))
    except Refusal as refusal:
        return {"refused": refusal.message, "path": refusal.path}
    return {"grammar": grammar.text, "formats": grammar.formats}


def _bound(limits: ConstraintLimits) -> None:
    """The default of both signals is to end the process; no handler of Python's has to run."""
    signal.setitimer(signal.ITIMER_PROF, limits.max_cpu_s)
    signal.setitimer(signal.ITIMER_REAL, limits.max_wall_s)
    with open("/proc/self/statm", encoding="ascii") as statm:
        num_bytes = int(statm.read().split()[0]) * resource.getpagesize() + limits.max_trial_bytes
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
