"""Authentication of a link when the run has a token. Pure: bytes in, bytes out.

The node opens with a random nonce. The leader answers with its own nonce and a MAC over its role and both nonces; the
node proves likewise that it knows the token. From then on every line is prefixed with a MAC:

    node    {"type":"challenge","nonce":N}
    leader  {"type":"answer","nonce":L,"mac":mac("leader", N, L)}
    node    {"type":"proof","mac":mac("node", N, L)}
    both    <mac of the line's number on this link and the line> <line>

All MACs are HMAC-SHA256 in hexadecimal. The handshake key is derived from the token and the run id; the line keys, one
per direction, are derived from that key and both nonces. So a line that is changed, omitted, repeated, reordered,
reflected, or taken from another link fails verification, and the link is closed. Nothing is encrypted.

The pattern is that of ISO/IEC 9798-4 (mutual authentication in three passes) with the counters of a TLS record layer.
"""

from __future__ import annotations

import hmac
import json
import secrets

from elastic_launch import codec
from elastic_launch.errors import ProtocolError
from elastic_launch.secret import Token, keyed

_NONCE = 32
_MAC = 64
"""Length of a MAC in characters."""


class AuthenticationError(ProtocolError):
    """The other side of a link did not prove that it knows the run's token."""


class MissingTokenError(AuthenticationError):
    """A node said hello without a proof: it has no token."""


class UnexpectedTokenError(AuthenticationError):
    """A node requires a proof of the token, but the run has none."""


class OtherTokenError(AuthenticationError):
    """The leader has a different token from this node's, or none. This is unauthenticated and proves nothing."""


def link_key(token: Token | None, run_id: str) -> bytes | None:
    """Return the key of a run's links, or None without a token."""
    return None if token is None else token.key("link", run_id)


class Seal:
    """Numbers the lines of one link in both directions and gives each its MAC."""

    def __init__(self, sending: bytes, receiving: bytes) -> None:
        self._sending = sending
        self._receiving = receiving
        self._sent = 0
        self._received = 0

    def close(self, line: bytes) -> bytes:
        """Return a line with its MAC."""
        mac = _line_mac(self._sending, self._sent, line)
        self._sent += 1
        return mac + b" " + line

    def open(self, line: bytes) -> bytes:
        """Return the line without its MAC.

        Raises:
            AuthenticationError: if it is not the next line that the other side sent. The link is then unusable.
        """
        mac, space, rest = line[:_MAC], line[_MAC : _MAC + 1], line[_MAC + 1 :]
        if space != b" " or not hmac.compare_digest(mac, _line_mac(self._receiving, self._received, rest)):
            raise AuthenticationError("A link received a line that the other side did not send in this form.")
        self._received += 1
        return rest


def _line_mac(key: bytes, number: int, line: bytes) -> bytes:
    return keyed(key, number.to_bytes(8, "big"), line).hex().encode()


