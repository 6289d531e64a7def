"""Requests that this server sends to addresses that users named: never to its own network, unless its operator allows that."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Mapping

import httpx

from specbatch.errors import InvalidRequest

TIMEOUT_SECONDS = 10.0  # of a connection, and of each read
ATTEMPT_SECONDS = 20.0  # of all of it
URL_CHARACTERS = 2048
# Addresses that carry an IPv4 address inside, which may be a private one: translation (NAT64) and tunnels (6to4).
_CARRIERS = tuple(map(ipaddress.ip_network, ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16")))


class DeliveryFailed(Exception):
    """Why a request did not arrive, in words for whoever named the address."""


def check_url(url: str, *, allow_private: bool) -> None:
    """Refuse what can be refused without asking DNS. Raises InvalidRequest."""
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, UnicodeError) as wrong:
        raise InvalidRequest(f"Invalid webhook_url: {wrong}.", code="invalid_value", param="webhook_url") from None
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.userinfo or len(url) > URL_CHARACTERS:
        message = f"Invalid webhook_url: write it as https://host/path, without a user, in at most {URL_CHARACTERS} characters."
        raise InvalidRequest(message, code="invalid_value", param="webhook_url")
    try:
        literal = is_public(parsed.host)
    except ValueError:
        return  # a name: resolved, and judged, when there is something to send
    if not literal and not allow_private:
        raise InvalidRequest("Invalid webhook_url: a private address.", code="invalid_value", param="webhook_url")


def is_public(address: str) -> bool:
    """Whether an IP address belongs to the internet at large. Raises ValueError for anything that is no address."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return is_public(str(parsed.ipv4_mapped))
        if any(parsed in carrier for carrier in _CARRIERS):
            return False
    return parsed.is_global and not parsed.is_multicast and not parsed.is_reserved


def post(url: str, content: bytes, headers: Mapping[str, str], *, allow_private: bool) -> None:
    """Send once; redirects are not followed and no proxy is used. Raises DeliveryFailed for anything but a 2xx answer.

    The name is resolved here and the connection goes to the address that was judged: a name that resolves to something else a moment
    later gains nothing.
    """
    target = httpx.URL(url)
    try:
        address = _resolve(target, allow_private=allow_private)
        request = target.copy_with(host=address)
        sent = {**headers, "host": target.netloc.decode("ascii")}
        extensions = {"sni_hostname": target.raw_host.decode("ascii")}
        status = asyncio.run(_status(request, content, sent, extensions))
    except TimeoutError as failure:
        raise DeliveryFailed(f"it gave no answer within {ATTEMPT_SECONDS:.0f} s") from failure
    except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as failure:
        raise DeliveryFailed(f"{type(failure).__name__}: {failure}") from failure
    if not 200 <= status < 300:
        raise DeliveryFailed(f"it answered {status}")


async def _status(url: httpx.URL, content: bytes, headers: Mapping[str, str], extensions: Mapping[str, str]) -> int:
    """The status of the answer. Asynchronous, because only such a request can be given a time for the whole of it: httpx bounds each read,
    and a receiver that sends a byte a second would hold up all others."""
    async with (
        asyncio.timeout(ATTEMPT_SECONDS),
        httpx.AsyncClient(trust_env=False, follow_redirects=False, timeout=TIMEOUT_SECONDS) as client,
        client.stream("POST", url, content=content, headers=headers, extensions=dict(extensions)) as response,
    ):
        return response.status_code


def _resolve(target: httpx.URL, *, allow_private: bool) -> str:
    port = target.port or (443 if target.scheme == "https" else 80)
    found = [str(entry[4][0]) for entry in socket.getaddrinfo(target.host, port, type=socket.SOCK_STREAM)]
    private = [address for address in found if not is_public(address)]
    if private and not allow_private:
        raise DeliveryFailed(f"{target.host} has a private address ({private[0]}); SPECBATCH_WEBHOOK_PRIVATE_ADDRESSES=true allows those")
    return found[0]
