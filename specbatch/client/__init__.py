"""The Python client: batches on this machine's embedded services, or on a server."""

from specbatch.client.batch import Batch
from specbatch.client.client import Client

__all__ = ["Batch", "Client"]