class _NodeSide:
    """The node's side of the handshake."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._nonce = secrets.token_bytes(_NONCE)
        self.opening = _line("challenge", nonce=self._nonce)

    def receive(self, line: bytes) -> tuple[bytes, Seal | None]:
        """Process the other side's next line; return the answer and, once the handshake is complete, the seal."""
        if _kind(line) == "refused":
            raise OtherTokenError("This node has a token, the run has none.")
        fields = _read(line, "answer", nonce=_NONCE, mac=_MAC // 2)
        nonces = (self._nonce, fields["nonce"])
        if not hmac.compare_digest(fields["mac"], keyed(self._key, b"leader", *nonces)):
            raise OtherTokenError("The token differs from that of the run, or it is another run.")
        up, down = _session(self._key, nonces)
        return _line("proof", mac=keyed(self._key, b"node", *nonces)), Seal(up, down)


class _LeaderSide:
    """The leader's side of the handshake."""

    opening = b""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._nonces: tuple[bytes, bytes] | None = None

    def receive(self, line: bytes) -> tuple[bytes, Seal | None]:
        """See the node's side."""
        if self._nonces is None:
            theirs = _read(line, "challenge", nonce=_NONCE)["nonce"]
            self._nonces = nonces = (theirs, secrets.token_bytes(_NONCE))
            return _line("answer", nonce=nonces[1], mac=keyed(self._key, b"leader", *nonces)), None
        proof = _read(line, "proof", mac=_MAC // 2)["mac"]
        if not hmac.compare_digest(proof, keyed(self._key, b"node", *self._nonces)):
            raise AuthenticationError("The process that connected does not know the run's token.")
        up, down = _session(self._key, self._nonces)
        return b"", Seal(down, up)


def _session(key: bytes, nonces: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
    """Return the keys of both directions: to the leader, and to the node."""
    return keyed(key, b"up", *nonces), keyed(key, b"down", *nonces)


def _line(kind: str, **fields: bytes) -> bytes:
    value = {"type": kind, **{name: data.hex() for name, data in fields.items()}}
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _kind(line: bytes) -> object:
    """Return the type of a line without a proof, or None if it has no type."""
    try:
        return codec.loads(line).get("type")
    except ProtocolError:
        return None


def _read(line: bytes, kind: str, **sizes: int) -> dict[str, bytes]:
    """Parse a line of the handshake: hexadecimal fields of the given sizes in bytes."""
    try:
        value = codec.loads(line)
    except ProtocolError as error:
        raise AuthenticationError(f"A link received something other than a {kind}.") from error
    if kind == "challenge" and value.get("type") in ("nodehello", "caller"):
        raise MissingTokenError("A node came without a token.")
    fields: dict[str, bytes] = {}
    for name, size in sizes.items():
        text = value.get(name)
        try:
            data = bytes.fromhex(text) if isinstance(text, str) else b""
        except ValueError:
            data = b""
        if value.get("type") != kind or len(data) != size:
            raise AuthenticationError(f"A link received something other than a {kind}.")
        fields[name] = data
    return fields


class Channel:
    """One side of a link: converts messages to bytes and back; with a key, only between holders of the token.

    Without a key, the bytes are the plain messages.

    Attributes:
        unsent: bytes to send; the owner removes them from the front.
    """

    def __init__(
        self, side: _NodeSide | _LeaderSide | None, limit: int = codec.MAX_BYTES, *, open_leader: bool = False
    ) -> None:
        self.unsent = bytearray()
        self._reader = codec.LineReader(limit)
        self._side = side
        self._seal: Seal | None = None
        self._held: list[bytes] = []
        self._first = open_leader
        if side is not None:
            self.unsent += side.opening

    @classmethod
    def of_node(cls, key: bytes | None) -> Channel:
        """The node's side of a link that it opened."""
        return cls(None if key is None else _NodeSide(key))

    @classmethod
    def of_leader(cls, key: bytes | None, limit: int) -> Channel:
        """The leader's side of an incoming link; ``limit`` as for :meth:`allow`."""
        return cls(None if key is None else _LeaderSide(key), limit, open_leader=key is None)

    @property
    def ready(self) -> bool:
        """Whether the other side has proven that it knows the token, or does not need to."""
        return self._side is None

    def allow(self, limit: int) -> None:
        """Buffer at most ``limit`` bytes of an unfinished line from now on."""
        self._reader.limit = limit

    def send(self, line: bytes) -> None:
        """Queue a packed message with its line end; it is held back until the other side's proof."""
        if self._side is not None:
            self._held.append(line)
        else:
            self.unsent += line if self._seal is None else self._seal.close(line[:-1]) + b"\n"

    def send_bare(self, line: bytes) -> None:
        """Queue an unauthenticated line, which informs the other side that its proof failed."""
        self.unsent += line

    def feed(self, data: bytes) -> list[bytes]:
        """Add received data and return the messages that it completes; answers are added to ``unsent``.

        Raises:
            AuthenticationError: if the data does not come from a holder of the token, or was tampered with.
            ProtocolError: if a line exceeds the limit.
        """
        messages = []
        for line in self._reader.feed(data):
            if self._side is not None:
                self._shake_hands(self._side, line)
            elif self._first and _kind(line) == "challenge":
                raise UnexpectedTokenError("A node came with a token, which the run does not have.")
            else:
                self._first = False
                messages.append(line if self._seal is None else self._seal.open(line))
        return messages

    def _shake_hands(self, side: _NodeSide | _LeaderSide, line: bytes) -> None:
        answer, seal = side.receive(line)
        self.unsent += answer
        if seal is not None:
            self._side, self._seal = None, seal
            held, self._held = self._held, []
            for message in held:
                self.send(message)
