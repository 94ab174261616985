#!/usr/bin/env python3
"""slow_clients.py HOST PORT SECONDS SLOW: SLOW connections that send next to nothing, and junk, to a server with TLS.

Run by neighbours.py on each node. Prints one JSON object: connections made and closed on us, answers to junk by code.
"""
import collections
import json
import random
import socket
import ssl
import sys
import threading
import time

HOST, PORT, SECONDS, SLOW = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
END = time.monotonic() + SECONDS
HALF = b"POST /v1/status/default/slow HTTP/1.1\r\nHost: status\r\nContent-Length: 100\r\n\r\n{"
context = ssl.create_default_context()
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
lock = threading.Lock()
said = collections.Counter()


def count(what):
    with lock:
        said[what] += 1


def open_connection(tls):
    plain = socket.create_connection((HOST, PORT), timeout=3)
    return context.wrap_socket(plain) if tls else plain


def be_slow(number):
    """Silent, or with a byte of a handshake a second, or with half of a request and then a byte a second."""
    kind = number % 3
    while time.monotonic() < END:
        try:
            with open_connection(tls=kind == 2) as peer:
                count("opened")
                if kind == 2:
                    peer.sendall(HALF)
                while time.monotonic() < END:
                    if kind:
                        peer.sendall(b" " if kind == 2 else b"\x16")
                    peer.settimeout(1)
                    try:
                        peer.recv(100)
                        break  # closed, or told off
                    except TimeoutError:
                        pass
        except OSError:  # refused, reset, a handshake that did not come
            pass
        if time.monotonic() < END:
            count("closed")
            time.sleep(0.2)


def junk_request(choice):
    head = f"POST /v1/status/default/nobody HTTP/1.1\r\nHost: status\r\nAuthorization: Bearer {random.random()}\r\n"
    if choice == 0:
        return random.randbytes(2000)
    if choice == 1:
        return f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + b"1000\r\n" + b"x" * 4096
    if choice == 2:
        return f"{head}Content-Length: 104857600\r\n\r\n".encode() + b"x" * 4096
    return f"{head}Content-Length: 50000\r\n\r\n".encode() + b"x" * 50000


def send_junk():
    while time.monotonic() < END:
        try:
            with open_connection(tls=True) as peer:
                peer.sendall(junk_request(random.randrange(4)))
                answer = peer.recv(100).split()
                count(answer[1].decode(errors="replace") if len(answer) > 1 else "none")
        except OSError:
            count("none")
        time.sleep(0.05)


threads = [threading.Thread(target=be_slow, args=(i,)) for i in range(SLOW)]
threads += [threading.Thread(target=send_junk) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps(said))
