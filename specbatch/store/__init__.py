"""All SQL. Each function runs in the caller's transaction; every transition is guarded by the state, and the attempt, it starts from."""
