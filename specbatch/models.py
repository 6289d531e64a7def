"""The tables. Times are seconds since the epoch by the database's clock; bodies are ASCII JSON text: any string survives any database."""

from __future__ import annotations

from sqlalchemy import JSON, BigInteger, Column, Double, ForeignKey, Index, Integer, MetaData, String, Table, Text

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

files = Table(
    "files",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("purpose", String(32), nullable=False),
    Column("filename", Text, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, index=True),
    Index(None, "created_at", "id"),
)

jobs = Table(
    "jobs",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("endpoint", String(64), nullable=False),
    Column("status", String(16), nullable=False),
    Column("stop", String(16)),  # why it ends early: cancelled or expired
    Column("completion_window", String(16), nullable=False),
    Column("input_file_id", String(64), nullable=False),
    Column("output_file_id", String(64)),
    Column("error_file_id", String(64)),
    Column("output_expires_seconds", Integer),
    Column("model", Text),
    Column("named_task", String(16)),
    Column("named_mode", String(16)),
    Column("run_key", String(64), index=True),  # of the `specbatch run` that still owes its user the output
    Column("on_invalid", String(8), nullable=False, server_default="fail"),
    Column("idempotency_key", String(255)),
    Column("idempotency_digest", String(64)),  # of the parameters that came with the key
    Column("webhook_url", Text),
    Column("metadata", JSON),
    Column("errors", JSON),
    Column("created_at", Double, nullable=False),
    Column("validated_at", Double),  # its rows and shards are complete
    Column("in_progress_at", Double),
    Column("finalizing_at", Double),
    Column("completed_at", Double),
    Column("failed_at", Double),
    Column("expired_at", Double),
    Column("cancelling_at", Double),
    Column("cancelled_at", Double),
    Column("expires_at", Double, nullable=False),
    # Kept by every settlement in its own transaction, so that reading a job costs one row however large the job is.
    Column("rows", BigInteger, nullable=False, server_default="0"),
    Column("settled", BigInteger, nullable=False, server_default="0"),
    Column("succeeded", BigInteger, nullable=False, server_default="0"),
    Column("prompt_tokens", BigInteger, nullable=False, server_default="0"),
    Column("cached_tokens", BigInteger, nullable=False, server_default="0"),
    Column("generated_tokens", BigInteger, nullable=False, server_default="0"),
    Column("drafted_tokens", BigInteger, nullable=False, server_default="0"),
    Column("accepted_tokens", BigInteger, nullable=False, server_default="0"),
    Column("first_claim_at", Double),
    Column("last_settle_at", Double),
    Column("peak_memory_bytes", BigInteger),
    # The lease of whoever validates or finalizes it.
    Column("attempt", Integer, nullable=False, server_default="0"),
    Column("owner", String(64)),
    Column("lease_until", Double, nullable=False, server_default="0"),
    Index(None, "status"),
    Index(None, "created_at", "id"),
    Index(None, "idempotency_key", unique=True),
)

