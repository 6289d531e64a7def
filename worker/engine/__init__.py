"""Engines behind one protocol: vLLM, and a scripted one for speed and faults."""
