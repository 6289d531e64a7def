"""The first tables.

Revision ID: 0001
Revises:
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "files",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("purpose", sa.String(length=32), nullable=False),
        sa.Column("filename", sa.Text(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_files")),
    )
    op.create_index(op.f("ix_files_created_at_id"), "files", ["created_at", "id"])
    op.create_index(op.f("ix_files_expires_at"), "files", ["expires_at"])

    op.create_table(
        "jobs",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("endpoint", sa.String(length=64), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("stop", sa.String(length=16), nullable=True),
        sa.Column("completion_window", sa.String(length=16), nullable=False),
        sa.Column("input_file_id", sa.String(length=64), nullable=False),
        sa.Column("output_file_id", sa.String(length=64), nullable=True),
        sa.Column("error_file_id", sa.String(length=64), nullable=True),
        sa.Column("output_expires_seconds", sa.Integer(), nullable=True),
        sa.Column("model", sa.Text(), nullable=True),
        sa.Column("named_task", sa.String(length=16), nullable=True),
        sa.Column("named_mode", sa.String(length=16), nullable=True),
        sa.Column("run_key", sa.String(length=64), nullable=True),
        sa.Column("metadata", sa.JSON(), nullable=True),
        sa.Column("errors", sa.JSON(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("validated_at", sa.Double(), nullable=True),
        sa.Column("in_progress_at", sa.Double(), nullable=True),
        sa.Column("finalizing_at", sa.Double(), nullable=True),
        sa.Column("completed_at", sa.Double(), nullable=True),
        sa.Column("failed_at", sa.Double(), nullable=True),
        sa.Column("expired_at", sa.Double(), nullable=True),
        sa.Column("cancelling_at", sa.Double(), nullable=True),
        sa.Column("cancelled_at", sa.Double(), nullable=True),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("rows", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("settled", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("succeeded", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("generated_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("drafted_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("accepted_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("first_claim_at", sa.Double(), nullable=True),
        sa.Column("last_settle_at", sa.Double(), nullable=True),
        sa.Column("peak_memory_bytes", sa.BigInteger(), nullable=True),
        sa.Column("attempt", sa.Integer(), server_default="0", nullable=False),
        sa.Column("owner", sa.String(length=64), nullable=True),
        sa.Column("lease_until", sa.Double(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
    )
    op.create_index(op.f("ix_jobs_created_at_id"), "jobs", ["created_at", "id"])
    op.create_index(op.f("ix_jobs_run_key"), "jobs", ["run_key"])
    op.create_index(op.f("ix_jobs_status"), "jobs", ["status"])

    op.create_table(
        "measurements",
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("row_index", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("mode", sa.String(length=16), nullable=False),
        sa.Column("task", sa.String(length=16), nullable=False),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("cached_tokens", sa.Integer(), nullable=False),
        sa.Column("generated_tokens", sa.Integer(), nullable=False),
        sa.Column("finish_reason", sa.String(length=32), nullable=True),
        sa.Column("load", sa.Integer(), nullable=False),
        sa.Column("queue_seconds", sa.Double(), nullable=True),
        sa.Column("ttft_seconds", sa.Double(), nullable=True),
        sa.Column("tpot_seconds", sa.Double(), nullable=True),
        sa.Column("drafted_tokens", sa.Integer(), nullable=False),
        sa.Column("accepted_tokens", sa.Integer(), nullable=False),
        sa.Column("mean_acceptance_length", sa.Double(), nullable=True),
        sa.Column("steps_by_accepted", sa.JSON(), nullable=True),
        sa.Column("measured_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "row_index", name=op.f("pk_measurements")),
    )
    op.create_index(op.f("ix_measurements_model_mode_task_measured_at"), "measurements", ["model", "mode", "task", "measured_at"])

    op.create_table(
        "results",
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("row_index", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("outcome", sa.String(length=16), nullable=False),
        sa.Column("status_code", sa.Integer(), nullable=True),
        sa.Column("body", sa.Text(), nullable=True),
        sa.Column("error_code", sa.String(length=64), nullable=True),
        sa.Column("error_message", sa.Text(), nullable=True),
        sa.Column("settled_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "row_index", name=op.f("pk_results")),
    )
    op.create_index(op.f("ix_results_job_id_sequence"), "results", ["job_id", "sequence"], unique=True)

    op.create_table(
        "rows",
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("row_index", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("shard_no", sa.Integer(), nullable=False),
        sa.Column("custom_id", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("task", sa.String(length=16), nullable=False),
        sa.Column("mode", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "row_index", name=op.f("pk_rows")),
    )
    op.create_index(op.f("ix_rows_job_id_custom_id"), "rows", ["job_id", "custom_id"])
    op.create_index(op.f("ix_rows_job_id_shard_no_row_index"), "rows", ["job_id", "shard_no", "row_index"])

    op.create_table(
        "speeds",
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("draft", sa.Text(), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("vllm", sa.String(length=64), nullable=False),
        sa.Column("mode", sa.String(length=16), nullable=False),
        sa.Column("task", sa.String(length=16), nullable=False),
        sa.Column("load", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("k", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("tokens_per_second", sa.Double(), nullable=False),
        sa.Column("requests", sa.Integer(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("ttft_seconds", sa.Double(), nullable=True),
        sa.Column("tpot_seconds", sa.Double(), nullable=True),
        sa.Column("drafted_tokens", sa.BigInteger(), nullable=False),
        sa.Column("accepted_tokens", sa.BigInteger(), nullable=False),
        sa.Column("step_seconds", sa.Double(), nullable=True),
        sa.Column("tokens_per_step", sa.Double(), nullable=True),
        sa.Column("start_seconds", sa.Double(), nullable=True),
        sa.Column("peak_memory_bytes", sa.BigInteger(), nullable=True),
        sa.Column("measured_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("model", "draft", "device", "vllm", "mode", "task", "load", "k", name=op.f("pk_speeds")),
    )

    op.create_table(
        "workers",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("names", sa.JSON(), nullable=False),
        sa.Column("modes", sa.JSON(), nullable=False),
        sa.Column("withheld", sa.JSON(), nullable=False),
        sa.Column("mode", sa.String(length=16), nullable=True),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_workers")),
    )
    op.create_index(op.f("ix_workers_seen_at"), "workers", ["seen_at"])

    op.create_table(
        "shards",
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("shard_no", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("mode", sa.String(length=16), nullable=False),
        sa.Column("task", sa.String(length=16), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("attempt", sa.Integer(), server_default="0", nullable=False),
        sa.Column("losses", sa.Integer(), server_default="0", nullable=False),
        sa.Column("owner", sa.String(length=64), nullable=True),
        sa.Column("lease_until", sa.Double(), server_default="0", nullable=False),
        sa.Column("not_before", sa.Double(), server_default="0", nullable=False),
        sa.Column("published_at", sa.Double(), server_default="0", nullable=False),
        sa.Column("rows", sa.Integer(), nullable=False),
        sa.Column("settled", sa.Integer(), server_default="0", nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_shards_job_id_jobs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "shard_no", name=op.f("pk_shards")),
    )
    op.create_index(op.f("ix_shards_status_lease_until"), "shards", ["status", "lease_until"])


def downgrade() -> None:
    op.drop_table("shards")
    op.drop_table("workers")
    op.drop_table("speeds")
    op.drop_table("rows")
    op.drop_table("results")
    op.drop_table("measurements")
    op.drop_table("jobs")
    op.drop_table("files")
