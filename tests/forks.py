"""Beside the tests' Ray: `serve SOCKET` imports libraries, and forks a Python for each `ask SOCKET SCRIPT ...`.

Who asks was started in place of the Python that it stands for, and lives as long. It hands over its arguments, working
directory, environment and files.
"""

import os
import socket
import sys

FILES = (0, 1, 2)


def ask(path: str, arguments: list[str]) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.connect(path)
        except OSError:  # it has failed, and said why
            os.execv(sys.executable, [sys.executable, *arguments])
        socket.send_fds(server, [b"."], FILES)
        environ = [f"{key}={value}" for key, value in os.environ.items()]
        server.sendall(os.fsencode("\0\0".join([os.getcwd(), "\0".join(arguments), "\0".join(environ)])))
        server.shutdown(socket.SHUT_WR)
        server.recv(1)  # nothing, when the fork is gone


def serve(path: str) -> None:
    """Returns in the server when its stdin is closed, and in a fork when that has run its script."""
    import gc
    import random
    import runpy
    import select
    import signal
    import threading

    import numpy
    import torch

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(128)
        import_libraries()
        if threading.active_count() > 1:
            raise RuntimeError(f"a fork would lack {threading.enumerate()[1:]}")
        gc.freeze()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
        while True:
            if 0 in select.select([listener, 0], [], [])[0]:
                return
            asker, _ = listener.accept()
            files = socket.recv_fds(asker, 1, len(FILES))[1]
            if files and os.fork() == 0:
                break
            asker.close()
            for file in files:
                os.close(file)
    os.setpgrp()  # Ray kills the group of a worker that is gone
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    folder, arguments, environ = os.fsdecode(b"".join(iter(lambda: asker.recv(1 << 16), b""))).split("\0\0")
    for file, number in zip(files, FILES, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(entry.split("=", 1) for entry in environ.split("\0"))
    for seed in (random.seed, numpy.random.seed, torch.seed):  # as other processes begin: each with numbers of its own
        seed()
    sys.argv = arguments.split("\0")
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")


def import_libraries() -> None:
    """What ranks import, and nothing of this project."""
    import diffusers
    import torch.nn.attention.flex_attention  # noqa: F401
    import transformers

    for name in ("AutoencoderKLWan", "WanImageToVideoPipeline", "WanPipeline", "UniPCMultistepScheduler"):
        getattr(diffusers, name)
    for name in ("AutoTokenizer", "UMT5EncoderModel"):
        getattr(transformers, name)


if __name__ == "__main__":
    command, socket_path, *script = sys.argv[1:]
    if command == "ask":
        ask(socket_path, script)
    else:
        serve(socket_path)
