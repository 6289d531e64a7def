"""The HTTP API: parse, call one service verb, answer."""
