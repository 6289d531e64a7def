"""All SQL. Each function runs inside the caller's transaction; every transition is guarded by the state, and by the attempt, it starts from."""
