"""What the whole contract needs: lenient validation, idempotent creation, webhooks, and which endpoints a model answers.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("on_invalid", sa.String(length=8), server_default="fail", nullable=False))
    op.add_column("jobs", sa.Column("idempotency_key", sa.String(length=255), nullable=True))
    op.add_column("jobs", sa.Column("idempotency_digest", sa.String(length=64), nullable=True))
    op.add_column("jobs", sa.Column("webhook_url", sa.Text(), nullable=True))
    op.create_index(op.f("ix_jobs_idempotency_key"), "jobs", ["idempotency_key"], unique=True)
    op.add_column("workers", sa.Column("endpoints", sa.JSON(), nullable=True))
    op.create_table(
        "webhooks",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("type", sa.String(length=32), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("attempts", sa.Integer(), server_default="0", nullable=False),
        sa.Column("due_at", sa.Double(), nullable=True),
        sa.Column("delivered_at", sa.Double(), nullable=True),
        sa.Column("failure", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhooks")),
    )
    op.create_index(op.f("ix_webhooks_due_at"), "webhooks", ["due_at"])


def downgrade() -> None:
    op.drop_table("webhooks")
    op.drop_column("workers", "endpoints")
    op.drop_index(op.f("ix_jobs_idempotency_key"), table_name="jobs")
    for name in ("webhook_url", "idempotency_digest", "idempotency_key", "on_invalid"):
        op.drop_column("jobs", name)