shards = Table(
    "shards",
    metadata,
    Column("job_id", String(64), ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("shard_no", Integer, primary_key=True, autoincrement=False),
    Column("model", Text, nullable=False),
    Column("mode", String(16), nullable=False),
    Column("task", String(16), nullable=False),  # of all its rows: so it can be sent to another mode as a whole
    Column("status", String(16), nullable=False),
    Column("attempt", Integer, nullable=False, server_default="0"),  # the fence: it only grows
    Column("losses", Integer, nullable=False, server_default="0"),  # attempts that ended with a dead engine or worker
    Column("owner", String(64)),
    Column("lease_until", Double, nullable=False, server_default="0"),
    Column("not_before", Double, nullable=False, server_default="0"),
    Column("published_at", Double, nullable=False, server_default="0"),
    Column("rows", Integer, nullable=False),
    Column("settled", Integer, nullable=False, server_default="0"),
    Index(None, "status", "lease_until"),
)

# Rows, results and measurements carry no foreign keys: every write to them happens under the lock of its shard or job,
# and a key check a row costs a fifth of the insert rate.
rows = Table(
    "rows",
    metadata,
    Column("job_id", String(64), primary_key=True),
    Column("row_index", Integer, primary_key=True, autoincrement=False),
    Column("shard_no", Integer, nullable=False),
    Column("custom_id", Text, nullable=False),
    Column("body", Text, nullable=False),
    Column("task", String(16), nullable=False),
    Column("mode", String(16), nullable=False),
    Column("reason", Text, nullable=False),
    Index(None, "job_id", "shard_no", "row_index"),
    Index(None, "job_id", "custom_id"),
)

results = Table(
    "results",
    metadata,
    Column("job_id", String(64), primary_key=True),
    Column("row_index", Integer, primary_key=True, autoincrement=False),
    Column("sequence", BigInteger, nullable=False),  # 1, 2, 3, ... within the job, in the order of settling, without gaps
    Column("attempt", Integer, nullable=False),
    Column("outcome", String(16), nullable=False),
    Column("status_code", Integer),
    Column("body", Text),
    Column("error_code", String(64)),
    Column("error_message", Text),
    Column("settled_at", Double, nullable=False),
    Index(None, "job_id", "sequence", unique=True),
)

measurements = Table(
    "measurements",
    metadata,
    Column("job_id", String(64), primary_key=True),
    Column("row_index", Integer, primary_key=True, autoincrement=False),
    Column("model", Text, nullable=False),
    Column("mode", String(16), nullable=False),
    Column("task", String(16), nullable=False),
    Column("prompt_tokens", Integer, nullable=False),
    Column("cached_tokens", Integer, nullable=False),
    Column("generated_tokens", Integer, nullable=False),
    Column("finish_reason", String(32)),
    Column("load", Integer, nullable=False),  # requests that ran in the engine when this one ended
    Column("queue_seconds", Double),
    Column("ttft_seconds", Double),
    Column("tpot_seconds", Double),
    Column("drafted_tokens", Integer, nullable=False),
    Column("accepted_tokens", Integer, nullable=False),
    Column("mean_acceptance_length", Double),
    Column("steps_by_accepted", JSON(none_as_null=True)),  # how many steps accepted 0, 1, 2, ... drafted tokens
    Column("measured_at", Double, nullable=False),
    Index(None, "model", "mode", "task", "measured_at"),
)

webhooks = Table(
    "webhooks",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("job_id", String(64), nullable=False),
    Column("type", String(32), nullable=False),
    Column("url", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("attempts", Integer, nullable=False, server_default="0"),
    Column("due_at", Double, index=True),  # of the next attempt; null once delivered, or given up
    Column("delivered_at", Double),
    Column("failure", Text),  # of the last attempt
)

# What `tune` measured. `draft` is the draft model or head of the modes that have one, else empty.
speeds = Table(
    "speeds",
    metadata,
    Column("model", Text, primary_key=True),
    Column("draft", Text, primary_key=True),
    Column("device", Text, primary_key=True),
    Column("vllm", String(64), primary_key=True),
    Column("mode", String(16), primary_key=True),
    Column("task", String(16), primary_key=True),
    Column("load", Integer, primary_key=True, autoincrement=False),
    Column("k", Integer, primary_key=True, autoincrement=False),
    Column("tokens_per_second", Double, nullable=False),
    Column("requests", Integer, nullable=False),
    Column("seconds", Double, nullable=False),
    Column("ttft_seconds", Double),
    Column("tpot_seconds", Double),
    Column("drafted_tokens", BigInteger, nullable=False),
    Column("accepted_tokens", BigInteger, nullable=False),
    Column("step_seconds", Double),
    Column("tokens_per_step", Double),
    Column("start_seconds", Double),
    Column("peak_memory_bytes", BigInteger),
    Column("measured_at", Double, nullable=False),
)

workers = Table(
    "workers",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("model", Text, nullable=False),
    Column("names", JSON, nullable=False),  # every name that a request may use for the model
    Column("modes", JSON, nullable=False),
    Column("withheld", JSON, nullable=False),  # mode -> why it is configured and not offered
    Column("mode", String(16)),  # of the engine that runs now
    Column("endpoints", JSON),  # that its model answers; null until an engine has run
    Column("started_at", Double, nullable=False),
    Column("seen_at", Double, nullable=False, index=True),
)
