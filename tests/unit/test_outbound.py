"""Where this server may be made to send something: to the internet, and to nothing on its own network."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from specbatch import outbound
from specbatch.errors import InvalidRequest


@pytest.mark.parametrize("address", ["93.184.216.34", "8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8"])
def test_public(address: str) -> None:
    assert outbound.is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1", "255.255.255.255"),
        *("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "240.0.0.1"),
        *("64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "192.0.2.1", "198.18.0.1"),
    ],
)
def test_private(address: str) -> None:
    assert not outbound.is_public(address)


@pytest.mark.parametrize("url", ["https://example.com/hook", "http://example.com:8080/a?b=c", "https://[2606:4700::1111]/"])
def test_urls_that_may_be_named(url: str) -> None:
    outbound.check_url(url, allow_private=False)


@pytest.mark.parametrize(
    "url",
    [
        *(
            "",
            "example.com",
            "ftp://example.com",
            "file:///etc/passwd",
            "https://",
            "https:///x",
            "https://user:pw@example.com/",
            "http://a\0b/",
        ),
        *("http://127.0.0.1/", "http://[::1]/", "http://169.254.169.254/latest/meta-data", "https://example.com/" + "x" * 2048),
        *("http://example.com/\ud800", "javascript:alert(1)", "http://[::ffff:10.0.0.1]/"),
    ],
)
def test_urls_that_may_not(url: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        outbound.check_url(url, allow_private=False)
    assert refusal.value.param == "webhook_url"


def test_private_addresses_may_be_allowed() -> None:
    outbound.check_url("http://127.0.0.1:9/", allow_private=True)


@pytest.mark.parametrize("host", ["localhost", "127.1", "0x7f000001", "2130706433"])
def test_names_of_private_addresses_are_not_sent_to(host: str) -> None:
    with pytest.raises(outbound.DeliveryFailed, match="private address"):
        outbound.post(f"http://{host}:9/", b"", {}, allow_private=False)


def test_one_private_address_among_public_ones_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*_: Any, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80)) for address in ("8.8.8.8", "10.0.0.1")]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(outbound.DeliveryFailed, match=r"10\.0\.0\.1"):
        outbound.post("http://example.com/", b"", {}, allow_private=False)


def test_an_unknown_name_is_a_failed_delivery() -> None:
    with pytest.raises(outbound.DeliveryFailed):
        outbound.post("http://name.invalid/", b"", {}, allow_private=True)
