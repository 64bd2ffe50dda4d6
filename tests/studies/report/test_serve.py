"""The live page under clients that are slow, many or broken: it goes on, and prints nothing about them."""

import http.client
import socket
import struct
import threading
import time

import pytest

from dampen.studies.report import serve


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setattr(serve, "SECONDS", 0.5)
    monkeypatch.setattr(serve, "THREADS", 4)
    made = serve.make_server([tmp_path])
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


def status(server):
    connection = http.client.HTTPConnection(serve.HOST, server.server_address[1], timeout=20)
    connection.request("GET", "/version")
    answer = connection.getresponse().status
    connection.close()
    return answer


def test_silent_clients_are_let_go_and_others_answered(server):
    before = threading.active_count()
    silent = [socket.create_connection(server.server_address) for _ in range(30)]
    for client in silent[:15]:
        client.sendall(b"GET / HTTP/1.1\r\nHost: ")  # and never the rest
    time.sleep(0.2)
    assert threading.active_count() - before <= 4  # no thread per client
    assert status(server) == 200  # when those inside have timed out, eight times over
    for client in silent:
        client.close()


def test_broken_clients_print_nothing(server, capfd):
    for content in (
        b"",
        b"\x16\x03\x01\x02\x00",
        b"GET / HTTP/9.9\r\n\r\n",
        b"A" * 70_000,
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    ):
        client = socket.create_connection(server.server_address)
        client.sendall(content)
        client.setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )  # reset, not closed
        client.close()
    assert status(server) == 200
    time.sleep(0.7)
    assert capfd.readouterr() == ("", "")


def test_many_clients_at_once_are_all_answered(server):
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(status(server))) for _ in range(60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [200] * 60


def test_an_error_of_ours_is_not_hidden(server, monkeypatch, capfd):
    def broken(runs):
        raise RuntimeError("ours")

    monkeypatch.setattr(serve, "fingerprint", broken)
    with pytest.raises(http.client.RemoteDisconnected):
        status(server)
    assert "ours" in capfd.readouterr().err


def test_a_client_that_sends_a_byte_now_and_then_is_let_go(server):
    """A request has so much time in all; a client that is never silent for long cannot keep a thread."""
    client = socket.create_connection(server.server_address)
    began = time.monotonic()
    with pytest.raises(OSError):
        for letter in b"GET /version HTTP/1.1\r\nX: " + b"a" * 10_000:
            client.sendall(bytes([letter]))
            time.sleep(0.1)
            assert time.monotonic() - began < 60, "still connected"
    client.close()
    assert status(server) == 200
